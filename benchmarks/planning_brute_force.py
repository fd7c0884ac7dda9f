"""The true optimum of docs/planning.md's value of a plan, for pools of a few nodes.

Every partition of every subset of the nodes into clusters, every order of their nodes and every cut is either evaluated or
excluded by a bound that holds exactly:

- of an order, the least T over all cuts by the limits 1 to 4 of the page and by round trips that are never longer than those
  of any cut (the shortest way from each stage to the end), each stage keeping its activations or recomputing, whichever is
  shorter, and from it the highest value, staleness included;
- of a set of nodes in a plan, the highest values that the other nodes could add.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmarks.planning_costs import MOST_IN_FLIGHT, Floats, Ints, PageCosts

CHUNK_BYTES = 64 << 20
"""Memory of one matrix over many orders."""
CLOSE = 1e-11
"""Relative difference below which a bound does not count as higher."""


@dataclass(frozen=True, kw_only=True)
class OptimalCluster:
    """One cluster of the optimum."""

    nodes: tuple[int, ...]
    cuts: tuple[int, ...]
    samples_per_s: float
    value: float


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best plan there is; without clusters if none is feasible."""

    value: float
    clusters: tuple[OptimalCluster, ...]
    evaluated: int
    """Cuts that were evaluated one by one."""


@dataclass(kw_only=True, eq=False)
class _Group:
    """A set of nodes in a plan of so many clusters: its orders, their bounds, and the best found."""

    orders: Ints
    bounds: Floats
    upper: float
    best: OptimalCluster | None
    done: bool = False


@dataclass(kw_only=True, eq=False)
class _Tables:
    """Costs of every node and pair for every (first, last) unit; infinite where nothing fits."""

    compute: Floats
    """Shape (nodes, U + 1, U + 1), like those of `busy` and `most`."""
    busy: dict[int, Floats]
    """By number of clusters."""
    again: dict[int, Floats]
    """`busy` of stages that recompute."""
    forward: Floats
    """What recomputing adds to `compute`."""
    most: dict[tuple[bool, bool], Floats]
    """Most in flight, without and with averaging, keeping activations and recomputing."""
    flow: Floats
    """Shape (nodes, nodes, U + 1), like that of `hop`."""
    hop: Floats


def find_optimum(costs: PageCosts, known: float = 0.0) -> Optimum:
    """Return the optimum for a pool of a few nodes; `known` is the value of any feasible plan, which only saves time.

    If nothing exceeds `known`, the clusters may be missing and the value is `known`.
    """
    search = _Search(costs=costs, tables=_tables(costs), known=known)
    search.prepare()
    search.refine(everything=False)
    found = search.best_partition(limited=False)
    if found is not None and _too_slow([cluster.samples_per_s for cluster in found], costs.slowest_cluster):
        # Rare: the best plan has a cluster so slow that it is not formed. All groups must then be known exactly.
        search.known = 0.0
        search.refine(everything=True)
        found = search.best_partition(limited=True)
    value = sum(cluster.value for cluster in found) if found else 0.0
    return Optimum(value=max(value, known), clusters=found or (), evaluated=search.evaluated)


def _too_slow(rates: list[float], slowest: float) -> bool:
    return min(rates) < slowest * max(rates)


def _tables(costs: PageCosts) -> _Tables:
    count, places = len(costs.names), np.arange(costs.units + 1)
    n, u, v = np.arange(count)[:, None, None], places[None, :, None], places[None, None, :]
    valid = np.broadcast_to(v > u, (count, costs.units + 1, costs.units + 1))
    most = {
        (averaging, again): np.where(valid, costs.most_in_flight(n, u, v, averaging, again), 0.0)
        for averaging in (False, True)
        for again in (False, True)
    }
    a, b = np.arange(count)[:, None, None], np.arange(count)[None, :, None]
    cut = places[None, None, :]
    return _Tables(
        compute=np.where(valid, costs.compute(n, u, v), np.inf),
        busy={clusters: np.where(valid, costs.busy(n, u, v, clusters), np.inf) for clusters in range(1, count + 1)},
        again={clusters: np.where(valid, costs.busy(n, u, v, clusters, True), np.inf) for clusters in range(1, count + 1)},
        forward=np.where(valid, costs.compute(n, u, v, True) - costs.compute(n, u, v), 0.0),
        most=most,
        flow=costs.flow(a, b, cut),
        hop=costs.hop(a, b, cut),
    )


@dataclass(kw_only=True, eq=False)
class _Search:
    costs: PageCosts
    tables: _Tables
    known: float
    evaluated: int = 0
    groups: dict[tuple[int, int], _Group] = field(default_factory=dict)
    """By number of clusters and set of nodes (a bit for each)."""

    def prepare(self) -> None:
        """Fill `groups`: the bound of every order, and the value of the cut that attains it."""
        count = len(self.costs.names)
        for clusters in range(1, count + 1):
            for size in range(1, min(count - clusters + 1, self.costs.units) + 1):
                self._add(clusters, np.asarray(list(itertools.permutations(range(count), size)), dtype=np.int64))

    def _add(self, clusters: int, orders: Ints) -> None:
        step = max(1, CHUNK_BYTES // (8 * (self.costs.units + 1) ** 2))
        bounds, cuts = np.zeros(len(orders)), np.zeros((len(orders), orders.shape[1] + 1), dtype=np.int64)
        for start in range(0, len(orders), step):
            part = slice(start, start + step)
            bounds[part], cuts[part] = self._bound(orders[part], clusters)
        reached = self.costs.evaluate(orders, cuts, clusters)
        self.evaluated += len(orders)
        sets = (1 << orders).sum(axis=1)
        for members in np.unique(sets):
            rows = np.flatnonzero((sets == members) & (bounds > 0))
            if not rows.size:
                continue
            rows = rows[np.argsort(-bounds[rows], kind="stable")]
            top = rows[np.argmax(reached.value[rows])]
            best = _cluster(orders[top], cuts[top], float(reached.samples_per_s[top]), float(reached.value[top]))
            group = _Group(orders=orders[rows], bounds=bounds[rows], upper=float(bounds[rows[0]]), best=best)
            self.groups[clusters, int(members)] = group

    def _stage_costs(self, orders: Ints, clusters: int) -> tuple[list[Floats], Floats]:
        """Return for every stage the least T for each (first, last), shape (rows, U + 1, U + 1), and the shortest round trip."""
        tables, stages = self.tables, orders.shape[1]
        most, most_again = tables.most[clusters > 1, False], tables.most[clusters > 1, True]
        limits: list[Floats] = []
        # The shortest way from a stage with that first unit to the end of the pipeline and back.
        rest = np.full((len(orders), self.costs.units + 1), np.inf)
        rest[:, -1] = 0.0
        shortest = np.zeros(len(orders))
        for k in range(stages - 1, -1, -1):
            node = orders[:, k]
            beyond = rest if k == stages - 1 else rest + tables.hop[node, orders[:, k + 1]]
            compute = np.where(most[node] >= 1, tables.compute[node], np.inf)
            trip = compute + beyond[:, None, :]
            kept = np.maximum(tables.busy[clusters][node], _by_trip(trip, most[node]))
            again = np.maximum(tables.again[clusters][node], _by_trip(trip + tables.forward[node], most_again[node]))
            limit = np.where(np.isfinite(trip), np.minimum(kept, again), np.inf)
            if k > 0:
                limit = np.maximum(limit, tables.flow[orders[:, k - 1], node][:, :, None])
            limits.append(limit)
            rest = (compute + beyond[:, None, :]).min(axis=2)
            shortest = trip[:, 0].min(axis=1)
        return limits[::-1], shortest

    def _bound(self, orders: Ints, clusters: int) -> tuple[Floats, Ints]:
        """Return per order a value that no cut exceeds (0 if none fits), and the cut with the least limit."""
        limits, shortest = self._stage_costs(orders, clusters)
        rows = np.arange(len(orders))
        best = np.full((len(orders), self.costs.units + 1), np.inf)
        best[:, 0] = 0.0
        choices = []
        for limit in limits:
            total = np.maximum(best[:, :, None], limit)
            chosen = total.argmin(axis=1)
            best = np.take_along_axis(total, chosen[:, None, :], axis=1)[:, 0]
            choices.append(chosen)
        cuts = [np.full(len(orders), self.costs.units)]
        for chosen in reversed(choices):
            cuts.append(chosen[rows, cuts[-1]])
        return self._highest_value(orders, best[:, -1], shortest), np.stack(cuts[::-1], axis=1)

    def _highest_value(self, orders: Ints, period: Floats, shortest: Floats) -> Floats:
        """Return the highest value for a T of at least `period` and a round trip of at least `shortest`."""
        costs = self.costs
        fits = np.isfinite(period)
        period, trip = np.where(fits, period, 1.0), np.where(fits, shortest, 0.0)
        best = np.zeros(len(orders))
        staleness = 0
        while True:
            longer = np.maximum(period, trip * (1 - CLOSE) / (staleness * costs.m + 1))
            best = np.maximum(best, costs.b / longer / (1 + costs.kappa * staleness))
            if np.all(longer <= period):
                break
            staleness += 1
        return np.where(fits, best * costs.reliability[orders].prod(axis=1), 0.0)

    # ------------------------------------------------------------ one cut after the other

    def refine(self, *, everything: bool) -> None:
        """Make `best` of every group exact that could be part of a better plan than the best known (or of all)."""
        count = len(self.costs.names)
        whole = (1 << count) - 1
        for clusters in range(1, count + 1):
            mine = {members: group for (number, members), group in self.groups.items() if number == clusters}
            if not mine:
                continue
            upper = _completions(count, clusters, {members: group.upper for members, group in mine.items()})
            for members, group in sorted(mine.items(), key=lambda item: -(item[1].upper + upper[clusters - 1][whole ^ item[0]])):
                rest = upper[clusters - 1][whole ^ members]
                target = 0.0 if everything else self.known - rest
                if rest == -np.inf or (not everything and group.upper + rest <= self.known * (1 + CLOSE)):
                    continue
                self._refine_group(clusters, group, target)
                values = {other: found.best.value for other, found in mine.items() if found.best is not None}
                lower = _completions(count, clusters, values)[clusters][whole]
                self.known = max(self.known, lower if np.isfinite(lower) else 0.0)

    def _refine_group(self, clusters: int, group: _Group, target: float) -> None:
        """Evaluate every cut of the group that may exceed both `target` and the best one found."""
        for order, bound in zip(group.orders, group.bounds, strict=True):
            goal = max(target, group.best.value if group.best is not None else 0.0) * (1 + CLOSE)
            if bound <= goal:
                break
            cuts = self._possible_cuts(order, clusters, goal)
            if not len(cuts):
                continue
            reached = self.costs.evaluate(order[None, :], cuts, clusters)
            self.evaluated += len(cuts)
            top = int(np.argmax(reached.value))
            if group.best is None or reached.value[top] > group.best.value:
                group.best = _cluster(order, cuts[top], float(reached.samples_per_s[top]), float(reached.value[top]))

    def _possible_cuts(self, order: Ints, clusters: int, goal: float) -> Ints:
        """Return all cuts, shape (cuts, stages + 1), none of whose limits alone keeps the value from exceeding `goal`."""
        costs = self.costs
        limits, _ = self._stage_costs(order[None, :], clusters)
        longest = costs.b * float(costs.reliability[order].prod()) / goal if goal > 0 else np.inf
        allowed = [np.isfinite(limit[0]) & (limit[0] <= longest) for limit in limits]
        ends = np.zeros(costs.units + 1, dtype=bool)
        ends[-1] = True
        for k in range(len(allowed) - 1, -1, -1):
            allowed[k] &= ends[None, :]
            ends = allowed[k].any(axis=1)
        rows = np.zeros((1, 1), dtype=np.int64)
        for pairs in allowed:
            places, onward = np.nonzero(pairs[rows[:, -1]])
            rows = np.concatenate([rows[places], onward[:, None]], axis=1)
        return rows

    # ------------------------------------------------------------ the best partition

    def best_partition(self, *, limited: bool) -> tuple[OptimalCluster, ...] | None:
        """Return the clusters with the highest sum of values; `limited` forbids one that is too slow beside the others."""
        best: tuple[OptimalCluster, ...] | None = None
        highest = 0.0
        for clusters in range(1, len(self.costs.names) + 1):
            mine = {
                members: group.best for (number, members), group in self.groups.items() if number == clusters and group.best is not None
            }
            for chosen in _partitions(sorted(mine), clusters, 0):
                found = [mine[members] for members in chosen]
                value = sum(cluster.value for cluster in found)
                slow = limited and _too_slow([cluster.samples_per_s for cluster in found], self.costs.slowest_cluster)
                if value > highest and not slow:
                    best, highest = tuple(found), value
        return best


def _by_trip(trip: Floats, most: Floats) -> Floats:
    """Return the least T by which so many in flight hide a round trip."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(most >= MOST_IN_FLIGHT, 0.0, np.where(most >= 1, trip / most, np.inf))


def _cluster(order: Ints, cuts: Ints, rate: float, value: float) -> OptimalCluster:
    return OptimalCluster(nodes=tuple(map(int, order)), cuts=tuple(map(int, cuts)), samples_per_s=rate, value=value)


def _completions(count: int, clusters: int, values: dict[int, float]) -> npt.NDArray[np.float64]:
    """Return the highest sum for exactly j disjoint sets within every set of nodes, shape (clusters + 1, 2**count)."""
    size = 1 << count
    best = np.full((clusters + 1, size), -np.inf)
    best[0] = 0.0
    everything = np.arange(size)
    for j in range(1, clusters + 1):
        for members, value in values.items():
            holders = everything[(everything & members) == members]
            best[j][holders] = np.maximum(best[j][holders], value + best[j - 1][holders ^ members])
    return best


def _partitions(sets: list[int], clusters: int, used: int) -> list[tuple[int, ...]]:
    """Return every choice of `clusters` disjoint sets, each in ascending order."""
    if clusters == 0:
        return [()]
    chosen = []
    for position, members in enumerate(sets):
        if not members & used:
            chosen += [(members, *more) for more in _partitions(sets[position + 1 :], clusters - 1, used | members)]
    return chosen
