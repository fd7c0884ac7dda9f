"""What an argument of a graph node may be: references to values, scalars, enumerated names, and lists of those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""The dtypes of roost.types.DTYPE_BYTES, as torch knows them."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

MEMORY_FORMATS: dict[str, torch.memory_format] = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}

MEMORY_FORMAT_NAMES: dict[torch.memory_format, str] = {layout: name for name, layout in MEMORY_FORMATS.items()}


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A use of the value with this number."""

    value: int


@dataclass(frozen=True, slots=True)
class DtypeName:
    """A dtype, by its name in DTYPES."""

    name: str


@dataclass(frozen=True, slots=True)
class MemoryFormatName:
    """A memory format, by its name in MEMORY_FORMATS."""

    name: str


Argument = ValueRef | DtypeName | MemoryFormatName | int | float | bool | str | None | tuple["Argument", ...]
"""Lists are tuples, so that nodes are immutable."""


def references(argument: Argument) -> Iterator[int]:
    """Yield the numbers of the values that `argument` uses, in order, with repetitions."""
    if isinstance(argument, ValueRef):
        yield argument.value
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def replace_references(argument: Argument, replace: Callable[[int], int]) -> Argument:
    """Return `argument` with every value number passed through `replace`."""
    if isinstance(argument, ValueRef):
        return ValueRef(replace(argument.value))
    if isinstance(argument, tuple):
        return tuple(replace_references(item, replace) for item in argument)
    return argument


def to_torch(argument: Argument) -> object:
    """Return a reference-free argument as torch takes it: dtypes and memory formats resolved, tuples as lists."""
    if isinstance(argument, DtypeName):
        return DTYPES[argument.name]
    if isinstance(argument, MemoryFormatName):
        return MEMORY_FORMATS[argument.name]
    if isinstance(argument, tuple):
        return [to_torch(item) for item in argument]
    return argument
