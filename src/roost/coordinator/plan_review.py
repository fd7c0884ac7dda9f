"""Looks at the plan of a running job when nodes have come, gone or want to go: is another one better, can it do without one?"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from roost.coordinator.node_calls import NodeCalls
from roost.coordinator.plan_keeper import PlanKeeper
from roost.errors import JobRefusedError, PlanningError, RoostError
from roost.types import NodeProfile, Plan

logger = logging.getLogger(__name__)

SETTLE_S = 3.0
"""Nodes that join one after the other are looked at together, and a plan that was just mended is left alone."""


class PlanReview:
    """One review at a time; nodes that come meanwhile are looked at afterwards."""

    def __init__(
        self,
        *,
        job_id: str,
        seed: int,
        keeper: PlanKeeper,
        calls: NodeCalls,
        pool: Callable[[], Sequence[NodeProfile]],
        is_training: Callable[[], bool],
        order: Callable[[], int],
        on_better: Callable[[Plan, Sequence[NodeProfile]], None],
    ) -> None:
        """`pool` returns the nodes that the job may use now, `order` the synchronisation points so far; `on_better` is told of a plan
        that is worth a change, and of the nodes it was made for."""
        self._job_id = job_id
        self._seed = seed
        self._keeper = keeper
        self._calls = calls
        self._pool = pool
        self._is_training = is_training
        self._order = order
        self._on_better = on_better
        self._again = False
        self.leaving: set[str] = set()
        """Nodes that want to go, and still have a stage."""

    def look_again(self) -> None:
        """The pool has changed: a review that is under way is followed by another."""
        self._again = True

    def forget_left(self) -> None:
        """Another plan is carried out: who has no stage in it has left."""
        self.leaving = {node_id for node_id in self.leaving if self._keeper.stage_of(node_id) is not None}

    async def run(self) -> None:
        """Review the plan until nothing has changed meanwhile."""
        self._again = True
        while self._again:
            self._again = False
            await asyncio.sleep(SETTLE_S)
            await self._review()

    async def _review(self) -> None:
        pool = [node for node in self._pool() if node.node_id not in self.leaving]
        try:
            following = await asyncio.to_thread(self._keeper.next_plan, pool, random.Random(self._seed))
        except PlanningError as error:
            logger.info("plan_stays job=%s reason=%s", self._job_id, error.message)
            return
        if not self._is_training():
            return
        if following is not self._keeper.plan:
            self._on_better(following, pool)
            return
        for node in pool:
            self._calls.nodes[node.node_id] = node
        try:
            await self._keeper.find_backups(pool, self._order())
        except RoostError as error:
            logger.warning("no_backup job=%s error=%s", self._job_id, error.message)

    async def let_leave(self, node_id: str) -> None:
        """Note that a node wants to go. Raises JobRefusedError if the job cannot go on without it."""
        others = [node for node in self._pool() if node.node_id not in {*self.leaving, node_id}]
        try:
            await asyncio.to_thread(self._keeper.next_plan, others, random.Random(self._seed))
        except PlanningError as error:
            raise JobRefusedError(
                f"job {self._job_id} cannot go on without node {node_id}: {error.message}",
                hint="Wait for its end, let another node join, or stop the node all the same: the job then waits for nodes.",
            ) from error
        self.leaving.add(node_id)
