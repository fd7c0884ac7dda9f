"""The cost model of docs/planning.md written down once more, number by number: without tables, arrays or the planner's search.

It tries everything, so it is for a few nodes and units only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from synthetic import Scene

from roost.types import NodeProfile

NEARLY = 1 - 1e-9
"""Rounding errors must not cost a micro-batch in flight."""
OPTIMIZER_TENSORS = {"SGD": 0, "AdamW": 2}


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What an order of nodes reaches with one cut and one depth."""

    value: float
    period_s: float
    staleness: int
    in_flight: tuple[int, ...]
    order: tuple[int, ...]
    cuts: tuple[int, ...]
    recompute: tuple[bool, ...]
    """Which stages run their forward again."""


class ByHand:
    """What clusters of one scene reach in a plan of that many clusters; every link must be measured."""

    def __init__(self, scene: Scene, clusters: int) -> None:
        self.scene, self.clusters, self.config, self.options = scene, clusters, scene.config, scene.options
        self.units = scene.profile.units
        self.scale = scene.config.micro_batch_size / scene.profile.micro_batch_size
        self.m = math.ceil(scene.config.batch_size / scene.config.micro_batch_size)
        self.links = {(link.source, link.target): link for link in scene.links}
        self.copies = OPTIMIZER_TENSORS[scene.config.optimizer.name]
        self.alone: dict[tuple[str, int, int, bool], tuple[float, float]] = {}
        self.held: dict[tuple[int, int, int, bool], float] = {}

    # ------------------------------------------------------------ symbols

    def x(self, cut: int) -> float:
        """Return the bytes on the wire at a cut."""
        if cut == len(self.units):
            return 0.0
        size = self.scene.profile.input_bytes if cut == 0 else self.units[cut - 1].crossing_bytes
        return math.ceil(size * self.scale) * self.options.activation_compression

    def averaged(self, first: int, last: int) -> float:
        return sum(tensor.nbytes for unit in self.units[first:last] for tensor in unit.tensors if tensor.averaged)

    def trainable(self, first: int, last: int) -> float:
        return sum(tensor.nbytes for unit in self.units[first:last] for tensor in unit.tensors if tensor.trainable)

    def bytes_out(self, first: int, last: int) -> float:
        return (self.x(last) if last < len(self.units) else 0) + (self.x(first) if first > 0 else 0)

    def bytes_in(self, first: int, last: int) -> float:
        return self.x(first) + (self.x(last) if last < len(self.units) else 0)

    # ------------------------------------------------------------ terms

    def compute(self, node: NodeProfile, first: int, last: int, again: bool = False) -> float:
        parts = self.units[first:last]
        work = sum((2 if again else 1) * unit.forward_s + unit.backward_s for unit in parts) * self.scale
        work += sum(unit.update_s for unit in parts) / self.m + self.scene.profile.stage_s
        seconds = work * self.scene.profile.reference_flop_per_s / node.flop_per_s
        if node.memory_bytes_per_s:
            unmeasured = sum(unit.trainable_bytes for unit in parts if not unit.update_s)
            copied = 2 * self.trainable(first, last) if last < len(self.units) else 0
            seconds += ((3 + self.copies) * unmeasured + copied) / (node.memory_bytes_per_s * self.m)
        neighbours = (first > 0) + (last < len(self.units))
        seconds += (2 * neighbours + 2) * node.message_s
        return seconds + (self.bytes_in(first, last) + self.bytes_out(first, last)) * node.wire_s_per_byte

    def copying(self, node: NodeProfile, first: int, last: int) -> float:
        """Return the seconds per micro-batch that averaging takes from computing."""
        if self.clusters == 1 or not node.memory_bytes_per_s:
            return 0.0
        return 12 * self.averaged(first, last) / (self.config.averaging_interval * self.m * node.memory_bytes_per_s)

    def line(self, piped: float, first: int, last: int, bytes_per_s: float) -> float:
        share = 2 * (self.clusters - 1) / self.clusters * self.options.averaging_compression
        averaging = share * self.averaged(first, last) / (self.config.averaging_interval * self.m)
        return min((piped + averaging) / bytes_per_s, 2 * piped / bytes_per_s)

    def up(self, node: NodeProfile) -> float:
        return max((link.bytes_per_s for link in self.scene.links if link.source == node.node_id), default=12.5e6)

    def down(self, node: NodeProfile) -> float:
        return max((link.bytes_per_s for link in self.scene.links if link.target == node.node_id), default=12.5e6)

    def own_terms(self, node: NodeProfile, first: int, last: int, again: bool = False) -> tuple[float, float]:
        """Return the compute of a stage, and the slowest of that and its lines; `again`: it recomputes."""
        key = (node.node_id, first, last, again)
        if key not in self.alone:
            compute = self.compute(node, first, last, again)
            uplink = self.line(self.bytes_out(first, last), first, last, self.up(node))
            downlink = self.line(self.bytes_in(first, last), first, last, self.down(node))
            self.alone[key] = compute, max(compute + self.copying(node, first, last), uplink, downlink)
        return self.alone[key]

    def memory(self, first: int, last: int, in_flight: int, again: bool = False) -> float:
        key = (first, last, in_flight, again)
        if key not in self.held:
            self.held[key] = self._memory(first, last, in_flight, again)
        return self.held[key]

    def _memory(self, first: int, last: int, in_flight: int, again: bool) -> float:
        parts = self.units[first:last]
        held = sum(tensor.nbytes for unit in parts for tensor in unit.tensors)
        held += (1 + self.copies + math.ceil((in_flight - 1) / self.m)) * self.trainable(first, last)
        largest = max((tensor.nbytes for unit in parts for tensor in unit.tensors if tensor.trainable), default=0)
        held += (2 if self.copies else 1) * largest
        saved = sum(math.ceil(unit.saved_bytes * self.scale) for unit in parts)
        held += in_flight * self.size(first) + saved if again else in_flight * saved
        arriving = self.m if first == 0 else 1
        held += 2 * (arriving * self.size(first) + self.size(last))
        return held + (2 * self.averaged(first, last) if self.clusters > 1 else 0)

    def size(self, cut: int) -> float:
        """Return the bytes of the values at a cut in memory: not compressed."""
        return self.x(cut) / self.options.activation_compression

    # ------------------------------------------------------------ one order, one cut

    def terms(
        self, nodes: Sequence[NodeProfile], cuts: Sequence[int], recompute: Sequence[bool] | None = None
    ) -> tuple[float, list[float]]:
        """Return the slowest of terms 1 to 4, and the round trip from every stage."""
        slowest = 1e-9
        compute = []
        for k, node in enumerate(nodes):
            own, busy = self.own_terms(node, cuts[k], cuts[k + 1], recompute is not None and recompute[k])
            compute.append(own)
            slowest = max(slowest, busy)
        trips = list(compute)
        for k in range(len(nodes) - 2, -1, -1):
            there = self.links[nodes[k].node_id, nodes[k + 1].node_id]
            back = self.links[nodes[k + 1].node_id, nodes[k].node_id]
            flows = self.x(cuts[k + 1]) / there.bytes_per_s, self.x(cuts[k + 1]) / back.bytes_per_s
            slowest = max(slowest, *flows)
            trips[k] += there.latency_s + back.latency_s + sum(flows) + trips[k + 1]
        return slowest, trips

    def best_depth(self, order: tuple[int, ...], cuts: tuple[int, ...]) -> list[Reached]:
        """Return what every depth that fits reaches, whichever stages recompute; none if memory does not suffice."""
        kept = self._best_depth(order, cuts, (False,) * len(order))
        slowest, _ = self.terms([self.scene.nodes[place] for place in order], cuts)
        if kept and kept[0].period_s == slowest:
            # Recomputing makes no stage faster and no round trip shorter: it helps where memory binds, and here it does not.
            return kept
        others = [choice for choice in itertools.product((False, True), repeat=len(order)) if any(choice)]
        return kept + [reached for choice in others for reached in self._best_depth(order, cuts, choice)]

    def _best_depth(self, order: tuple[int, ...], cuts: tuple[int, ...], recompute: tuple[bool, ...]) -> list[Reached]:
        nodes = [self.scene.nodes[place] for place in order]
        slowest, trips = self.terms(nodes, cuts, recompute)
        periods = {slowest}
        for trip in trips:
            depth = 1
            while trip / depth > slowest and depth < 5000:
                periods.add(trip / depth)
                depth += 1
        reliability = math.prod(node.reliability for node in nodes)
        bound = self.config.max_in_flight or math.inf
        found = []
        for period in sorted(periods):
            in_flight = tuple(max(1, math.ceil(trip / period * NEARLY)) for trip in trips)
            fits = all(
                depth <= bound and self.memory(cuts[k], cuts[k + 1], depth, recompute[k]) <= nodes[k].memory_bytes
                for k, depth in enumerate(in_flight)
            )
            if fits:
                staleness = math.ceil((in_flight[0] - 1) / self.m)
                value = self.config.micro_batch_size / period / (1 + self.options.staleness_cost * staleness) * reliability
                found.append(
                    Reached(
                        value=value,
                        period_s=period,
                        staleness=staleness,
                        in_flight=in_flight,
                        order=order,
                        cuts=tuple(cuts),
                        recompute=recompute,
                    )
                )
        return found

    def everything(self, orders: Iterator[tuple[int, ...]] | Sequence[tuple[int, ...]]) -> list[Reached]:
        """Return what every order, cut and depth reaches."""
        found: list[Reached] = []
        for order in orders:
            for inner in itertools.combinations(range(1, len(self.units)), len(order) - 1):
                found += self.best_depth(order, (0, *inner, len(self.units)))
        return found

    def best(self, orders: Iterator[tuple[int, ...]] | Sequence[tuple[int, ...]]) -> Reached | None:
        return max(self.everything(orders), key=lambda reached: reached.value, default=None)

    def best_of_group(self, group: frozenset[int]) -> Reached | None:
        return self.best(itertools.permutations(sorted(group)))


def best_partition(scene: Scene, *, least: int = 1, most: int = 0) -> tuple[float, tuple[frozenset[int], ...]] | None:
    """Return the most that disjoint groups of the scene's nodes are worth together, and the groups; None if none fits."""
    count = len(scene.nodes)
    known: dict[tuple[frozenset[int], int], float] = {}
    by_hand = {clusters: ByHand(scene, clusters) for clusters in range(1, count + 1)}
    best: tuple[float, tuple[frozenset[int], ...]] | None = None
    # The cluster of every node, or none (-1); numbers of clusters in the order of their first nodes.
    for owners in itertools.product(range(-1, count), repeat=count):
        used = list(dict.fromkeys(owner for owner in owners if owner >= 0))
        clusters = len(used)
        if used != list(range(clusters)) or clusters < max(1, least) or (most and clusters > most):
            continue
        groups = tuple(frozenset(place for place in range(count) if owners[place] == number) for number in used)
        for group in groups:
            if (group, clusters) not in known:
                reached = by_hand[clusters].best_of_group(group)
                known[group, clusters] = reached.value if reached else 0.0
        values = [known[group, clusters] for group in groups]
        if min(values) > 0 and (best is None or sum(values) > best[0]):
            best = sum(values), groups
    return best
