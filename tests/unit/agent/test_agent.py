"""One real agent, running the last of two stages; everybody else is played by the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inproc_pool import node
from roost import messages as m
from roost.agent.assignment import assignment_from
from roost.agent.budget import check_tensors
from roost.agent.service import Agent
from roost.capture.cut import cut, legal_cuts
from roost.capture.export import Captured, capture
from roost.capture.graph_format import to_bytes
from roost.config import PAUSE_FILE, AgentConfig, JobConfig, NamedArguments
from roost.errors import ForbiddenError, JobRefusedError, MalformedMessageError, OutOfBudgetError
from roost.pipeline.tensor_bytes import from_buffer, spec_of, to_buffer
from roost.transport.inproc import InprocNetwork, InprocTransport
from roost.transport.interface import Buffer, Sender
from roost.types import ClusterPlan, MicroBatch, Peer, Plan, Role, StagePlan, TensorKind, TensorRecord

CONFIG = JobConfig(
    job_id="job", optimizer=NamedArguments(name="SGD", arguments=(("lr", 0.1),)), samples=8, batch_size=4, micro_batch_size=4
)


@dataclass
class Actor:
    """A peer played by the test: answers calls with `answers`, keeps what it is sent."""

    answers: Callable[[m.Message], tuple[m.Message, list[Buffer]]]
    received: list[tuple[str, m.Message]] = field(default_factory=list)
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def on_message(self, sender: Sender, message: m.Message, buffers: list[bytearray | memoryview]) -> None:
        await self._keep(sender, message)

    async def on_call(self, sender: Sender, message: m.Message, buffers: list[bytearray | memoryview]) -> tuple[m.Message, list[Buffer]]:
        await self._keep(sender, message)
        return self.answers(message)

    async def _keep(self, sender: Sender, message: m.Message) -> None:
        async with self.moved:
            self.received.append((sender.peer_id, message))
            self.moved.notify_all()

    async def wait_for(self, kind: type[m.Message], fits: Callable[[Any], bool] = lambda message: True) -> Any:
        """Return the first message of this kind that fits, when it is there."""

        def found() -> list[m.Message]:
            return [message for _, message in self.received if isinstance(message, kind) and fits(message)]

        async with asyncio.timeout(20), self.moved:
            await self.moved.wait_for(found)
        return found()[0]


class Scene:
    """The agent 'last' and, played by the test: coordinator, requester, the first stage 'first', and a 'stranger'."""

    def __init__(self, state_dir: str = "") -> None:
        self.state_dir = state_dir
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.inputs, self.labels = torch.randn(4, 6), torch.randint(3, (4,))
        self.captured: Captured = capture(self.model, nn.CrossEntropyLoss(), (self.inputs,), (self.labels,))
        count = len(self.captured.graph.nodes)
        middle = legal_cuts(self.captured.graph)[1]
        self.programs = cut(self.captured.graph, (0, middle, count))
        stages = tuple(
            StagePlan(
                cluster=0,
                index=index,
                node_id=name,
                first_unit=index,
                last_unit=index + 1,
                start=start,
                stop=stop,
                max_in_flight=2 - index,
                memory_needed_bytes=1,
                memory_available_bytes=2,
                compute_s=0.1,
                send_s=0.0,
            )
            for index, (name, start, stop) in enumerate((("first", 0, middle), ("last", middle, count)))
        )
        cluster = ClusterPlan(index=0, stages=stages, share=1.0, samples_per_s=1.0, bottleneck="compute")
        self.plan = Plan(clusters=(cluster,), segments=(), backups=(), samples_per_s=1.0, notes=())
        self.network = InprocNetwork()
        self.actors: dict[str, Actor] = {}
        self.transports: dict[str, InprocTransport] = {}
        self.peers: dict[str, Peer] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Agent]:
        for name, role in (
            ("coordinator", Role.COORDINATOR),
            ("requester", Role.REQUESTER),
            ("first", Role.NODE),
            ("stranger", Role.NODE),
        ):
            self.actors[name] = Actor(self._answer)
            self.transports[name] = InprocTransport(name, role, self.network)
            await self.transports[name].start(self.actors[name])
            self.peers[name] = Peer(peer_id=name, address=self.transports[name].address)
        transport = InprocTransport("last", Role.NODE, self.network)
        config = AgentConfig(node_id="last", state_dir=self.state_dir)
        agent = Agent(config=config, transport=transport, coordinator=self.peers["coordinator"], profile=node("last"))
        task = asyncio.create_task(agent.run())
        registered = await self.actors["coordinator"].wait_for(m.RegisterNode)
        self.peers["last"] = Peer(peer_id="last", address=registered.profile.address)
        try:
            yield agent
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.gather(*(transport.stop() for transport in self.transports.values()))

    def _answer(self, message: m.Message) -> tuple[m.Message, list[Buffer]]:
        match message:
            case m.RegisterNode():
                return m.Registered(heartbeat_s=0.05), []
            case m.FetchGraph():
                return m.GraphReply(), [to_bytes(self.captured.graph)]
            case m.FetchTensors(names=names):
                tensors = {name: self.captured.tensors[name] for name in names}
                specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
                return m.TensorsReply(tensors=specs), [to_buffer(tensor) for tensor in tensors.values()]
            case _:
                return m.Done(), []

    async def call(self, source: str, message: m.Message) -> m.Message:
        return (await self.transports[source].call(self.peers["last"], message, deadline_s=20)).message

    async def prepare(self) -> None:
        message = m.PrepareStage(
            config=CONFIG,
            plan=self.plan,
            cluster=0,
            stage=1,
            peers=(self.peers["first"], self.peers["last"]),
            requester=self.peers["requester"],
            resume=False,
        )
        await self.call("coordinator", message)

    def activation(self, number: int, *, scale: float = 1.0) -> tuple[m.Activation, list[Buffer]]:
        tensors = {name: tensor.clone() for name, tensor in self.captured.tensors.items()}
        own = {record.name: tensors[record.name] for record in self.programs[0].tensors}
        values = dict(zip(self.programs[0].receives[-1], (self.inputs, self.labels), strict=True))
        sent = self.programs[0].run(values, own, training=True)
        crossing = {value: sent[value].detach() for value in self.programs[0].sends[1]}
        crossing = {value: tensor * scale if tensor.is_floating_point() else tensor for value, tensor in crossing.items()}
        message = m.Activation(
            job_id="job",
            source_stage=0,
            micro_batch=MicroBatch(
                number=number, batch=number, position=0, count=1, samples=4, batch_samples=4, training=True, seed=1, lease=number
            ),
            values=tuple(spec_of(str(value), tensor) for value, tensor in crossing.items()),
            rng=False,
        )
        return message, [to_buffer(tensor) for tensor in crossing.values()]


def play(scenario: Callable[[Scene, Agent], Any], *, state_dir: str = "") -> None:
    async def run() -> None:
        scene = Scene(state_dir)
        async with scene.running() as agent, asyncio.timeout(60):
            await scenario(scene, agent)

    asyncio.run(run())


def test_the_last_stage_answers_an_activation_with_the_gradient_autograd_gives() -> None:
    async def scenario(scene: Scene, agent: Agent) -> None:
        await scene.prepare()
        message, buffers = scene.activation(0)
        await scene.transports["first"].send(scene.peers["last"], message, buffers)
        gradient = await scene.actors["first"].wait_for(m.Gradient)
        assert gradient.micro_batch == 0
        assert not gradient.evaluation
        # The gradient leaves before the update: a heartbeat tells that it is done.
        heartbeat = await scene.actors["coordinator"].wait_for(m.Heartbeat, lambda beat: beat.metrics and beat.metrics.updates == 1)
        assert heartbeat.job_id == "job"
        ended = await scene.call("coordinator", m.EndJob(job_id="job", reason="over"))
        assert isinstance(ended, m.StageReport)
        expected = nn.CrossEntropyLoss()(scene.model(scene.inputs), scene.labels)
        assert ended.metrics.loss_sum == pytest.approx(4 * expected.item(), rel=1e-6)
        assert (ended.metrics.updates, ended.metrics.samples, ended.metrics.staleness_max) == (1, 4, 0)

    play(scenario)


def test_values_from_a_node_without_that_stage_are_dropped_and_training_goes_on() -> None:
    async def scenario(scene: Scene, agent: Agent) -> None:
        await scene.prepare()
        message, buffers = scene.activation(0)
        await scene.transports["stranger"].send(scene.peers["last"], message, buffers)
        await scene.transports["first"].send(scene.peers["last"], message, buffers)
        assert (await scene.actors["first"].wait_for(m.Gradient)).micro_batch == 0
        assert not any(isinstance(message, m.StageFailed) for _, message in scene.actors["coordinator"].received)

    play(scenario)


def test_values_of_the_wrong_shape_stop_the_stage_with_the_reason() -> None:
    async def scenario(scene: Scene, agent: Agent) -> None:
        await scene.prepare()
        message, _ = scene.activation(0)
        wrong: dict[str, Tensor] = {spec.name: torch.zeros(2, 2) for spec in message.values}
        specs = tuple(spec_of(name, tensor) for name, tensor in wrong.items())
        bad = m.Activation(job_id="job", source_stage=0, micro_batch=message.micro_batch, values=specs, rng=False)
        await scene.transports["first"].send(scene.peers["last"], bad, [to_buffer(tensor) for tensor in wrong.values()])
        failed = await scene.actors["coordinator"].wait_for(m.StageFailed)
        assert failed.job_id == "job"
        # It keeps what it has until the coordinator says what becomes of it.
        assert isinstance(await scene.call("coordinator", m.HoldStage(job_id="job")), m.StageReport)

    play(scenario)


def test_a_loss_that_is_not_finite_is_reported_as_such() -> None:
    async def scenario(scene: Scene, agent: Agent) -> None:
        await scene.prepare()
        message, buffers = scene.activation(0, scale=float("nan"))
        await scene.transports["first"].send(scene.peers["last"], message, buffers)
        assert (await scene.actors["coordinator"].wait_for(m.StageFailed)).code == "R601"

    play(scenario)


def test_a_node_runs_one_stage_at_a_time_and_is_free_after_the_job() -> None:
    async def scenario(scene: Scene, agent: Agent) -> None:
        await scene.prepare()
        with pytest.raises(JobRefusedError, match="already runs"):
            await scene.prepare()
        await scene.call("coordinator", m.EndJob(job_id="job", reason="over"))
        await scene.prepare()

    play(scenario)


def test_a_plan_that_gives_this_node_no_such_stage_is_refused() -> None:
    async def scenario(scene: Scene, agent: Agent) -> None:
        scene.plan = Plan(clusters=(), segments=(), backups=(), samples_per_s=0.0, notes=())
        with pytest.raises(MalformedMessageError, match="no stage 1"):
            await scene.prepare()

    play(scenario)


def test_messages_of_another_job_are_dropped() -> None:
    async def scenario(scene: Scene, agent: Agent) -> None:
        await scene.prepare()
        message, buffers = scene.activation(0)
        other = m.Activation(job_id="other", source_stage=0, micro_batch=message.micro_batch, values=message.values, rng=False)
        await scene.transports["first"].send(scene.peers["last"], other, buffers)
        await scene.transports["first"].send(scene.peers["last"], message, buffers)
        await scene.actors["first"].wait_for(m.Gradient)
        ended = await scene.call("coordinator", m.EndJob(job_id="job", reason="over"))
        assert isinstance(ended, m.StageReport)
        assert ended.metrics.micro_batches == 1

    play(scenario)


def test_a_paused_node_takes_what_arrives_and_computes_it_when_it_may_go_on(tmp_path: Path) -> None:
    async def scenario(scene: Scene, agent: Agent) -> None:
        coordinator, first = scene.actors["coordinator"], scene.actors["first"]
        await scene.prepare()
        (tmp_path / PAUSE_FILE).touch()
        await coordinator.wait_for(m.Heartbeat, lambda beat: beat.paused)
        message, buffers = scene.activation(0)
        await scene.transports["first"].send(scene.peers["last"], message, buffers)
        # Two more heartbeats: it lives, keeps its stage, and has computed nothing.
        beats = len(coordinator.received)
        async with coordinator.moved:
            await coordinator.moved.wait_for(lambda: len(coordinator.received) >= beats + 2)
        last = coordinator.received[-1][1]
        assert isinstance(last, m.Heartbeat)
        assert (last.job_id, last.paused, last.metrics.micro_batches if last.metrics else -1) == ("job", True, 0)
        assert first.received == []
        (tmp_path / PAUSE_FILE).unlink()
        assert (await first.wait_for(m.Gradient)).micro_batch == 0
        await coordinator.wait_for(m.Heartbeat, lambda beat: not beat.paused and beat.metrics and beat.metrics.updates == 1)

    play(scenario, state_dir=str(tmp_path))


def test_an_agent_that_starts_paused_says_so_when_it_registers(tmp_path: Path) -> None:
    async def scenario(scene: Scene, agent: Agent) -> None:
        registered = await scene.actors["coordinator"].wait_for(m.RegisterNode)
        assert registered.paused

    (tmp_path / PAUSE_FILE).touch()
    play(scenario, state_dir=str(tmp_path))


def test_a_stage_that_needs_more_than_the_node_lends_is_refused() -> None:
    async def scenario(scene: Scene, agent: Agent) -> None:
        cluster = scene.plan.clusters[0]
        stages = (cluster.stages[0], replace(cluster.stages[1], memory_needed_bytes=10**9 + 1))
        scene.plan = replace(scene.plan, clusters=(replace(cluster, stages=stages),))
        with pytest.raises(OutOfBudgetError, match=r"lends 1.0 GB; stage 1 of cluster 0 needs 1.0 GB"):
            await scene.prepare()
        assert not scene.actors["requester"].received

    play(scenario)


def test_a_stage_whose_tensors_alone_take_more_than_the_node_lends_is_refused_whatever_the_plan_says() -> None:
    trainable = TensorRecord(name="weight", dtype="float32", shape=(100,), kind=TensorKind.PARAMETER, trainable=True)
    buffer = TensorRecord(name="buffer", dtype="float32", shape=(50,), kind=TensorKind.BUFFER, trainable=False)
    adam = replace(CONFIG, optimizer=NamedArguments(name="Adam"))
    scene = Scene()
    message = m.PrepareStage(
        config=adam,
        plan=scene.plan,
        cluster=0,
        stage=1,
        peers=tuple(Peer(peer_id=name, address=f"{name}:1") for name in ("first", "last")),
        requester=Peer(peer_id="requester", address="requester:1"),
        resume=False,
    )
    given = assignment_from(message, node_id="last", coordinator=Peer(peer_id="coordinator", address="coordinator:1"))
    # Weight, gradient and two moments of Adam; the buffer once.
    check_tensors(given, (trainable, buffer), 4 * 400 + 200)
    with pytest.raises(OutOfBudgetError, match="needs"):
        check_tensors(given, (trainable, buffer), 4 * 400 + 199)


def test_a_stage_that_is_held_is_lent_to_the_nodes_that_the_coordinator_named_and_to_nobody_else() -> None:
    async def scenario(scene: Scene, agent: Agent) -> None:
        await scene.prepare()
        names = tuple(record.name for record in scene.programs[1].tensors)
        for name in ("first", "stranger"):
            with pytest.raises(ForbiddenError, match=f"{name} may not fetch the stage of node last"):
                await scene.call(name, m.FetchState(job_id="job", names=names))
        await scene.call("coordinator", m.HoldStage(job_id="job", borrowers=("first",)))
        reply = await scene.transports["first"].call(scene.peers["last"], m.FetchState(job_id="job", names=names), deadline_s=20)
        assert isinstance(reply.message, m.StateReply)
        assert tuple(spec.name for spec in reply.message.tensors) == names
        for spec, buffer in zip(reply.message.tensors, reply.buffers, strict=False):
            assert torch.equal(from_buffer(spec, buffer), scene.captured.tensors[spec.name])
        with pytest.raises(ForbiddenError):
            await scene.call("stranger", m.FetchState(job_id="job", names=names))
        with pytest.raises(MalformedMessageError, match="does not hold"):
            await scene.call("first", m.FetchState(job_id="job", names=("of.another.stage",)))

    play(scenario)
