"""Clusters of one to three stages: every cut is looked at, at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from roost.planning.cost import Floats
from roost.planning.network import Network
from roost.planning.stages import SHORTEST_PERIOD_S, SLACK, Orders, Places, StageCutter

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
        stages = [(orders[:, k, None], cuts[k][None, :], cuts[k + 1][None, :]) for k in range(count)]
        most = [tables.most_in_flight[stage] for stage in stages]
        trips, period = self._trips(orders, cuts, [tables.compute[stage] for stage in stages])
        for stage, trip, fits in zip(stages, trips, most, strict=True):
            period = np.maximum(period, tables.busy[stage])
            period = np.maximum(period, np.where(fits > 0, trip / np.maximum(fits, 1.0), np.inf))
        return self._least_stale(period, trips[0], cuts)

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

    def _trips(self, orders: Orders, cuts: Sequence[Places], compute: Sequence[Floats]) -> tuple[list[Floats], Floats]:
        """Return the round trip from every stage, first stage first, and the slowest flow."""
        maker = self.cutter.maker
        network: Network = maker.network
        beyond, flow, trips = np.zeros(compute[0].shape), np.full(compute[0].shape, SHORTEST_PERIOD_S), [compute[-1]]
        for k in range(orders.shape[1] - 2, -1, -1):
            here, there = orders[:, k], orders[:, k + 1]
            size = maker.crossing[cuts[k + 1]][None, :]
            onward, back = size / network.rate[here, there][:, None], size / network.rate[there, here][:, None]
            delay = (network.latency[here, there] + network.latency[there, here])[:, None]
            beyond = beyond + compute[k + 1] + delay + onward + back
            flow = np.maximum(flow, np.maximum(onward, back))
            trips.append(compute[k] + beyond)
        return trips[::-1], flow

    def _least_stale(self, period: Floats, trip: Floats, cuts: Sequence[Places]) -> BestCut | None:
        """Return the best of every cut, at its least period or at a longer one that needs less in flight."""
        m, kappa = self.cutter.costs.micro_batches_per_batch, self.cutter.maker.options.staleness_cost
        if not np.isfinite(period).any():
            return None
        with np.errstate(invalid="ignore"):
            depth = np.maximum(np.ceil(trip / period * (1 - SLACK)), 1.0)
        stale = np.where(np.isfinite(period), np.ceil((depth - 1) / m), 0.0)
        cost = period * (1 + kappa * stale)
        row, column = np.unravel_index(int(np.argmin(cost)), cost.shape)
        best, place, staleness = float(cost[row, column]), (int(row), int(column)), int(stale[row, column])
        seconds = float(period[place])
        # Staleness that costs more than this much is not worth any speed; each level is a longer period with less in flight.
        for level in range(int(stale[period <= best].max(initial=0)) - 1, -1, -1):
            longer = np.where(stale > level, np.maximum(period, trip / (1 + level * m)), period)
            cost = longer * (1 + kappa * np.minimum(stale, level))
            row, column = np.unravel_index(int(np.argmin(cost)), cost.shape)
            if cost[row, column] < best * (1 - SLACK):
                best, place = float(cost[row, column]), (int(row), int(column))
                seconds, staleness = float(longer[place]), int(min(stale[place], level))
        chosen = tuple(int(cut[place[1]]) for cut in cuts)
        return BestCut(row=place[0], cuts=chosen, period_s=seconds, staleness=staleness)
