"""From profiles to a plan: checks the pool, searches, and writes down what was found and why."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

from roost.config import JobConfig, format_bytes
from roost.errors import EmptyPoolError, InvalidConfigError, NodeTooSmallError, PlanningError, PoolTooSmallError
from roost.planning.clusters import WORK_BUDGET, ClusterSearch
from roost.planning.cost import LinkTable, UnitCosts, link_table, merge_units, unit_costs
from roost.planning.memory import MemoryModel, optimizer_copies
from roost.planning.segments import make_segments
from roost.planning.shares import data_shares
from roost.planning.stages import ClusterCut, StageCutter
from roost.types import ClusterPlan, LinkProfile, ModelProfile, NodeProfile, Plan, StagePlan

SEARCHED_UNITS = 64
"""Models with more units are searched with neighbouring units merged; the cuts of the chosen clusters are then made exact."""
SHORTAGE_PRECISION = 5e-3
"""How exactly a shortage of memory is searched for, relative to it."""
QUICK_BUDGET = 15_000_000
"""Work for a search that only asks whether there is some plan."""


def make_plan(
    profile: ModelProfile, nodes: Sequence[NodeProfile], links: Sequence[LinkProfile], config: JobConfig, rng: random.Random
) -> Plan:
    """Return the plan with the highest predicted samples per second; equal inputs, `rng` included, give equal plans.

    Raises EmptyPoolError with fewer nodes than clusters, NodeTooSmallError if a unit fits on no node, PoolTooSmallError
    if the nodes together are too small.
    """
    pool = tuple(sorted(nodes, key=lambda node: node.node_id))
    _check_pool(pool, config)
    costs = unit_costs(profile, config)
    table = link_table(links)
    fine = _cutter(costs, table, config)
    _check_units(profile, pool, fine.memory, config)
    coarse = _cutter(merge_units(costs, SEARCHED_UNITS)[0], table, config)
    clusters = _search(pool, coarse, config, rng).best()
    if clusters is not None and coarse.costs.units < fine.costs.units:
        clusters = [_recut(cut, fine, len(clusters) > 1) for cut in clusters]
    if clusters is None and coarse.costs.units < fine.costs.units:
        clusters = _search(pool, fine, config, rng, quick=True).best()
    if clusters is None:
        raise _pool_too_small(pool, coarse, config)
    return _write(profile, pool, fine, clusters, table)


def _cutter(costs: UnitCosts, links: LinkTable, config: JobConfig) -> StageCutter:
    memory = MemoryModel(costs=costs, optimizer_copies=optimizer_copies(config.optimizer))
    return StageCutter(costs=costs, memory=memory, links=links, in_flight_bound=config.max_in_flight)


def _search(
    pool: tuple[NodeProfile, ...], cutter: StageCutter, config: JobConfig, rng: random.Random, *, quick: bool = False
) -> ClusterSearch:
    return ClusterSearch(
        nodes=pool,
        cutter=cutter,
        min_clusters=config.min_clusters,
        max_clusters=config.max_clusters,
        rng=rng,
        budget=QUICK_BUDGET if quick else WORK_BUDGET,
    )


def _recut(cut: ClusterCut, fine: StageCutter, averaging: bool) -> ClusterCut:
    """Return the best cut between any two units for nodes that were chosen, and ordered, on merged units."""
    found = fine.cut(cut.nodes, averaging, polish=True)
    assert found is not None, "every cut between merged units is a cut between units"
    return found


# ------------------------------------------------------------ what cannot be planned


def _check_pool(pool: Sequence[NodeProfile], config: JobConfig) -> None:
    names = [node.node_id for node in pool]
    if len(set(names)) != len(names):
        raise InvalidConfigError(f"two nodes have the same name: {names}", hint="Give every node a name of its own (--name).")
    if not pool:
        raise EmptyPoolError("no node has joined")
    if len(pool) < config.min_clusters:
        raise EmptyPoolError(f"{len(pool)} nodes cannot form the {config.min_clusters} clusters that min_clusters asks for")


def _check_units(profile: ModelProfile, pool: Sequence[NodeProfile], memory: MemoryModel, config: JobConfig) -> None:
    """Raise NodeTooSmallError for the unit that is furthest from fitting on the largest node."""
    least = memory.least_for_units(config.max_in_flight, averaging=config.min_clusters > 1)
    largest = max(pool, key=lambda node: node.memory_bytes)
    worst = int(least.argmax())
    needed = math.ceil(least[worst])
    short = needed - largest.memory_bytes
    if short > 0:
        raise NodeTooSmallError(
            f"'{profile.units[worst].label}' cannot be cut further and needs {_exact(needed)}; the largest node, "
            f"{largest.node_id}, lends {_exact(largest.memory_bytes)}: {_exact(short)} short",
            short_bytes=short,
        )


def _pool_too_small(pool: tuple[NodeProfile, ...], cutter: StageCutter, config: JobConfig) -> PlanningError:
    """Return the error that says how much memory is missing: how much more on each of the largest nodes would be enough."""
    enlarged = sorted(pool, key=lambda node: -node.memory_bytes)[: config.min_clusters]
    whole = float(cutter.memory.stage_bytes(0, cutter.costs.units, 1, config.min_clusters > 1))
    low, high = 0, math.ceil(whole) - min(node.memory_bytes for node in enlarged)
    while high - low > max(1, high * SHORTAGE_PRECISION):
        middle = (low + high) // 2
        bigger = _enlarge(pool, {node.node_id for node in enlarged}, middle)
        low, high = (low, middle) if _search(bigger, cutter, config, random.Random(0), quick=True).feasible() else (middle, high)
    total = sum(node.memory_bytes for node in pool)
    missing = high * len(enlarged)
    names = ", ".join(sorted(node.node_id for node in enlarged))
    return PoolTooSmallError(
        f"{len(pool)} nodes with {_exact(total)} together cannot hold {_wanted(config)}, each with the whole model: "
        f"{_exact(missing)} short. It would fit with {_exact(high)} more on {'each of ' if len(enlarged) > 1 else ''}{names}",
        short_bytes=missing,
    )


def _wanted(config: JobConfig) -> str:
    return "one cluster" if config.min_clusters == 1 else f"the {config.min_clusters} clusters that min_clusters asks for"


def _enlarge(pool: Sequence[NodeProfile], names: set[str], extra: int) -> tuple[NodeProfile, ...]:
    return tuple(dataclasses.replace(node, memory_bytes=node.memory_bytes + extra) if node.node_id in names else node for node in pool)


def _exact(size: int) -> str:
    """Return a size for people with its exact number of bytes."""
    return f"{format_bytes(size)} ({size} bytes)"


# ------------------------------------------------------------ writing the plan down


def _write(
    profile: ModelProfile, pool: Sequence[NodeProfile], cutter: StageCutter, clusters: Sequence[ClusterCut], links: LinkTable
) -> Plan:
    averaging = len(clusters) > 1
    rates = [cutter.costs.micro_batch_size / cut.period_s for cut in clusters]
    plans = tuple(
        ClusterPlan(
            index=index,
            stages=_stages(profile, cutter, index, cut, averaging),
            share=share,
            samples_per_s=rate,
            bottleneck=cut.bottleneck,
        )
        for index, (cut, rate, share) in enumerate(zip(clusters, rates, data_shares(rates), strict=True))
    )
    used = {node.node_id for cut in clusters for node in cut.nodes}
    unused = [node for node in pool if node.node_id not in used]
    notes = [f"cluster {plan.index} is bound by the {plan.bottleneck}: {plan.samples_per_s:.0f} samples/s" for plan in plans]
    notes += [_why_unused(node, cutter, averaging) for node in unused]
    return Plan(
        clusters=plans,
        segments=make_segments(profile, clusters, links),
        backups=tuple(node.node_id for node in unused),
        samples_per_s=math.fsum(rates),
        notes=tuple(notes),
    )


def _stages(profile: ModelProfile, cutter: StageCutter, cluster: int, cut: ClusterCut, averaging: bool) -> tuple[StagePlan, ...]:
    stages = []
    for index, node in enumerate(cut.nodes):
        first, last = cut.cuts[index], cut.cuts[index + 1]
        needed = float(cutter.memory.stage_bytes(first, last, cut.in_flight[index], averaging))
        stages.append(
            StagePlan(
                cluster=cluster,
                index=index,
                node_id=node.node_id,
                first_unit=first,
                last_unit=last,
                start=profile.units[first].start,
                stop=profile.units[last - 1].stop,
                max_in_flight=cut.in_flight[index],
                memory_needed_bytes=math.ceil(needed),
                memory_available_bytes=node.memory_bytes,
                compute_s=cut.compute_s[index],
                send_s=cut.send_s[index],
            )
        )
    return tuple(stages)


def _why_unused(node: NodeProfile, cutter: StageCutter, averaging: bool) -> str:
    smallest = math.ceil(cutter.memory.least_for_units(cutter.in_flight_bound, averaging).min())
    if node.memory_bytes < smallest:
        return (
            f"{node.node_id} is a backup: the smallest stage needs {_exact(smallest)} and it lends {_exact(node.memory_bytes)}, "
            f"{_exact(smallest - node.memory_bytes)} short"
        )
    return f"{node.node_id} is a backup: no cluster would gain from it, so using it would not raise the predicted samples per second"
