"""What a group of nodes can reach as one cluster, whatever the order of its stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from roost.planning.cost import Floats
from roost.planning.enumeration import MOST_STAGES, CutEnumerator
from roost.planning.memory import older_versions
from roost.planning.stages import EXACT, SHORTEST_PERIOD_S, SLACK, ClusterCut, Orders, PeriodProbe, StageCutter

Group = frozenset[int]
"""Nodes of one cluster, by their place in the pool."""

PERMUTED = 4
"""Groups up to this size are tried in every order."""
THOROUGH_POOL = 40
"""In larger pools groups are compared by plain orders only."""
EXACT_ORDER = 8
"""Groups up to this size can be searched for the best order exactly."""
CALL_OVERHEAD = 20_000
"""What handling one stage costs besides, in entries of tables."""
FAR_S = 1e30
"""Stands for an impossible round trip where sums are compared."""
ROUGH = 4e-3
"""Relative precision of a period while groups are compared."""


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """The best order found for a group."""

    order: tuple[int, ...]
    period_s: float
    staleness: int
    value: float
    exact: bool
    """True if no order, cut or depth is worth more."""
    cuts: tuple[int, ...] = ()
    """Empty if they are still to be found for the period."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupSearch:
    """Finds the best order of a group; remembers what it found."""

    cutter: StageCutter
    _known: dict[tuple[Group, int, bool], GroupResult | None] = field(default_factory=dict)
    _short: dict[tuple[Group, int], float] = field(default_factory=dict)
    _whole: dict[bool, float] = field(default_factory=dict)
    _likely: dict[tuple[Group, int], float] = field(default_factory=dict)
    _least: dict[int, tuple[Floats, Floats, Floats]] = field(default_factory=dict)
    spent: list[int] = field(default_factory=lambda: [0])
    """Entries of cost tables looked at so far: the measure of work, the same on every machine."""

    # ------------------------------------------------------------ bounds

    def least_period(self, group: Group, clusters: int) -> float:
        """Return a period that the group cannot be below, from its computation and lines alone; infinite if memory is short."""
        alone, _, _ = self._bounds(clusters)
        places = list(group)
        size = len(places)
        costs = self.cutter.costs
        if size > costs.units:
            return math.inf
        if size == 1:
            return max(float(alone[places[0]]), SHORTEST_PERIOD_S)
        nodes = [self.cutter.nodes[place] for place in places]
        if sum(node.memory_bytes for node in nodes) < self._whole_bytes(clusters):
            return math.inf
        work = float(costs.seconds[-1]) * costs.reference_flop_per_s / sum(node.flop_per_s for node in nodes)
        return max(work * (1 - SLACK), SHORTEST_PERIOD_S, self.line_period(group, clusters))

    def _bounds(self, clusters: int) -> tuple[Floats, Floats, Floats]:
        """Return per node the least busy time with the whole model, with any part of it, and with a part from its middle."""
        if clusters not in self._least:
            tables = self.cutter.tables(clusters)
            busy = np.where(tables.most_in_flight > 0, tables.busy, np.inf)
            alone = busy[:, 0, -1].copy()
            busy[:, 0, -1] = np.inf
            middle = busy[:, 1:, :-1].min(axis=(1, 2), initial=np.inf)
            self._least[clusters] = alone, busy.min(axis=(1, 2)), middle
        return self._least[clusters]

    def most_value(self, group: Group, clusters: int) -> float:
        """Return a value that the group cannot exceed; 0 if it cannot hold the model."""
        least = self.least_period(group, clusters)
        return self.cutter.value(list(group), least, 0) if math.isfinite(least) else 0.0

    def held(self, group: Group, clusters: int) -> float:
        """Return the fraction of the model's bytes that the group's memory holds, about."""
        return sum(self.cutter.nodes[place].memory_bytes for place in group) / self._whole_bytes(clusters)

    def line_period(self, group: Group, clusters: int) -> float:
        """Return a period that the lines of the group's nodes allow at best, in a cluster of that many stages or more."""
        if len(group) == 1:
            return 0.0
        _, end, middle = self._bounds(clusters)
        between = sorted((float(middle[place]) for place in group), reverse=True)
        return max(float(max(end[list(group)])), between[2] if len(group) > 2 else 0.0)

    def likely_value(self, group: Group, clusters: int) -> float:
        """Return about what the group reaches if the model could be cut anywhere: quick, rarely too low; 0 if memory is short."""
        key = (group, clusters)
        if key not in self._likely:
            self._likely[key] = self._estimate(group, clusters)
        return self._likely[key]

    def _estimate(self, group: Group, clusters: int) -> float:
        least = self.least_period(group, clusters)
        if not math.isfinite(least):
            return 0.0
        if len(group) > 1:
            costs = self.cutter.costs
            whole = self._whole_bytes(clusters)
            work = float(costs.seconds[-1]) * costs.reference_flop_per_s
            # A node takes at most what its memory holds: with those that are full first, the others share the rest by speed.
            nodes = sorted((self.cutter.nodes[place] for place in group), key=lambda node: node.memory_bytes / node.flop_per_s)
            left, speed, period = 1.0, sum(node.flop_per_s for node in nodes), 0.0
            for node in nodes:
                fraction = node.memory_bytes / whole
                if fraction * work / node.flop_per_s >= left * work / speed:
                    period = left * work / speed
                    break
                left -= fraction
                speed -= node.flop_per_s
            if not period and left > 0:
                return 0.0
            least = max(least, period)
        return self.cutter.value(list(group), least, 0)

    def _whole_bytes(self, clusters: int) -> float:
        """Return the bytes of the whole model as one stage, less the buffers at its end."""
        averaging = clusters > 1
        if averaging not in self._whole:
            memory, costs = self.cutter.maker.memory, self.cutter.costs
            ends = 2 * float(costs.crossing_bytes[0]) * costs.micro_batches_per_batch
            self._whole[averaging] = max(1.0, float(memory.stage_bytes(0, costs.units, 1, averaging)) - ends)
        return self._whole[averaging]

    @cached_property
    def _enumerator(self) -> CutEnumerator:
        return CutEnumerator(cutter=self.cutter)

    # ------------------------------------------------------------ the best order

    def rough(self, group: Group, clusters: int) -> GroupResult | None:
        """Return a good order of the group: the best of several plain ones, its period to ROUGH; None if none fits."""
        key = (group, clusters, False)
        if key not in self._known:
            self._known[key] = self._search(group, clusters, exact=False)
        return self._known[key]

    def cut_groups(self, clusters: int) -> list[tuple[Group, float]]:
        """Return every group that was found to hold the model, with its value, in the order they were looked at."""
        return [
            (group, result.value)
            for (group, count, exact), result in self._known.items()
            if count == clusters and not exact and result is not None
        ]

    def exact(self, group: Group, clusters: int) -> GroupResult | None:
        """Return the best order of the group, its period to EXACT; for groups beyond EXACT_ORDER the best of several plain ones."""
        key = (group, clusters, True)
        if key not in self._known:
            self._known[key] = self._search(group, clusters, exact=True)
        return self._known[key]

    def holds(self, group: Group, clusters: int) -> bool:
        """Return True if the group's memory holds the model in some order; for groups beyond EXACT_ORDER in one of several."""
        if not math.isfinite(self.least_period(group, clusters)):
            return False
        if np.isfinite(self.cutter.round_trips(self.orders(group), clusters, math.inf)).any():
            return True
        return PERMUTED < len(group) <= EXACT_ORDER and self._keeping(group, clusters, math.inf, None) is not None

    def reaches(self, group: Group, clusters: int, value: float) -> bool:
        """Return False if none of the plain orders is worth as much as `value`; True if one may be."""
        known = self._known.get((group, clusters, False), self)
        if known is not self or len(group) <= MOST_STAGES:
            result = self.rough(group, clusters)
            return result is not None and result.value >= value
        if self._short.get((group, clusters), math.inf) <= value:
            return False
        orders = self._rough_orders(group)
        self._spend(len(orders), len(group), 1)
        period_s = self.cutter.value(list(group), 1.0, 0) / value
        if np.isfinite(self.cutter.round_trips(orders, clusters, period_s)).any():
            return True
        self._short[group, clusters] = value
        return False

    def can_exceed(self, group: Group, clusters: int, value: float) -> bool:
        """Return False if no order of the group is worth more than `value`; True if one may be."""
        if self.most_value(group, clusters) <= value:
            return False
        period_s = self.cutter.value(sorted(group), 1.0, 0) / value
        if len(group) <= MOST_STAGES:
            result = self.exact(group, clusters)
            return result is not None and result.value > value
        if len(group) <= PERMUTED:
            orders = self.orders(group)
            self._spend(len(orders), len(group), 1)
            return bool(np.isfinite(self.cutter.round_trips(orders, clusters, period_s)).any())
        return self._keeping(group, clusters, period_s, None) is not None

    def _search(self, group: Group, clusters: int, *, exact: bool) -> GroupResult | None:
        least = self.least_period(group, clusters)
        if not math.isfinite(least):
            return None
        orders = self.orders(group)
        if len(group) <= MOST_STAGES:
            return self._enumerated(orders, clusters)
        complete = len(group) <= PERMUTED
        if not exact:
            orders = self._rough_orders(group)
        self._spend(len(orders), len(group), 8)
        found = self.cutter.best(orders, clusters, least_s=least, precision=EXACT if exact else ROUGH)
        best = None if found is None else self._result(orders[found[0]], clusters, found[1], None, exact=complete and exact)
        if not exact:
            return best
        if complete:
            return self._less_stale(best, orders, clusters, least) if best is not None else None
        if len(group) > EXACT_ORDER:
            return self._less_stale(best, orders[[found[0]]], clusters, least) if best is not None and found is not None else None
        return self._best_order(group, clusters, least, best)

    def _enumerated(self, orders: Orders, clusters: int) -> GroupResult | None:
        """Return the best result of all cuts in these orders."""
        self._spend(len(orders), orders.shape[1], 1)
        found = self._enumerator.best(orders, clusters)
        if found is None:
            return None
        order = tuple(int(place) for place in orders[found.row])
        value = self.cutter.value(order, found.period_s, found.staleness)
        return GroupResult(order=order, period_s=found.period_s, staleness=found.staleness, value=value, exact=True, cuts=found.cuts)

    def _result(self, order: Sequence[int], clusters: int, period_s: float, staleness: int | None, *, exact: bool) -> GroupResult:
        """Return what an order has at a period it can keep."""
        trip = float(self.cutter.round_trips(np.asarray([order], dtype=np.intp), clusters, period_s, staleness)[0])
        m = self.cutter.costs.micro_batches_per_batch
        stale = older_versions(max(1, math.ceil(trip / period_s * (1 - SLACK))), m)
        places = tuple(int(place) for place in order)
        value = self.cutter.value(places, period_s, stale)
        return GroupResult(order=places, period_s=period_s, staleness=stale, value=value, exact=exact)

    def _below(self, best: GroupResult, staleness: int) -> float:
        """Return the period below which a cluster with that staleness is worth more than `best`."""
        kappa = self.cutter.maker.options.staleness_cost
        return best.period_s * (1 + kappa * best.staleness) / (1 + kappa * staleness)

    def _less_stale(self, best: GroupResult, orders: Orders, clusters: int, least: float) -> GroupResult:
        """Return the best of these orders when less staleness may cost a little speed."""
        m = self.cutter.costs.micro_batches_per_batch
        shortest = float(np.min(self.cutter.round_trips(orders, clusters, math.inf)))
        for staleness in range(best.staleness - 1, -1, -1):
            floor = max(least, shortest / (1 + staleness * m))
            below = self._below(best, staleness)
            if floor >= below:
                break
            found = self.cutter.best(orders, clusters, least_s=floor, below_s=below, staleness=staleness)
            if found is not None:
                best = self._result(orders[found[0]], clusters, found[1], staleness, exact=best.exact)
        return best

    def of_order(self, order: Sequence[int], clusters: int, precision: float = EXACT) -> GroupResult | None:
        """Return the best result with the nodes in this order (for small groups: any order), to `precision`; None if none fits."""
        group = frozenset(order)
        if len(order) <= MOST_STAGES:
            return self._enumerated(self.orders(group), clusters)
        orders = np.asarray([order], dtype=np.intp)
        least = self.least_period(group, clusters)
        found = self.cutter.best(orders, clusters, least_s=least, precision=precision) if math.isfinite(least) else None
        if found is None:
            return None
        return self._less_stale(self._result(orders[found[0]], clusters, found[1], None, exact=True), orders, clusters, least)

    def cut_of(self, result: GroupResult, clusters: int) -> ClusterCut:
        """Return the cut of a result: of equally good ones a balanced one that sends little."""
        cutter = self.cutter
        cuts = result.cuts or cutter.cuts_at(result.order, clusters, result.period_s, result.staleness)
        assert cuts is not None, "results are of orders that keep their period"
        found = cutter.at(result.order, cuts, clusters, result.period_s)
        other = cutter.balanced(found, clusters)
        if other is None or other.value < found.value * (1 - SLACK) or sum(other.recompute) > sum(found.recompute):
            return found
        return other

    def orders(self, group: Group) -> Orders:
        """Return the orders to try: all for small groups, else plain ones."""
        if len(group) <= PERMUTED:
            return np.asarray(self._distinct(itertools.permutations(sorted(group))), dtype=np.intp)
        return self.plain_orders(group)

    def _rough_orders(self, group: Group) -> Orders:
        """Return the orders by which groups are compared: in pools that leave time for it all of a small group."""
        return self.orders(group) if len(self.cutter.nodes) <= THOROUGH_POOL else self.plain_orders(group)

    def plain_orders(self, group: Group) -> Orders:
        """Return orders by memory, by speed, and along fast links."""
        members = sorted(group)
        nodes, network = self.cutter.nodes, self.cutter.maker.network
        orders = [
            # Early stages keep more in flight, so large nodes first.
            tuple(sorted(members, key=lambda place: (-nodes[place].memory_bytes, place))),
            tuple(sorted(members, key=lambda place: (-nodes[place].memory_bytes / nodes[place].flop_per_s, place))),
            tuple(sorted(members, key=lambda place: (-nodes[place].flop_per_s, place))),
            tuple(sorted(members, key=lambda place: (nodes[place].flop_per_s, place))),
        ]
        if not network.uniform:
            lines = np.minimum(network.up, network.down)
            inner = sorted(members, key=lambda place: (lines[place], place))
            # The ends of a pipeline send half as much: the slowest lines there.
            orders.append((inner[0], *inner[2:], inner[1]))
            orders += [self._chain(members, start) for start in (orders[0][0], inner[0])]
        return np.asarray(self._distinct(orders), dtype=np.intp)

    def _chain(self, members: Sequence[int], start: int) -> tuple[int, ...]:
        """Return the members, each next one that with the fastest link from the one before, of equals the nearest."""
        network = self.cutter.maker.network
        chain, left = [start], [place for place in members if place != start]
        while left:
            here = chain[-1]
            nearest = max(
                left, key=lambda place: (min(network.rate[here, place], network.rate[place, here]), -network.latency[here, place])
            )
            left.remove(nearest)
            chain.append(nearest)
        return tuple(chain)

    def _distinct(self, orders: Iterator[tuple[int, ...]] | Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return `orders` without those that only exchange nodes which are alike."""
        uniform = self.cutter.maker.network.uniform
        distinct: dict[tuple[object, ...], tuple[int, ...]] = {}
        for order in orders:
            distinct.setdefault(tuple(self._likeness(place) if uniform else place for place in order), order)
        return list(distinct.values())

    def _likeness(self, place: int) -> tuple[float, ...]:
        node = self.cutter.nodes[place]
        return (node.memory_bytes, node.flop_per_s, node.memory_bytes_per_s, node.message_s, node.wire_s_per_byte)

    # ------------------------------------------------------------ every order at once

    def _best_order(self, group: Group, clusters: int, least: float, best: GroupResult | None) -> GroupResult | None:
        """Return the best result over all orders, starting from `best`, a good one."""
        if best is None:
            order = self._keeping(group, clusters, math.inf, None)
            if order is None:
                return None
            best = self._polish(order, clusters, least, None)
        low, halving = least, True
        while best.period_s > low * (1 + EXACT):
            # Halving the gap first: with it closed, one look just below the best proves that nothing is better.
            tried = math.sqrt(low * best.period_s) if halving else best.period_s * (1 - EXACT)
            order = self._keeping(group, clusters, tried, None) if low < tried < best.period_s else None
            if order is None:
                if not halving or tried <= low:
                    break
                low, halving = max(low, tried), False
                continue
            best, halving = self._polish(order, clusters, low, None), True
        return self._less_stale_order(group, clusters, max(low, least), best)

    def _polish(self, order: tuple[int, ...], clusters: int, least: float, staleness: int | None) -> GroupResult:
        orders = np.asarray([order], dtype=np.intp)
        found = self.cutter.best(orders, clusters, least_s=least, staleness=staleness)
        assert found is not None, "the order keeps some period"
        return self._result(order, clusters, found[1], staleness, exact=True)

    def _less_stale_order(self, group: Group, clusters: int, least: float, best: GroupResult) -> GroupResult:
        """Return the best over all orders when less staleness may cost a little speed."""
        costs = self.cutter.costs
        m = costs.micro_batches_per_batch
        fastest = max(self.cutter.nodes[place].flop_per_s for place in group)
        shortest = float(costs.seconds[-1]) * costs.reference_flop_per_s / fastest
        # The least period may be shared by several orders; the one with the shortest round trip is least stale.
        for staleness in range(best.staleness - 1, -1, -1):
            below = self._below(best, staleness)
            if max(least, shortest / (1 + staleness * m)) >= below:
                break
            order = self._keeping(group, clusters, below * (1 - EXACT), staleness)
            while order is not None:
                best = self._polish(order, clusters, least, staleness)
                order = self._keeping(group, clusters, self._below(best, staleness) * (1 - EXACT), staleness)
        return best

    def _keeping(self, group: Group, clusters: int, period_s: float, staleness: int | None) -> tuple[int, ...] | None:
        """Return an order of the group that can keep this period, or None if there is none.

        Orders with the same first node and the same others behind it are compared by the round trip from each first unit: one
        that is not shorter anywhere is dropped.
        """
        members = sorted(group)
        probe = self.cutter.probe(members, clusters, period_s, staleness)
        states: dict[tuple[Group, int], tuple[Orders, Floats]] = {}
        for place in range(len(members)):
            order = np.asarray([[place]], dtype=np.intp)
            tail = probe.tail(order, None, first=len(members) == 1)
            if np.isfinite(tail).any():
                states[frozenset((place,)), place] = order, tail
        for size in range(2, len(members) + 1):
            states = self._extend(states, probe, first=size == len(members))
        complete = [(float(tails[0, 0]), tuple(members[place] for place in orders[0])) for orders, tails in states.values()]
        return min(complete)[1] if complete else None

    def _extend(
        self, states: dict[tuple[Group, int], tuple[Orders, Floats]], probe: PeriodProbe, *, first: bool
    ) -> dict[tuple[Group, int], tuple[Orders, Floats]]:
        """Return the states with one node more in front."""
        longer: dict[tuple[Group, int], tuple[list[Orders], list[Floats]]] = {}
        for (nodes, _), (orders, tails) in states.items():
            others = [place for place in range(len(probe.hop)) if place not in nodes]
            heads = np.repeat(np.asarray(others, dtype=np.intp), len(orders))
            extended = np.concatenate([heads[:, None], np.tile(orders, (len(others), 1))], axis=1)
            self._spend(len(extended), 1, 1)
            more = probe.tail(extended, np.tile(tails, (len(others), 1)), first=first)
            alive = np.isfinite(more).any(axis=1)
            for place in others:
                here = alive & (heads == place)
                if here.any():
                    kept = longer.setdefault((nodes | {place}, place), ([], []))
                    kept[0].append(extended[here])
                    kept[1].append(more[here])
        return {key: _undominated(np.concatenate(orders), np.concatenate(tails)) for key, (orders, tails) in longer.items()}

    def spend_call(self) -> None:
        """Count a step that may cost nothing else, so that a search always ends."""
        self.spent[0] += CALL_OVERHEAD

    def _spend(self, orders: int, stages: int, probes: int) -> None:
        units = self.cutter.costs.units
        self.spent[0] += orders * stages * probes * (units + 1) ** 2 // 2 + stages * probes * CALL_OVERHEAD


def _undominated(orders: Orders, tails: Floats) -> tuple[Orders, Floats]:
    """Return the rows of which no other is at least as short everywhere; of equals the first."""
    if len(orders) == 1:
        return orders, tails
    ranked = np.argsort(np.where(np.isfinite(tails), tails, FAR_S).sum(axis=1), kind="stable")
    kept: list[int] = []
    for index in ranked:
        if not kept or not (tails[kept] <= tails[index]).all(axis=1).any():
            kept.append(int(index))
    return orders[kept], tails[kept]
