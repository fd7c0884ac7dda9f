"""Large pools: clusters grown greedily from many starts, then improved step by step within a fixed amount of work.

A quick estimate of what a group reaches (computation, lines, memory, without the cut) proposes; only what it finds promising is
cut. The main step takes a few clusters that are near each other apart and grows them anew together with unused nodes; moving
and exchanging single nodes does the rest.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from roost.planning.groups import Group, GroupResult, GroupSearch
from roost.planning.packing import Packing
from roost.planning.partitions import Bounds

CANDIDATES = 12
"""Nodes that are considered as the next of a growing group."""
TAKEN_APART = 3
"""Most clusters that one step takes apart."""
SOME_NODES, MANY_NODES = 40, 200
"""Pools beyond these start from fewer partitions: each takes time."""
PARTS = 4
"""Times that the best of all groups seen so far are chosen anew."""
TINY = 1e-30
LEAST_GAIN = 1e-6
"""Relative gain below which a step changes nothing."""


@dataclass(kw_only=True, eq=False)
class LocalSearch:
    """Improves partitions of one pool."""

    groups: GroupSearch
    bounds: Bounds
    rng: random.Random
    budget: int
    clusters: int
    """Number of clusters that costs are computed for; the final ones are computed for the true number."""
    _near: dict[int, list[int]] = field(default_factory=dict)

    def best(self) -> tuple[Group, ...] | None:
        """Return the best partition found; None if none was found that respects memory and bounds."""
        starts = [start for start in self._starts() if start]
        self._seeded()
        current = self._recombined(starts)
        if current is None:
            return None
        begun = self.groups.spent[0]
        for part in range(1, PARTS + 1):
            improved = self._improve(current, begun + max(0, self.budget - begun) * part // PARTS)
            current = self._recombined([improved]) or improved
        return current

    def _seeded(self) -> None:
        """Grow a group around every node from the whole pool, so that there is something to combine."""
        everybody = dict.fromkeys(range(len(self.groups.cutter.nodes)))
        for seed in everybody:
            if self.groups.spent[0] > self.budget // 4:
                break
            self._grown(seed, everybody)

    def _recombined(self, others: Sequence[tuple[Group, ...]]) -> tuple[Group, ...] | None:
        """Return the best choice among all groups that were cut so far; it is at least as good as any of `others`."""
        known = self.groups.cut_groups(self.clusters)
        candidates = [other for other in others if self.bounds.allow(len(other))]
        if known:
            packing = Packing(
                nodes=len(self.groups.cutter.nodes),
                groups=[group for group, _ in known],
                values=[value for _, value in known],
                bounds=self.bounds,
            )
            chosen = packing.choose()
            candidates += [tuple(chosen)] if chosen else []
        return max(candidates, key=self._total, default=None)

    def feasible(self) -> bool:
        """Return True if one of the starts respects memory and bounds."""
        return any(self.bounds.least <= len(start) for start in self._starts() if start)

    # ------------------------------------------------------------ values

    def _value(self, group: Group) -> float:
        result = self._result(group)
        return result.value if result else 0.0

    def _result(self, group: Group) -> GroupResult | None:
        return self.groups.rough(group, self.clusters)

    def _total(self, partition: Iterable[Group]) -> float:
        return math.fsum(self._value(group) for group in partition)

    def _likely(self, group: Group) -> float:
        return self.groups.likely_value(group, self.clusters)

    # ------------------------------------------------------------ starts

    def _starts(self) -> list[tuple[Group, ...]]:
        nodes, network = self.groups.cutter.nodes, self.groups.cutter.maker.network
        places = list(range(len(nodes)))
        by_memory = sorted(places, key=lambda place: (-nodes[place].memory_bytes, place))
        mixed = [place for pair in itertools.zip_longest(by_memory, reversed(by_memory)) for place in pair if place is not None]
        orders = [
            by_memory,
            sorted(places, key=lambda place: (-nodes[place].flop_per_s, -nodes[place].memory_bytes, place)),
            mixed[: len(places)],
        ]
        if not network.uniform:
            orders.append(sorted(places, key=lambda place: (-min(network.up[place], network.down[place]), place)))
        if len(nodes) > MANY_NODES:
            return [self._runs(orders[-1]), tuple(self._grow(orders[-1]))]
        starts = [self._runs(order) for order in orders]
        grown = (orders[-1],) if len(nodes) > SOME_NODES else (orders[-1], orders[1], by_memory[::-1])
        return starts + [tuple(self._grow(order)) for order in grown]

    def _runs(self, order: Sequence[int]) -> tuple[Group, ...]:
        """Return groups of neighbours in `order`, each the smallest that holds the model; what is left at the end stays unused."""
        groups: list[Group] = []
        start = 0
        while start < len(order) and not (self.bounds.most and len(groups) == self.bounds.most):
            size = 1
            while start + size <= len(order) and not self._holds(order[start : start + size]):
                size += 1
            if start + size > len(order):
                break
            groups.append(frozenset(order[start : start + size]))
            start += size
        return tuple(groups)

    def _holds(self, places: Sequence[int]) -> bool:
        group = frozenset(places)
        return self._likely(group) > 0 and self._value(group) > 0

    # ------------------------------------------------------------ growing groups

    def _grow(self, seeds: Sequence[int], most: int = 0) -> list[Group]:
        """Return groups grown from `seeds`, in that order, until the nodes are used or no further group holds the model."""
        left = dict.fromkeys(seeds)
        groups: list[Group] = []
        limit = min(most or len(left), self.bounds.most or len(left))
        for seed in seeds:
            if seed not in left or len(groups) == limit:
                continue
            group = self._grown(seed, left)
            if group is not None:
                groups.append(group)
                for place in group:
                    del left[place]
        return groups

    def _grown(self, seed: int, left: dict[int, None]) -> Group | None:
        """Return the best group around `seed` from the nodes in `left`; None if none holds the model."""
        group: Group = frozenset((seed,))
        units = self.groups.cutter.costs.units
        best, best_worth = None, 0.0
        while True:
            if self._likely(group) > 0 and (value := self._value(group)) > 0:
                worth = self._worth(group, value)
                if worth <= best_worth * (1 + LEAST_GAIN):
                    break
                best, best_worth = group, worth
            if len(group) >= units:
                break
            candidates = self._candidates(group, left)
            if not candidates:
                break
            group = max((group | {place} for place in candidates), key=self._promise)
        return best

    def _worth(self, group: Group, value: float) -> float:
        """Return the value of a group relative to what its nodes would reach if nothing but their computation bound them.

        The most that is worth more than making further groups of the same nodes; a little less for every node, since a
        smaller group sends less and is less stale.
        """
        nodes = self.groups.cutter.nodes
        return value / sum(nodes[place].flop_per_s for place in group)

    def _promise(self, group: Group) -> tuple[float, float, float]:
        """Return how good it looks to have grown to this group: memory first, while that is short."""
        nodes, network = self.groups.cutter.nodes, self.groups.cutter.maker.network
        likely = self._likely(group)
        held = self.groups.held(group, self.clusters)
        slowest = min(min(network.up[place], network.down[place]) for place in group)
        if likely > 0:
            return 1.0, self._worth(group, likely), slowest
        speed = sum(nodes[place].flop_per_s for place in group)
        lines = self.groups.line_period(group, self.clusters)
        # Short of memory: much memory for its speed, and lines that do not bind.
        return 0.0, held / (1 + speed * lines), slowest

    def _candidates(self, group: Group, left: dict[int, None]) -> list[int]:
        found: list[int] = []
        for place in self._neighbours(min(group)):
            if place in left and place not in group:
                found.append(place)
                if len(found) == CANDIDATES:
                    return found
        others = [place for place in left if place not in group and place not in found]
        if len(others) > CANDIDATES - len(found):
            others = self.rng.sample(others, CANDIDATES - len(found))
        return found + others

    def _neighbours(self, place: int) -> list[int]:
        """Return the nodes best linked to `place`, nearest first."""
        if place not in self._near:
            network = self.groups.cutter.maker.network
            rate = np.minimum(network.rate[place], network.rate[:, place])
            nearest = np.lexsort((network.latency[place], -rate))[: 4 * CANDIDATES + 1]
            self._near[place] = [other for other in nearest.tolist() if other != place]
        return self._near[place]

    # ------------------------------------------------------------ improving

    def _improve(self, start: tuple[Group, ...], limit: int) -> tuple[Group, ...]:
        groups = list(start)
        unused = sorted(set(range(len(self.groups.cutter.nodes))).difference(*groups))
        failures, patience = 0, 20 * len(self.groups.cutter.nodes)
        while groups and failures < patience and self.groups.spent[0] < limit:
            self.groups.spend_call()
            chosen, rebuilt = self._step(groups, unused)
            failures += 1
            if rebuilt is None or not self.bounds.allow(len(groups) - len(chosen) + len(rebuilt)):
                continue
            before = math.fsum(self._value(groups[index]) for index in chosen)
            if not self._better(rebuilt, before, sum(len(groups[index]) for index in chosen)):
                continue
            freed = set(unused).union(*(groups[index] for index in chosen)).difference(*rebuilt)
            groups = [group for index, group in enumerate(groups) if index not in chosen] + rebuilt
            unused, failures = sorted(freed), 0
        return tuple(groups)

    def _better(self, rebuilt: Sequence[Group], before: float, nodes: int) -> bool:
        """Return True if the groups are worth more than `before`, or as much with fewer nodes."""
        likely = math.fsum(self._likely(group) for group in rebuilt)
        fewer = sum(map(len, rebuilt)) < nodes
        needed = before if fewer else before * (1 + LEAST_GAIN)
        if likely < needed:
            return False
        after = 0.0
        for group in sorted(rebuilt, key=len):
            likely -= self._likely(group)
            if not self.groups.reaches(group, self.clusters, max(needed - after - likely, 0.0) * (1 - LEAST_GAIN) or TINY):
                return False
            value = self._value(group)
            after += value
            if value <= 0 or after + likely < needed:
                return False
        return after >= needed

    def _step(self, groups: Sequence[Group], unused: Sequence[int]) -> tuple[list[int], list[Group] | None]:
        """Return the clusters that a random step changes, and what it makes of them; None if the step is void."""
        source = self.rng.randrange(len(groups))
        kind = self.rng.random()
        if kind < 0.4:
            return self._apart(groups, unused, source)
        place = self.rng.choice(sorted(groups[source]))
        rest = groups[source] - {place}
        if unused and self.rng.random() < 0.5:
            other = self.rng.choice(unused)
            if kind < 0.6:
                return [source], [groups[source] | {other}]
            return [source], [rest | {other}] if kind < 0.9 or not rest else [rest]
        target = self._nearby(groups, source)
        if target is None:
            return [source], [rest] if rest else None
        if kind < 0.75:
            return [source, target], [group for group in (rest, groups[target] | {place}) if group]
        other = self.rng.choice(sorted(groups[target]))
        return [source, target], [rest | {other}, (groups[target] - {other}) | {place}]

    def _nearby(self, groups: Sequence[Group], source: int) -> int | None:
        """Return another cluster: half of the time one with a node that is well linked to the source."""
        if len(groups) < 2:
            return None
        if self.rng.random() < 0.5:
            near = set(self._neighbours(self.rng.choice(sorted(groups[source])))[:CANDIDATES])
            close = [index for index, group in enumerate(groups) if index != source and not near.isdisjoint(group)]
            if close:
                return self.rng.choice(close)
        target = self.rng.randrange(len(groups) - 1)
        return target + (target >= source)

    def _apart(self, groups: Sequence[Group], unused: Sequence[int], source: int) -> tuple[list[int], list[Group] | None]:
        """Return clusters to take apart, and the groups grown from their nodes and some unused ones."""
        chosen = {source}
        for _ in range(self.rng.randint(0, TAKEN_APART - 1)):
            target = self._nearby(groups, source)
            if target is not None:
                chosen.add(target)
        free = [place for index in sorted(chosen) for place in sorted(groups[index])]
        free += self.rng.sample(list(unused), min(len(unused), CANDIDATES))
        self.rng.shuffle(free)
        most = 0
        if self.bounds.most:
            most = self.bounds.most - len(groups) + len(chosen)
        return sorted(chosen), self._grow(free, most) or None
