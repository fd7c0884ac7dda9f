"""Weight versions: a backward uses exactly the weights its forward used (weight stashing).

A version that equals the current weights costs nothing: it is a set of aliases of the same storage. Only when weights are
about to change while micro-batches that used them are in flight do the weights move to new storage (copy on write).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from roost.types import TensorRecord

_ALIGNMENT = 64
"""Bytes at which torch aligns its own memory; matrix kernels may round differently on memory that is not."""


@dataclass(kw_only=True, slots=True, eq=False)
class WeightVersion:
    """The tensors one or more forwards ran with."""

    tensors: dict[str, Tensor]
    """What the program runs with, by name. Trainable parameters are leaves that require grad."""
    in_flight: int = 0
    """Micro-batches that went forward with it and not yet backward."""


class WeightVersions:
    """A stage's tensors: the current version, which changes, and the older ones that are still in flight, which do not."""

    def __init__(self, records: Iterable[TensorRecord], tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Take over `tensors` (owned and shared, by name) on `device`; aligned ones that are there already are not copied."""
        trainable = {record.name for record in records if record.trainable}
        placed = {name: _placed(tensor, device) for name, tensor in tensors.items()}
        self.parameters = {name: Parameter(tensor) for name, tensor in placed.items() if name in trainable}
        """Trainable parameters of the current version: what the optimizer updates in place."""
        aliases = {name: _leaf(parameter) for name, parameter in self.parameters.items()}
        self.current = WeightVersion(tensors={**placed, **aliases})
        self._older: list[WeightVersion] = []
        self._rewritten: list[str] | None = None

    @property
    def alive(self) -> int:
        """Versions in memory, the current one included."""
        return 1 + len(self._older)

    def take(self, instead: Mapping[str, Tensor] | None = None) -> WeightVersion:
        """Return the current version and count one more micro-batch in flight on it.

        With `instead`, return a version of its own, which holds these tensors for the current ones of their names.
        """
        if instead:
            version = WeightVersion(tensors={**self.current.tensors, **instead}, in_flight=1)
            self._older.append(version)
            return version
        self.current.in_flight += 1
        return self.current

    def release(self, version: WeightVersion) -> None:
        """Count one micro-batch less on `version`; an older version without any is dropped."""
        version.in_flight -= 1
        if version.in_flight == 0 and version is not self.current:
            self._older.remove(version)

    def tensor(self, name: str) -> Tensor:
        """Return the current tensor called `name`, without grad; it shares its storage."""
        return self.current.tensors[name].detach()

    def make_writable(self, names: Iterable[str]) -> None:
        """Give those of the tensors `names` that micro-batches in flight use storage of their own."""
        users = [*self._older, self.current] if self.current.in_flight else self._older
        if not users:
            return
        # Versions share what did not change between them, so the question is asked tensor by tensor.
        now = self.current.tensors
        used = [name for name in names if any(version.tensors[name] is now[name] for version in users)]
        if used and self.current.in_flight:
            self._older.append(self.current)
            self.current = WeightVersion(tensors=dict(now))
        for name in used:
            self._replace(name, now[name].detach().clone())

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Set current tensors to `values`, bit for bit; versions in flight keep what they have."""
        self.make_writable(values)
        for name, value in values.items():
            # .data has a version counter of its own, so autograd does not mistake this for a change of a saved tensor.
            self.current.tensors[name].data.copy_(value)

    @contextmanager
    def forward(self, instead: Mapping[str, Tensor] | None = None) -> Iterator[Mapping[str, Tensor]]:
        """Give the tensors for a training forward: the current ones, but `instead` of those of its names.

        The first forward shows which float buffers the program changes in place. Autograd would refuse the backward of an
        older forward that saved them, so later forwards get them in storage of their own while older ones are in flight.
        batch_norm does not count its running statistics as changed, and its backward in training does not read them.
        """
        if self._rewritten is None:
            before = {name: tensor._version for name, tensor in self.current.tensors.items() if self._is_float_buffer(name)}
            yield {**self.current.tensors, **instead} if instead else self.current.tensors
            self._rewritten = [name for name, counter in before.items() if self.current.tensors[name]._version != counter]
            return
        if self._rewritten:
            self.make_writable(self._rewritten)
        yield {**self.current.tensors, **instead} if instead else self.current.tensors

    def _is_float_buffer(self, name: str) -> bool:
        return name not in self.parameters and self.current.tensors[name].is_floating_point()

    def _replace(self, name: str, tensor: Tensor) -> None:
        parameter = self.parameters.get(name)
        if parameter is None:
            self.current.tensors[name] = tensor
        else:
            parameter.data = tensor
            self.current.tensors[name] = _leaf(parameter)


def _leaf(parameter: Parameter) -> Tensor:
    # .data, unlike detach(), has its own version counter: the optimizer's in-place step on the parameter leaves the alias
    # valid, and copy on write guarantees that no graph in flight sees the step.
    return parameter.data.requires_grad_()


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    moved = tensor.detach().to(device)
    return moved if moved.data_ptr() % _ALIGNMENT == 0 and moved.is_contiguous() else moved.clone(memory_format=torch.contiguous_format)
