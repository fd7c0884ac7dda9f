"""Which nodes form a cluster together: the partition of the pool with the highest predicted samples per second.

arXiv 2401.01728 groups nodes of similar speed and data rate, each group with enough memory for the whole model. Such groups
are where the search starts. Small pools are searched completely; larger ones by moving and exchanging nodes while that
helps, within a fixed budget of work, so that a plan takes seconds and equal inputs give equal plans.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from roost.planning.stages import ClusterCut, StageCutter
from roost.types import NodeProfile

EXHAUSTIVE_POOL = 8
"""Pools up to this size are searched completely: 21,147 ways to group eight nodes, each in a cluster or left out."""
TIE = 0.02
"""Predictions that differ by less than this fraction count as equal: then fewer stages, then less staleness win."""
SLOWEST_CLUSTER = 0.02
"""A cluster slower than this fraction of the fastest is left out: it adds next to nothing, and every averaging round waits for it."""
WORK_BUDGET = 100_000_000
"""Entries of cost tables that one search may fill: one or two seconds on one core."""
STAGE_OVERHEAD = 10_000
"""What handling one stage costs besides, in entries."""
SINGLE_STEPS = 12
"""Groups grow by single nodes up to this size, beyond it by a quarter."""
PERMUTED_STAGES = 4
"""Clusters up to this size are tried in every order; larger ones by exchanging neighbours."""
EXCHANGES = 12
"""Neighbours of a large cluster that are exchanged to find a better order."""

Group = frozenset[int]
"""Nodes of one cluster, by their place in the pool."""
Partition = tuple[Group, ...]


@dataclass(kw_only=True, eq=False)
class ClusterSearch:
    """Finds partitions of one pool; remembers what every group of nodes can reach."""

    nodes: tuple[NodeProfile, ...]
    cutter: StageCutter
    min_clusters: int
    max_clusters: int
    """0: no bound."""
    rng: random.Random
    budget: int = WORK_BUDGET
    """Once it is used up, groups that were not looked at yet count as unable to hold the model."""
    _known: dict[tuple[Group, bool], ClusterCut | None] = field(default_factory=dict)
    _work: int = 0

    def best(self) -> list[ClusterCut] | None:
        """Return the clusters of the best partition found, fastest first; None if none respects memory and bounds."""
        starts = list(dict.fromkeys(partition for partition in self._simple() if self._rates(partition) is not None))
        found = self._complete() if len(self.nodes) <= EXHAUSTIVE_POOL else self._climb(starts)
        chosen = self._choose([*found, *starts])
        if chosen is None:
            return None
        averaging = len(chosen) > 1
        clusters = [self._ordered(group, averaging) for group in chosen]
        return sorted(clusters, key=lambda cut: (-1 / cut.period_s, tuple(node.node_id for node in cut.nodes)))

    def feasible(self) -> bool:
        """Return True if a quick search finds some partition that respects memory and bounds."""
        return any(self._rates(partition) is not None for partition in self._simple())

    # ------------------------------------------------------------ what a group reaches

    def _cut(self, group: Group, averaging: bool) -> ClusterCut | None:
        key = (group, averaging)
        if key not in self._known:
            self._known[key] = self._evaluate(group, averaging)
        return self._known[key]

    def _evaluate(self, group: Group, averaging: bool) -> ClusterCut | None:
        members = [self.nodes[index] for index in sorted(group)]
        # One stage with one micro-batch in flight needs least: less memory than that cannot hold the model.
        least = self.cutter.memory.stage_bytes(0, self.cutter.costs.units, 1, averaging)
        if len(members) > self.cutter.costs.units or sum(node.memory_bytes for node in members) < least or self._work > self.budget:
            return None
        cuts = [cut for order in self._orders(members) if (cut := self._try(order, averaging)) is not None]
        if not cuts and len(members) <= PERMUTED_STAGES:
            every = self._distinct(list(itertools.permutations(members)))
            cuts = [cut for order in every if (cut := self._try(order, averaging)) is not None]
        return min(cuts, key=lambda cut: cut.period_s, default=None)

    def _try(self, order: Sequence[NodeProfile], averaging: bool) -> ClusterCut | None:
        self._work += len(order) * ((self.cutter.costs.units + 1) ** 2 + STAGE_OVERHEAD)
        return self.cutter.cut(order, averaging)

    def _orders(self, members: Sequence[NodeProfile]) -> list[tuple[NodeProfile, ...]]:
        """Return the orders worth trying: early stages keep more in flight, so large nodes first; else by speed, or along fast links."""
        orders = [
            tuple(sorted(members, key=lambda node: -node.memory_bytes)),
            tuple(sorted(members, key=lambda node: -node.flop_per_s)),
            tuple(sorted(members, key=lambda node: node.flop_per_s)),
        ]
        links = self.cutter.links
        if not links.uniform:
            chain, left = [orders[0][0]], list(orders[0][1:])
            while left:
                nearest = max(left, key=lambda node: links.bytes_per_s(chain[-1].node_id, node.node_id))
                left.remove(nearest)
                chain.append(nearest)
            orders.append(tuple(chain))
        return self._distinct(orders)

    def _distinct(self, orders: Sequence[tuple[NodeProfile, ...]]) -> list[tuple[NodeProfile, ...]]:
        """Return `orders` without those that only exchange nodes which are alike."""
        uniform = self.cutter.links.uniform
        distinct = {
            tuple((node.memory_bytes, node.flop_per_s, "" if uniform else node.node_id) for node in order): order
            for order in reversed(orders)
        }
        return list(reversed(distinct.values()))

    def _ordered(self, group: Group, averaging: bool) -> ClusterCut:
        """Return the cut of a chosen group after trying further orders of its nodes, polished."""
        best = self._cut(group, averaging)
        assert best is not None, "only groups that hold the model are chosen"
        if len(group) <= PERMUTED_STAGES:
            every = list(itertools.permutations([self.nodes[index] for index in sorted(group)]))
            orders = self._distinct([best.nodes, *every])
        else:
            orders = [_exchange(best.nodes, place) for place in range(min(len(group) - 1, EXCHANGES))]
        for order in orders:
            cut = self._try(order, averaging)
            if cut is not None and cut.period_s < best.period_s * (1 - 1e-9):
                best = cut
        polished = self.cutter.cut(best.nodes, averaging, polish=True)
        return polished if polished is not None and polished.period_s <= best.period_s * (1 + 1e-9) else best

    # ------------------------------------------------------------ comparing partitions

    def _allowed(self, clusters: int) -> bool:
        return clusters >= self.min_clusters and (self.max_clusters == 0 or clusters <= self.max_clusters)

    def _rates(self, partition: Partition) -> list[float] | None:
        """Return micro-batches per second of every cluster; None if memory or the bounds forbid the partition."""
        if not self._allowed(len(partition)):
            return None
        rates = []
        for group in partition:
            cut = self._cut(group, len(partition) > 1)
            if cut is None:
                return None
            rates.append(1 / cut.period_s)
        return rates

    def _balanced(self, partition: Partition, rates: Sequence[float]) -> bool:
        return len(partition) <= self.min_clusters or min(rates) >= SLOWEST_CLUSTER * max(rates)

    def _choose(self, partitions: Sequence[Partition]) -> Partition | None:
        """Return the best: highest total; within TIE of it fewest stages per cluster, then least staleness, then the higher total."""
        rated = [(partition, rates) for partition in partitions if (rates := self._rates(partition)) is not None]
        rated = [entry for entry in rated if self._balanced(*entry)] or rated
        if not rated:
            return None
        highest = max(sum(rates) for _, rates in rated)
        close = [(partition, sum(rates)) for partition, rates in rated if sum(rates) >= highest * (1 - TIE)]

        def rank(entry: tuple[Partition, float]) -> tuple[float, int, float, list[list[int]]]:
            partition, total = entry
            stages = sum(len(group) for group in partition) / len(partition)
            cuts = [self._cut(group, len(partition) > 1) for group in partition]
            staleness = max(max(cut.in_flight) for cut in cuts if cut is not None)
            return stages, staleness, -total, sorted(sorted(group) for group in partition)

        return min(close, key=rank)[0]

    # ------------------------------------------------------------ small pools: everything

    def _complete(self) -> list[Partition]:
        """Return every allowed partition that is within TIE of the best so far, when it is met."""
        singles: list[Partition] = [(group,) for group in self._groups(range(len(self.nodes))) if self._rates((group,)) is not None]
        if self.max_clusters == 1:
            return singles
        kept: list[Partition] = list(singles)
        highest = max((sum(self._rates(partition) or ()) for partition in singles), default=0.0)
        rates = {group: 1 / cut.period_s for group in self._groups(range(len(self.nodes))) if (cut := self._cut(group, True)) is not None}
        for partition in self._partitions(frozenset(range(len(self.nodes))), rates):
            total = sum(rates[group] for group in partition)
            if len(partition) < 2 or not self._allowed(len(partition)) or total < highest * (1 - TIE):
                continue
            if self._balanced(partition, [rates[group] for group in partition]):
                highest = max(highest, total)
                kept.append(partition)
        return kept

    def _groups(self, indexes: Sequence[int]) -> Iterator[Group]:
        for size in range(1, min(len(indexes), self.cutter.costs.units) + 1):
            yield from (frozenset(chosen) for chosen in itertools.combinations(indexes, size))

    def _partitions(self, left: Group, usable: dict[Group, float]) -> Iterator[Partition]:
        """Yield every way to form clusters from `left`, each from a usable group; nodes may stay unused."""
        if not left:
            yield ()
            return
        first = min(left)
        rest = left - {first}
        yield from self._partitions(rest, usable)
        for size in range(len(rest) + 1):
            for others in itertools.combinations(sorted(rest), size):
                group = frozenset((first, *others))
                if group in usable:
                    yield from ((group, *more) for more in self._partitions(rest - group, usable))

    # ------------------------------------------------------------ where to start

    def _simple(self) -> list[Partition]:
        """Return partitions of similar nodes: for several orders of the pool, cut the order into the smallest groups that suffice."""
        places = range(len(self.nodes))
        by_memory = sorted(places, key=lambda index: (-self.nodes[index].memory_bytes, index))
        by_speed = sorted(places, key=lambda index: (-self.nodes[index].flop_per_s, -self.nodes[index].memory_bytes, index))
        # Large nodes beside small ones form more clusters than alike ones do, when only that gives each enough memory.
        mixed = [index for pair in itertools.zip_longest(by_memory, reversed(by_memory)) for index in pair if index is not None]
        single = self._smallest(by_memory, averaging=False)
        found: list[Partition] = [(single,)] if single is not None else []
        if self.max_clusters != 1:
            found += [self._similar(order) for order in (by_speed, by_memory, mixed[: len(self.nodes)])]
        found += [self._dealt(by_memory, self.min_clusters)] if self.min_clusters > 1 else []
        # Fewest nodes that hold the model, then more of them: a stage more also means a micro-batch more in flight.
        return found

    def _similar(self, order: Sequence[int]) -> Partition:
        """Return groups of neighbours in `order`, each the smallest that holds the model; what is left at the end stays unused."""
        groups: list[Group] = []
        left = list(order)
        while not (self.max_clusters and len(groups) == self.max_clusters):
            group = self._smallest(left, averaging=True)
            if group is None:
                break
            groups.append(group)
            left = [index for index in left if index not in group]
        return tuple(groups)

    def _smallest(self, order: Sequence[int], averaging: bool) -> Group | None:
        """Return the first nodes of `order` that hold the model: as few as that takes, or, beyond SINGLE_STEPS, some more."""
        size, most = 1, min(len(order), self.cutter.costs.units)
        while most:
            group = frozenset(order[:size])
            if self._cut(group, averaging) is not None:
                return group
            if size == most:
                break
            size = min(most, size + 1 if size < SINGLE_STEPS else size + size // 4)
        return None

    def _dealt(self, by_memory: Sequence[int], clusters: int) -> Partition:
        """Return `clusters` groups with about equal memory: each next node goes where least is."""
        groups: list[list[int]] = [[] for _ in range(clusters)]
        for index in by_memory:
            short = [group for group in groups if not group or self._cut(frozenset(group), True) is None]
            if not short:
                break
            min(short, key=lambda group: sum(self.nodes[member].memory_bytes for member in group)).append(index)
        return tuple(frozenset(group) for group in groups)

    # ------------------------------------------------------------ large pools: improve step by step

    def _climb(self, starts: Sequence[Partition]) -> list[Partition]:
        """Return local optima: from every start, exchange and move nodes while the total rises, until the budget is used."""
        optima = []
        for number, start in enumerate(starts):
            limit = self._work + (self.budget - self._work) // (len(starts) - number)
            optima.append(self._improve(start, limit))
        return optima

    def _improve(self, start: Partition, limit: int) -> Partition:
        current, total = start, sum(self._rates(start) or ())
        patience = 4 * len(self.nodes)
        failures = 0
        while failures < patience and self._work < limit:
            candidate = self._neighbour(current)
            rates = self._rates(candidate) if candidate else None
            failures += 1
            if rates is None or not self._balanced(candidate, rates):
                continue
            fewer = sum(map(len, candidate)) < sum(map(len, current)) and len(candidate) >= len(current)
            if sum(rates) > total * (1 + 1e-6) or (fewer and sum(rates) >= total):
                current, total, failures = candidate, sum(rates), 0
        return current

    def _neighbour(self, partition: Partition) -> Partition:
        """Return a partition that differs by one move: a node goes elsewhere, two are exchanged, or unused ones form a cluster."""
        groups = [set(group) for group in partition]
        unused = sorted(set(range(len(self.nodes))).difference(*groups))
        source = self.rng.randrange(len(groups))
        move = self.rng.randrange(4)
        if move == 0 and unused:
            groups[source].add(self.rng.choice(unused))
        elif move == 1 and unused:
            groups.append(set(self.rng.sample(unused, self.rng.randint(1, min(len(unused), max(map(len, groups)))))))
        else:
            node = self.rng.choice(sorted(groups[source]))
            groups[source].remove(node)
            target = self.rng.randrange(-1, len(groups))
            swap = sorted(groups[target]) if target >= 0 else unused
            if target >= 0 and target != source:
                groups[target].add(node)
            if move == 3 and swap and target != source:
                back = self.rng.choice(swap)
                groups[source].add(back)
                groups[target].discard(back) if target >= 0 else None
        return tuple(frozenset(group) for group in groups if group)


def _exchange(nodes: tuple[NodeProfile, ...], place: int) -> tuple[NodeProfile, ...]:
    return (*nodes[:place], nodes[place + 1], nodes[place], *nodes[place + 2 :])
