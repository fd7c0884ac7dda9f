"""A pool whose coordinator and agents run on the requester's event loop, over the in-process transport.

The production code of all three roles runs; only sockets, processes and certificates are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from roost.agent.service import Agent
from roost.api import Job, prepare
from roost.config import AgentConfig, CoordinatorConfig
from roost.coordinator.service import Coordinator
from roost.coordinator.store import Store
from roost.errors import PlanningError, RoostError
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


class InprocPool:
    """Coordinator and agents as tasks; `network`, `agents` and `coordinator` are there for tests to look at and to break."""

    def __init__(self, nodes: list[NodeProfile], directory: Path, *, lost_after_s: float = 15.0) -> None:
        self._nodes = nodes
        self._directory = directory
        self._lost_after_s = lost_after_s
        self.network = InprocNetwork()
        self.agents: dict[str, Agent] = {}
        self.coordinator: Coordinator | None = None

    @contextlib.asynccontextmanager
    async def enter(self, *, on_failure: Callable[[RoostError], None]) -> AsyncIterator[Membership]:
        """Start everything, yield, and stop everything."""
        hub = InprocTransport("coordinator", Role.COORDINATOR, self.network)
        with Store(self._directory / "roost.sqlite") as store:
            config = CoordinatorConfig(heartbeat_s=0.05, lost_after_s=self._lost_after_s)
            self.coordinator = Coordinator(config=config, transport=hub, store=store)
            await hub.start(self.coordinator)
            peer = Peer(peer_id="coordinator", address=hub.address)
            tasks = [asyncio.create_task(self.coordinator.watch())]
            for profile in self._nodes:
                transport = InprocTransport(profile.node_id, Role.NODE, self.network)
                agent = Agent(config=AgentConfig(node_id=profile.node_id), transport=transport, coordinator=peer, profile=profile)
                self.agents[profile.node_id] = agent
                tasks.append(asyncio.create_task(agent.run()))
            try:
                requester = InprocTransport("requester", Role.REQUESTER, self.network)
                yield Membership(transport=requester, coordinator=peer, wait_nodes=len(self._nodes))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self.coordinator.close()
                await hub.stop()


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
