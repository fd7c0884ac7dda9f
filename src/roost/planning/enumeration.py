"""Clusters of one to three stages: every cut is looked at, at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from roost.planning.cost import Floats
from roost.planning.network import Network
from roost.planning.stages import SHORTEST_PERIOD_S, SLACK, Orders, Places, StageCutter
from roost.planning.tables import StageTables

MOST_STAGES = 3
"""Clusters with more stages have too many cuts to look at each."""


@dataclass(frozen=True, kw_only=True)
class BestCut:
    """The best of all orders and cuts that were looked at."""

    row: int
    """Which of the orders."""
    cuts: tuple[int, ...]
    period_s: float
    staleness: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Stages:
    """The stages at one position of many pipelines: arrays of one shape, or that broadcast to it."""

    nodes: Places
    first: Places
    last: Places

    @property
    def places(self) -> tuple[Places, Places, Places]:
        return self.nodes, self.first, self.last


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """The best of an array of pipelines."""

    cost: float
    """Period, times what staleness takes."""
    place: tuple[int, ...]
    period_s: float
    staleness: int


@dataclass(frozen=True, kw_only=True, eq=False)
class CutEnumerator:
    """Looks at every cut of a few nodes in given orders."""

    cutter: StageCutter
    _cuts: dict[int, list[Places]] = field(default_factory=dict)

    def best(self, orders: Orders, clusters: int) -> BestCut | None:
        """Return the order, cut and depth that are worth most; None if memory is short for all. At most MOST_STAGES stages.

        The same as `StageCutter.predict` for every order and cut.
        """
        count = orders.shape[1]
        cuts = self._every(count)
        if not cuts[0].size:
            return None
        tables = self.cutter.tables(clusters)
        stages = [_Stages(nodes=orders[:, k, None], first=cuts[k][None, :], last=cuts[k + 1][None, :]) for k in range(count)]
        free, period, trip = self._periods(stages, (tables,) * count)
        best = self._least_stale(period, trip)
        if best is None:
            return None
        row, column = best.place[0], best.place[1]
        # Recomputing helps only where memory binds, and where something better than the best would be left if it did not.
        rows, columns = np.nonzero((period > free) & (free < best.cost))
        chosen = [_Stages(nodes=orders[rows, k], first=cuts[k][columns], last=cuts[k + 1][columns]) for k in range(count)]
        # A last stage never has more than one micro-batch in flight.
        for modes in itertools.product((False, True), repeat=count - 1 if rows.size else 0):
            if any(modes):
                _, period, trip = self._periods(chosen, [tables.of(mode) for mode in (*modes, False)])
                found = self._least_stale(period, trip)
                if found is not None and found.cost < best.cost * (1 - SLACK):
                    best, row, column = found, int(rows[found.place[0]]), int(columns[found.place[0]])
        return BestCut(row=row, cuts=tuple(int(cut[column]) for cut in cuts), period_s=best.period_s, staleness=best.staleness)

    def _every(self, count: int) -> list[Places]:
        """Return the first units of the stages of every cut, and the end: one array of all cuts for each."""
        if count not in self._cuts:
            units = self.cutter.costs.units
            grids: list[Places] = []
            if count == 2:
                grids = [np.arange(1, units)]
            elif count == 3:
                one, two = np.triu_indices(units - 1, k=1) if units > 2 else (np.empty(0, dtype=np.intp),) * 2
                grids = [one + 1, two + 1]
            size = grids[0].size if grids else 1
            self._cuts[count] = [np.zeros(size, dtype=np.intp), *grids, np.full(size, units, dtype=np.intp)]
        return self._cuts[count]

    def _periods(self, stages: Sequence[_Stages], tables: Sequence[StageTables]) -> tuple[Floats, Floats, Floats]:
        """Return the least periods without and with the bounds of memory, and the round trips from the first stage.

        All have the shape of the stages' arrays. The periods without are those of terms 1 to 4, infinite where a stage does not fit.
        """
        maker = self.cutter.maker
        network: Network = maker.network
        costs = [part.compute[stage.places] for stage, part in zip(stages, tables, strict=True)]
        most = [part.most_in_flight[stage.places] for stage, part in zip(stages, tables, strict=True)]
        free = np.full(costs[-1].shape, SHORTEST_PERIOD_S)
        trips = [costs[-1]]
        for k in range(len(stages) - 2, -1, -1):
            here, there = stages[k].nodes, stages[k + 1].nodes
            size = maker.crossing[stages[k + 1].first]
            onward, back = size / network.rate[here, there], size / network.rate[there, here]
            delay = network.latency[here, there] + network.latency[there, here]
            free = np.maximum(free, np.maximum(onward, back))
            trips.append(costs[k] + (trips[-1] + delay + onward + back))
        period = free
        for stage, part, trip, fits in zip(stages, tables, trips[::-1], most, strict=True):
            free = np.maximum(free, np.where(fits > 0, part.busy[stage.places], np.inf))
            period = np.maximum(period, np.where(fits > 0, trip / np.maximum(fits, 1.0), np.inf))
        return free, np.maximum(free, period), trips[-1]

    def _least_stale(self, period: Floats, trip: Floats) -> _Choice | None:
        """Return the best of every cut, at its least period or at a longer one that needs less in flight."""
        m, kappa = self.cutter.costs.micro_batches_per_batch, self.cutter.maker.options.staleness_cost
        if not np.isfinite(period).any():
            return None
        with np.errstate(invalid="ignore"):
            depth = np.maximum(np.ceil(trip / period * (1 - SLACK)), 1.0)
        stale = np.where(np.isfinite(period), np.ceil((depth - 1) / m), 0.0)
        cost = period * (1 + kappa * stale)
        place = _least(cost)
        best, staleness = float(cost[place]), int(stale[place])
        seconds = float(period[place])
        # Staleness that costs more than this much is not worth any speed; each level is a longer period with less in flight.
        for level in range(int(stale[period <= best].max(initial=0)) - 1, -1, -1):
            longer = np.where(stale > level, np.maximum(period, trip / (1 + level * m)), period)
            cost = longer * (1 + kappa * np.minimum(stale, level))
            lower = _least(cost)
            if cost[lower] < best * (1 - SLACK):
                best, place = float(cost[lower]), lower
                seconds, staleness = float(longer[place]), int(min(stale[place], level))
        return _Choice(cost=best, place=place, period_s=seconds, staleness=staleness)


def _least(cost: Floats) -> tuple[int, ...]:
    return tuple(int(index) for index in np.unravel_index(int(np.argmin(cost)), cost.shape))
