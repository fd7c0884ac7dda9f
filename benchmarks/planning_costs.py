"""The cost model of docs/planning.md, written a second time from the page: what judges the planner shares no code with it.

Everything is vectorised: nodes and units may be arrays of any shapes that broadcast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roost.config import JobConfig, NamedArguments, PlanningConfig
from roost.types import LinkProfile, ModelProfile, NodeProfile

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Indices = int | Ints

MOST_IN_FLIGHT = 4096
"""More in flight than any pool of this benchmark needs: a stage whose node could hold as many is not bound by memory."""
ROUNDING = 1e-9
"""Relative error that is forgiven before a ratio is rounded up."""
SHORTEST_PERIOD_S = 1e-9
MOST_CHOSEN = 4
"""Stages of which every choice is tried."""
KEPT_BY_OPTIMIZER = {"AdamW": 2, "Adam": 2, "SGD": 0}
"""Tensors per parameter, for the optimizers of this benchmark (without momentum)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """What ordered, cut clusters reach, one row each."""

    period_s: Floats
    """Infinite where a stage does not fit."""
    in_flight: Ints
    """Shape (rows, stages)."""
    samples_per_s: Floats
    value: Floats
    """Samples per second less staleness and unreliability (the page's value of a plan, for one cluster)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PageCosts:
    """The symbols of the page for one model, pool and job."""

    names: tuple[str, ...]
    """Node ids; nodes are indices into it from here on."""
    units: int
    b: int
    m: int
    optimizer_copies: int
    interval: int
    kappa: float
    g: float
    slowest_cluster: float
    in_flight_bound: int
    W: Floats
    """Prefix sums over units, shape (units + 1,), of seconds; then of bytes: held, trainable, averaged, saved."""
    W_f: Floats
    """Prefix sums over units of the seconds of the forward alone."""
    update: Floats
    """Prefix sums of U; of the trainable bytes of units without one."""
    unmeasured: Floats
    e: float
    largest: Floats
    """Entry (u, v): bytes of the largest trainable tensor of units u .. v-1."""
    held: Floats
    Q: Floats
    A: Floats
    saved: Floats
    x: Floats
    ratio: Floats
    """P_ref / P_n of every node."""
    s_per_byte: Floats
    h: Floats
    w: Floats
    memory: Floats
    reliability: Floats
    up: Floats
    down: Floats
    r: Floats
    """Shape (nodes, nodes), infinite on the diagonal."""
    latency: Floats

    def compute(self, n: Indices, u: Indices, v: Indices, again: bool | Flags = False) -> Floats:
        """Return c_k (1 of the page) for units u .. v-1 on node n; `again`: the stage recomputes."""
        n, u, v = np.asarray(n), np.asarray(u), np.asarray(v)
        messages = 2 * ((u > 0).astype(np.float64) + (v < self.units)) + 2
        wire = self.bytes_in(u, v) + self.bytes_out(u, v)
        work = self.W[v] - self.W[u] + np.where(again, self.W_f[v] - self.W_f[u], 0.0) + (self.update[v] - self.update[u]) / self.m + self.e
        passed = (3 + self.optimizer_copies) * (self.unmeasured[v] - self.unmeasured[u])
        copied = np.where(v < self.units, 2 * (self.Q[v] - self.Q[u]), 0.0)
        moved = (passed + copied) * self.s_per_byte[n] / self.m
        return np.asarray(work * self.ratio[n] + moved + messages * self.h[n] + wire * self.w[n])

    def bytes_in(self, u: Indices, v: Indices) -> Floats:
        return np.asarray(self.x[u] + self.x[v])

    def bytes_out(self, u: Indices, v: Indices) -> Floats:
        return np.asarray(self.x[v] + np.where(np.asarray(u) > 0, self.x[u], 0.0))

    def busy(self, n: Indices, u: Indices, v: Indices, clusters: int, again: bool | Flags = False) -> Floats:
        """Return the longest of compute, uplink and downlink (1, 3 and 4 of the page)."""
        sent, received = self.line_bytes(u, v, clusters)
        copied = (12 if clusters > 1 else 0) * (self.A[v] - self.A[u]) / (self.interval * self.m)
        computing = self.compute(n, u, v, again) + copied * self.s_per_byte[n]
        return np.maximum(computing, np.maximum(sent / self.up[n], received / self.down[n]))

    def line_bytes(self, u: Indices, v: Indices, clusters: int) -> tuple[Floats, Floats]:
        """Return the bytes that an uplink and a downlink carry per micro-batch, averaging included."""
        averaging = 2 * (clusters - 1) / clusters * (self.A[v] - self.A[u]) * self.g / (self.interval * self.m)
        out, into = self.bytes_out(u, v), self.bytes_in(u, v)
        return np.minimum(out + averaging, 2 * out), np.minimum(into + averaging, 2 * into)

    def flow(self, before: Indices, after: Indices, u: Indices) -> Floats:
        """Return the longer of the two flows over a hop that cuts before unit u (2 of the page)."""
        return np.asarray(self.x[u] / np.minimum(self.r[before, after], self.r[after, before]))

    def hop(self, before: Indices, after: Indices, u: Indices) -> Floats:
        """Return what a hop adds to the round trip: both latencies and both flows."""
        flows = self.x[u] / self.r[before, after] + self.x[u] / self.r[after, before]
        return np.asarray(self.latency[before, after] + self.latency[after, before] + flows)

    def memory_needed(self, u: Indices, v: Indices, in_flight: npt.ArrayLike, averaging: bool, again: bool | Flags = False) -> Floats:
        """Return the bytes of a stage with so many micro-batches in flight."""
        u, v, in_flight = np.asarray(u), np.asarray(v), np.asarray(in_flight)
        versions = np.ceil((in_flight - 1) / self.m)
        trainable = (1 + self.optimizer_copies + versions) * (self.Q[v] - self.Q[u])
        ends = 2 * (np.where(u == 0, self.m, 1) * self.x[u] + self.x[v])
        saved = self.saved[v] - self.saved[u]
        activations = np.where(again, in_flight * self.x[u] + saved, in_flight * saved)
        moment = (2 if self.optimizer_copies else 1) * self.largest[u, v]
        needed = self.held[v] - self.held[u] + trainable + activations + ends + moment
        return np.asarray(needed + (2 * (self.A[v] - self.A[u]) if averaging else 0.0))

    def most_in_flight(self, n: Indices, u: Indices, v: Indices, averaging: bool, again: bool | Flags = False) -> Floats:
        """Return the most micro-batches that a stage can have in flight: 0 if it does not fit, at most MOST_IN_FLIGHT."""
        n, u, v = np.broadcast_arrays(n, u, v)
        limit = self.memory[n]
        low = np.zeros(n.shape)
        step = MOST_IN_FLIGHT
        while step >= 1:
            higher = low + step
            fits = (higher <= MOST_IN_FLIGHT) & (self.memory_needed(u, v, higher, averaging, again) <= limit)
            low = np.where(fits, higher, low)
            step //= 2
        return np.minimum(low, self.in_flight_bound) if self.in_flight_bound else low

    def evaluate(self, orders: Ints, cuts: Ints, clusters: int) -> Evaluation:
        """Return the most each row can be worth in a plan of so many clusters: orders (rows or 1, stages), cuts (rows, stages + 1).

        The period is the least that memory allows, or a longer one if less staleness is worth more. Up to MOST_CHOSEN stages every
        choice of those that recompute is tried.
        """
        orders = np.broadcast_to(orders, (cuts.shape[0], orders.shape[1]))
        kept = np.zeros((1, orders.shape[1]), dtype=bool)
        best = self.evaluate_with(orders, cuts, clusters, kept)
        # Where memory does not bind, recomputing only takes time.
        rows = np.flatnonzero(best.period_s > self._limits(orders, cuts, clusters, kept)[0])
        if not rows.size:
            return best
        for again in self._choices(orders[rows], cuts[rows], clusters):
            other = self.evaluate_with(orders[rows], cuts[rows], clusters, again)
            better = other.value > best.value[rows]
            for name in ("period_s", "in_flight", "samples_per_s", "value"):
                getattr(best, name)[rows[better]] = getattr(other, name)[better]
        return best

    def _choices(self, orders: Ints, cuts: Ints, clusters: int) -> Iterator[Flags]:
        """Yield the choices of stages that recompute: every one, or for many stages those that a shorter period forces, one by one.

        A stage whose round trip alone is what keeps the period from being shorter must recompute for it to be; that lengthens the round
        trips before it, and so on.
        """
        stages = orders.shape[1]
        if stages <= MOST_CHOSEN:
            yield from (np.asarray([chosen], dtype=bool) for chosen in itertools.product((False, True), repeat=stages))
            return
        again = np.zeros(orders.shape, dtype=bool)
        for _ in range(stages):
            _, trips = self._limits(orders, cuts, clusters, again)
            with np.errstate(divide="ignore"):
                waiting = trips / self.most_in_flight(orders, cuts[:, :-1], cuts[:, 1:], clusters > 1, again)
            forced = (waiting >= waiting.max(axis=1, keepdims=True) * (1 - ROUNDING)) & ~again
            if not forced.any():
                return
            again = again | forced
            yield again

    def evaluate_with(self, orders: Ints, cuts: Ints, clusters: int, again: Flags) -> Evaluation:
        """Return the most each row can be worth if those stages recompute for which `again`, shape (rows or 1, stages), is true."""
        limit, trips = self._limits(orders, cuts, clusters, again)
        most = self.most_in_flight(orders, cuts[:, :-1], cuts[:, 1:], clusters > 1, again)
        with np.errstate(divide="ignore"):
            least = np.maximum(limit, (trips / most).max(axis=1))
        best = self._reached(orders, least, trips)
        staleness = 0
        while True:
            longer = np.maximum(least, trips[:, 0] / (staleness * self.m + 1))
            other = self._reached(orders, longer, trips)
            better = other.value > best.value
            best = Evaluation(
                period_s=np.where(better, other.period_s, best.period_s),
                in_flight=np.where(better[:, None], other.in_flight, best.in_flight),
                samples_per_s=np.where(better, other.samples_per_s, best.samples_per_s),
                value=np.where(better, other.value, best.value),
            )
            if np.all(longer <= least):
                return best
            staleness += 1

    def _limits(self, orders: Ints, cuts: Ints, clusters: int, again: Flags) -> tuple[Floats, Floats]:
        """Return the longest of 1 to 4 of the page, shape (rows,), and the round trips R_k (5), shape (rows, stages)."""
        u, v = cuts[:, :-1], cuts[:, 1:]
        limit = np.maximum(self.busy(orders, u, v, clusters, again).max(axis=1), SHORTEST_PERIOD_S)
        compute = self.compute(orders, u, v, again)
        trips, beyond = compute.copy(), np.zeros(len(cuts))
        for k in range(orders.shape[1] - 2, -1, -1):
            before, after, cut = orders[:, k], orders[:, k + 1], v[:, k]
            limit = np.maximum(limit, self.flow(before, after, cut))
            beyond = beyond + self.hop(before, after, cut) + compute[:, k + 1]
            trips[:, k] += beyond
        return limit, trips

    def _reached(self, orders: Ints, period: Floats, trips: Floats) -> Evaluation:
        """Return what each row has at a period, with the least in flight that hides its round trips."""
        fits = np.isfinite(period)
        ratio = trips / np.where(fits, period, 1.0)[:, None]
        in_flight = np.maximum(1, np.ceil(ratio * (1 - ROUNDING))).astype(np.int64)
        staleness = np.ceil((in_flight[:, 0] - 1) / self.m)
        rate = np.where(fits, self.b / period, 0.0)
        value = rate / (1 + self.kappa * staleness) * self.reliability[orders].prod(axis=1)
        return Evaluation(period_s=period, in_flight=in_flight, samples_per_s=rate, value=value)


def page_costs(
    profile: ModelProfile, nodes: Sequence[NodeProfile], links: Sequence[LinkProfile], config: JobConfig, options: PlanningConfig
) -> PageCosts:
    """Return the symbols of the page; every pair of nodes must have its links."""
    scale = config.micro_batch_size / profile.micro_batch_size
    units = profile.units
    crossing = np.asarray([profile.input_bytes, *(unit.crossing_bytes for unit in units[:-1]), 0], dtype=np.float64)
    names = tuple(node.node_id for node in nodes)
    rate, latency = _link_arrays(names, links)
    finite = np.where(np.isfinite(rate), rate, 0.0)
    return PageCosts(
        names=names,
        units=len(units),
        b=config.micro_batch_size,
        m=math.ceil(config.batch_size / config.micro_batch_size),
        optimizer_copies=_kept(config.optimizer),
        interval=config.averaging_interval,
        kappa=options.staleness_cost,
        g=options.averaging_compression,
        slowest_cluster=options.slowest_cluster,
        in_flight_bound=config.max_in_flight,
        W=_sums([(unit.forward_s + unit.backward_s) * scale for unit in units]),
        W_f=_sums([unit.forward_s * scale for unit in units]),
        update=_sums([unit.update_s for unit in units]),
        unmeasured=_sums([0 if unit.update_s else unit.trainable_bytes for unit in units]),
        e=profile.stage_s + profile.stage_update_s / math.ceil(config.batch_size / config.micro_batch_size),
        largest=_largest([max((tensor.nbytes for tensor in unit.tensors if tensor.trainable), default=0) for unit in units]),
        held=_sums([unit.tensor_bytes for unit in units]),
        Q=_sums([unit.trainable_bytes for unit in units]),
        A=_sums([sum(tensor.nbytes for tensor in unit.tensors if tensor.averaged) for unit in units]),
        saved=_sums([math.ceil(unit.saved_bytes * scale) for unit in units]),
        x=crossing * scale * options.activation_compression,
        ratio=profile.reference_flop_per_s / np.asarray([node.flop_per_s for node in nodes]),
        s_per_byte=np.asarray([1 / node.memory_bytes_per_s if node.memory_bytes_per_s else 0.0 for node in nodes]),
        h=np.asarray([node.message_s for node in nodes]),
        w=np.asarray([node.wire_s_per_byte for node in nodes]),
        memory=np.asarray([node.memory_bytes for node in nodes], dtype=np.float64),
        reliability=np.asarray([node.reliability for node in nodes]),
        up=finite.max(axis=1),
        down=finite.max(axis=0),
        r=rate,
        latency=latency,
    )


def _largest(sizes: Sequence[int]) -> Floats:
    table = np.zeros((len(sizes) + 1, len(sizes) + 1))
    for u, _ in enumerate(sizes):
        for v in range(u + 1, len(sizes) + 1):
            table[u, v] = max(table[u, v - 1], sizes[v - 1])
    return table


def _sums(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])


def _kept(optimizer: NamedArguments) -> int:
    return KEPT_BY_OPTIMIZER[optimizer.name] + int(bool(optimizer.as_dict().get("momentum")))


def _link_arrays(names: tuple[str, ...], links: Sequence[LinkProfile]) -> tuple[Floats, Floats]:
    place = {name: index for index, name in enumerate(names)}
    rate, latency = np.full((len(names), len(names)), np.inf), np.zeros((len(names), len(names)))
    for link in links:
        rate[place[link.source], place[link.target]] = link.bytes_per_s
        latency[place[link.source], place[link.target]] = link.latency_s
    return rate, latency
