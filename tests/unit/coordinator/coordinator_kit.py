"""A coordinator on the in-process network, with nodes and requesters that answer as they are told: no torch, no training."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from roost import messages as m
from roost.config import CoordinatorConfig, JobConfig, NamedArguments
from roost.coordinator.service import Coordinator
from roost.coordinator.store import Store
from roost.errors import RoostError
from roost.transport.inproc import InprocNetwork, InprocTransport
from roost.transport.interface import Buffer, Sender
from roost.types import (
    EvaluationResult,
    Lease,
    ModelProfile,
    NodeProfile,
    Peer,
    Role,
    StageMetrics,
    TensorKind,
    TensorRecord,
    UnitProfile,
)

MB = 10**6
WAIT_S = 20.0
"""Nothing here takes that long: it only ends a test that hangs."""
COORDINATOR = Peer(peer_id="coordinator", address="inproc:coordinator")


def unit(index: int) -> UnitProfile:
    weight = TensorRecord(name=f"layers.{index}.weight", dtype="float32", shape=(MB // 4,), kind=TensorKind.PARAMETER, trainable=True)
    return UnitProfile(
        start=index,
        stop=index + 1,
        label=f"layers.{index}",
        forward_s=0.001,
        backward_s=0.002,
        forward_flop=1e6,
        tensors=(weight,),
        saved_bytes=1000,
        crossing_bytes=1000,
    )


def model(units: int = 4) -> ModelProfile:
    """Return a made-up model of equal units, each with a parameter of one megabyte."""
    return ModelProfile(
        name="made-up",
        micro_batch_size=4,
        reference_flop_per_s=1e9,
        units=tuple(unit(index) for index in range(units)),
        input_bytes=1000,
    )


def profile(name: str, *, memory: int = 100 * MB, speed: float = 1e9) -> NodeProfile:
    return NodeProfile(
        node_id=name,
        address=f"inproc:{name}",
        memory_bytes=memory,
        flop_per_s=speed,
        matmul_flop_per_s=speed,
        convolution_flop_per_s=speed,
        device="cpu",
        threads=1,
    )


def config(job_id: str = "job", **fields: int) -> JobConfig:
    settings: dict[str, Any] = {"batch_size": 4, "micro_batch_size": 4, "samples": 22, "epochs": 1, **fields}
    return JobConfig(job_id=job_id, optimizer=NamedArguments(name="SGD", arguments=(("lr", 0.1),)), **settings)


def metrics(node: str, *, cluster: int = 0, stage: int = 0, samples: int = 0, loss_sum: float = 0.0) -> StageMetrics:
    return StageMetrics(
        node_id=node,
        cluster=cluster,
        stage=stage,
        updates=-(-samples // 4),
        micro_batches=-(-samples // 4),
        samples=samples,
        loss_sum=loss_sum,
        loss_samples=samples if loss_sum else 0,
        staleness_max=0,
        staleness_sum=0,
        compute_s=0.0,
        cpu_s=0.0,
        bytes_sent=0,
        bytes_received=0,
        rounds=0,
    )


class Endpoint:
    """A peer of the coordinator that writes down what it is asked."""

    def __init__(self, name: str, role: Role, network: InprocNetwork) -> None:
        self.name = name
        self.transport = InprocTransport(name, role, network)
        self.asked: list[m.Message] = []
        self.answers: dict[type[m.Message], Callable[[Any], m.Message]] = {}
        """Replies that differ from the usual ones; a function here may raise."""

    async def on_call(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> tuple[m.Message, Sequence[Buffer]]:
        self.asked.append(message)
        answer = self.answers.get(type(message), self.usual)
        return answer(message), []

    async def on_message(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> None:
        self.asked.append(message)

    def usual(self, message: m.Message) -> m.Message:
        return m.Done()

    async def call(self, message: m.Message) -> m.Message:
        return (await self.transport.call(COORDINATOR, message, deadline_s=WAIT_S)).message

    async def send(self, message: m.Message) -> None:
        """Tell the coordinator something, whatever it answers."""
        with contextlib.suppress(RoostError):
            await self.call(message)

    def was_asked(self, kind: type[m.Message]) -> bool:
        return any(isinstance(message, kind) for message in self.asked)


class FakeNode(Endpoint):
    """A node that takes every stage and trains nothing: a test leases and reports for it."""

    def __init__(self, node: NodeProfile, network: InprocNetwork) -> None:
        super().__init__(node.node_id, Role.NODE, network)
        self.profile = node
        self.go = asyncio.Event()
        self.metrics = metrics(node.node_id)
        self.line = asyncio.Event()
        """Set while the node can upload."""
        self.line.set()
        self._uploads: set[asyncio.Task[None]] = set()

    def usual(self, message: m.Message) -> m.Message:
        match message:
            case m.ProbeLinks():
                return m.LinkReport(links=())
            case m.PrepareStage():
                self.metrics = replace(metrics(self.name), cluster=message.cluster, stage=message.stage, number=message.number)
            case m.ContinueJob():
                self.go.set()
            case m.SaveStage(background=True):
                task = asyncio.create_task(self._upload(message))
                self._uploads.add(task)
                task.add_done_callback(self._uploads.discard)
            case m.AverageNow() | m.EndJob() | m.HoldStage():
                return m.StageReport(metrics=self.metrics)
        return m.Done()

    async def _upload(self, message: m.SaveStage) -> None:
        await self.line.wait()
        await self.send(m.StageSaved(job_id=message.job_id, checkpoint=message.checkpoint, attempt=message.attempt))

    async def register(self, *, torch_version: str = "2.13.0", protocol_version: int = m.PROTOCOL_VERSION) -> m.Message:
        message = m.RegisterNode(
            protocol_version=protocol_version, roost_version="0.1.0", torch_version=torch_version, profile=self.profile
        )
        return await self.call(message)

    async def heartbeat(self, job_id: str = "", reported: StageMetrics | None = None, *, paused: bool = False) -> m.Message:
        return await self.call(m.Heartbeat(job_id=job_id, metrics=reported, paused=paused))

    async def lease(self, *, job_id: str = "job", cluster: int = 0, want: int = 1) -> m.LeaseGrant:
        """Ask for leases for cluster number `cluster`."""
        grant = await self.call(m.LeaseRequest(job_id=job_id, cluster=cluster, want=want))
        assert isinstance(grant, m.LeaseGrant)
        return grant

    async def done(self, *leases: Lease, job_id: str = "job", cluster: int = 0) -> None:
        """Report training leases as applied."""
        samples = self.metrics.samples + sum(lease.samples for lease in leases)
        self.metrics = replace(self.metrics, samples=samples, updates=self.metrics.updates + len(leases))
        await self.send(m.LeaseDone(job_id=job_id, cluster=cluster, lease_ids=tuple(lease.lease_id for lease in leases)))

    async def evaluated(self, lease: Lease, *, loss: float, metric: float, job_id: str = "job", cluster: int = 0) -> None:
        """Report a validation lease whose samples all have this loss and metric."""
        count = lease.samples
        result = EvaluationResult(lease_id=lease.lease_id, samples=count, loss_sum=loss * count, metric_sum=metric * count)
        await self.send(m.EvaluationDone(job_id=job_id, cluster=cluster, result=result, number=lease.lease_id))

    async def train(self, *, job_id: str = "job", cluster: int | None = None) -> list[Lease]:
        """Once told to go, take and report training leases until there are none; return them."""
        async with asyncio.timeout(WAIT_S):
            await self.go.wait()
        self.go.clear()
        cluster = self.metrics.number if cluster is None else cluster
        taken: list[Lease] = []
        drained = False
        while not drained:
            grant = await self.lease(job_id=job_id, cluster=cluster)
            drained = grant.drained
            assert all(lease.training for lease in grant.leases)
            taken.extend(grant.leases)
            await self.done(*grant.leases, job_id=job_id, cluster=cluster)
        return taken


class FakeRequester(Endpoint):
    """A requester that says yes to every checkpoint and keeps the updates it gets."""

    def __init__(self, name: str, network: InprocNetwork) -> None:
        super().__init__(name, Role.REQUESTER, network)
        self.updates: list[m.JobUpdate] = []
        self._changed = asyncio.Condition()

    def usual(self, message: m.Message) -> m.Message:
        if isinstance(message, m.FinishCheckpoint):
            return m.CheckpointWritten(path=f"/checkpoints/{message.checkpoint}")
        return m.Done()

    async def changed(self) -> None:
        """Wait for the next update."""
        async with self._changed:
            await self._changed.wait()

    async def on_message(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> None:
        assert isinstance(message, m.JobUpdate)
        async with self._changed:
            self.updates.append(message)
            self._changed.notify_all()

    async def until(self, state: m.JobState, *, job_id: str = "job") -> m.JobUpdate:
        """Return the first update of a job in `state`, waiting for it."""

        def found() -> m.JobUpdate | None:
            return next((update for update in self.updates if (update.job_id, update.state) == (job_id, state)), None)

        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: found() is not None)
        update = found()
        assert update is not None
        return update

    async def submit(
        self, job: JobConfig | None = None, *, wait_nodes: int = 1, wait_s: float = WAIT_S, units: int = 4, **fields: Any
    ) -> m.JobAccepted:
        message = m.SubmitJob(
            **{
                "protocol_version": m.PROTOCOL_VERSION,
                "torch_version": "2.13.0",
                "config": job or config(),
                "profile": model(units),
                "requester": Peer(peer_id=self.name, address=self.transport.address),
                "wait_nodes": wait_nodes,
                "wait_s": wait_s,
                "resume": False,
                **fields,
            }
        )
        reply = await self.call(message)
        assert isinstance(reply, m.JobAccepted)
        return reply


class Scene:
    """A coordinator with registered nodes and a requester."""

    def __init__(self, network: InprocNetwork, coordinator: Coordinator, store: Store) -> None:
        self.network = network
        self.coordinator = coordinator
        self.store = store
        self.nodes: dict[str, FakeNode] = {}
        self.requester = FakeRequester("requester", network)
        self._endpoints: list[Endpoint] = []

    async def add(self, endpoint: Endpoint) -> None:
        await endpoint.transport.start(endpoint)
        self._endpoints.append(endpoint)

    async def join(self, node: NodeProfile) -> FakeNode:
        """Start and register a node."""
        fake = self.nodes[node.node_id] = FakeNode(node, self.network)
        await self.add(fake)
        await fake.register()
        return fake

    async def close(self) -> None:
        for endpoint in self._endpoints:
            await endpoint.transport.stop()


@contextlib.asynccontextmanager
async def scene(directory: Path, *nodes: NodeProfile, **settings: float) -> AsyncIterator[Scene]:
    """Yield a running coordinator that `nodes` have joined."""
    network = InprocNetwork()
    hub = InprocTransport("coordinator", Role.COORDINATOR, network)
    with Store(directory / "roost.sqlite") as store:
        coordinator = Coordinator(config=CoordinatorConfig(**settings), transport=hub, store=store)  # type: ignore[arg-type]
        await hub.start(coordinator)
        watch = asyncio.create_task(coordinator.watch())
        stage = Scene(network, coordinator, store)
        await stage.add(stage.requester)
        for node in nodes:
            await stage.join(node)
        try:
            yield stage
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await coordinator.close()
            await stage.close()
            await hub.stop()


def refusal(error: type[RoostError]) -> Callable[[Any], m.Message]:
    """Return an answer that is this error."""

    def answer(message: m.Message) -> m.Message:
        raise error(f"{type(message).__name__} fails in this test")

    return answer
