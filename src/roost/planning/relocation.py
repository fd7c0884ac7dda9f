"""What given clusters reach on a pool, and which bytes have to move between nodes before they can run."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from roost.planning.cost import merged_at
from roost.planning.memory import MemoryModel, optimizer_copies
from roost.planning.network import Network
from roost.planning.planner import Planner
from roost.planning.stages import SHORTEST_PERIOD_S, SLACK, ClusterCut, StageCutter
from roost.planning.writing import write_plan
from roost.types import NodeProfile, Plan

REQUESTER = ""
"""As the source of a move: nobody else has the bytes, so they come from the requester's checkpoint."""
WORK_BUDGET = 300_000_000
"""Entries of tables that cuts may go through in one search for a change: a few seconds on one core."""
SEARCH_STEPS = 12
"""Times that finding the best cut goes through the tables, about."""
PRECISION = 1e-3
"""Relative precision of the period for which a cut is looked for; what that cut reaches is then predicted exactly."""
MOST_ENTRIES = 1_000_000
"""Pools whose tables have no more entries are kept whole."""
NOT_WORTH_MOVING = "what it would add, if anything, is not worth the bytes that would have to move"
"""Why a node without a stage has none."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """Bytes that a node must fetch before it can run its new stage."""

    target: str
    source: str
    """The node that has them; empty if only the requester's checkpoint does."""
    first_unit: int
    last_unit: int
    """Half-open."""
    tensors: tuple[str, ...]
    nbytes: int
    """Parameters, buffers and optimizer state."""
    seconds: float
    """Over that link alone; nodes that fetch or send several share their line (PlanChange.move_s)."""


# ------------------------------------------------------------ what clusters reach


@dataclass(frozen=True)
class Layout:
    """Who runs what in one cluster: nodes in the order of their stages, and where the model is cut for them."""

    nodes: tuple[str, ...]
    cuts: tuple[int, ...]

    def stage(self, place: int) -> tuple[int, int]:
        """Return the units of a stage: first, and last (not included)."""
        return self.cuts[place], self.cuts[place + 1]


def layouts_of(plan: Plan) -> tuple[Layout, ...]:
    """Return the clusters of `plan`."""
    return tuple(
        Layout(tuple(stage.node_id for stage in cluster.stages), (0, *(stage.last_unit for stage in cluster.stages)))
        for cluster in plan.clusters
    )


@dataclass(kw_only=True, eq=False)
class Forecast:
    """Predicts clusters on the pool as it is now; remembers what it predicted."""

    planner: Planner
    apart: frozenset[frozenset[str]] = frozenset()
    """Pairs of nodes that cannot reach each other: no cluster may have both, since any two of its stages may have something to send."""
    _predicted: dict[tuple[Layout, int], ClusterCut | None] = field(default_factory=dict, init=False)
    _best: dict[tuple[tuple[str, ...], int, float], Layout | None] = field(default_factory=dict, init=False)
    _part: tuple[tuple[str, ...], StageCutter] | None = field(default=None, init=False)
    _work: int = field(default=0, init=False)

    @cached_property
    def nodes(self) -> dict[str, NodeProfile]:
        """The nodes that are there now, by name."""
        return {node.node_id: node for node in self.planner.pool}

    @property
    def network(self) -> Network:
        return self.planner.fine.maker.network

    def broken(self, layout: Layout) -> bool:
        """Return True if one of its nodes is gone, or two cannot reach each other."""
        return any(name not in self.nodes for name in layout.nodes) or self.apart_in(layout.nodes) is not None

    def apart_in(self, names: Collection[str]) -> frozenset[str] | None:
        """Return two of these nodes that cannot reach each other, None if there are none."""
        together = set(names)
        return next((pair for pair in self.apart if pair <= together), None)

    def predict(self, layout: Layout, clusters: int) -> ClusterCut | None:
        """Return the prediction for one of `clusters` clusters; None if a node is gone, two are apart, or its memory is short."""
        key = (layout, clusters)
        if key not in self._predicted:
            self._predicted[key] = None if self.broken(layout) else self._predict(layout, clusters)
        return self._predicted[key]

    def _predict(self, layout: Layout, clusters: int) -> ClusterCut | None:
        fine = self.planner.fine
        places = [self.network.places[name] for name in layout.nodes]
        nodes = [fine.nodes[place] for place in places]
        if self._whole:
            return fine.predict(nodes, layout.cuts, clusters)
        # Of the tables for every stage that could be, only these stages are asked for: with a unit for each there are no others.
        costs = merged_at(fine.costs, layout.cuts)
        known = fine.maker.memory
        memory = MemoryModel(costs=costs, optimizer_copies=known.optimizer_copies, averaging_copies=known.averaging_copies)
        maker = dataclasses.replace(fine.maker, costs=costs, memory=memory, network=self.network.part(places))
        found = StageCutter(nodes=tuple(nodes), maker=maker).predict(nodes, tuple(range(len(layout.cuts))), clusters)
        return None if found is None else dataclasses.replace(found, cuts=layout.cuts)

    @property
    def _whole(self) -> bool:
        """True if the tables of the whole pool are small enough to be kept."""
        fine = self.planner.fine
        return len(fine.nodes) * (fine.costs.units + 1) ** 2 <= MOST_ENTRIES

    def cut(self, names: Sequence[str], clusters: int, below_s: float = math.inf) -> Layout | None:
        """Return the best cut for nodes in this order with a period below `below_s`.

        None if there is none, if they cannot hold the model, or if the budget of work is used up.
        """
        key = (tuple(names), clusters, below_s)
        if key not in self._best:
            self._best[key] = self._cut(*key)
        return self._best[key]

    def _cut(self, names: tuple[str, ...], clusters: int, below_s: float) -> Layout | None:
        units, options = self.planner.fine.costs.units, self.planner.fine.maker.options
        if not 0 < len(names) <= units or self.apart_in(names) is not None or self._work > WORK_BUDGET * options.effort:
            return None
        cutter, order = self._cutter(names)
        speed = sum(cutter.nodes[place].flop_per_s for place in order) / cutter.costs.reference_flop_per_s
        least = max(SHORTEST_PERIOD_S, float(cutter.costs.seconds[-1]) / speed * (1 - SLACK))
        self._work += len(names) * (units + 1) ** 2
        found = cutter.best(np.asarray([order], dtype=np.intp), clusters, least_s=least, below_s=below_s, precision=PRECISION)
        if found is None:
            return None
        self._work += SEARCH_STEPS * len(names) * (units + 1) ** 2
        cuts = cutter.cuts_at(order, clusters, found[1])
        return None if cuts is None else Layout(names, cuts)

    def _cutter(self, names: tuple[str, ...]) -> tuple[StageCutter, tuple[int, ...]]:
        """Return what cuts for these nodes, and their places in it: the tables of a large pool would not fit in memory."""
        fine = self.planner.fine
        places = tuple(self.network.places[name] for name in names)
        if self._whole:
            return fine, places
        if self._part is None or self._part[0] != names:
            self._part = names, fine.part(places)
        return self._part[1], tuple(range(len(names)))

    def rate(self, layout: Layout, clusters: int) -> float:
        """Return the predicted samples per second; 0 for a cluster that cannot run."""
        found = self.predict(layout, clusters)
        return 0.0 if found is None else self.planner.fine.costs.micro_batch_size / found.period_s

    def worth(self, layout: Layout, clusters: int) -> float:
        """Return samples per second, less what staleness and absent nodes take from them; 0 for a cluster that cannot run."""
        found = self.predict(layout, clusters)
        return 0.0 if found is None else found.value

    def write(self, layouts: Sequence[Layout]) -> Plan:
        """Return the plan with these clusters; every one of them must be able to run."""
        cuts = [found for layout in layouts if (found := self.predict(layout, len(layouts))) is not None]
        planner = self.planner
        return write_plan(planner.profile, planner.fine, cuts, unable=planner.unable, unused_because=NOT_WORTH_MOVING)

    # ------------------------------------------------------------ lines between nodes, and to the requester

    def line(self, name: str, *, sends: bool) -> float:
        """Return the bytes per second that a node can send, or receive, in all; the requester's line is like the median node's."""
        lines = self.network.up if sends else self.network.down
        place = self.network.places.get(name)
        return float(np.median(lines)) if place is None else float(lines[place])

    def link(self, source: str, target: str) -> tuple[float, float]:
        """Return bytes per second and latency from a node, or the requester, to a node."""
        if source in self.network.places:
            return self.network.bytes_per_s(source, target), self.network.latency_s(source, target)
        rate = min(self.line(source, sends=True), self.line(target, sends=False))
        return rate, float(np.median(self.network.latency[:, self.network.places[target]]))


# ------------------------------------------------------------ which bytes move


@dataclass(kw_only=True, eq=False)
class Relocation:
    """Knows who holds what now, and so what has to move for other clusters."""

    forecast: Forecast
    old: tuple[Layout, ...]
    copies: Mapping[str, tuple[int, int]]
    """Units (first, last; half-open) that nodes hold besides their stage."""
    _sums: list[int] = field(default_factory=list, init=False)
    _held: dict[str, list[tuple[int, int]]] = field(default_factory=dict, init=False)
    _runners: dict[int, tuple[str, ...]] = field(default_factory=dict, init=False)
    _moved: dict[Layout, tuple[Move, ...]] = field(default_factory=dict, init=False)

    def nbytes(self, first: int, last: int) -> int:
        """Return what units first .. last-1 weigh on the move: every tensor, and what the optimizer keeps for those it updates."""
        if not self._sums:
            state = optimizer_copies(self.forecast.planner.config.optimizer)
            sizes = (unit.tensor_bytes + state * unit.trainable_bytes for unit in self.forecast.planner.profile.units)
            self._sums.extend(itertools.accumulate(sizes, initial=0))
        return self._sums[max(last, first)] - self._sums[first]

    def held(self, name: str) -> list[tuple[int, int]]:
        """Return the ranges of units that a node holds, its stage first; nothing if it is gone."""
        if not self._held:
            for layout in self.old:
                for place, holder in enumerate(layout.nodes):
                    self._held.setdefault(holder, []).append(layout.stage(place))
            for holder, units in self.copies.items():
                self._held.setdefault(holder, []).append(units)
        return self._held.get(name, []) if name in self.forecast.nodes else []

    def overlap(self, name: str, stage: tuple[int, int]) -> int:
        """Return the bytes of a stage that a node holds already."""
        return max((self.nbytes(max(first, stage[0]), min(last, stage[1])) for first, last in self.held(name)), default=0)

    def moves(self, layouts: Sequence[Layout]) -> tuple[tuple[Move, ...], tuple[float, ...]]:
        """Return the moves to `layouts`, and for each of these the seconds until it can run: 0 if it is one of the current."""
        known = set(self.old)
        per_layout = [() if layout in known else self._fetched(layout) for layout in layouts]
        return tuple(move for moves in per_layout for move in moves), self._waits(per_layout)

    def _fetched(self, layout: Layout) -> tuple[Move, ...]:
        if layout not in self._moved:
            self._moved[layout] = tuple(self._fetches(layout))
        return self._moved[layout]

    def _fetches(self, layout: Layout) -> Iterator[Move]:
        """Yield what the nodes of a cluster must fetch; each source that is chosen counts as busy for the choices that follow."""
        up: dict[str, float] = {}
        for place, target in enumerate(layout.nodes):
            first, last = layout.stage(place)
            mine = self.held(target)
            missing = [unit for unit in range(first, last) if not any(low <= unit < high for low, high in mine)]
            holders = {unit: self._holders(unit, target) for unit in missing}
            runs: list[list[int]] = []
            for unit in missing:
                if runs and runs[-1][-1] == unit - 1 and holders[unit] == holders[unit - 1]:
                    runs[-1].append(unit)
                else:
                    runs.append([unit])
            for run in runs:
                if size := self.nbytes(run[0], run[-1] + 1):
                    yield self._fetch(target, run[0], run[-1] + 1, size, holders[run[0]], up)

    def _fetch(self, target: str, first: int, last: int, size: int, holders: Sequence[str], up: dict[str, float]) -> Move:
        def seconds(source: str) -> float:
            rate, latency_s = self.forecast.link(source, target)
            return latency_s + size / rate

        source = min(holders, key=lambda name: max(up.get(name, 0.0) + size / self.forecast.line(name, sends=True), seconds(name)))
        up[source] = up.get(source, 0.0) + size / self.forecast.line(source, sends=True)
        units = self.forecast.planner.profile.units[first:last]
        return Move(
            target=target,
            source=source,
            first_unit=first,
            last_unit=last,
            tensors=tuple(tensor.name for unit in units for tensor in unit.tensors),
            nbytes=size,
            seconds=seconds(source),
        )

    def _holders(self, unit: int, target: str) -> tuple[str, ...]:
        """Return who can send a unit: whoever runs it now, else a backup with a copy, else the requester."""
        if unit not in self._runners:
            runs = [layout.nodes[bisect.bisect_right(layout.cuts, unit) - 1] for layout in self.old]
            kept = sorted(name for name, (first, last) in self.copies.items() if first <= unit < last)
            alive = tuple(name for name in runs if name in self.forecast.nodes)
            self._runners[unit] = alive or tuple(name for name in kept if name in self.forecast.nodes)
        return tuple(name for name in self._runners[unit] if name != target) or (REQUESTER,)

    def _waits(self, per_layout: Sequence[Sequence[Move]]) -> tuple[float, ...]:
        """Return for every cluster when its last node has its bytes: nodes fetch at the same time, and share lines and links."""
        moves = [move for fetched in per_layout for move in fetched]
        up: dict[str, float] = {}
        down: dict[str, float] = {}
        link: dict[tuple[str, str], float] = {}
        for move in moves:
            up[move.source] = up.get(move.source, 0.0) + move.nbytes / self.forecast.line(move.source, sends=True)
            down[move.target] = down.get(move.target, 0.0) + move.nbytes / self.forecast.line(move.target, sends=False)
            pair = (move.source, move.target)
            rate, latency_s = self.forecast.link(*pair)
            link[pair] = link.get(pair, latency_s) + move.nbytes / rate
        return tuple(
            max((max(up[move.source], down[move.target], link[move.source, move.target]) for move in fetched), default=0.0)
            for fetched in per_layout
        )
