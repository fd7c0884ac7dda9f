"""A pool whose coordinator and agents run on the requester's event loop, over the in-process transport.

The production code of all three roles runs; only sockets, processes and certificates are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from roost.agent.service import Agent
from roost.api import Job, prepare
from roost.config import AgentConfig, CoordinatorConfig
from roost.coordinator.service import Coordinator
from roost.coordinator.store import Store
from roost.errors import PlanningError, RoostError
from roost.messages import Message
from roost.planning.planner import make_plan
from roost.requester.pools import Membership
from roost.transport.inproc import InprocNetwork, InprocTransport
from roost.types import NodeProfile, Peer, Role


def node(name: str, *, memory: int = 10**9, flop_per_s: float = 1e10) -> NodeProfile:
    """Return a declared profile; nothing is measured or paced."""
    return NodeProfile(
        node_id=name,
        address="",
        memory_bytes=memory,
        flop_per_s=flop_per_s,
        matmul_flop_per_s=flop_per_s,
        convolution_flop_per_s=flop_per_s,
        bf16_flop_per_s=flop_per_s,
        device="cpu",
        threads=1,
        emulated=True,
    )


class TrippingTransport(InprocTransport):
    """Does something just before it sends certain messages to others."""

    def __init__(self, peer_id: str, role: Role, network: InprocNetwork) -> None:
        super().__init__(peer_id, role, network)
        self.trips: list[tuple[Callable[[Message], bool], Callable[[], None]]] = []

    async def send(self, peer: Peer, message: Message, buffers: Any = (), **options: Any) -> None:
        for due, action in self.trips:
            # Nodes measure what messages cost by sending some to themselves.
            if peer.peer_id != self.peer_id and due(message):
                action()
        await super().send(peer, message, buffers, **options)


class InprocPool:
    """Coordinator and agents as tasks; `network`, `agents` and `coordinator` are there for tests to look at and to break."""

    def __init__(self, nodes: list[NodeProfile], directory: Path, *, lost_after_s: float = 15.0, **settings: float) -> None:
        """`settings` are further fields of CoordinatorConfig."""
        self._nodes = nodes
        self._directory = directory
        self._settings = {"heartbeat_s": 0.05, "lost_after_s": lost_after_s, **settings}
        self._trips: dict[str, list[tuple[Callable[[Message], bool], Callable[[], None]]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.wait_nodes = len(nodes)
        self.network = InprocNetwork()
        self.agents: dict[str, Agent] = {}
        self.coordinator: Coordinator | None = None
        self._store: Store | None = None

    def when_sent(self, node_id: str, due: Callable[[Message], bool], action: Callable[[], None]) -> None:
        """Do something just before a node sends each message that is `due`."""
        self._trips.setdefault(node_id, []).append((due, action))

    def kill(self, node_id: str) -> None:
        """End a node as SIGKILL would."""
        self.network.kill(node_id)
        self._tasks[node_id].cancel()

    async def restart_coordinator(self) -> None:
        """End the coordinator as SIGKILL would, and start another with what is on the disk."""
        self.network.kill("coordinator")
        assert self.coordinator is not None and self._store is not None
        self._watching.cancel()
        await self.coordinator.close()
        self._store.close()
        self._store.open()
        await self._start_coordinator()

    async def _start_coordinator(self) -> None:
        assert self._store is not None
        hub = InprocTransport("coordinator", Role.COORDINATOR, self.network)
        self.coordinator = Coordinator(config=CoordinatorConfig(**self._settings), transport=hub, store=self._store)
        self.coordinator.restore()
        await hub.start(self.coordinator)
        self.coordinator.take_over()
        self._hub, self._watching = hub, asyncio.create_task(self.coordinator.watch())

    def start(self, profile: NodeProfile) -> None:
        """Start an agent; one of a node that was killed begins with nothing."""
        transport = TrippingTransport(profile.node_id, Role.NODE, self.network)
        transport.trips = self._trips.get(profile.node_id, [])
        peer = Peer(peer_id="coordinator", address="inproc:coordinator")
        agent = Agent(config=AgentConfig(node_id=profile.node_id), transport=transport, coordinator=peer, profile=profile)
        self.agents[profile.node_id] = agent
        self._tasks[profile.node_id] = asyncio.get_running_loop().create_task(agent.run())

    @contextlib.asynccontextmanager
    async def enter(self, *, on_failure: Callable[[RoostError], None]) -> AsyncIterator[Membership]:
        """Start everything, yield, and stop everything."""
        with Store(self._directory / "roost.sqlite") as self._store:
            await self._start_coordinator()
            peer = Peer(peer_id="coordinator", address="inproc:coordinator")
            for profile in self._nodes:
                self.start(profile)
            try:
                requester = InprocTransport("requester", Role.REQUESTER, self.network)
                yield Membership(transport=requester, coordinator=peer, wait_nodes=self.wait_nodes)
            finally:
                tasks = [self._watching, *self._tasks.values()]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                assert self.coordinator is not None
                await self.coordinator.close()
                await self._hub.stop()


def nodes_for_stages(job: Job, names: list[str]) -> list[NodeProfile]:
    """Return equal nodes with so little memory that the model fits on all of them together and on no fewer."""
    package = prepare(job)
    low, high = 1, 10**9
    while high - low > 1:
        middle = (low + high) // 2
        try:
            make_plan(package.profile, [node(name, memory=middle) for name in names], [], package.config, random.Random(0))
        except PlanningError:
            low = middle
        else:
            high = middle
    return [node(name, memory=high) for name in names]
