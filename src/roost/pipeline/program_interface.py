"""What a stage runner needs of the program it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from roost.types import TensorRecord

DATA_SOURCE = -1
"""The source of values that come from the dataset instead of from a stage."""


class RunnableProgram(Protocol):
    """The consecutive piece of a model's graph that one stage runs. Values are known by their numbers in the graph."""

    @property
    def index(self) -> int:
        """Position of the stage in its cluster, 0 first."""

    @property
    def start(self) -> int:
        """First graph position, inclusive."""

    @property
    def stop(self) -> int:
        """Last graph position, exclusive."""

    @property
    def tensors(self) -> tuple[TensorRecord, ...]:
        """Parameters and buffers this stage owns."""

    @property
    def shared(self) -> tuple[TensorRecord, ...]:
        """Read-only buffers this stage uses and another one owns."""

    @property
    def receives(self) -> Mapping[int, tuple[int, ...]]:
        """Values by the stage they come from; DATA_SOURCE for the dataset."""

    @property
    def sends(self) -> Mapping[int, tuple[int, ...]]:
        """Values by the later stage they go to."""

    @property
    def differentiable(self) -> frozenset[int]:
        """The values that carry a gradient."""

    @property
    def changed_tensors(self) -> frozenset[str]:
        """Names among `tensors` of those that a training forward changes in place (batch-norm statistics)."""

    @property
    def changed_values(self) -> frozenset[int]:
        """The received values that a training forward changes in place."""

    @property
    def draws_random(self) -> bool:
        """True if a training forward draws random numbers (dropout)."""

    @property
    def is_last(self) -> bool:
        """True if the loss is computed here."""

    @property
    def loss_value(self) -> int | None:
        """Number of the loss, a mean over the samples of a micro-batch, on the last stage."""

    @property
    def metric_value(self) -> int | None:
        """Number of the metric that evaluation computes on the last stage, if there is one."""

    def run(self, values: dict[int, Tensor], tensors: Mapping[str, Tensor], *, training: bool) -> dict[int, Tensor]:
        """Return every value that is sent, on the last stage also the loss and, in evaluation, the metric.

        `tensors` holds owned and shared tensors by name. In training, batch-norm buffers in it change in place. A
        parameter may itself be among the values that are returned (tied weights).
        """
