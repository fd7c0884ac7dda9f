"""How a running job gets from one plan to the next: which clusters stay as they are, who has the state that others need, and how
the rings of those that stay go on until the rest is ready (docs/failover.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from roost.planning.relocation import layouts_of
from roost.types import ClusterPlan, ModelProfile, Plan, StagePlan


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A node that holds the state of consecutive units."""

    node_id: str
    number: int
    """Of its cluster."""
    first_unit: int
    last_unit: int
    """Half-open."""
    kept: bool
    """True if its cluster stays as it is."""
    copy: bool = False
    """True for a backup's copy, which is older than what a stage holds."""


@dataclass(frozen=True, kw_only=True)
class Transition:
    """From one plan to the next."""

    plan: Plan
    """The next one; clusters that stay have the very stages they had, under their new index."""
    kept: Mapping[int, int]
    """Number of each cluster that stays, by its index in the plan."""

    @property
    def changed(self) -> tuple[ClusterPlan, ...]:
        """The clusters whose nodes build their stages anew."""
        return tuple(cluster for cluster in self.plan.clusters if cluster.index not in self.kept)


@dataclass(frozen=True, kw_only=True)
class StageState:
    """Where the state of a new stage is."""

    tensors: Mapping[str, tuple[str, ...]]
    """Names of the tensors that are there, by node."""
    missing: tuple[str, ...]
    """Tensors that no node has."""


def transition(current: Plan, numbers: Sequence[int], broken: Collection[int], following: Plan) -> Transition:
    """Return the way from `current`, whose clusters have `numbers`, to `following`.

    A cluster stays if it is not `broken` (by number) and `following` has one with the same nodes and cuts.
    """
    old = dict(zip(layouts_of(current), zip(numbers, current.clusters, strict=True), strict=True))
    kept: dict[int, int] = {}
    clusters = []
    for layout, cluster in zip(layouts_of(following), following.clusters, strict=True):
        number, before = old.get(layout, (-1, cluster))
        if number >= 0 and number not in broken:
            kept[cluster.index] = number
            stages = tuple(replace(stage, cluster=cluster.index) for stage in before.stages)
            cluster = replace(cluster, stages=stages)
        clusters.append(cluster)
    return Transition(plan=replace(following, clusters=tuple(clusters)), kept=kept)


def without_clusters(current: Plan, numbers: Sequence[int], broken: Collection[int]) -> Transition | None:
    """Return the way to the clusters of `current` that are not `broken` (by number); None if none is left, or none is broken.

    Segments stay as they are, with fewer members: so rings go on at once, before it is known what becomes of the rest.
    """
    left = [(number, cluster) for number, cluster in zip(numbers, current.clusters, strict=True) if number not in broken]
    if not left or len(left) == len(current.clusters):
        return None
    whole = sum(cluster.share for _, cluster in left)
    clusters = tuple(
        replace(
            cluster,
            index=index,
            share=cluster.share / whole,
            stages=tuple(replace(stage, cluster=index) for stage in cluster.stages),
        )
        for index, (_, cluster) in enumerate(left)
    )
    members = {stage.node_id for cluster in clusters for stage in cluster.stages}
    segments = tuple(replace(segment, members=tuple(node for node in segment.members if node in members)) for segment in current.segments)
    plan = replace(
        current, clusters=clusters, segments=segments, samples_per_s=sum(cluster.samples_per_s for cluster in clusters), backup_stages=()
    )
    return Transition(plan=plan, kept={index: number for index, (number, _) in enumerate(left)})


def holders_of(current: Plan, numbers: Sequence[int], kept: Collection[int], there: Collection[str]) -> tuple[Holder, ...]:
    """Return who of the nodes that are `there` holds what; `kept` are the numbers of the clusters that stay as they are."""
    return tuple(
        Holder(node_id=stage.node_id, number=number, first_unit=stage.first_unit, last_unit=stage.last_unit, kept=number in kept)
        for number, cluster in zip(numbers, current.clusters, strict=True)
        for stage in cluster.stages
        if stage.node_id in there
    )


def state_of(stage: StagePlan, cluster: ClusterPlan, holders: Sequence[Holder], profile: ModelProfile) -> StageState:
    """Return who has the state of `stage`, one of the stages of a `cluster` that is built anew.

    For every unit: the node itself, else one of the cluster that most of these nodes come from, so that its stages fit each other,
    else one of a cluster that trains on, else any other, else a backup's copy.
    """
    origin = _origin(cluster, holders)
    found: dict[str, list[str]] = {}
    missing: list[str] = []
    for unit in range(stage.first_unit, stage.last_unit):
        names = [tensor.name for tensor in profile.units[unit].tensors]
        best = min(_having(unit, holders), key=lambda holder: _preference(holder, stage, origin), default=None)
        (missing if best is None else found.setdefault(best.node_id, [])).extend(names)
    return StageState(tensors={node: tuple(names) for node, names in found.items() if names}, missing=tuple(missing))


def _having(unit: int, holders: Sequence[Holder]) -> Iterator[Holder]:
    return (holder for holder in holders if holder.first_unit <= unit < holder.last_unit)


def _preference(holder: Holder, stage: StagePlan, origin: int) -> tuple[bool, bool, bool, bool, int, str]:
    return (
        holder.copy,
        holder.node_id != stage.node_id,
        holder.number != origin,
        not holder.kept,
        holder.number,
        holder.node_id,
    )


def _origin(cluster: ClusterPlan, holders: Sequence[Holder]) -> int:
    """Return the number of the cluster that most units of this one come from by its own nodes; -1 if none do."""
    nodes = {stage.node_id for stage in cluster.stages}
    units: dict[int, int] = {}
    for holder in holders:
        if holder.node_id in nodes and not holder.copy:
            units[holder.number] = units.get(holder.number, 0) + holder.last_unit - holder.first_unit
    return max(units, key=lambda number: (units[number], -number), default=-1)
