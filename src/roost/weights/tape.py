"""The record of a model's initialisation: which operations made every tensor, in the order they were called."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TensorRef:
    """A tensor as a window on a recorded storage; tensors that share memory refer to the same storage."""

    storage: int
    """Number of the storage on its tape."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements."""
    conjugate: bool = False
    negative: bool = False
    """Views whose elements are conjugated or negated when they are read."""

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """Return this window on a real storage."""
        tensor = torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, self.offset, self.shape, self.stride)
        tensor = tensor.conj() if self.conjugate else tensor
        return torch._neg_view(tensor) if self.negative else tensor

    def scratch(self) -> Tensor:
        """Return a new CPU tensor of the same layout with arbitrary contents."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedOp:
    """One call; tensors in `args` and `kwargs` are TensorRefs, real tensors in them are constants."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[tuple[int, TensorRef], ...]
    """Results in storages of their own: position among the results, and how they lie in memory."""
    reads: frozenset[int]
    """Storages whose contents before the call matter to its result."""
    writes: frozenset[int]
    """Storages it creates or changes."""
    replaces: frozenset[int]
    """Those of `writes` of which nothing from before the call is left."""
    random: bool = False
    float_default: torch.dtype | None = None
    """The default dtype at the call, where the result's dtype depends on it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneratorMove:
    """The user set the generator: to a given state, or back to where it was before an earlier entry."""

    state: Tensor | None = None
    position: int = 0


@dataclass(kw_only=True, eq=False)
class Tape:
    """All entries of one block, and the storages they work on."""

    start: Tensor
    """The generator's state before the first entry."""
    entries: list[RecordedOp | GeneratorMove] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    """Storages on the meta device by number. Holding them keeps their addresses from being used again."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Number of the storage at an address."""
    draws: list[int] = field(default_factory=list)
    """Positions of the entries that change the generator."""

    def append(self, entry: RecordedOp | GeneratorMove) -> None:
        """Add an entry at the end."""
        if isinstance(entry, GeneratorMove) or entry.random:
            self.draws.append(len(self.entries))
        self.entries.append(entry)

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of the storage of `tensor`, or None if it was not made on this tape."""
        if tensor.device.type != "meta" or tensor.layout is not torch.strided:
            return None
        return self.numbers.get(tensor.untyped_storage()._cdata)

    def adopt(self, tensor: Tensor) -> int:
        """Return the number of the storage of `tensor`, a new one if it is unknown."""
        storage = tensor.untyped_storage()
        number = self.numbers.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number

    def ref(self, tensor: Tensor) -> TensorRef | None:
        """Return how `tensor` lies on this tape, or None if it was not made on it."""
        number = self.number_of(tensor)
        if number is None:
            return None
        return TensorRef(
            storage=number,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            conjugate=tensor.is_conj(),
            negative=tensor.is_neg(),
        )

    def covers(self, ref: TensorRef) -> bool:
        """Return whether writing all elements of `ref` writes every byte of its storage."""
        elements = 1
        for size, stride in sorted(zip(ref.shape, ref.stride, strict=True), key=lambda pair: pair[1]):
            if size != 1 and stride != elements:
                return False
            elements *= size
        return elements * ref.dtype.itemsize == self.storages[ref.storage].nbytes()

    def draws_between(self, start: int, stop: int) -> list[int]:
        """Return the positions from `start` to before `stop` of the entries that change the generator."""
        return self.draws[bisect_left(self.draws, start) : bisect_left(self.draws, stop)]


def transformed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value`, an argument or a result of an operation, with every element of its lists replaced by `change(element)`."""
    if isinstance(value, (list, tuple)):
        return type(value)(transformed(item, change) for item in value) if type(value) in (list, tuple) else change(value)
    return change(value)


def elements_of(*values: Any) -> Iterator[Any]:
    """Yield the elements of arguments or results, lists and tuples opened."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from elements_of(*value)
        else:
            yield value
