"""What units cost: prefix sums over the units of a model, for one job (docs/planning.md)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roost.config import JobConfig
from roost.types import ModelProfile

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitCosts:
    """Costs of one micro-batch as prefix sums: entry u covers units 0 .. u-1, so a stage first..last is a difference.

    Every array has shape (units + 1,) and dtype float64; byte counts stay exact below 2**53.
    """

    units: int
    micro_batch_size: int
    micro_batches_per_batch: int
    seconds: Floats
    """Forward and backward on the reference machine."""
    forward_seconds: Floats
    """Of these the forward, which a stage that recomputes runs twice."""
    update_seconds: Floats
    """The optimizer's step on the reference machine, once per batch."""
    unmeasured_bytes: Floats
    """Trainable bytes of units whose step was not measured."""
    tensor_bytes: Floats
    trainable_bytes: Floats
    largest_bytes: Floats
    """Not a sum: bytes of the largest trainable tensor of unit u; 0 at the end."""
    averaged_bytes: Floats
    saved_bytes: Floats
    """Activations kept for the backward."""
    crossing_bytes: Floats
    """Not a sum: bytes that cross the cut before unit u; at 0 the inputs and labels, at the end 0."""
    reference_flop_per_s: float
    stage_seconds: float
    """What a stage takes per micro-batch besides its units, on the reference machine."""


def unit_costs(profile: ModelProfile, config: JobConfig) -> UnitCosts:
    """Return the costs of `profile`, scaled in proportion if the job's micro-batch size is not the one it was measured for."""
    scale = config.micro_batch_size / profile.micro_batch_size
    units = profile.units

    def sums(values: Sequence[float]) -> Floats:
        return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])

    crossing = [profile.input_bytes, *(unit.crossing_bytes for unit in units[:-1]), 0]
    return UnitCosts(
        units=len(units),
        micro_batch_size=config.micro_batch_size,
        micro_batches_per_batch=-(-config.batch_size // config.micro_batch_size),
        seconds=sums([(unit.forward_s + unit.backward_s) * scale for unit in units]),
        forward_seconds=sums([unit.forward_s * scale for unit in units]),
        update_seconds=sums([unit.update_s for unit in units]),
        unmeasured_bytes=sums([0 if unit.update_s else unit.trainable_bytes for unit in units]),
        tensor_bytes=sums([unit.tensor_bytes for unit in units]),
        trainable_bytes=sums([unit.trainable_bytes for unit in units]),
        largest_bytes=np.asarray([*(unit.largest_bytes for unit in units), 0], dtype=np.float64),
        averaged_bytes=sums([sum(tensor.nbytes for tensor in unit.tensors if tensor.averaged) for unit in units]),
        saved_bytes=sums([math.ceil(unit.saved_bytes * scale) for unit in units]),
        crossing_bytes=np.asarray([math.ceil(size * scale) for size in crossing], dtype=np.float64),
        reference_flop_per_s=profile.reference_flop_per_s,
        stage_seconds=profile.stage_s + profile.stage_update_s / -(-config.batch_size // config.micro_batch_size),
    )


def merge_units(costs: UnitCosts, limit: int) -> tuple[UnitCosts, tuple[int, ...]]:
    """Return costs with at most `limit` units, each a run of the given ones, and the first unit of each run (and the end).

    Runs hold about the same work and memory, and end where few bytes cross: a search over them is quick and loses little.
    """
    if costs.units <= limit:
        return costs, tuple(range(costs.units + 1))
    held = costs.seconds / max(costs.seconds[-1], 1e-30)
    held = held + (costs.tensor_bytes + costs.saved_bytes) / max(costs.tensor_bytes[-1] + costs.saved_bytes[-1], 1.0)
    # A little per unit, so that units without work or memory are spread too.
    held = held + np.arange(costs.units + 1) / costs.units * 0.1
    bucket = np.minimum((held / held[-1] * limit).astype(np.int64), limit - 1)
    places = [0]
    for number in range(1, limit):
        inside = np.flatnonzero(bucket[1:-1] == number) + 1
        if inside.size:
            places.append(int(inside[np.argmin(costs.crossing_bytes[inside])]))
    places.append(costs.units)
    return merged_at(costs, places), tuple(places)


def merged_at(costs: UnitCosts, places: Sequence[int]) -> UnitCosts:
    """Return costs with one unit for each run of given ones between two of `places`, which begin at 0 and end at the number of units.

    Every stage that begins and ends at such places costs exactly what it did.
    """
    chosen = np.asarray(places)
    arrays = {name: value[chosen] for name, value in vars(costs).items() if isinstance(value, np.ndarray)}
    arrays["largest_bytes"] = np.append(np.maximum.reduceat(costs.largest_bytes, chosen[:-1]), 0.0)
    return dataclasses.replace(costs, units=len(places) - 1, **arrays)
