"""A stage that looks at the shapes of what it receives before it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from roost.capture.graph import Graph
from roost.capture.program import StageProgram
from roost.capture.sizes import check_stage_sizes

MAX_REMEMBERED = 4096
"""Combinations of shapes that are not looked at twice."""


@dataclass(frozen=True, kw_only=True)
class BoundedProgram(StageProgram):
    """A stage of a graph from a stranger: values of new shapes are first followed through its nodes on shapes alone.

    Shapes of all values follow from the shapes of the data, which the requester decides batch by batch, so a check before
    training cannot stand for all of them.
    """

    graph: Graph
    limit_bytes: int
    """What any value, or any piece of memory a node asks for, may take."""
    mixed: bool
    """True: it runs under autocast to bfloat16, so values arrive in that where the graph itself makes float32."""
    checked: dict[Any, None] = field(default_factory=dict, compare=False, repr=False)
    """Shapes of received values that passed, oldest first."""

    def run(
        self, values: Mapping[int, Tensor], tensors: Mapping[str, Tensor], *, training: bool, device: torch.device | None = None
    ) -> dict[int, Tensor]:
        """Return what StageProgram.run returns. Raises GraphFormatError before computing if a value would be over the limit."""
        shapes = tuple(sorted((number, self._shape(number, value)) for number, value in values.items()))
        if shapes not in self.checked:
            written = {number: self._as_written(value) for number, value in values.items()}
            check_stage_sizes(self.graph, range(self.start, self.stop), written, self.limit_bytes)
            while len(self.checked) >= MAX_REMEMBERED:
                del self.checked[next(iter(self.checked))]
            self.checked[shapes] = None
        return super().run(values, tensors, training=training, device=device)

    def _as_written(self, value: Tensor) -> Tensor:
        """Return a value in the dtype that the graph makes without autocast, which takes at least as much memory."""
        if not self.mixed or value.dtype is not torch.bfloat16:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=torch.float32, device="meta")

    def _shape(self, number: int, value: Tensor) -> tuple[Any, ...]:
        if number in self.numbers:
            return (value.item(),)
        return (str(value.dtype), tuple(value.shape), tuple(value.stride()))


def bounded(program: StageProgram, graph: Graph, limit_bytes: int, *, mixed: bool = False) -> BoundedProgram:
    """Return `program`, a stage of `graph`, so that no value in it takes more than `limit_bytes`; `mixed`: it runs under autocast."""
    known = {item.name: getattr(program, item.name) for item in fields(StageProgram)}
    return BoundedProgram(**known, graph=graph, limit_bytes=limit_bytes, mixed=mixed)
