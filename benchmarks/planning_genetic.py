"""The paper's planner as a baseline: clusters by a genetic algorithm, the model divided in proportion to memory.

Cluster formation of arXiv 2401.01728 and of its authors' implementation: a chromosome holds the cluster of every node; clusters
should be alike in memory and in data rate, and one whose memory does not hold the model is penalised above all. Population 200,
500 generations, tournaments of 5, one-point crossover, mutation of 1% of the genes. The model is then divided among the nodes
of a cluster in proportion to the memory they lend.

Where the paper leaves something open, the baseline gets more than the paper has:

- likeness counts compute too;
- the number of clusters is tried at several values (5, the authors' default, and from the memory of the pool), best taken;
- besides division by memory, division by speed and the division with the least slowest stage or hop (a dynamic programme that
  knows compute, lines, flows and memory) are tried, each with the nodes in their given order and with the nearest neighbour by
  rate next, and the best of these per cluster is taken;
- a cluster that does not fit is left out with its nodes, as is one that is too slow, instead of failing the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.planning_costs import Floats, Ints, PageCosts

POPULATION = 200
GENERATIONS = 500
TOURNAMENT = 5
MUTATION = 0.01
SHORTAGE_WEIGHT = 100.0
"""What a missing model's worth of memory counts beside the relative spread of the clusters."""
DEFAULT_CLUSTERS = 5


@dataclass(frozen=True, kw_only=True)
class BaselinePlan:
    """Clusters as (nodes, cuts), and what they reach by the cost model; no clusters if none fits."""

    clusters: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    samples_per_s: float
    value: float


NOTHING = BaselinePlan(clusters=(), samples_per_s=0.0, value=0.0)


def genetic_plans(costs: PageCosts, rng: np.random.Generator) -> tuple[BaselinePlan, BaselinePlan]:
    """Return the best plans over the numbers of clusters tried: by the best division, and by the paper's division alone."""
    whole = float(costs.memory_needed(0, costs.units, 1, True))
    divider = _Divider(costs)
    best = by_memory = NOTHING
    for count in _counts(costs, whole):
        labels = form_clusters(costs, whole, count, rng)
        by_memory = max(by_memory, divider.plan(labels, by_memory_only=True), key=_rate)
        best = max(best, divider.plan(labels, by_memory_only=False), key=_rate)
    return best, by_memory


def _rate(plan: BaselinePlan) -> float:
    return plan.samples_per_s


def _counts(costs: PageCosts, whole: float) -> list[int]:
    """Return the numbers of clusters to try: at most one for each model's worth of memory in the pool."""
    most = max(1, min(len(costs.names), int(costs.memory.sum() / whole)))
    return sorted({most, max(1, round(0.75 * most)), max(1, most // 2), min(most, DEFAULT_CLUSTERS)})


def form_clusters(costs: PageCosts, whole: float, count: int, rng: np.random.Generator) -> Ints:
    """Return the cluster of every node, shape (nodes,): the fittest chromosome of all generations."""
    genes = len(costs.names)
    traits = _traits(costs, count)
    tiled = np.tile(traits, (1, POPULATION))
    population = rng.integers(count, size=(POPULATION, genes))
    best, least = population[0], np.inf
    for _ in range(GENERATIONS):
        penalty = _penalties(population, tiled, whole, count)
        fittest = int(penalty.argmin())
        if penalty[fittest] < least:
            best, least = population[fittest].copy(), float(penalty[fittest])
        population = _next_generation(population, penalty, count, rng)
    return best


def _traits(costs: PageCosts, count: int) -> Floats:
    """Return memory in bytes, then memory over data rate, and compute, both in units of a cluster's fair part: (3, nodes)."""
    rate = np.where(np.isfinite(costs.r), costs.r, np.nan)
    transfer = costs.memory / np.nanmean(rate, axis=1)
    speed = 1 / costs.ratio
    return np.stack([costs.memory, transfer / transfer.sum() * count, speed / speed.sum() * count])


def _penalties(population: Ints, traits: Floats, whole: float, count: int) -> Floats:
    """Return what is bad about every chromosome, shape (population,): memory short of the model, and unlike clusters.

    `traits` are those of the nodes once for every chromosome, shape (3, population * nodes).
    """
    rows = len(population)
    places = (population + np.arange(rows)[:, None] * count).ravel()
    memory, transfer, speed = (np.bincount(places, weights=trait, minlength=rows * count).reshape(rows, count) for trait in traits)
    used = memory > 0
    shortage = np.where(used, np.maximum(0.0, whole - memory) / whole, 0.0).sum(axis=1)
    spread = np.zeros(rows)
    for total in (memory / memory.sum(axis=1, keepdims=True) * count, transfer, speed):
        spread += np.where(used, total, -np.inf).max(axis=1) - np.where(used, total, np.inf).min(axis=1)
    return SHORTAGE_WEIGHT * shortage + spread


def _next_generation(population: Ints, penalty: Floats, count: int, rng: np.random.Generator) -> Ints:
    rows, genes = population.shape
    rivals = rng.integers(rows, size=(rows, TOURNAMENT))
    parents = population[rivals[np.arange(rows), penalty[rivals].argmin(axis=1)]]
    points = rng.integers(1, max(2, genes), size=(rows // 2, 1))
    first, second = parents[0::2], parents[1::2]
    head = np.arange(genes)[None, :] < points
    children = np.concatenate([np.where(head, first, second), np.where(head, second, first)])
    mutated = rng.random(children.shape) < MUTATION
    return np.where(mutated, rng.integers(count, size=children.shape), children)


# ------------------------------------------------------------ dividing the model

_Division = tuple[tuple[int, ...], tuple[int, ...], float, float]
"""Nodes, cuts, samples per second, value."""


class _Divider:
    """Divides the model among the nodes of clusters; keeps the tables that several divisions need."""

    def __init__(self, costs: PageCosts) -> None:
        self._costs = costs
        places = np.arange(costs.units + 1)
        self._u, self._v = places[:, None], places[None, :]
        self._compute: dict[int, Floats] = {}
        self._memory: dict[tuple[int, bool], Floats] = {}
        self._lines: dict[int, tuple[Floats, Floats]] = {}

    def plan(self, labels: Ints, *, by_memory_only: bool) -> BaselinePlan:
        """Return the plan of the clusters that fit, the slow ones left out; what averaging costs depends on how many those are."""
        groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        while groups:
            found = [self._best_division(group, len(groups), by_memory_only) for group in groups]
            fastest = max((one[2] for one in found if one is not None), default=0.0)
            slowest = self._costs.slowest_cluster * fastest
            kept = [(group, one) for group, one in zip(groups, found, strict=True) if one is not None and one[2] >= slowest]
            if len(kept) == len(groups):
                return BaselinePlan(
                    clusters=tuple((one[0], one[1]) for _, one in kept),
                    samples_per_s=sum(one[2] for _, one in kept),
                    value=sum(one[3] for _, one in kept),
                )
            groups = [group for group, _ in kept]
        return NOTHING

    def _best_division(self, group: Ints, clusters: int, by_memory_only: bool) -> _Division | None:
        if len(group) > self._costs.units:
            return None
        best: _Division | None = None
        for order, cuts in self._divisions(group, clusters, by_memory_only):
            reached = self._costs.evaluate(order[None, :], np.asarray([cuts]), clusters)
            rate, value = float(reached.samples_per_s[0]), float(reached.value[0])
            if rate > 0 and (best is None or rate > best[2]):
                best = (tuple(map(int, order)), tuple(map(int, cuts)), rate, value)
        return best

    def _divisions(self, group: Ints, clusters: int, by_memory_only: bool) -> Iterator[tuple[Ints, list[int]]]:
        costs = self._costs
        held = costs.memory_needed(0, np.arange(costs.units + 1), 1, clusters > 1)
        yield group, _proportional(held, costs.memory[group])
        if by_memory_only:
            return
        for order in (group, self._nearest_next(group)):
            yield order, _proportional(held, costs.memory[order])
            yield order, _proportional(costs.W, 1 / costs.ratio[order])
            cuts = self._least_slowest(order, clusters)
            if cuts is not None:
                yield order, cuts

    def _nearest_next(self, group: Ints) -> Ints:
        """Return the nodes, each followed by the one it has the fastest link with; the first is the one with the most memory."""
        costs, left = self._costs, list(group)
        order = [left.pop(int(costs.memory[group].argmax()))]
        while left:
            both = np.minimum(costs.r[order[-1], left], costs.r[left, order[-1]])
            order.append(left.pop(int(both.argmax())))
        return np.asarray(order)

    def _least_slowest(self, order: Ints, clusters: int) -> list[int] | None:
        """Return the cuts whose slowest stage or hop is fastest, every stage in its memory; None if there are none."""
        costs, places = self._costs, np.arange(self._costs.units + 1)
        best = np.where(places == 0, 0.0, np.inf)
        choices: list[npt.NDArray[np.intp]] = []
        for k, node in enumerate(order):
            # Earlier stages have more in flight: one more for each stage that follows.
            limit = self._busy(int(node), clusters)
            limit = np.where(self._memory_needed(len(order) - k, clusters > 1) <= costs.memory[node], limit, np.inf)
            if k > 0:
                limit = np.maximum(limit, costs.flow(order[k - 1], node, places)[:, None])
            total = np.maximum(best[:, None], limit)
            choices.append(total.argmin(axis=0))
            best = total.min(axis=0)
        if not np.isfinite(best[-1]):
            return None
        cuts = [costs.units]
        for chosen in reversed(choices):
            cuts.append(int(chosen[cuts[-1]]))
        return cuts[::-1]

    def _busy(self, node: int, clusters: int) -> Floats:
        costs, u, v = self._costs, self._u, self._v
        if node not in self._compute:
            self._compute[node] = np.where(v > u, costs.compute(node, u, v), np.inf)
        if clusters not in self._lines:
            self._lines[clusters] = costs.line_bytes(u, v, clusters)
        sent, received = self._lines[clusters]
        return np.maximum(self._compute[node], np.maximum(sent / costs.up[node], received / costs.down[node]))

    def _memory_needed(self, in_flight: int, averaging: bool) -> Floats:
        if (in_flight, averaging) not in self._memory:
            self._memory[in_flight, averaging] = self._costs.memory_needed(self._u, self._v, in_flight, averaging)
        return self._memory[in_flight, averaging]


def _proportional(sums: Floats, weights: Floats) -> list[int]:
    """Return cuts that give every stage a part of `sums` (prefix sums over units) in proportion to its weight, at least a unit."""
    units, stages = len(sums) - 1, len(weights)
    wanted = np.cumsum(weights)[:-1] / weights.sum() * (sums[-1] - sums[0]) + sums[0]
    cuts = [0]
    for k, goal in enumerate(wanted):
        nearest = int(np.abs(sums - goal).argmin())
        cuts.append(min(max(nearest, cuts[-1] + 1), units - (stages - 1 - k)))
    return [*cuts, units]
