"""The best cut of the model for nodes in a given order, by dynamic programming over the units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roost.planning.cost import Floats, LinkTable, UnitCosts
from roost.planning.memory import MemoryModel
from roost.types import NodeProfile

BALANCE_WEIGHT = 1e-3
"""Among cuts with the same slowest stage the least traffic wins; this little weight on balance decides between equals."""
SLACK = 1e-9
"""Relative rounding error that is forgiven when two times are compared."""
SHORTEST_PERIOD_S = 1e-9
"""Predicted for a model that costs nothing, so that rates stay finite."""


@dataclass(frozen=True, kw_only=True)
class ClusterCut:
    """Nodes in the order of their stages, where the model is cut for them, and what that is predicted to reach."""

    nodes: tuple[NodeProfile, ...]
    cuts: tuple[int, ...]
    """First unit of every stage, and the number of units: one more entry than nodes."""
    in_flight: tuple[int, ...]
    period_s: float
    """Seconds between two micro-batches."""
    compute_s: tuple[float, ...]
    send_s: tuple[float, ...]
    bottleneck: str

    @property
    def stages(self) -> int:
        return len(self.nodes)


def stage_in_flight(index: int, stages: int, bound: int) -> int:
    """Return the micro-batches in flight that keep stage `index` busy, at most `bound` (0: no bound)."""
    return min(stages - index, bound) if bound else stages - index


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCutter:
    """Cuts one model for nodes in a given order."""

    costs: UnitCosts
    memory: MemoryModel
    links: LinkTable
    in_flight_bound: int
    """JobConfig.max_in_flight: 0 means none."""

    def cut(self, nodes: Sequence[NodeProfile], averaging: bool, *, polish: bool = False) -> ClusterCut | None:
        """Return the cut whose slowest stage or hop is fastest, or None if no cut respects every node's memory.

        `polish` also picks, among the cuts that are equally fast, one that sends little and is balanced.
        """
        if len(nodes) > self.costs.units:
            return None
        stage_costs = [self._stage_seconds(nodes, index, averaging) for index in range(len(nodes))]
        found = _minimise_slowest(stage_costs)
        if found is None:
            return None
        slowest, cuts = found
        if polish:
            limit = slowest * (1 + SLACK)
            weights = [self._traffic(nodes, index, slowest) for index in range(len(nodes))]
            cuts = _minimise_sum([np.where(cost <= limit, weight, np.inf) for cost, weight in zip(stage_costs, weights, strict=True)])
        return self._predict(tuple(nodes), cuts)

    def in_flight(self, index: int, stages: int) -> int:
        """Return StagePlan.max_in_flight."""
        return stage_in_flight(index, stages, self.in_flight_bound)

    def _stage_seconds(self, nodes: Sequence[NodeProfile], index: int, averaging: bool) -> Floats:
        """Return the seconds per micro-batch that stage `index` is busy, per (first, last); infinite where memory is short."""
        busy = np.maximum(self._compute(nodes[index]), self._sending(nodes, index))
        needed = self.memory.matrix(self.in_flight(index, len(nodes)), averaging)
        return np.where(needed <= nodes[index].memory_bytes, busy, np.inf)

    def _compute(self, node: NodeProfile) -> Floats:
        seconds = self.costs.seconds
        return (seconds[None, :] - seconds[:, None]) * (self.costs.reference_flop_per_s / node.flop_per_s)

    def _sending(self, nodes: Sequence[NodeProfile], index: int) -> Floats:
        """Return the seconds the uplink is busy: values to the next stage and gradients to the one before share it."""
        crossing, me = self.costs.crossing_bytes, nodes[index].node_id
        back = crossing / self.links.bytes_per_s(me, nodes[index - 1].node_id) if index else np.zeros_like(crossing)
        last = index == len(nodes) - 1
        onward = np.zeros_like(crossing) if last else crossing / self.links.bytes_per_s(me, nodes[index + 1].node_id)
        return np.asarray(back[:, None] + onward[None, :], dtype=np.float64)

    def _traffic(self, nodes: Sequence[NodeProfile], index: int, slowest: float) -> Floats:
        balance = BALANCE_WEIGHT * self._compute(nodes[index]) ** 2 / slowest if slowest > 0 else 0.0
        return np.asarray(self._sending(nodes, index) + balance, dtype=np.float64)

    def _predict(self, nodes: tuple[NodeProfile, ...], cuts: tuple[int, ...]) -> ClusterCut:
        """Return the prediction: a micro-batch every `period_s`, the slowest of computing, sending, and the round trips.

        Stage s may have F_s micro-batches in flight, so it cannot start more than F_s of them per round trip (its own compute
        and that of all later stages, and every hop there and back): that binds when links are slow or F is small.
        """
        count = len(nodes)
        compute = [self.costs.compute_s(cuts[k], cuts[k + 1], nodes[k]) for k in range(count)]
        in_flight = tuple(self.in_flight(k, count) for k in range(count))
        send = [self._hop(nodes, cuts, k, k + 1) for k in range(count - 1)]
        back = [self._hop(nodes, cuts, k + 1, k) for k in range(count - 1)]
        limits = [(seconds, f"compute of {node.node_id}") for seconds, node in zip(compute, nodes, strict=True)]
        limits += [self._sending_limit(nodes, cuts, k) for k in range(count)] if count > 1 else []
        for k, node in enumerate(nodes):
            trip = sum(compute[k:]) + sum(send[k:]) + sum(back[k:])
            what = f"round trip from {node.node_id} with {in_flight[k]} in flight"
            limits.append((trip / in_flight[k] * (1 - SLACK), what))
        period, bottleneck = max(limits, key=lambda limit: limit[0])
        return ClusterCut(
            nodes=nodes,
            cuts=cuts,
            in_flight=in_flight,
            period_s=max(period, SHORTEST_PERIOD_S),
            compute_s=tuple(compute),
            send_s=(*send, 0.0),
            bottleneck=bottleneck,
        )

    def _sending_limit(self, nodes: Sequence[NodeProfile], cuts: Sequence[int], k: int) -> tuple[float, str]:
        """Return the seconds per micro-batch that node k's uplink is busy, and the name of its slower link."""
        me, crossing = nodes[k].node_id, self.costs.crossing_bytes
        neighbours = [(k - 1, cuts[k]), (k + 1, cuts[k + 1])]
        parts = [
            (float(crossing[cut]) / self.links.bytes_per_s(me, nodes[other].node_id), f"link {me} -> {nodes[other].node_id}")
            for other, cut in neighbours
            if 0 <= other < len(nodes)
        ]
        return sum(seconds for seconds, _ in parts), max(parts)[1]

    def _hop(self, nodes: Sequence[NodeProfile], cuts: Sequence[int], source: int, target: int) -> float:
        size = float(self.costs.crossing_bytes[cuts[max(source, target)]])
        return self.links.seconds(nodes[source].node_id, nodes[target].node_id, size)


def _minimise_slowest(stage_costs: Sequence[Floats]) -> tuple[float, tuple[int, ...]] | None:
    """Return the least possible maximum over stages of stage_costs[k][first, last], and its cuts; None if none is finite."""
    places = stage_costs[0].shape[0]
    best = np.full(places, np.inf)
    best[0] = 0.0
    choices = []
    for cost in stage_costs:
        total = np.maximum(best[:, None], cost)
        chosen = np.argmin(total, axis=0)
        best = total[chosen, np.arange(places)]
        choices.append(chosen)
    if not np.isfinite(best[-1]):
        return None
    return float(best[-1]), _trace(choices)


def _minimise_sum(stage_weights: Sequence[Floats]) -> tuple[int, ...]:
    """Return the cuts with the least sum over stages of stage_weights[k][first, last]; one must be finite."""
    places = stage_weights[0].shape[0]
    best = np.full(places, np.inf)
    best[0] = 0.0
    choices = []
    for weight in stage_weights:
        total = best[:, None] + weight
        chosen = np.argmin(total, axis=0)
        best = total[chosen, np.arange(places)]
        choices.append(chosen)
    return _trace(choices)


def _trace(choices: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.intp]]]) -> tuple[int, ...]:
    cuts = [choices[-1].shape[0] - 1]
    for chosen in reversed(choices):
        cuts.append(int(chosen[cuts[-1]]))
    return tuple(reversed(cuts))
