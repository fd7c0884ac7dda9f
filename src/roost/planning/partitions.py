"""Small pools: the best way to group the nodes into clusters, found exactly by best-first search with bounds.

Every partition of every part of the pool is kept with an upper bound of its value: the sum of its groups' bounds. The most
promising is looked at again and again, and the bound of one of its groups made exact or low enough to drop the partition,
until the most promising one is exact: nothing can be better.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from roost.planning.groups import EXACT_ORDER, Group, GroupResult, GroupSearch

Partition = tuple[Group, ...]
GAIN = 1e-7
"""Relative gain below which two partitions are equal."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How many clusters a plan may have, and which are too slow for it."""

    least: int
    most: int
    """0: no bound."""
    slowest: float
    """Least speed of a cluster relative to the fastest, unless there are no more clusters than `least`."""

    def allow(self, clusters: int) -> bool:
        return clusters >= self.least and (self.most == 0 or clusters <= self.most)

    def balanced(self, periods_s: Sequence[float]) -> bool:
        """Return True if no cluster is too slow to be in a plan with the others."""
        return len(periods_s) <= self.least or min(periods_s) >= self.slowest * max(periods_s)


@dataclass(kw_only=True, eq=False)
class PartitionSearch:
    """Finds the best partition of a pool of at most EXACT_ORDER nodes."""

    groups: GroupSearch
    bounds: Bounds
    budget: int
    """Work after which the best so far is taken."""
    _upper: npt.NDArray[np.float64] = field(init=False)
    _result: dict[tuple[int, int], GroupResult | None] = field(default_factory=dict)

    def best(self) -> tuple[GroupResult, ...] | None:
        """Return the results of the best partition's groups; None if none fits the nodes' memory and the bounds."""
        count = len(self.groups.cutter.nodes)
        assert count <= EXACT_ORDER, "larger pools are searched step by step"
        partitions = self._partitions(count)
        members = np.zeros((len(partitions), count), dtype=np.intp)
        for row, partition in enumerate(partitions):
            members[row, : len(partition)] = partition
        sizes = np.asarray([len(partition) for partition in partitions], dtype=np.intp)
        self._upper = np.zeros((count + 1, 1 << count))
        for clusters in sorted(set(sizes.tolist())):
            for mask in range(1, 1 << count):
                self._upper[clusters, mask] = self.groups.most_value(_places(mask), clusters)
        incumbent = self._rough(members, sizes)
        return self._prove(members, sizes, incumbent)

    def feasible(self) -> bool:
        """Return True if some partition respects memory and bounds."""
        count = len(self.groups.cutter.nodes)
        holds: dict[tuple[int, bool], bool] = {}
        for partition in self._partitions(count):
            for mask in partition:
                key = (mask, len(partition) > 1)
                if key not in holds:
                    holds[key] = self.groups.holds(_places(mask), 1 + key[1])
                if not holds[key]:
                    break
            else:
                return True
        return False

    def _partitions(self, count: int) -> list[tuple[int, ...]]:
        """Return every allowed partition of every part of the pool, as bit masks of its groups, fewest nodes first."""
        every = [partition for partition in _split((1 << count) - 1) if partition and self.bounds.allow(len(partition))]
        return sorted(every, key=lambda partition: (sum(mask.bit_count() for mask in partition), partition))

    def _totals(
        self, values: npt.NDArray[np.float64], members: npt.NDArray[np.intp], sizes: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.float64]:
        """Return the sum of the groups' values per partition; -1 if one of them cannot hold the model."""
        each = values[sizes[:, None], members]
        impossible = ((each <= 0) & (members > 0)).any(axis=1)
        return np.where(impossible, -1.0, each.sum(axis=1))

    def _rough(self, members: npt.NDArray[np.intp], sizes: npt.NDArray[np.intp]) -> tuple[float, tuple[GroupResult, ...] | None]:
        """Return the best partition by the groups' plain orders: a lower bound for the exact search."""
        values, looked = self._upper.copy(), np.zeros(self._upper.shape, dtype=bool)
        totals = self._totals(values, members, sizes)
        while True:
            row = int(np.argmax(totals))
            if totals[row] <= 0:
                return 0.0, None
            clusters = int(sizes[row])
            masks = [int(mask) for mask in members[row, :clusters]]
            unknown = [mask for mask in masks if not looked[clusters, mask]]
            if not unknown:
                results = [self.groups.rough(_places(mask), clusters) for mask in masks]
                found = tuple(result for result in results if result is not None)
                if self.bounds.balanced([result.period_s for result in found]):
                    return float(totals[row]), found
                totals[row] = -1.0
                continue
            for mask in unknown:
                result = self.groups.rough(_places(mask), clusters)
                # Plain orders may miss one that fits: such a group stays open for the exact search.
                values[clusters, mask] = result.value if result else 0.0
                looked[clusters, mask] = True
                touched = (sizes == clusters) & (members == mask).any(axis=1) & (totals > 0)
                totals[touched] = self._totals(values, members[touched], sizes[touched])

    def _prove(
        self, members: npt.NDArray[np.intp], sizes: npt.NDArray[np.intp], incumbent: tuple[float, tuple[GroupResult, ...] | None]
    ) -> tuple[GroupResult, ...] | None:
        best, found = incumbent
        totals = self._totals(self._upper, members, sizes)
        while True:
            row = int(np.argmax(totals))
            # Of equal partitions the first, which has fewest nodes, wins; rough values are not quite as high as exact ones.
            if totals[row] <= best * (1 + GAIN) or self.groups.spent[0] > self.budget:
                return self._exactly(found)
            clusters = int(sizes[row])
            masks = [int(mask) for mask in members[row, :clusters]]
            unknown = [mask for mask in masks if (clusters, mask) not in self._result]
            if not unknown:
                results = tuple(self._result[clusters, mask] for mask in masks)
                complete = tuple(result for result in results if result is not None)
                if len(complete) == len(results) and self.bounds.balanced([result.period_s for result in complete]):
                    return complete
                totals[row] = -1.0
                continue
            mask = max(unknown, key=lambda mask: (mask.bit_count(), mask))
            self._tighten(clusters, mask, best * (1 + GAIN) - (float(totals[row]) - self._upper[clusters, mask]))
            touched = (sizes == clusters) & (members == mask).any(axis=1) & (totals > 0)
            totals[touched] = self._totals(self._upper, members[touched], sizes[touched])

    def _tighten(self, clusters: int, mask: int, needed: float) -> None:
        """Lower the bound of a group: to what it must exceed, if it cannot; else to its exact value."""
        group = _places(mask)
        if needed > 0 and not self.groups.can_exceed(group, clusters, needed):
            self._upper[clusters, mask] = min(self._upper[clusters, mask], needed)
            return
        result = self.groups.exact(group, clusters)
        self._result[clusters, mask] = result
        self._upper[clusters, mask] = result.value if result else 0.0

    def _exactly(self, found: tuple[GroupResult, ...] | None) -> tuple[GroupResult, ...] | None:
        """Return the results of the same groups with exact periods."""
        if found is None:
            return None
        exact = (self.groups.exact(frozenset(result.order), len(found)) for result in found)
        return tuple(result or rough for result, rough in zip(exact, found, strict=True))


def _places(mask: int) -> Group:
    return frozenset(place for place in range(mask.bit_length()) if mask >> place & 1)


def _split(left: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to form groups from the nodes in `left`; nodes may stay unused."""
    if not left:
        yield ()
        return
    first = left & -left
    rest = left ^ first
    yield from _split(rest)
    others = [1 << place for place in range(rest.bit_length()) if rest >> place & 1]
    for size in range(len(others) + 1):
        for chosen in itertools.combinations(others, size):
            group = first | sum(chosen)
            yield from ((group, *more) for more in _split(left & ~group))
