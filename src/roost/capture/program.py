"""Runs one stage of a cut graph: a loop over operations, without generated code.

A program holds no state of a call, so several threads may run it at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from roost.capture.schedule import Schedule, execute
from roost.capture.signatures import ValueKind
from roost.types import TensorRecord

DATA_SOURCE = -1
"""The key of `receives` for the data inputs, which come from outside the pipeline."""


@dataclass(frozen=True, kw_only=True)
class StageProgram:
    """One stage: what it owns, what it receives and sends, and how it runs."""

    index: int
    start: int
    """First graph position."""
    stop: int
    """Graph position after the last one."""
    tensors: tuple[TensorRecord, ...]
    """Parameters and buffers it owns: those used here first, in the order of the graph."""
    shared: tuple[TensorRecord, ...]
    """Read-only buffers and frozen parameters that an earlier stage owns and this one needs a copy of."""
    receives: dict[int, tuple[int, ...]]
    """By source stage, the numbers of the values that come from there; stage 0 gets the data inputs under DATA_SOURCE."""
    sends: dict[int, tuple[int, ...]]
    """By target stage, the numbers of the values that go there. A tied parameter is sent by its owner like any value."""
    differentiable: frozenset[int]
    """Among the received and sent values, those that carry a gradient. A value that a stage uses only where no gradient flows
    gets none there although it is listed."""
    changed_tensors: frozenset[str]
    """Names among `tensors` of the buffers that a training forward changes in place."""
    changed_values: frozenset[int]
    """The received values that a training forward changes in place; only data inputs can be among them."""
    draws_random: bool
    """True if its forward draws random numbers in training."""
    is_last: bool
    loss_value: int | None
    """Number of the loss; None on earlier stages."""
    metric_value: int | None
    """Number of the metric; None on earlier stages and without a metric."""
    training_schedule: Schedule
    evaluation_schedule: Schedule
    numbers: dict[int, ValueKind]
    """Received and sent values that are numbers at run time; they travel as tensors without dimensions."""

    def run(
        self, values: Mapping[int, Tensor], tensors: Mapping[str, Tensor], *, training: bool, device: torch.device | None = None
    ) -> dict[int, Tensor]:
        """Return every value this stage sends, and on the last stage the loss and, in evaluation, the metric.

        `values` are the received values by number; `tensors` the parameters and buffers of `tensors` and `shared` by name.
        In training, received values in `differentiable` are made to require a gradient (pass leaves, their `.grad` then holds
        it after a backward), and buffers such as batch-norm statistics are changed in place as the eager model does.
        In evaluation nothing is changed and no gradient is recorded. `device` is where the stage computes; None: where its tensors
        are, or else what it received.
        """
        place = self._device_of(values, tensors) if device is None else device
        if not training:
            with torch.no_grad():
                return self._run(self.evaluation_schedule, values, tensors, place)
        for number in self.training_schedule.received_leaves:
            # A whole number behind an operation that passes gradients on may be among them: what it is made from decides.
            if values[number].is_floating_point() and not values[number].requires_grad:
                values[number].requires_grad_()
        return self._run(self.training_schedule, values, tensors, place)

    def _device_of(self, values: Mapping[int, Tensor], tensors: Mapping[str, Tensor]) -> torch.device:
        """Return where the stage's tensors are, or else what it received; numbers travel as tensors on the CPU and say nothing."""
        received = (tensor for number, tensor in values.items() if number not in self.numbers)
        return next((tensor.device for source in (tensors.values(), received) for tensor in source), torch.device("cpu"))

    def _run(
        self, schedule: Schedule, values: Mapping[int, Tensor], tensors: Mapping[str, Tensor], device: torch.device
    ) -> dict[int, Tensor]:
        results = execute(schedule, values, tensors, device)
        return {number: self._as_tensor(number, value) for number, value in results}

    def _as_tensor(self, number: int, value: object) -> Tensor:
        kind = self.numbers.get(number)
        if kind is None:
            assert isinstance(value, Tensor)
            return value
        return torch.tensor(value, dtype=torch.int64 if kind is ValueKind.INTEGER else torch.float64)
