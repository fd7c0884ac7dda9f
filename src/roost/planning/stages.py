"""The best cut of the model for nodes in a given order: the least period that their computation, links and memory allow.

For a given period T the cut is found exactly, by dynamic programming from the last stage to the first. The state is the first
unit of the stage, its value the shortest round trip R from there to the end of the pipeline: a shorter one needs fewer
micro-batches in flight at all earlier stages, and so less of their memory. The least feasible T is found by bisection.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from roost.planning.cost import Floats, UnitCosts
from roost.planning.memory import older_versions
from roost.planning.tables import StageTables, TableMaker
from roost.types import NodeProfile

Orders = npt.NDArray[np.intp]
"""Nodes by their place in the pool, in the order of their stages, shape (orders, stages)."""

Places = npt.NDArray[np.intp]

SHORTEST_PERIOD_S = 1e-9
"""Predicted for a model that costs nothing, so that rates stay finite."""
LEAST_RELIABILITY = 1e-100
"""However unreliable its nodes are, a cluster is worth more than none."""
SLACK = 1e-9
"""Relative rounding error that is forgiven when two times are compared."""
TRACED = 3
"""Of the orders that can keep a period, so many are cut to see what they really reach."""
BALANCE_WEIGHT = 1e-2
"""Among cuts with the same period the least traffic wins; this little weight on balance decides between near equals."""
EXACT = 1e-7
"""Relative precision of a period that counts as exact."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One of the things that a cluster's period cannot be shorter than."""

    seconds: float
    node_id: str
    kind: str
    """'compute', 'uplink', 'downlink', 'link' or 'round trip'."""
    name: str
    """For people."""


@dataclass(frozen=True, kw_only=True)
class ClusterCut:
    """Nodes in the order of their stages, where the model is cut for them, and what that is predicted to reach."""

    nodes: tuple[NodeProfile, ...]
    cuts: tuple[int, ...]
    """First unit of every stage, and the number of units: one more entry than nodes."""
    in_flight: tuple[int, ...]
    """Micro-batches in flight that hide every round trip: the least."""
    allowed: tuple[int, ...]
    """With headroom, where memory and the job's bound have room for it."""
    period_s: float
    """Seconds between two micro-batches."""
    staleness: int
    """Largest staleness at any stage, in updates: older weight versions of the first."""
    value: float
    """Samples per second, less what staleness and absent nodes take from them (docs/planning.md)."""
    recompute: tuple[bool, ...]
    """Stages that run their forward again before the backward: those whose activations do not fit as often as they need it."""
    compute_s: tuple[float, ...]
    send_s: tuple[float, ...]
    limits: tuple[Limit, ...]
    """What bounds the period, slowest first."""

    @property
    def bottleneck(self) -> str:
        return self.limits[0].name

    @property
    def stages(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, kw_only=True, eq=False)
class PeriodProbe:
    """Looks for cuts that keep one period on a few nodes, which are numbered from 0 here."""

    compute: Floats
    """Seconds by [way, node, first, last]: of stages that keep their activations and, where that may help, that recompute."""
    limit: Floats
    """Longest round trip that the micro-batches which fit in memory hide, as `compute`; negative if the stage is too slow."""
    hop: Floats
    """Seconds there and back by [node, next node, first unit of the next]; infinite if too slow."""
    first_limit: float
    """Longest round trip from a first stage."""

    def tail(self, orders: Orders, tail: Floats | None, *, first: bool) -> Floats:
        """Return the shortest round trip from the first node of each order to the last, by its first unit.

        The orders are ends of pipelines; `tail` is the same for them without their first nodes, None if they have no other.
        Shape (orders, units + 1), or (orders, 1) if `first`: then the nodes are first stages.
        """
        nodes = orders[:, 0]
        if tail is None:
            compute, limit = self.compute[0, nodes, :, -1], self.limit[0, nodes, :, -1]
            if first:
                compute, limit = compute[:, :1], np.minimum(limit[:, :1], self.first_limit)
            return np.where(compute <= limit, compute, np.inf)
        beyond = self.hop[nodes, orders[:, 1]] + tail
        if first:
            return self.trips(np.s_[:, nodes, 0], beyond, self.first_limit).min(axis=-1)[:, None]
        shortest = self.trips(np.s_[:, nodes], beyond[:, None, :], None).min(axis=-1)
        shortest[:, 0] = np.inf
        return shortest

    def trips(self, stages: Any, beyond: Floats, longest: float | None) -> Floats:
        """Return the round trips from some stages, an index of the tables, with `beyond` behind them.

        Infinite for stages whose memory does not hide it, or if it is over `longest`. A stage that fits both ways does not recompute:
        the shorter round trip needs less in flight before it.
        """
        need: Floats = self.compute[stages] + beyond
        need[need > (self.limit[stages] if longest is None else np.minimum(self.limit[stages], longest))] = np.inf
        return need[0] if len(need) == 1 else np.minimum(need[0], need[1], out=need[0])

    def round_trips(self, orders: Orders) -> Floats:
        """Return the shortest round trip of each order, shape (orders,); infinite if it cannot keep the period."""
        tail: Floats | None = None
        for stage in range(orders.shape[1] - 1, -1, -1):
            tail = self.tail(orders[:, stage:], tail, first=stage == 0)
        assert tail is not None, "an order has at least one node"
        return np.asarray(tail[:, 0])

    def cuts(self) -> tuple[int, ...] | None:
        """Return the cuts with the shortest round trip for the nodes in their own order, or None if there are none."""
        count, units = self.hop.shape[0], self.hop.shape[2] - 1
        order = np.arange(count)[None, :]
        tails: list[Floats] = []
        for stage in range(count - 1, -1, -1):
            tails.append(self.tail(order[:, stage:], tails[-1] if tails else None, first=stage == 0))
        if not np.isfinite(tails[-1][0, 0]):
            return None
        cuts = [0]
        for stage, tail in zip(range(count - 1), reversed(tails[:-1]), strict=True):
            beyond = self.hop[stage, stage + 1] + tail[0]
            cuts.append(int(np.argmin(self.trips(np.s_[:, stage, cuts[-1]], beyond, None if stage else self.first_limit))))
        return (*cuts, units)


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCutter:
    """Cuts one model for nodes of one pool, in a given order."""

    nodes: tuple[NodeProfile, ...]
    maker: TableMaker
    _tables: dict[int, StageTables] = field(default_factory=dict)

    @property
    def costs(self) -> UnitCosts:
        return self.maker.costs

    def part(self, places: Sequence[int]) -> StageCutter:
        """Return a cutter for some of the nodes, in that order: its tables are small."""
        maker = dataclasses.replace(self.maker, network=self.maker.network.part(places))
        return StageCutter(nodes=tuple(self.nodes[place] for place in places), maker=maker)

    def tables(self, clusters: int) -> StageTables:
        """Return the tables for a plan of that many clusters, made when first asked for."""
        if clusters not in self._tables:
            self._tables[clusters] = self.maker.tables(self.nodes, clusters, range(len(self.nodes)))
        return self._tables[clusters]

    # ------------------------------------------------------------ one period

    def probe(self, members: Sequence[int], clusters: int, period_s: float, staleness: int | None = None) -> PeriodProbe:
        """Return what can look for cuts that keep `period_s` on these nodes; `staleness` caps what the first stage keeps in flight."""
        tables, network, crossing = self.tables(clusters), self.maker.network, self.maker.crossing
        chosen = np.asarray(members, dtype=np.intp)
        rate, latency = network.rate[chosen][:, chosen], network.latency[chosen][:, chosen]
        both = (1 / rate + 1 / rate.T)[:, :, None] * crossing + (latency + latency.T)[:, :, None]
        slowest = crossing / np.minimum(rate, rate.T)[:, :, None]
        longest = period_s * (1 + SLACK)
        hop = np.where(slowest <= longest, both, np.inf)
        compute, busy, hidden = tables.ways
        limit = hidden[:, chosen] * longest
        limit[busy[:, chosen] > longest] = -1.0
        return PeriodProbe(
            compute=compute[:, chosen],
            limit=limit,
            hop=hop,
            first_limit=math.inf if staleness is None else self._in_flight_at(staleness) * longest,
        )

    def _in_flight_at(self, staleness: int) -> int:
        return 1 + staleness * self.costs.micro_batches_per_batch

    # ------------------------------------------------------------ the least period

    def round_trips(self, orders: Orders, clusters: int, period_s: float, staleness: int | None = None) -> Floats:
        """Return the shortest round trip of each order at that period, shape (orders,); infinite if the period is too short."""
        members, local = np.unique(orders, return_inverse=True)
        return self.probe(members.tolist(), clusters, period_s, staleness).round_trips(local.reshape(orders.shape))

    def cuts_at(self, order: Sequence[int], clusters: int, period_s: float, staleness: int | None = None) -> tuple[int, ...] | None:
        """Return the cuts with the shortest round trip at that period, or None if there are none."""
        return self.probe(order, clusters, period_s, staleness).cuts()

    def best(
        self,
        orders: Orders,
        clusters: int,
        *,
        least_s: float,
        below_s: float = math.inf,
        staleness: int | None = None,
        precision: float = EXACT,
    ) -> tuple[int, float] | None:
        """Return the row of the order with the least period, and that period, to `precision`; None if none is below `below_s`.

        `least_s` is a period that none can be below.
        """
        low = max(least_s, SHORTEST_PERIOD_S)
        bound = below_s * (1 - SLACK) if math.isfinite(below_s) else math.inf
        feasible = np.flatnonzero(np.isfinite(self.round_trips(orders, clusters, bound, staleness)))
        if not feasible.size:
            return None
        row, orders, rows, high, step, verify = int(feasible[0]), orders[feasible], feasible, bound, 0.02, False
        if not math.isfinite(bound):
            high, row = min((self._reached(orders[place], clusters, math.inf, staleness), int(rows[place])) for place in range(len(rows)))
        while high > low * (1 + precision):
            middle = math.sqrt(low * high)
            # From below in growing steps first: most groups come near what their computation allows. Then by halves; what was
            # found may be the least already, so a period just below it is tried first.
            tried = high * (1 - precision) if verify else min(low * (1 + step), middle)
            if not low < tried < high:
                break
            feasible = np.flatnonzero(np.isfinite(self.round_trips(orders, clusters, tried, staleness)))
            if not feasible.size:
                if verify:
                    break
                low, step = tried, step * 3
                continue
            orders, rows, step, verify = orders[feasible], rows[feasible], math.inf, not verify
            reached = [self._reached(order, clusters, tried, staleness) for order in orders[: TRACED if precision <= EXACT else 1]]
            best = int(np.argmin(reached))
            row, high = int(rows[best]), min(tried, reached[best])
        return row, high

    def _reached(self, order: Sequence[int], clusters: int, period_s: float, staleness: int | None) -> float:
        """Return the period that the cuts found for `period_s` really have: that or less."""
        cuts = self.cuts_at(order, clusters, period_s, staleness)
        assert cuts is not None, "only for a period that the order can keep"
        modes, trips, hops = self._modes(order, cuts, clusters, period_s)
        waiting = max(trip / _needed(trip, period_s) for trip in trips)
        return max(self._busy(order, cuts, clusters, modes), waiting, *hops)

    def _busy(self, order: Sequence[int], cuts: tuple[int, ...], clusters: int, modes: Sequence[bool]) -> float:
        """Return the longest of terms 1, 3 and 4."""
        tables = self.tables(clusters)
        busy = (float(tables.of(modes[k]).busy[place, cuts[k], cuts[k + 1]]) for k, place in enumerate(order))
        return max(SHORTEST_PERIOD_S, *busy)

    def _modes(
        self, order: Sequence[int], cuts: tuple[int, ...], clusters: int, period_s: float
    ) -> tuple[tuple[bool, ...], list[float], list[float]]:
        """Return which stages must recompute to keep that period, as they have no memory to hide their round trip otherwise.

        And the round trips and flows with these, as `_trips` does.
        """
        tables = self.tables(clusters)
        modes = [False] * len(order)
        trips, hops = self._trips(order, cuts, clusters, modes)
        later = 0.0  # what stages further on add by recomputing
        for k in range(len(order) - 2, -1, -1):
            stage = (order[k], cuts[k], cuts[k + 1])
            if math.isfinite(period_s) and _needed(trips[k] + later, period_s) > tables.most_in_flight[stage]:
                modes[k] = True
                later += float(tables.again.compute[stage] - tables.compute[stage])
            trips[k] += later
        return tuple(modes), trips, hops

    # ------------------------------------------------------------ what given cuts reach

    def value(self, order: Sequence[int], period_s: float, staleness: int) -> float:
        """Return samples per second, less what staleness and absent nodes take from them."""
        reliability = max(LEAST_RELIABILITY, math.prod(self.nodes[place].reliability for place in order))
        return self.costs.micro_batch_size / period_s / (1 + self.maker.options.staleness_cost * staleness) * reliability

    def at(self, order: Sequence[int], cuts: tuple[int, ...], clusters: int, period_s: float) -> ClusterCut:
        """Return what these cuts reach with as many micro-batches in flight as `period_s` needs."""
        modes, _, _ = self._modes(order, cuts, clusters, period_s)
        limits, in_flight, compute, send = self._limits(tuple(order), cuts, clusters, period_s, modes)
        period = max(max(limit.seconds for limit in limits), SHORTEST_PERIOD_S)
        staleness = older_versions(in_flight[0], self.costs.micro_batches_per_batch)
        return ClusterCut(
            nodes=tuple(self.nodes[place] for place in order),
            cuts=cuts,
            in_flight=in_flight,
            allowed=self._with_headroom(order, cuts, clusters, period, in_flight, modes),
            recompute=modes,
            period_s=period,
            staleness=staleness,
            value=self.value(order, period, staleness),
            compute_s=compute,
            send_s=send,
            limits=tuple(limits),
        )

    def _with_headroom(
        self,
        order: Sequence[int],
        cuts: tuple[int, ...],
        clusters: int,
        period_s: float,
        least: tuple[int, ...],
        modes: tuple[bool, ...],
    ) -> tuple[int, ...]:
        """Return the micro-batches that each stage may have in flight: a stage's own compute needs no headroom."""
        tables, rho = self.tables(clusters), self.maker.options.headroom
        trips, _ = self._trips(order, cuts, clusters, modes)
        allowed = []
        for k, place in enumerate(order):
            own = float(tables.of(modes[k]).compute[place, cuts[k], cuts[k + 1]])
            most = int(tables.of(modes[k]).most_in_flight[place, cuts[k], cuts[k + 1]])
            allowed.append(max(least[k], min(most, _needed(own + rho * (trips[k] - own), period_s))))
        return tuple(allowed)

    def balanced(self, cut: ClusterCut, clusters: int) -> ClusterCut | None:
        """Return the cut with the same period and depth that sends least and is most balanced; None if the search finds none.

        Stages recompute where they must, but not where none of `cut` does.
        """
        order = [self._places()[node.node_id] for node in cut.nodes]
        tables, network, crossing = self.tables(clusters), self.maker.network, self.maker.crossing
        limit = cut.period_s * (1 + SLACK)
        best = np.full(self.costs.units + 1, np.inf)
        best[0] = 0.0
        choices = []
        for k, place in enumerate(order):
            weight = np.full(tables.compute[place].shape, np.inf)
            for ways in (tables.again, tables) if any(cut.recompute) else (tables,):
                compute = ways.compute[place]
                fits = (ways.busy[place] <= limit) & (ways.most_in_flight[place] >= cut.in_flight[k])
                weight = np.where(fits, BALANCE_WEIGHT * compute * (compute / cut.period_s), weight)
            if k < len(order) - 1:
                there, back = network.rate[place, order[k + 1]], network.rate[order[k + 1], place]
                hops = np.where(crossing / min(there, back) <= limit, crossing / there + crossing / back, np.inf)
                weight = weight + hops[None, :]
            total = best[:, None] + weight
            choices.append(np.argmin(total, axis=0))
            best = np.min(total, axis=0)
        if not np.isfinite(best[-1]):
            return None
        cuts = [self.costs.units]
        for chosen in reversed(choices):
            cuts.append(int(chosen[cuts[-1]]))
        return self.predict(cut.nodes, tuple(reversed(cuts)), clusters)

    def _places(self) -> dict[str, int]:
        return self.maker.network.places

    def predict(self, nodes: Sequence[NodeProfile], cuts: tuple[int, ...], clusters: int) -> ClusterCut | None:
        """Return the best that `nodes` in this order reach with the model cut there; None if their memory does not suffice.

        The period is the least at which every stage has the memory for the micro-batches it needs in flight, if need be by
        recomputing, unless a little longer one with less staleness is worth more.
        """
        order = tuple(self._places()[node.node_id] for node in nodes)
        tables = self.tables(clusters)
        if min(int(tables.most_in_flight[place, cuts[k], cuts[k + 1]]) for k, place in enumerate(order)) < 1:
            return None
        candidates = [self._least_period(order, cuts, clusters, None)]
        _, trips, _ = self._modes(order, cuts, clusters, candidates[0])
        unbounded = older_versions(_needed(trips[0], candidates[0]), self.costs.micro_batches_per_batch)
        candidates += [self._least_period(order, cuts, clusters, staleness) for staleness in range(unbounded)]
        return max((self.at(order, cuts, clusters, period) for period in candidates), key=lambda cut: (cut.value, -cut.staleness))

    def _least_period(self, order: Sequence[int], cuts: tuple[int, ...], clusters: int, staleness: int | None) -> float:
        """Return the least period of these cuts, whose stages all fit, to EXACT; `staleness` caps what the first one keeps in flight.

        A shorter period needs more in flight, so the stages that must recompute to keep it only become more.
        """
        modes, trips, hops = self._modes(order, cuts, clusters, math.inf)
        best = tried = math.inf
        while True:
            most = [int(self.tables(clusters).of(modes[k]).most_in_flight[place, cuts[k], cuts[k + 1]]) for k, place in enumerate(order)]
            if staleness is not None:
                most[0] = min(most[0], self._in_flight_at(staleness))
            waiting = [trip / bound if bound else math.inf for trip, bound in zip(trips, most, strict=True)]
            reached = max(self._busy(order, cuts, clusters, modes), *hops, *waiting)
            if reached >= tried:
                return best
            best, tried = reached, reached * (1 - EXACT)
            modes, trips, hops = self._modes(order, cuts, clusters, tried)

    def _trips(self, order: Sequence[int], cuts: tuple[int, ...], clusters: int, modes: Sequence[bool]) -> tuple[list[float], list[float]]:
        """Return the round trip from every stage (term 5), and the seconds of every flow (term 2)."""
        tables, network = self.tables(clusters), self.maker.network
        trips, hops, trip = [], [], 0.0
        for k in range(len(order) - 1, -1, -1):
            if k < len(order) - 1:
                size = float(self.maker.crossing[cuts[k + 1]])
                for ends in ((order[k], order[k + 1]), (order[k + 1], order[k])):
                    hops.append(size / float(network.rate[ends]))
                    trip += float(network.latency[ends]) + hops[-1]
            trip += float(tables.of(modes[k]).compute[order[k], cuts[k], cuts[k + 1]])
            trips.append(trip)
        return trips[::-1], hops

    def _limits(
        self, order: tuple[int, ...], cuts: tuple[int, ...], clusters: int, period_s: float, modes: tuple[bool, ...]
    ) -> tuple[list[Limit], tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
        """Return what bounds the period, slowest first, and per stage the micro-batches in flight, compute and sending seconds."""
        tables, network, names = self.tables(clusters), self.maker.network, [self.nodes[place].node_id for place in order]
        trips, _ = self._trips(order, cuts, clusters, modes)
        copied = self.maker.averaging_copies(clusters)
        in_flight = tuple(_needed(trip, period_s) for trip in trips)
        limits: list[Limit] = []
        compute, send = [], []
        for k, (place, name) in enumerate(zip(order, names, strict=True)):
            compute.append(float(tables.of(modes[k]).compute[place, cuts[k], cuts[k + 1]]))
            rate = self.nodes[place].memory_bytes_per_s
            averaging = float(copied[cuts[k + 1]] - copied[cuts[k]]) / rate if rate else 0.0
            limits.append(Limit(seconds=compute[-1] + averaging, node_id=name, kind="compute", name=f"compute of {name}"))
            lines = self.maker.line_seconds(place, cuts[k], cuts[k + 1], clusters)
            limits += [
                Limit(seconds=seconds, node_id=name, kind=kind, name=f"{kind} of {name}")
                for kind, seconds in zip(("uplink", "downlink"), lines, strict=True)
            ]
            if k < len(order) - 1:
                size = float(self.maker.crossing[cuts[k + 1]])
                there, back = float(network.rate[place, order[k + 1]]), float(network.rate[order[k + 1], place])
                send.append(float(network.latency[place, order[k + 1]]) + size / there)
                limits.append(Limit(seconds=size / there, node_id=name, kind="link", name=f"link {name} -> {names[k + 1]}"))
                limits.append(Limit(seconds=size / back, node_id=names[k + 1], kind="link", name=f"link {names[k + 1]} -> {name}"))
            waiting = trips[k] / in_flight[k]
            what = f"round trip from {name} with {in_flight[k]} in flight"
            limits.append(Limit(seconds=waiting, node_id=name, kind="round trip", name=what))
        # Of equals the first is named, and a round trip last.
        limits.sort(key=lambda limit: -limit.seconds * (1 - SLACK if limit.kind == "round trip" else 1))
        return limits, in_flight, tuple(compute), (*send, 0.0)


def _needed(trip_s: float, period_s: float) -> int:
    """Return the micro-batches in flight that hide a round trip."""
    return max(1, math.ceil(trip_s / period_s * (1 - SLACK)))
