"""From profiles to a plan: checks the pool, searches, and hands what was found to be written down."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

from roost.config import JobConfig, PlanningConfig
from roost.errors import EmptyPoolError, InvalidConfigError, NodeTooSmallError, PlanningError, PoolTooSmallError
from roost.planning.cost import UnitCosts, merge_units, unit_costs
from roost.planning.groups import EXACT_ORDER, Group, GroupResult, GroupSearch
from roost.planning.local_search import LocalSearch
from roost.planning.memory import MemoryModel, optimizer_copies
from roost.planning.network import Network, make_network
from roost.planning.partitions import Bounds, PartitionSearch
from roost.planning.stages import EXACT, ClusterCut, StageCutter
from roost.planning.tables import TableMaker
from roost.planning.writing import exact_bytes, write_plan
from roost.types import LinkProfile, ModelProfile, NodeProfile, Plan

SEARCHED_UNITS = ((8, 48), (40, 32), (10**9, 24))
"""Up to how many nodes, models with more units than this are searched with neighbouring units merged; the chosen clusters are then
cut between any two units."""
CUT_ANYWHERE, CUT_UNITS = 60, 96
"""In pools beyond so many nodes the chosen clusters are cut between so many units at most."""
SHORTAGE_PRECISION = 5e-3
"""How exactly a shortage of memory is searched for, relative to it."""
SMALL_BUDGET = 6_000_000_000
LARGE_BUDGET = 40_000_000
LARGE_BUDGET_PER_NODE = 300_000
FEW_CLUSTERS = 4
"""With at least as many clusters, a single one is not tried: averaging takes at most half of every line from them."""
FINAL_BUDGET = 8_000_000
"""Work on the best orders of the chosen clusters of a large pool."""
LARGE_PRECISION = 1e-5
"""Relative precision of the periods of a large pool's clusters."""
QUICK_BUDGET = 100_000_000


def make_plan(
    profile: ModelProfile,
    nodes: Sequence[NodeProfile],
    links: Sequence[LinkProfile],
    config: JobConfig,
    rng: random.Random,
    *,
    options: PlanningConfig | None = None,
) -> Plan:
    """Return the plan with the highest predicted value; equal inputs, `rng` included, give equal plans.

    Raises EmptyPoolError with fewer nodes than clusters, NodeTooSmallError if a unit fits on no node, PoolTooSmallError
    if the nodes together are too small.
    """
    planner = Planner.of(profile, nodes, links, config, options or PlanningConfig())
    plan = planner.plan(rng)
    if plan is None:
        raise planner.too_small()
    return plan


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Planner:
    """One model, pool and job, with the cost model over all units and over merged ones."""

    profile: ModelProfile
    config: JobConfig
    fine: StageCutter
    """Over all units."""
    coarse: StageCutter
    """Over merged units, for searching."""
    final: StageCutter
    """For the cuts of the chosen clusters: over all units, or in very large pools over some merged ones."""
    places: tuple[int, ...]
    """First unit of each unit of `final`, and the end."""
    unable: tuple[str, ...] = ()
    """Nodes whose devices cannot compute in the job's precision."""

    @classmethod
    def of(
        cls,
        profile: ModelProfile,
        nodes: Sequence[NodeProfile],
        links: Sequence[LinkProfile],
        config: JobConfig,
        options: PlanningConfig,
    ) -> Planner:
        """Return the planner of a pool; the order of `nodes` and `links` does not matter.

        Nodes that cannot compute in the job's precision are left out. Raises EmptyPoolError if no node is left.
        """
        pool = tuple(sorted(nodes, key=lambda node: node.node_id))
        names = [node.node_id for node in pool]
        if len(set(names)) != len(names):
            raise InvalidConfigError(f"two nodes have the same name: {names}", hint="Give every node a name of its own (--name).")
        if not pool:
            raise EmptyPoolError("no node has joined")
        if config.precision == "bf16":
            pool = tuple(dataclasses.replace(node, flop_per_s=node.bf16_flop_per_s) for node in pool if node.bf16_flop_per_s)
        unable = tuple(name for name in names if name not in {node.node_id for node in pool})
        if not pool:
            raise EmptyPoolError(
                f"no node can compute in {config.precision}: not {', '.join(unable)}",
                hint="Train with precision='float32', or let a node join whose device has bfloat16.",
            )
        names = [node.node_id for node in pool]
        ordered = sorted(links, key=lambda link: (link.source, link.target, link.bytes_per_s, link.latency_s))
        # Links to nodes that are not in the pool still tell what a node's line carries.
        others = sorted({end for link in ordered for end in (link.source, link.target)}.difference(names))
        declared = {node.node_id: (node.up_bytes_per_s, node.down_bytes_per_s) for node in pool}
        network = make_network([*names, *others], ordered, declared).part(range(len(names)))
        costs = unit_costs(profile, config)
        fine = _cutter(pool, network, costs, config, options)
        last, places = merge_units(costs, costs.units if len(pool) <= CUT_ANYWHERE else CUT_UNITS)
        final = fine if last.units == costs.units else _cutter(pool, network, last, config, options)
        # Merged from those of `final`, so that every cut the search finds is one that can be made there.
        limit = next(units for most, units in SEARCHED_UNITS if len(pool) <= most)
        merged = merge_units(last, limit)[0]
        coarse = final if merged.units == last.units else _cutter(pool, network, merged, config, options)
        return cls(profile=profile, config=config, fine=fine, coarse=coarse, final=final, places=places, unable=unable)

    @property
    def pool(self) -> tuple[NodeProfile, ...]:
        return self.fine.nodes

    @property
    def bounds(self) -> Bounds:
        slowest = self.fine.maker.options.slowest_cluster
        return Bounds(least=self.config.min_clusters, most=self.config.max_clusters, slowest=slowest)

    # ------------------------------------------------------------ searching

    def plan(self, rng: random.Random) -> Plan | None:
        """Return the best plan found, None if the nodes together are too small. Raises what `check` does."""
        self.check()
        found = self.search(rng)
        return None if found is None else write_plan(self.profile, self.fine, self.exact_cuts(found), unable=self.unable)

    def search(self, rng: random.Random) -> list[tuple[int, ...]] | None:
        """Return the orders of the clusters of the best plan found; None if none respects memory and bounds."""
        groups = GroupSearch(cutter=self.coarse)
        found = _partition(groups, self.bounds, rng, self.fine.maker.options.effort)
        if found is None and self.coarse is not self.final:
            # Merged units are larger: nodes that are just large enough may need the finest cuts.
            found = _partition(GroupSearch(cutter=self.final), self.bounds, rng, 0.1)
        return None if found is None else [result.order for result in found]

    def exact_cuts(self, orders: Sequence[tuple[int, ...]]) -> list[ClusterCut]:
        """Return the best cuts between any two units for these clusters, the fastest first.

        Clusters that turn out too slow to be in a plan with the others are left out.
        """
        bounds = self.bounds
        while True:
            cuts = sorted(
                (self._exact_cut(order, len(orders)) for order in orders),
                key=lambda cut: (cut.period_s, tuple(node.node_id for node in cut.nodes)),
            )
            if bounds.balanced([cut.period_s for cut in cuts]):
                return cuts
            # With fewer clusters the others average less, and may be faster: all are cut anew.
            kept = [cut for cut in cuts if cut.period_s * bounds.slowest <= cuts[0].period_s]
            places = self.fine.maker.network.places
            orders = [tuple(places[node.node_id] for node in cut.nodes) for cut in cuts[: max(len(kept), bounds.least)]]

    def _exact_cut(self, order: tuple[int, ...], clusters: int) -> ClusterCut:
        groups = GroupSearch(cutter=self.final.part(order))
        precision = EXACT if len(self.pool) <= EXACT_ORDER else LARGE_PRECISION
        result = groups.of_order(range(len(order)), clusters, precision)
        assert result is not None, "every cut between merged units is a cut between units"
        cut = groups.cut_of(result, clusters)
        if self.final is self.fine:
            return cut
        exact = self.fine.part(order).predict(cut.nodes, tuple(self.places[unit] for unit in cut.cuts), clusters)
        assert exact is not None, "merging units changes no cost"
        return exact

    # ------------------------------------------------------------ what cannot be planned

    def check(self) -> None:
        """Raise EmptyPoolError with fewer nodes than clusters, NodeTooSmallError for the unit furthest from fitting on the largest node."""
        wanted = self.config.min_clusters
        if len(self.pool) < wanted:
            raise EmptyPoolError(f"{len(self.pool)} nodes cannot form the {wanted} clusters that min_clusters asks for")
        least = self.fine.maker.memory.least_for_units(averaging=wanted > 1)
        largest = max(self.pool, key=lambda node: node.memory_bytes)
        worst = int(least.argmax())
        needed = math.ceil(least[worst])
        short = needed - largest.memory_bytes
        if short > 0:
            raise NodeTooSmallError(
                f"'{self.profile.units[worst].label}' cannot be cut further and needs {exact_bytes(needed)}; the largest node, "
                f"{largest.node_id}, lends {exact_bytes(largest.memory_bytes)}: {exact_bytes(short)} short",
                short_bytes=short,
            )

    def too_small(self) -> PlanningError:
        """Return the error that says how much memory is missing: how much more on each of the largest nodes would be enough."""
        wanted = self.config.min_clusters
        enlarged = sorted(self.pool, key=lambda node: -node.memory_bytes)[:wanted]
        whole = float(self.fine.maker.memory.stage_bytes(0, self.fine.costs.units, 1, wanted > 1))
        low, high = 0, max(1, math.ceil(whole) - min(node.memory_bytes for node in enlarged))
        while high - low > max(1, high * SHORTAGE_PRECISION):
            middle = (low + high) // 2
            low, high = (low, middle) if self._would_fit({node.node_id for node in enlarged}, middle) else (middle, high)
        total = sum(node.memory_bytes for node in self.pool)
        missing = high * len(enlarged)
        names = ", ".join(sorted(node.node_id for node in enlarged))
        clusters = "one cluster" if wanted == 1 else f"the {wanted} clusters that min_clusters asks for"
        return PoolTooSmallError(
            f"{len(self.pool)} nodes with {exact_bytes(total)} together cannot hold {clusters}, each with the whole model: "
            f"{exact_bytes(missing)} short. It would fit with {exact_bytes(high)} more on {'each of ' if len(enlarged) > 1 else ''}{names}",
            short_bytes=missing,
        )

    def _would_fit(self, names: set[str], extra: int) -> bool:
        """Return True if a quick search finds a plan with that much more memory on each of these nodes."""
        larger = tuple(
            dataclasses.replace(node, memory_bytes=node.memory_bytes + extra) if node.node_id in names else node for node in self.pool
        )
        for cutter in (self.coarse, self.fine):
            groups = GroupSearch(cutter=StageCutter(nodes=larger, maker=cutter.maker))
            if _feasible(groups, self.bounds):
                return True
        return False


def _cutter(pool: tuple[NodeProfile, ...], network: Network, costs: UnitCosts, config: JobConfig, options: PlanningConfig) -> StageCutter:
    memory = MemoryModel(costs=costs, optimizer_copies=optimizer_copies(config.optimizer), averaging_copies=config.averaging_copies)
    maker = TableMaker(costs=costs, memory=memory, network=network, config=config, options=options)
    return StageCutter(nodes=pool, maker=maker)


def _partition(groups: GroupSearch, bounds: Bounds, rng: random.Random, effort: float) -> tuple[GroupResult, ...] | None:
    """Return the best partition found: exactly for small pools, step by step for large ones."""
    nodes = groups.cutter.nodes
    if len(nodes) <= EXACT_ORDER:
        return PartitionSearch(groups=groups, bounds=bounds, budget=int(SMALL_BUDGET * effort)).best()
    budget = int((LARGE_BUDGET + LARGE_BUDGET_PER_NODE * len(nodes)) * effort)
    return _large(groups, bounds, rng, budget)


def _large(groups: GroupSearch, bounds: Bounds, rng: random.Random, budget: int) -> tuple[GroupResult, ...] | None:
    """Return the better of the best single cluster and the best partition into several."""
    candidates: list[tuple[GroupResult, ...]] = []
    if bounds.most != 1:
        several = LocalSearch(groups=groups, bounds=bounds, rng=rng, budget=budget, clusters=_likely_clusters(groups, bounds)).best()
        candidates += [results for results in (_results(groups, _without_slow(groups, several, bounds)),) if results]
    # One cluster alone averages nothing: it may beat a few. It cannot beat many.
    if bounds.allow(1) and all(len(results) < FEW_CLUSTERS for results in candidates):
        alone = Bounds(least=1, most=1, slowest=0.0)
        limit = groups.spent[0] + budget // 4
        single = LocalSearch(groups=groups, bounds=alone, rng=rng, budget=limit, clusters=1).best()
        candidates += [results for results in (_results(groups, single),) if results]
    return max(candidates, key=lambda results: math.fsum(result.value for result in results), default=None)


def _likely_clusters(groups: GroupSearch, bounds: Bounds) -> int:
    """Return about how many clusters the pool's memory makes; only the bytes of a ring depend on it, and hardly."""
    every = frozenset(range(len(groups.cutter.nodes)))
    likely = max(2, min(len(every), int(groups.held(every, 2))), bounds.least)
    return min(likely, bounds.most) if bounds.most else likely


def _without_slow(groups: GroupSearch, partition: Sequence[Group] | None, bounds: Bounds) -> list[Group] | None:
    """Return the partition without the clusters that are too slow to be in a plan with the others."""
    if partition is None:
        return None
    rated = [(result.period_s, group) for group in partition if (result := groups.rough(group, max(2, len(partition)))) is not None]
    rated.sort(key=lambda entry: (entry[0], sorted(entry[1])))
    while rated and not bounds.balanced([period for period, _ in rated]):
        rated.pop()
    return [group for _, group in rated]


def _results(groups: GroupSearch, partition: Sequence[Group] | None) -> tuple[GroupResult, ...] | None:
    """Return what the groups reach in a plan of that many clusters; None if one does not fit.

    The best order is looked for exactly, for as many groups as FINAL_BUDGET lasts.
    """
    if not partition:
        return None
    limit, count = groups.spent[0] + FINAL_BUDGET, len(partition)
    found = [groups.exact(group, count) if groups.spent[0] < limit else groups.rough(group, count) for group in partition]
    complete = tuple(result for result in found if result is not None)
    return complete if len(complete) == len(found) else None


def _feasible(groups: GroupSearch, bounds: Bounds) -> bool:
    """Return True if a quick search finds some partition that respects memory and bounds."""
    if len(groups.cutter.nodes) <= EXACT_ORDER:
        return PartitionSearch(groups=groups, bounds=bounds, budget=QUICK_BUDGET).feasible()
    clusters = max(1, bounds.least)
    search = LocalSearch(groups=groups, bounds=bounds, rng=random.Random(0), budget=QUICK_BUDGET, clusters=clusters)
    return search.feasible()
