"""Mends the plan of a running job: after nodes were lost, when one wants to leave, when others have joined (docs/failover.md)."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from roost import messages as m
from roost.config import CoordinatorConfig
from roost.coordinator.node_calls import NodeCalls, first_error
from roost.coordinator.plan_keeper import PlanKeeper
from roost.errors import NodeLostError, PlanningError, RequesterLostError, RoostError, TransportError
from roost.planning.takeover import StageState, Transition
from roost.protocol.data_leases import LeaseBook
from roost.transport.interface import Transport
from roost.types import NodeProfile, Peer, Plan

logger = logging.getLogger(__name__)

DRAIN_S = 30.0
"""How long clusters that are to change on purpose may finish what they have leased; then it is leased again."""
MOST_FAILURES = 6
"""Attempts in a row that may fail for another reason than a lost node."""
RETRY_S = 0.5
"""Pause after the first failed attempt; it doubles with each."""
UNREACHED = re.compile(r"node (\S+) cannot go on: (\S+) at ")
"""What a node says that could not reach another one."""
REQUESTER_S = 10.0
"""Deadline for the requester to take note of a plan."""


@dataclass(frozen=True, kw_only=True)
class Return:
    """Where a job goes back to if no node has some of its state."""

    checkpoint: str
    """Its name on the requester's disk; empty: as the job was submitted."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A plan that a review has found, and what it was asked of: looking for it once more would find it again."""

    before: Plan
    pool: frozenset[NodeProfile]
    plan: Plan


class Repairer:
    """Finds the next plan and carries it out; whatever is lost meanwhile starts it again."""

    def __init__(
        self,
        *,
        job_id: str,
        seed: int,
        keeper: PlanKeeper,
        book: LeaseBook,
        calls: NodeCalls,
        transport: Transport,
        requester: Peer,
        settings: CoordinatorConfig,
        pool: Callable[[], Sequence[NodeProfile]],
        on_lost: Callable[[str, str], None],
    ) -> None:
        """`pool` returns the nodes that the job may use now; `on_lost` is told of a node that could not be reached."""
        self._job_id = job_id
        self._seed = seed
        self._keeper = keeper
        self._book = book
        self._calls = calls
        self._transport = transport
        self._requester = requester
        self._settings = settings
        self._pool = pool
        self._on_lost = on_lost
        self._reported = 0
        self._found: _Found | None = None
        self._pool_changed = asyncio.Event()
        self.drained = asyncio.Event()
        """To be set when a lease is done."""
        self.draining: frozenset[int] = frozenset()
        """Clusters that get no more leases, as they are about to change."""
        self.returned: Return | None = None
        """Set if the last repair went back to a checkpoint."""
        self.checkpoint = ""
        """The newest checkpoint of the job."""

    def pool_changed(self) -> None:
        """A node has joined, come back, or gone: whoever waits for nodes looks again."""
        self._pool_changed.set()

    def expect(self, following: Plan, pool: Sequence[NodeProfile]) -> None:
        """A review has found this plan for these nodes: the next repair takes it, unless something has changed by then."""
        assert self._keeper.plan is not None, "asked for only after planning"
        self._found = _Found(before=self._keeper.plan, pool=frozenset(pool), plan=following)

    async def repair(self, order: int, *, leaving: Collection[str] = ()) -> None:
        """Bring the job to a plan that can go on, without the nodes that are `leaving`.

        Raises NodeLostError if the nodes that are there cannot hold the model and no other joins in time, and the RoostError of a
        change that fails again and again.
        """
        failures = 0
        while True:
            try:
                await self._repair_once(order, leaving)
                return
            except (RoostError, BaseExceptionGroup) as raised:
                error = first_error(raised)
                if isinstance(error, PlanningError) or not isinstance(error, RoostError):
                    raise error from raised
                # A requester that is away may come back; after how long it counts as lost is not decided here.
                failures += not isinstance(error, RequesterLostError)
                self._note(error, failures)
            await asyncio.sleep(RETRY_S * 2 ** max(0, failures - 1))

    def _note(self, error: RoostError, failures: int) -> None:
        if isinstance(error, NodeLostError) and error.node:
            # That starts another repair, which ends this one.
            self._on_lost(error.node, error.message)
        elif failures >= MOST_FAILURES:
            raise error
        else:
            logger.warning("repair_failed job=%s error=%s", self._job_id, error.message)
            self._blame_link(error)

    def _blame_link(self, error: RoostError) -> None:
        """A node could not reach another one that has what it needs: look for a way without that link."""
        found = UNREACHED.search(error.message)
        if found is not None and {found[1], found[2]} <= self._calls.nodes.keys():
            self._keeper.quarrels.avoid(found[1], found[2])

    async def _repair_once(self, order: int, leaving: Collection[str]) -> None:
        keeper = self._keeper
        began = time.monotonic()
        await keeper.go_on_without_broken(order)
        following = await self._next_plan(leaving)
        logger.info("plan_chosen job=%s broken=%s seconds=%.2f", self._job_id, sorted(keeper.broken), time.monotonic() - began)
        way = keeper.way_to(following)
        changing = keeper.leaving(way)
        await self._drain(changing)
        await keeper.hold(way)
        for number in sorted(changing):
            self._book.release(number, "the cluster was cut anew")
        keeper.broken |= changing
        states = keeper.states(way)
        self.returned = None
        if any(state.missing for state in states.values()):
            states = self._go_back()
        keeper.generation += 1
        numbers = keeper.number_clusters(way)
        await self._tell_requester(way)
        await keeper.carry_out(way, numbers, states, order)
        self._book.set_clusters(keeper.shares)
        logger.info(
            "plan_installed job=%s generation=%d clusters=%d changed=%d seconds=%.2f",
            self._job_id,
            keeper.generation,
            len(way.plan.clusters),
            len(way.changed),
            time.monotonic() - began,
        )

    async def _next_plan(self, leaving: Collection[str]) -> Plan:
        deadline = time.monotonic() + self._settings.rejoin_s
        while True:
            self._pool_changed.clear()
            pool = [node for node in self._pool() if node.node_id not in leaving]
            found, self._found = self._found, None
            for node in pool:
                self._calls.nodes[node.node_id] = node
            try:
                if not pool:
                    raise PlanningError("no node is left")
                if found is not None and not self._keeper.broken and (found.before, found.pool) == (self._keeper.plan, frozenset(pool)):
                    return found.plan
                # First only what is broken, and soon; whether more is worth changing is looked at when training goes on.
                improve = not self._keeper.broken or self._keeper.apart
                return await asyncio.to_thread(self._keeper.next_plan, pool, random.Random(self._seed), improve=improve)
            except PlanningError as error:
                await self._wait_for_nodes(deadline, error)

    async def _wait_for_nodes(self, deadline: float, error: PlanningError) -> None:
        logger.warning("waiting_for_nodes job=%s reason=%s", self._job_id, error.message)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._pool_changed.wait()
        except TimeoutError:
            lost = ", ".join(sorted(self._keeper.gone)) or "nodes"
            raise NodeLostError(
                f"{lost} went away, and no other node came within {self._settings.rejoin_s:.0f} s: {error.message}",
                hint="Start the nodes again, or more of them, and resume from the last checkpoint.",
            ) from error

    async def _drain(self, numbers: frozenset[int]) -> None:
        """Give clusters nothing new, and wait until what they have leased is done, or for DRAIN_S."""
        self.draining = numbers
        try:
            async with asyncio.timeout(DRAIN_S if numbers else None):
                while self._book.busy(numbers):
                    self.drained.clear()
                    await self.drained.wait()
        except TimeoutError:
            logger.warning("not_drained job=%s clusters=%s", self._job_id, sorted(numbers))
        finally:
            self.draining = frozenset()

    def _go_back(self) -> dict[tuple[int, int], StageState]:
        """Let all clusters begin again from the last checkpoint: some of the state since then is lost."""
        logger.warning("going_back job=%s checkpoint=%s", self._job_id, self.checkpoint or "none")
        self._book.go_back(f"all nodes that held some of the weights were lost; back to {self.checkpoint or 'the beginning'}")
        self.returned = Return(checkpoint=self.checkpoint)
        return {}

    async def _tell_requester(self, way: Transition) -> None:
        replayed = self._book.replayed
        nodes = tuple(self._calls.nodes[node_id] for node_id in dict.fromkeys(stage.node_id for stage in way.plan.stages))
        message = m.PlanChanged(
            job_id=self._job_id,
            plan=way.plan,
            nodes=nodes,
            generation=self._keeper.generation,
            reason=f"{len(way.changed)} of {len(way.plan.clusters)} clusters are built anew",
            replayed=replayed[self._reported :],
            checkpoint=self.returned.checkpoint if self.returned is not None else "",
        )
        try:
            await self._transport.call(self._requester, message, deadline_s=REQUESTER_S)
        except TransportError as error:
            raise RequesterLostError(f"requester {self._requester.peer_id} was not told of the new plan: {error.message}") from error
        self._reported = len(replayed)
