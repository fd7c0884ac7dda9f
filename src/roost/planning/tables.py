"""What every possible stage costs on every node of a pool: the terms of docs/planning.md that need no neighbour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from roost.config import BYTES_PER_ENCODED_BYTE, JobConfig, PlanningConfig
from roost.planning.cost import Floats, UnitCosts
from roost.planning.memory import MemoryModel
from roost.planning.network import Network
from roost.types import NodeProfile

MESSAGES_PER_NEIGHBOUR = 2
"""A micro-batch makes a stage exchange a value and a gradient with each neighbour."""
MESSAGES_PER_MICRO_BATCH = 2
"""And its share of leases, data, completion and reports."""
UPDATE_PASSES = 3
"""An optimizer step reads the gradient and the parameter and writes the parameter, besides its own state."""
AVERAGING_PASSES = 12
"""A round copies a stage's tensors, compares them with the copy, and adds the difference to new ones."""
COPY_PASSES = 2
"""An update while micro-batches are in flight reads the weights and writes them to a new place (weight stashing)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTables:
    """Costs of stage first .. last-1 on every node, by [node, first, last], dtype float64; for one number of clusters.

    Where last <= first a stage is impossible: it is busy for ever and fits no micro-batch.
    """

    compute: Floats
    """Seconds of compute per micro-batch (term 1)."""
    busy: Floats
    """Seconds per micro-batch of the slowest of compute, uplink and downlink (terms 1, 3 and 4)."""
    most_in_flight: Floats
    """Micro-batches in flight that fit in the node's memory and the job's bound; 0 if none."""
    make_again: Callable[[], StageTables] | None = None
    """Makes the same for stages that recompute; None in those."""

    @cached_property
    def again(self) -> StageTables:
        """The tables of stages that recompute, made when first asked for: where memory is plenty they are not."""
        assert self.make_again is not None, "stages recompute once"
        return self.make_again()

    @cached_property
    def ways(self) -> tuple[Floats, Floats, Floats]:
        """Both ways to run a stage, by [way, node, first, last]: keeping and, if that fits more in flight anywhere, recomputing.

        `compute`, `busy`, and the periods that a round trip may last for memory to hide it: `most_in_flight`, but -1 where none fits.
        """
        gains = bool((self.again.most_in_flight > self.most_in_flight).any())
        ways = (self, self.again) if gains else (self,)
        most = np.stack([way.most_in_flight for way in ways])
        return np.stack([way.compute for way in ways]), np.stack([way.busy for way in ways]), np.where(most < 1, -1.0, most)

    def of(self, recompute: bool) -> StageTables:
        """Return the tables of stages that recompute, or of those that do not."""
        return self.again if recompute else self


@dataclass(frozen=True, kw_only=True, eq=False)
class TableMaker:
    """Makes the tables of one model, pool and job."""

    costs: UnitCosts
    memory: MemoryModel
    network: Network
    config: JobConfig
    options: PlanningConfig

    def tables(self, nodes: Sequence[NodeProfile], clusters: int, places: Sequence[int]) -> StageTables:
        """Return the tables of `nodes`, which have these places in the network, in a plan of that many clusters."""
        compute = self._compute(nodes)
        sent, received = self.sent_bytes(), self.received_bytes()
        averaged = self.averaged_bytes(clusters)
        chosen = np.asarray(places, dtype=np.intp)
        uplink = shared_line(sent, averaged, self.network.up[chosen])
        downlink = shared_line(received, averaged, self.network.down[chosen])
        lines = np.maximum(uplink, downlink)
        impossible = ~np.triu(np.ones(compute.shape[1:], dtype=bool), k=1)
        copied = self.averaging_copies(clusters)
        memory_s = np.asarray([1 / node.memory_bytes_per_s if node.memory_bytes_per_s else 0.0 for node in nodes])
        averaging = (copied[None, :] - copied[:, None]) * memory_s[:, None, None]

        def made(compute: Floats, make_again: Callable[[], StageTables] | None) -> StageTables:
            most = self.memory.most_in_flight([node.memory_bytes for node in nodes], clusters > 1, recompute=make_again is None)
            if self.config.max_in_flight:
                most = np.minimum(most, self.config.max_in_flight)
            busy = np.maximum(compute + averaging, lines)
            compute[:, impossible] = 0.0
            busy[:, impossible] = np.inf
            return StageTables(compute=compute, busy=busy, most_in_flight=most, make_again=make_again)

        return made(compute, lambda: made(compute + self._forward(nodes), None))

    @cached_property
    def crossing(self) -> Floats:
        """Bytes on the wire that cross the cut before each unit, by the planner's options and the job's codec, shape (units + 1,).

        The codec is not for the data that the first stage receives.
        """
        codec = np.full(self.costs.crossing_bytes.shape, BYTES_PER_ENCODED_BYTE[self.config.activation_compression])
        codec[0] = 1.0
        return np.asarray(self.costs.crossing_bytes * self.options.activation_compression * codec, dtype=np.float64)

    def sent_bytes(self) -> Floats:
        """Return the bytes per micro-batch that a stage sends to its neighbours, by [first, last]."""
        crossing = self.crossing
        back = np.where(np.arange(crossing.shape[0]) > 0, crossing, 0.0)
        return np.asarray(back[:, None] + crossing[None, :], dtype=np.float64)

    def received_bytes(self) -> Floats:
        """Return the bytes per micro-batch that a stage receives from its neighbours, at the first stage the data, by [first, last]."""
        return np.asarray(self.crossing[:, None] + self.crossing[None, :], dtype=np.float64)

    def line_bytes(self, first: int, last: int, clusters: int) -> tuple[float, float, float]:
        """Return the bytes per micro-batch that a stage sends and receives as a pipeline, and those of averaging (each way)."""
        crossing, averaged = self.crossing, self._averaging_share(clusters) * self.costs.averaged_bytes
        before, after = float(crossing[first]), float(crossing[last])
        return (before if first else 0.0) + after, before + after, float(averaged[last] - averaged[first])

    def line_seconds(self, place: int, first: int, last: int, clusters: int) -> tuple[float, float]:
        """Return the seconds per micro-batch that the uplink and the downlink of a stage are busy (terms 3 and 4)."""
        sent, received, averaged = self.line_bytes(first, last, clusters)
        up, down = float(self.network.up[place]), float(self.network.down[place])
        return min(sent + averaged, 2 * sent) / up, min(received + averaged, 2 * received) / down

    def round_bytes(self, first: int, last: int, clusters: int) -> float:
        """Return the bytes that a stage sends (and receives) in one averaging round."""
        updates = self.config.planned_interval * self.costs.micro_batches_per_batch
        averaged = self.costs.averaged_bytes
        return self._averaging_share(clusters) * updates * float(averaged[last] - averaged[first])

    def averaged_bytes(self, clusters: int) -> Floats:
        """Return the bytes per micro-batch that a stage sends (and receives) for averaging at the interval asked for, by [first, last]."""
        each = self.costs.averaged_bytes * self._averaging_share(clusters)
        return np.asarray(each[None, :] - each[:, None], dtype=np.float64)

    def averaging_copies(self, clusters: int) -> Floats:
        """Return the bytes per micro-batch that averaging reads and writes in memory, as prefix sums over units."""
        updates = self.config.planned_interval * self.costs.micro_batches_per_batch
        return np.asarray(self.costs.averaged_bytes * ((AVERAGING_PASSES if clusters > 1 else 0) / updates), dtype=np.float64)

    @property
    def averaging_compression(self) -> float:
        """Bytes on the wire per byte of averaged parameters, by the planner's options and the job's codec."""
        return self.options.averaging_compression * BYTES_PER_ENCODED_BYTE[self.config.averaging_compression]

    def _averaging_share(self, clusters: int) -> float:
        """Return the bytes per micro-batch and per averaged byte that a ring of that many members sends."""
        updates = self.config.planned_interval * self.costs.micro_batches_per_batch
        return 2 * (clusters - 1) / clusters * self.averaging_compression / updates

    def _forward(self, nodes: Sequence[NodeProfile]) -> Floats:
        """Return the seconds per micro-batch of a stage's forward alone, by [node, first, last]."""
        forward = self.costs.forward_seconds
        ratio = np.asarray([self.costs.reference_flop_per_s / node.flop_per_s for node in nodes])
        return np.asarray((forward[None, :] - forward[:, None]) * ratio[:, None, None], dtype=np.float64)

    def _compute(self, nodes: Sequence[NodeProfile]) -> Floats:
        costs, memory = self.costs, self.memory
        m = costs.micro_batches_per_batch
        work = costs.seconds + costs.update_seconds / m
        work = work[None, :] - work[:, None] + costs.stage_seconds
        passed = costs.unmeasured_bytes * (UPDATE_PASSES + memory.optimizer_copies) / m
        passed = passed[None, :] - passed[:, None]
        # Only the last stage never has older micro-batches in flight when it updates.
        copied = costs.trainable_bytes[None, :] - costs.trainable_bytes[:, None]
        copied = np.where(np.arange(costs.units + 1)[None, :] < costs.units, copied * (COPY_PASSES / m), 0.0)
        units = np.arange(costs.units + 1)
        messages = messages_of(units[:, None], units[None, :], costs.units)
        wired = self.sent_bytes() + self.received_bytes()

        def each(values: Sequence[float]) -> Floats:
            return np.asarray(values, dtype=np.float64)[:, None, None]

        compute = work * each([costs.reference_flop_per_s / node.flop_per_s for node in nodes])
        compute = compute + (passed + copied) * each([1 / node.memory_bytes_per_s if node.memory_bytes_per_s else 0.0 for node in nodes])
        compute = compute + messages * each([node.message_s for node in nodes])
        return np.asarray(compute + wired * each([node.wire_s_per_byte for node in nodes]), dtype=np.float64)


def messages_of(first: npt.ArrayLike, last: npt.ArrayLike, units: int) -> Floats:
    """Return the messages per micro-batch of stages first .. last-1 of a model with `units` units."""
    neighbours = np.add(np.asarray(first) > 0, np.asarray(last) < units, dtype=np.float64)
    return np.asarray(MESSAGES_PER_NEIGHBOUR * neighbours + MESSAGES_PER_MICRO_BATCH, dtype=np.float64)


def shared_line(piped: Floats, averaged: Floats, bytes_per_s: Floats) -> Floats:
    """Return the seconds per micro-batch that a line is busy, by [node, first, last].

    Averaging slows the pipeline's own bytes, but never to less than half of the line: where it cannot keep up with its
    interval it takes longer instead.
    """
    least = np.minimum(piped + averaged, 2 * piped)
    return np.asarray(least[None, :, :] / bytes_per_s[:, None, None], dtype=np.float64)
