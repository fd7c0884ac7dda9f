"""How many bytes a stage needs.

For a stage with units first .. last-1 that may have F micro-batches in flight:

    parameters and buffers                        tensor_bytes
    + gradients                                   trainable_bytes
    + optimizer state                             k * trainable_bytes      (k: tensors the optimizer keeps per parameter)
    + what an update holds for a moment           U * largest_bytes        (of one tensor; U = 2, or 1 if the optimizer keeps nothing)
    + older weight versions                       V * trainable_bytes      (V = ceil((F - 1) / micro-batches per batch))
    + activations kept for the backward           F * saved_bytes; if the stage recomputes
                                                  F * crossing_bytes before the stage + saved_bytes (of the one that goes backward)
    + values that arrive                          2 * crossing_bytes before the stage (one in use, one arriving);
                                                  at stage 0 two whole batches of inputs and labels
    + values and gradients at the far end         2 * crossing_bytes after the stage
    + averaging, with more than one cluster       2 * averaged_bytes       (the snapshot and the sum; more with compression)

V is the staleness bound: F micro-batches in flight were forwarded with at most that many versions besides the current one
(one more for a moment, at the end of an epoch whose last batch has fewer micro-batches).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from roost.config import NamedArguments
from roost.planning.cost import Floats, UnitCosts

BUFFERED_TRANSFERS = 2
"""Transfers that are held at once at each end of a stage: one in use, one on its way."""
IN_FLIGHT_LIMIT = 4096
"""No stage needs more micro-batches in flight than this."""
AVERAGING_COPIES = 2
"""Copies of the averaged tensors during a round: the snapshot, and the sum."""

_ALWAYS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1, "Adagrad": 1, "Adadelta": 2, "ASGD": 1, "Rprop": 2}
"""Tensors per parameter that an optimizer of torch.optim always keeps; those not listed keep none."""
_OPTIONAL = {"SGD": ("momentum",), "RMSprop": ("momentum", "centered"), "Adam": ("amsgrad",), "AdamW": ("amsgrad",)}
"""Arguments that make it keep one more when they are not zero."""


def optimizer_copies(optimizer: NamedArguments) -> int:
    """Return how many tensors of a parameter's size the optimizer keeps for it."""
    arguments = optimizer.as_dict()
    optional = sum(bool(arguments.get(name)) for name in _OPTIONAL.get(optimizer.name, ()))
    return _ALWAYS.get(optimizer.name, 0) + optional


def older_versions(max_in_flight: int, micro_batches_per_batch: int) -> int:
    """Return how many weight versions besides the current one a stage may have to keep; also its staleness bound."""
    return -(-(max_in_flight - 1) // micro_batches_per_batch)


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryModel:
    """The formula of this module for one model and one optimizer."""

    costs: UnitCosts
    optimizer_copies: int
    averaging_copies: int = AVERAGING_COPIES
    """Copies of its averaged tensors that averaging needs; more with compression or an outer optimizer (JobConfig.averaging_copies)."""
    _matrices: dict[tuple[int, bool, bool], Floats] = field(default_factory=dict)

    def stage_bytes(
        self, first: npt.ArrayLike, last: npt.ArrayLike, max_in_flight: int, averaging: bool, recompute: bool = False
    ) -> Floats:
        """Return the bytes for units first .. last-1; arrays of first and last units give an array."""
        first, last = np.asarray(first), np.asarray(last)
        costs = self.costs

        def total(sums: Floats) -> Floats:
            return np.asarray(sums[last] - sums[first], dtype=np.float64)

        copies = 1 + self.optimizer_copies + older_versions(max_in_flight, costs.micro_batches_per_batch)
        arriving = np.where(first == 0, costs.micro_batches_per_batch, 1) * costs.crossing_bytes[first]
        needed = total(costs.tensor_bytes) + copies * total(costs.trainable_bytes)
        # Adam's root of the second moment and its quotient; and while going backward, a gradient that is not yet added.
        needed = needed + (2 if self.optimizer_copies else 1) * self._largest_within[first, last]
        kept = costs.crossing_bytes[first] if recompute else total(costs.saved_bytes)
        needed = needed + max_in_flight * kept + (total(costs.saved_bytes) if recompute else 0.0)
        needed = needed + BUFFERED_TRANSFERS * (arriving + costs.crossing_bytes[last])
        if averaging:
            needed = needed + self.averaging_copies * total(costs.averaged_bytes)
        return np.asarray(needed, dtype=np.float64)

    @cached_property
    def _largest_within(self) -> Floats:
        """The bytes of the largest trainable tensor of units first .. last-1, 0 for none; shape (units + 1, units + 1)."""
        count = self.costs.units
        table = np.zeros((count + 1, count + 1))
        for first in range(count):
            table[first, first + 1 :] = np.maximum.accumulate(self.costs.largest_bytes[first:count])
        return table

    def matrix(self, max_in_flight: int, averaging: bool, recompute: bool = False) -> Floats:
        """Return stage_bytes for every pair, shape (units + 1, units + 1); infinite where last <= first."""
        key = (max_in_flight, averaging, recompute)
        if key not in self._matrices:
            places = np.arange(self.costs.units + 1)
            first, last = places[:, None], places[None, :]
            self._matrices[key] = np.where(last > first, self.stage_bytes(first, last, max_in_flight, averaging, recompute), np.inf)
        return self._matrices[key]

    def most_in_flight(self, memory_bytes: npt.ArrayLike, averaging: bool, recompute: bool = False) -> Floats:
        """Return the most micro-batches in flight that fit in `memory_bytes`, for every pair, at most IN_FLIGHT_LIMIT; 0: none fits.

        Shape: that of `memory_bytes`, then (units + 1, units + 1). The bytes grow with every micro-batch in flight by what it keeps,
        and with every m-th by a weight version: so whole cycles of m are counted first, then the rest.
        """
        costs, m = self.costs, self.costs.micro_batches_per_batch
        saved = costs.crossing_bytes[:, None] if recompute else costs.saved_bytes[None, :] - costs.saved_bytes[:, None]
        version = costs.trainable_bytes[None, :] - costs.trainable_bytes[:, None]
        left = np.asarray(memory_bytes, dtype=np.float64)[..., None, None] - self.matrix(1, averaging, recompute)
        with np.errstate(divide="ignore", invalid="ignore"):
            # Of bytes that do not grow the number is infinite, or none at all (0 / 0), which fmin leaves out.
            cycles = np.maximum(np.fmin(np.floor(left / (m * saved + version)), IN_FLIGHT_LIMIT), 0)
            most = 1 + cycles * m
            if m > 1:
                rest = left - cycles * (m * saved + version) - version
                more = np.maximum(np.fmin(np.floor(rest / saved), m - 1), 0)
                most += np.where(rest < 0, 0, more)
        return np.where(left >= 0, np.minimum(most, IN_FLIGHT_LIMIT), 0.0)

    def least_for_units(self, averaging: bool) -> Floats:
        """Return for every unit the bytes of the smallest stage that holds it with one micro-batch in flight, shape (units,)."""
        least = self.matrix(1, averaging).copy()
        # Smallest over every stage that starts at or before unit u and ends after it.
        least = np.minimum.accumulate(least, axis=0)
        least = np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1]
        places = np.arange(self.costs.units)
        return np.asarray(least[places, places + 1], dtype=np.float64)
