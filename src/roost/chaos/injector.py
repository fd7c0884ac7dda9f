"""Carries a schedule of faults out on a pool while it trains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from roost.chaos.links import LinkState
from roost.chaos.pool import COORDINATOR, BreakablePool
from roost.chaos.schedule import Fault, FaultKind, pick
from roost.errors import RoostError, StageFailedError
from roost.messages import JobState
from roost.requester.pools import Membership
from roost.requester.run import RunMetrics
from roost.types import ModelProfile, NodeProfile, Plan

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Incident:
    """A fault that came."""

    kind: FaultKind
    node: str
    """Which node was hit; "coordinator" if it was that, empty if it was everything."""
    other: str
    """The other end of a link that was cut."""
    began: float
    """Unix time."""
    ended: float | None
    """Unix time at which what was broken was given back, None before."""
    had_stage: bool
    """True if the node ran a stage, or both nodes of a link did in one cluster."""


class ChaosPool:
    """A BreakablePool for the trainings of one job, one after the other, with faults in between. Implements Pool and Observer."""

    def __init__(self, pool: BreakablePool, faults: Sequence[Fault], *, on_incident: Callable[[Incident], None]) -> None:
        """`on_incident` hears of every fault when it comes and when it is over, on the run's own thread."""
        self._pool = pool
        self._faults = list(faults)
        self._on_incident = on_incident
        self._on_failure: Callable[[RoostError], None] = lambda error: None
        self._training = asyncio.Event()
        self._given_back = asyncio.Event()
        self._trained_s = 0.0
        self._since: float | None = None
        self._plan: Plan | None = None
        self._away: set[str] = set()  # nodes that are down, frozen, or cut off
        self._tasks: set[asyncio.Task[None]] = set()
        self.incidents: list[Incident] = []
        self.restarting = False
        """True if the run was ended in order to be started again from its last checkpoint."""
        self.over_since: float | None = None
        """Unix time at which the last fault was over, None before."""

    @property
    def paced(self) -> bool:
        """True if some node emulates a slower machine by sleeping."""
        return self._pool.paced

    @contextlib.asynccontextmanager
    async def enter(self, *, on_failure: Callable[[RoostError], None]) -> AsyncIterator[Membership]:
        """Start the pool, and break it once it trains; stop it at the end."""
        self._training, self._given_back = asyncio.Event(), asyncio.Event()
        self._since, self._on_failure, self.restarting = None, on_failure, False
        self._away.clear()
        async with self._pool.enter(on_failure=on_failure) as membership:
            self._spawn(self._inject())
            try:
                yield membership
            finally:
                self._trained_s = self._clock()
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------ what the run tells

    def planned(self, plan: Plan, nodes: tuple[NodeProfile, ...], profile: ModelProfile) -> None:
        """Take the plan that is carried out from now on."""
        self._plan = plan

    def updated(self, metrics: RunMetrics) -> None:
        """Begin with the faults once samples have been trained."""
        if metrics.state is JobState.TRAINING and metrics.samples and self._since is None:
            self._since = time.monotonic()
            self._training.set()

    # ------------------------------------------------------------ the schedule

    def _clock(self) -> float:
        """Return the seconds of training so far."""
        return self._trained_s + (time.monotonic() - self._since if self._since is not None else 0.0)

    async def _inject(self) -> None:
        await self._training.wait()
        while self._faults:
            await asyncio.sleep(max(0.0, self._faults[0].at_s - self._clock()))
            await self._until(lambda: bool(self._there()))
            self._strike(self._faults.pop(0))
        await self._until(lambda: all(incident.ended is not None for incident in self.incidents))
        self.over_since = time.time()

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that can only come true when what was broken is given back."""
        while not holds():
            self._given_back.clear()
            await self._given_back.wait()

    def _there(self) -> set[str]:
        return set(self._pool.names) - self._away

    def _victim(self, fault: Fault) -> str:
        """Return a node that is there, one with a stage if there is any."""
        there = self._there()
        return pick(there & self._with_stage() or there, fault.first)

    def _with_stage(self) -> set[str]:
        return {stage.node_id for stage in self._plan.stages} if self._plan is not None else set()

    def _strike(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.RESTART:
                incident = self._note(fault.kind, "")
                work = self._everything(fault, incident)
            case FaultKind.COORDINATOR:
                incident = self._note(fault.kind, COORDINATOR)
                work = self._killed(fault, incident)
            case FaultKind.CUT:
                node, other = self._link(fault)
                incident = self._note(fault.kind, node, other)
                work = self._cut(fault, incident)
            case FaultKind.KILL:
                incident = self._note(fault.kind, self._victim(fault))
                work = self._killed(fault, incident)
            case FaultKind.FREEZE:
                incident = self._note(fault.kind, self._victim(fault))
                work = self._frozen(fault, incident)
            case FaultKind.BLACKHOLE:
                incident = self._note(fault.kind, self._victim(fault))
                work = self._cable(fault, incident)
        self._spawn(work)

    def _link(self, fault: Fault) -> tuple[str, str]:
        """Return two nodes: neighbours in a cluster if there are such."""
        node = self._victim(fault)
        others = self._mates(node) & self._there() or set(self._pool.names) - {node}
        return (node, pick(others, fault.second)) if others else (node, COORDINATOR)

    def _mates(self, node: str) -> set[str]:
        """Return the nodes of the same cluster."""
        clusters = self._plan.clusters if self._plan is not None else ()
        members = ({stage.node_id for stage in cluster.stages} for cluster in clusters)
        return next((found - {node} for found in members if node in found), set())

    def _note(self, kind: FaultKind, node: str, other: str = "") -> Incident:
        had_stage = other in self._mates(node) if other else node in self._with_stage()
        incident = Incident(kind=kind, node=node, other=other, began=time.time(), ended=None, had_stage=had_stage)
        self.incidents.append(incident)
        self._on_incident(incident)
        return incident

    def _over(self, incident: Incident) -> None:
        incident.ended = time.time()
        self._away.discard(incident.node)
        self._given_back.set()
        self._on_incident(incident)

    # ------------------------------------------------------------ the faults

    async def _killed(self, fault: Fault, incident: Incident) -> None:
        self._away.add(incident.node)
        self._pool.kill(incident.node)
        await asyncio.sleep(fault.lasts_s)
        await self._pool.start(incident.node)
        self._over(incident)

    async def _frozen(self, fault: Fault, incident: Incident) -> None:
        self._away.add(incident.node)
        self._pool.freeze(incident.node)
        await asyncio.sleep(fault.lasts_s)
        self._pool.thaw(incident.node)
        self._over(incident)

    async def _cut(self, fault: Fault, incident: Incident) -> None:
        self._pool.set_link(incident.node, incident.other, LinkState.CUT)
        await asyncio.sleep(fault.lasts_s)
        self._pool.set_link(incident.node, incident.other, LinkState.OPEN)
        self._over(incident)

    async def _cable(self, fault: Fault, incident: Incident) -> None:
        self._away.add(incident.node)
        self._pool.set_cable(incident.node, LinkState.SILENT)
        await asyncio.sleep(fault.lasts_s)
        self._pool.set_cable(incident.node, LinkState.OPEN)
        self._over(incident)

    async def _everything(self, fault: Fault, incident: Incident) -> None:
        self.restarting = True
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        for name in (COORDINATOR, *self._pool.names):
            self._pool.kill(name)
        for open_one in self.incidents:
            # Whatever else was broken is given back by the restart.
            open_one.ended = open_one.ended or time.time() + fault.lasts_s
        await asyncio.sleep(fault.lasts_s)
        self._on_incident(incident)
        self._on_failure(StageFailedError("everything was stopped, to be started again"))

    # ------------------------------------------------------------ tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="fault")
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(StageFailedError(f"a fault could not be carried out: {type(error).__name__}: {error}"))
