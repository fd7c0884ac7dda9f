"""A pool of emulated nodes around the real coordinator, in virtual time. Messages of the coordinator really are encoded and decoded."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.planning_pools import Scenario
from benchmarks.scale_churn import Churn
from benchmarks.scale_clock import COORDINATOR, OTHERS, REAL_CPU, VirtualClock
from benchmarks.scale_nodes import TORCH, Doing, EmulatedNode
from roost import messages as m
from roost.config import CoordinatorConfig, TransportConfig
from roost.coordinator import job_runner, plan_keeper
from roost.coordinator.service import Coordinator
from roost.coordinator.store import Store
from roost.errors import DeadlineError, RoostError
from roost.planning.planner import make_plan
from roost.planning.replan import propose_change
from roost.transport.dispatch import answer, error_from
from roost.transport.framing import Assembler, pack
from roost.transport.interface import Buffer, Handler, Lane, Reply, Sender, StreamWatcher, Traffic
from roost.types import LinkProfile, Peer, Role

LATENCY_S = 0.02
"""Between the coordinator and anybody, one way."""
REQUESTER = Peer(peer_id="requester", address="emulated")
LIMITS = TransportConfig()


def coded(message: m.Message) -> tuple[m.Message, int]:
    """Return a message as it arrives, and its bytes."""
    packed = pack(message, (), LIMITS)
    complete = None
    assembler = Assembler(LIMITS)
    for frame in packed.frames(LIMITS.frame_bytes):
        complete = assembler.feed(frame)
    assert complete is not None
    return complete[0], packed.nbytes


class CoordinatorTransport:
    """The coordinator's endpoint. Implements `Transport` for what a coordinator needs."""

    def __init__(self, pool: EmulatedPool) -> None:
        self._pool = pool
        self.handler: Handler | None = None

    @property
    def peer_id(self) -> str:
        return "coordinator"

    @property
    def address(self) -> str:
        return "emulated"

    @property
    def traffic(self) -> Traffic:
        return Traffic(bytes_sent=0, bytes_received=0, messages_sent=0, messages_received=0)

    def watch_streams(self, watcher: StreamWatcher) -> None:
        """The coordinator's streams do not break."""

    async def start(self, handler: Handler) -> None:
        self.handler = handler

    async def stop(self) -> None:
        self.handler = None

    async def send(
        self, peer: Peer, message: m.Message, buffers: Sequence[Buffer] = (), *, lane: Lane = Lane.TRAINING, deadline_s: float | None = None
    ) -> None:
        self._pool.count(type(message).__name__, pack(message, buffers, LIMITS).nbytes)

    async def call(
        self,
        peer: Peer,
        message: m.Message,
        buffers: Sequence[Buffer] = (),
        *,
        lane: Lane = Lane.TRAINING,
        deadline_s: float | None = None,
    ) -> Reply:
        self._pool.count(type(message).__name__, pack(message, buffers, LIMITS).nbytes)
        limit = LIMITS.call_s if deadline_s is None else deadline_s
        try:
            async with asyncio.timeout(limit):
                reply = await self._pool.reply_of(peer, message)
        except TimeoutError as error:
            raise DeadlineError(f"{peer.peer_id} did not answer {type(message).__name__} in {limit:g} s") from error
        if isinstance(reply, RoostError):
            raise reply
        return Reply(message=coded(reply)[0], buffers=[])

    async def forget(self, peer_id: str) -> None:
        """Nothing is open."""


class EmulatedPool:
    """Nodes, their links, a requester, and the real coordinator with its database on the disk."""

    def __init__(self, scenario: Scenario, *, present: int, churn: Churn, heartbeat_s: float, directory: Path, seed: int) -> None:
        self.loop = VirtualClock()
        self.heartbeat_s = heartbeat_s
        self.spent: dict[Doing, float] = defaultdict(float)
        """Seconds that nodes were there, by what they did."""
        self.messages: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.replans: list[tuple[str, float]] = []
        """Kind, and CPU seconds."""
        self.repairs: list[float] = []
        """Seconds of virtual time from the loss of a stage's node to a plan that is carried out without it."""
        self.departures = 0
        self.lost_stages = 0
        self._scenario = scenario
        self._churn = churn
        self._present = present
        self._rng = random.Random(seed)
        self._lost_at: dict[str, float] = {}
        self._links: dict[str, list[LinkProfile]] = defaultdict(list)
        self._down: dict[str, float] = {}
        for link in scenario.links:
            self._links[link.source].append(link)
            self._down[link.target] = max(self._down.get(link.target, 0.0), link.bytes_per_s)
        self.nodes = {node.node_id: EmulatedNode(node, scenario.profile, self) for node in scenario.nodes}
        self.store = Store(directory / "roost.sqlite")
        self.transport = CoordinatorTransport(self)
        self.coordinator: Coordinator | None = None
        self.error = ""
        self._closed = False

    @property
    def now(self) -> float:
        return self.loop.now

    # ------------------------------------------------------------ what nodes need

    def links_of(self, name: str) -> tuple[LinkProfile, ...]:
        """Return what a node measures."""
        return tuple(self._links[name])

    def downlink(self, name: str) -> float:
        """Return the bytes per second at which a node receives."""
        return self._down.get(name, 1e7)

    def count(self, kind: str, nbytes: int) -> None:
        """Note a message from or to the coordinator."""
        self.messages[kind] += 1
        self.nbytes[kind] += nbytes

    # ------------------------------------------------------------ messages

    def tell(self, node: EmulatedNode, message: m.Message, heard: Callable[[m.Message | RoostError], None]) -> None:
        """Call the coordinator for a node; `heard` gets the reply, or the error that it carries."""
        sender = Sender(peer_id=node.name, role=Role.NODE)
        self.loop.call_later(LATENCY_S, self._arrive, sender, message, heard)

    def _arrive(self, sender: Sender, message: m.Message, heard: Callable[[m.Message | RoostError], None]) -> None:
        if self._closed:
            return
        self.loop.create_task(self._serve(sender, message, heard), context=COORDINATOR.copy())

    async def _serve(self, sender: Sender, message: m.Message, heard: Callable[[m.Message | RoostError], None]) -> None:
        handler = self.transport.handler
        if handler is None:
            return
        message, nbytes = coded(message)
        self.count(type(message).__name__, nbytes)
        reply, _ = await answer(handler, "coordinator", sender, message, [])
        self.count(type(reply).__name__, pack(reply, (), LIMITS).nbytes)
        outcome = error_from(reply) if isinstance(reply, m.Failed) else reply
        self.loop.call_later(LATENCY_S, heard, outcome, context=OTHERS)

    async def reply_of(self, peer: Peer, message: m.Message) -> m.Message | RoostError:
        """Return what a node or the requester answers; a node that is not there never does."""
        node = self.nodes.get(peer.peer_id)
        heard: asyncio.Future[m.Message | RoostError] = self.loop.create_future()

        def settle(outcome: m.Message | RoostError) -> None:
            if not heard.done():
                heard.set_result(outcome)

        async def ask() -> None:
            await asyncio.sleep(LATENCY_S)
            try:
                reply = await node.answer(message) if node is not None else self._requester_answers(message)
            except RoostError as error:
                settle(error)
                return
            await asyncio.sleep(LATENCY_S)
            settle(reply)

        if node is None or node.there:
            self.loop.create_task(ask(), context=OTHERS.copy())
        return await heard

    @staticmethod
    def _requester_answers(message: m.Message) -> m.Message:
        return m.CheckpointWritten(path="emulated") if isinstance(message, m.FinishCheckpoint) else m.Done()

    # ------------------------------------------------------------ coming and going

    def _arrives(self, node: EmulatedNode, seconds: float) -> None:
        node.arrive()
        self.loop.call_later(seconds, self._departs, node)

    def _departs(self, node: EmulatedNode) -> None:
        self.departures += 1
        if node.held is not None:
            self.lost_stages += 1
            self._lost_at.setdefault(node.name, self.now)
            number = node.held.number
            for other in self.nodes.values():
                if other.held is not None and other.held.number == number and other is not node:
                    other.stop()
        node.depart()

    def _next_arrival(self) -> None:
        away = [node for node in self.nodes.values() if not node.there]
        if away:
            self._arrives(self._rng.choice(away), self._churn.session_s())
        self.loop.call_later(self._churn.gap_s(), self._next_arrival)

    def begin(self) -> None:
        """Let the nodes of the steady state arrive within a heartbeat and others follow."""
        for node in list(self.nodes.values())[: self._present]:
            # All stay until the job runs: what is measured is a pool that runs, not how it starts.
            self.loop.call_later(self._rng.uniform(0, self.heartbeat_s), node.arrive)

    def begin_churn(self) -> None:
        """From now on nodes leave and others arrive."""
        for node in self.nodes.values():
            if node.there:
                self.loop.call_later(self._churn.rest_s(), self._departs, node)
        self.loop.call_later(self._churn.gap_s(), self._next_arrival)

    # ------------------------------------------------------------ the coordinator and its job

    async def coordinate(self) -> None:
        """Be the coordinator's process."""
        config = CoordinatorConfig(heartbeat_s=self.heartbeat_s, lost_after_s=max(15.0, 4 * self.heartbeat_s))
        self.store.open()
        self.coordinator = Coordinator(config=config, transport=self.transport, store=self.store)
        await self.transport.start(self.coordinator)
        await self.coordinator.watch()

    async def submit(self, wait_nodes: int) -> None:
        """Be the requester: submit the job and stay there."""
        message = m.SubmitJob(
            protocol_version=m.PROTOCOL_VERSION,
            torch_version=TORCH,
            config=self._scenario.config,
            profile=self._scenario.profile,
            requester=REQUESTER,
            wait_nodes=wait_nodes,
            wait_s=600.0,
            resume=False,
        )
        sender = Sender(peer_id=REQUESTER.peer_id, role=Role.REQUESTER)
        accepted: asyncio.Future[m.Message | RoostError] = self.loop.create_future()
        self._arrive(sender, message, accepted.set_result)
        while True:
            await asyncio.sleep(1.0)
            if accepted.done() and isinstance(outcome := accepted.result(), RoostError):
                self.error = outcome.message
                return
            beat = m.RequesterHeartbeat(job_id=self._scenario.config.job_id)
            self._arrive(sender, beat, lambda reply: None)

    @property
    def job(self) -> job_runner.JobRunner | None:
        """The job, once there is one."""
        return self.coordinator._job if self.coordinator is not None else None

    def settle(self) -> None:
        """Count the time of all nodes until now."""
        for node in self.nodes.values():
            if node.there:
                node.settle()

    def close(self) -> None:
        """End everything that is under way, and the loop."""
        self._closed = True
        while left := asyncio.all_tasks(self.loop):
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.close()
        self.store.close()

    # ------------------------------------------------------------ measuring

    def patches(self) -> list[Any]:
        """Return what lets the production code run in virtual time, and its planning be timed."""

        def timed(kind: str, plan: Callable[..., Any]) -> Callable[..., Any]:
            def plan_and_time(*arguments: Any, **options: Any) -> Any:
                began = REAL_CPU()
                try:
                    return plan(*arguments, **options)
                finally:
                    self.replans.append((kind, REAL_CPU() - began))

            return plan_and_time

        def propose(*arguments: Any, improve: bool = True, **options: Any) -> Any:
            kind = "improve" if improve else "repair"
            return timed(kind, propose_change)(*arguments, improve=improve, **options)

        carried_out = plan_keeper.PlanKeeper.carry_out

        async def carry_out(keeper: plan_keeper.PlanKeeper, *arguments: Any, **options: Any) -> None:
            gone = set(keeper.gone)
            await carried_out(keeper, *arguments, **options)
            self.repairs += [self.now - self._lost_at.pop(name) for name in sorted(gone & set(self._lost_at))]

        return [
            mock.patch.object(time, "monotonic", self.loop.time),
            mock.patch.object(plan_keeper, "propose_change", propose),
            mock.patch.object(job_runner, "make_plan", timed("plan", make_plan)),
            mock.patch.object(plan_keeper.PlanKeeper, "carry_out", carry_out),
        ]
