"""What each node of the current plan may read and upload: the tensors of its stage, and of the stage that it is a backup of."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from roost.errors import ForbiddenError
from roost.types import Plan, StagePlan

TensorPositions = Mapping[str, tuple[int, ...]]
"""For each tensor the positions of the graph whose stage needs it; the stage of the first one owns it (capture/cut.py)."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """What one node may do."""

    reads: frozenset[str]
    """Tensors it may fetch, with their optimizer state."""
    uploads: frozenset[str]
    """Tensors it may upload, with their optimizer state."""
    segments: frozenset[int]
    """Segments it may upload to: those of the plan, and -1 - the index of its stage for what is in none."""
    samples: bool
    """True if it is the first stage of its cluster, which fetches samples."""


class AccessTable:
    """Answers for every node of a plan; each answer is worked out when it is first asked for."""

    def __init__(self, positions: TensorPositions, plan: Plan) -> None:
        self._positions = positions
        self._plan = plan
        self._stages: dict[str, list[StagePlan]] = {}
        for stage in plan.stages:
            self._stages.setdefault(stage.node_id, []).append(stage)
        self._backed: dict[str, list[StagePlan]] = {}
        places = {(stage.cluster, stage.index): stage for stage in plan.stages}
        for backup in plan.backup_stages:
            if (backup.cluster, backup.stage) in places:
                self._backed.setdefault(backup.node_id, []).append(places[backup.cluster, backup.stage])
        self._known: dict[str, Access] = {}

    def of(self, node_id: str, job_id: str) -> Access:
        """Return what a node may do. Raises ForbiddenError for one that is not in the plan."""
        if node_id not in self._stages and node_id not in self._backed:
            raise ForbiddenError(f"node {node_id} has no stage in job {job_id}")
        if node_id not in self._known:
            self._known[node_id] = self._work_out(node_id)
        return self._known[node_id]

    def _work_out(self, node_id: str) -> Access:
        own = self._stages.get(node_id, [])
        held = [*own, *self._backed.get(node_id, [])]
        segments = {segment.index for segment in self._plan.segments if node_id in segment.members}
        return Access(
            reads=frozenset(name for name, found in self._positions.items() if any(_within(found, stage) for stage in held)),
            uploads=frozenset(name for name, found in self._positions.items() if any(_within(found[:1], stage) for stage in own)),
            segments=frozenset(segments | {-1 - stage.index for stage in own}),
            samples=any(stage.index == 0 for stage in own),
        )


def _within(positions: tuple[int, ...], stage: StagePlan) -> bool:
    """Return whether one of the ascending `positions` is in the stage."""
    first = bisect_left(positions, stage.start)
    return first < len(positions) and positions[first] < stage.stop
