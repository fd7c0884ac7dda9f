"""What would make a plan possible where there is none: the smallest change of each sort, found by planning again."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence

from roost.config import JobConfig, PlanningConfig, format_bytes
from roost.planning.advice import ENOUGH_MEMORY, ChangeKind, PoolChange, Replanner
from roost.planning.variations import PoolView
from roost.types import LinkProfile, ModelProfile, NodeProfile, Plan

MOST_KINDS = 3
"""Kinds of nodes of which more are tried."""
MOST_MORE_NODES = 16
"""More of one kind are not tried."""
MOST_ENLARGED = 2
"""Nodes of which more memory is tried: the largest."""
MEMORY_PRECISION = 0.02
"""How exactly the memory is found that is missing, relative to it."""
EFFORT = 0.05
"""Of the effort that the plan itself gets: here it matters that there is one, and there are many to look for."""
MOST_IN_FLIGHT = 3
"""Bounds on the micro-batches in flight that are tried, up from one."""


def remedies(
    profile: ModelProfile,
    nodes: Sequence[NodeProfile],
    links: Sequence[LinkProfile],
    config: JobConfig,
    rng: random.Random,
    options: PlanningConfig | None = None,
) -> tuple[PoolChange, ...]:
    """Return changes each of which alone lets make_plan succeed where it raised PlanningError; settings of the job come first.

    Of every sort the smallest that was found: fewer in flight, smaller micro-batches, fewer clusters, memory on one node, more
    nodes of one kind. `rng` is not changed; the number of plans is bounded whatever the inputs.
    """
    if not nodes:
        return ()
    options = options or PlanningConfig()
    quick = dataclasses.replace(options, effort=EFFORT * options.effort)
    planner = Replanner(profile=profile, config=config, rng=rng, options=quick)
    pool = PoolView(nodes=tuple(nodes), links=tuple(links))
    settings = [*_fewer_in_flight(planner, pool), *_smaller_micro_batches(planner, pool), *_fewer_clusters(planner, pool)]
    if not settings:
        settings = _least_of_all(planner, pool)
    return (*settings, *_memory_on_one_node(planner, pool), *_more_nodes(planner, pool))


def _change(kind: ChangeKind, what: str, plan: Plan) -> PoolChange:
    return PoolChange(kind=kind, what=what, samples_per_s=plan.samples_per_s, gain=0.0)


def _first(planner: Replanner, pool: PoolView, configs: Iterable[JobConfig]) -> tuple[JobConfig, Plan] | None:
    """Return the first of these jobs that can be planned, with its plan."""
    for config in configs:
        plan = planner.plan(pool, config)
        if plan is not None:
            return config, plan
    return None


def _fewer_in_flight(planner: Replanner, pool: PoolView) -> list[PoolChange]:
    """Return the loosest of the tight bounds on micro-batches in flight that would do."""
    bound = planner.config.max_in_flight
    tried = [value for value in range(MOST_IN_FLIGHT, 0, -1) if bound == 0 or value < bound]
    found = _first(planner, pool, (dataclasses.replace(planner.config, max_in_flight=value) for value in tried))
    if found is None:
        return []
    return [_change(ChangeKind.IN_FLIGHT, f"max_in_flight={found[0].max_in_flight} in the job (slower, with less memory)", found[1])]


def _halved(size: int) -> list[int]:
    sizes = []
    while size > 1:
        size = (size + 1) // 2
        sizes.append(size)
    return sizes


def _smaller_micro_batches(planner: Replanner, pool: PoolView) -> list[PoolChange]:
    sizes = _halved(planner.config.micro_batch_size)
    found = _first(planner, pool, (dataclasses.replace(planner.config, micro_batch_size=size) for size in sizes))
    if found is None:
        return []
    what = f"micro_batch_size={found[0].micro_batch_size} in the job instead of {planner.config.micro_batch_size}"
    return [_change(ChangeKind.MICRO_BATCH, what, found[1])]


def _fewer_clusters(planner: Replanner, pool: PoolView) -> list[PoolChange]:
    counts = _halved(planner.config.min_clusters)
    found = _first(planner, pool, (dataclasses.replace(planner.config, min_clusters=count) for count in counts))
    if found is None:
        return []
    what = f"min_clusters={found[0].min_clusters} in the job instead of {planner.config.min_clusters}"
    return [_change(ChangeKind.CLUSTERS, what, found[1])]


def _least_of_all(planner: Replanner, pool: PoolView) -> list[PoolChange]:
    """Return all settings at once, if that would do: where none alone does."""
    config = dataclasses.replace(planner.config, min_clusters=1, max_clusters=0, max_in_flight=1, micro_batch_size=1)
    plan = planner.plan(pool, config)
    if plan is None or config == planner.config:
        return []
    return [_change(ChangeKind.MICRO_BATCH, "min_clusters=1, micro_batch_size=1 and max_in_flight=1 in the job, all three", plan)]


def _memory_on_one_node(planner: Replanner, pool: PoolView) -> list[PoolChange]:
    """Return how much one node would have to lend, of the largest nodes, that which needs the least more first."""
    found = []
    for node in sorted(pool.nodes, key=lambda node: (-node.memory_bytes, node.node_id))[:MOST_ENLARGED]:
        enough = _enough_memory(planner, pool, node)
        if enough is not None:
            found.append((enough[0] - node.memory_bytes, node, *enough))
    found.sort(key=lambda item: (item[0], item[1].node_id))
    return [
        _change(
            ChangeKind.MEMORY,
            f"{node.node_id} lends {format_bytes(memory)} instead of {format_bytes(node.memory_bytes)} ({format_bytes(more)} more)",
            plan,
        )
        for more, node, memory, plan in found
    ]


def _enough_memory(planner: Replanner, pool: PoolView, node: NodeProfile) -> tuple[int, Plan] | None:
    """Return the least memory of `node` with which there is a plan, up to MEMORY_PRECISION, and the plan; None if none is enough."""

    def plan_with(memory: int) -> Plan | None:
        return planner.plan(pool.with_memory(node.node_id, memory))

    best = plan_with(ENOUGH_MEMORY)
    if best is None:
        return None
    # What its stages need there is enough, and what it has is not.
    high = max((stage.memory_needed_bytes for stage in best.stages if stage.node_id == node.node_id), default=ENOUGH_MEMORY)
    high = max(high, node.memory_bytes + 1)
    smaller = plan_with(high)
    if smaller is None:
        return None
    best, low = smaller, node.memory_bytes
    while high - low > max(1, MEMORY_PRECISION * (high - node.memory_bytes)):
        middle = (low + high) // 2
        plan = plan_with(middle)
        if plan is None:
            low = middle
        else:
            high, best = middle, plan
    return high, best


def _more_nodes(planner: Replanner, pool: PoolView) -> list[PoolChange]:
    """Return how many more nodes of each kind would do, the fewest first."""
    found = []
    for node in pool.kinds()[:MOST_KINDS]:
        enough = _enough_nodes(planner, pool, node)
        if enough is not None:
            count, plan = enough
            what = f"one more node like {node.node_id}" if count == 1 else f"{count} more nodes like {node.node_id}"
            found.append((count, what, plan))
    return [_change(ChangeKind.MORE_NODES, what, plan) for _, what, plan in sorted(found, key=lambda item: (item[0], item[1]))]


def _enough_nodes(planner: Replanner, pool: PoolView, node: NodeProfile) -> tuple[int, Plan] | None:
    """Return the least number of further nodes like `node` with which there is a plan, and the plan; None if none is enough."""

    def plan_with(count: int) -> Plan | None:
        return planner.plan(pool.with_twins(node.node_id, count))

    low, high = 0, 1
    while (plan := plan_with(high)) is None:
        low, high = high, 2 * high
        if high > MOST_MORE_NODES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        smaller = plan_with(middle)
        if smaller is None:
            low = middle
        else:
            high, plan = middle, smaller
    return high, plan
