"""Datasets as tensors: reads samples by index and makes batches of them.

A dataset is a tuple or dict of equally long tensors, or anything with `len()` and `[index]` that gives a tuple or dict of tensors,
arrays or numbers. The columns of a tuple have an order, those of a dict have names. A collate function, such as one that pads,
takes the list of samples and gives the tuple or dict of the batch's tensors itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roost.config import require
from roost.errors import InvalidDataError
from roost.types import DTYPE_BYTES

WIRE_DTYPES = frozenset(getattr(torch, name) for name in DTYPE_BYTES)
PROBED_SAMPLES = 32
"""Samples looked at, one by one and spread over the dataset, to see which dimensions vary."""
PROBED_BATCHES = 8

Collate = Callable[[list[Any]], Any]
Shape = tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class DataExample:
    """What batches of a dataset look like."""

    names: tuple[str, ...] | None
    """The columns' names, if the samples are dicts."""
    batch: tuple[Tensor, ...]
    """A batch: of those looked at, the one with the most numbers."""
    varying: tuple[frozenset[int], ...]
    """For each column the dimensions beyond the first whose size differs between samples."""


class SampleSource:
    """Batches of a dataset by sample indices; the same indices give the same tensors."""

    def __init__(self, dataset: Any, *, what: str, collate: Collate | None = None) -> None:
        self._dataset = dataset
        self._what = what
        self._collate = collate
        self._columns = _columns(dataset) if collate is None else None
        self._names: tuple[str, ...] | None = None
        self._expected: list[tuple[torch.dtype, Shape]] | None = None

    def __len__(self) -> int:
        """Return the number of samples. Raises InvalidDataError."""
        if self._columns is None:
            return self._length_of_dataset()
        parts = list(self._columns.values())
        if isinstance(self._dataset, tuple) and len(parts) < 2:
            raise InvalidDataError(f"{self._what} must have at least two tensors: inputs and labels")
        if any(part.dim() == 0 for part in parts):
            raise InvalidDataError(f"{self._what} has a tensor without dimensions; the first dimension must be the samples")
        lengths = [len(part) for part in parts]
        if len(set(lengths)) != 1:
            raise InvalidDataError(f"{self._what} has tensors of different lengths: {lengths}")
        return lengths[0]

    def _length_of_dataset(self) -> int:
        if not hasattr(self._dataset, "__getitem__"):
            raise InvalidDataError(f"{self._what} is a {type(self._dataset).__name__}, which has no [index]")
        try:
            return len(self._dataset)
        except (TypeError, NotImplementedError) as error:
            raise InvalidDataError(f"{self._what} is a {type(self._dataset).__name__} without a length: {error}") from error

    def select(self, names: tuple[str, ...]) -> None:
        """Let batches have these columns of a dataset of dicts, in this order, and no others."""
        self._names = names

    def expect(self, expected: Sequence[tuple[torch.dtype, Shape]]) -> None:
        """Let batches pass from now on only if each column has this dtype and this shape, where None stands for any size."""
        self._expected = list(expected)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return one tensor per column, stacked over `indices` along dimension 0. Raises InvalidDataError."""
        columns = self._read(indices)
        if self._names is not None:
            missing = [name for name in self._names if name not in columns]
            if missing:
                raise InvalidDataError(
                    f"{self._what}: samples {list(indices)[:4]}... have no {missing[0]!r}, the first training samples do"
                )
            columns = {name: columns[name] for name in self._names}
        batch = tuple(columns.values())
        if self._expected is not None and not _fits(batch, self._expected):
            raise InvalidDataError(
                f"{self._what}: samples {list(indices)[:4]}... are {_described((part.dtype, part.shape) for part in batch)}, "
                f"the model was captured for {_described(self._expected)}",
                hint="Every sample must have the same number of elements, shapes and dtypes: pad, crop or convert them in the dataset.",
            )
        return batch

    def example(self, samples: int) -> DataExample:
        """Return what batches of `samples` samples look like, from a few of them. Raises InvalidDataError, InvalidConfigError."""
        total = len(self)
        require(total > 0, f"{self._what} is empty")
        samples = min(samples, total)
        first = self._read(range(samples))
        names = tuple(first) if all(isinstance(name, str) for name in first) else None
        batches = [tuple(first.values())]
        shapes = [[part.shape[1:] for part in batches[0]]]
        if self._collate is not None:
            starts = sorted({(total - samples) * index // (PROBED_BATCHES - 1) for index in range(PROBED_BATCHES)})
            batches += [self._same_columns(range(start, start + samples), first) for start in starts if start > 0]
            single = sorted({(total - 1) * index // (PROBED_SAMPLES - 1) for index in range(PROBED_SAMPLES)})
            shapes += [[part.shape[1:] for part in self._same_columns([index], first)] for index in single]
            shapes += [[part.shape[1:] for part in batch] for batch in batches[1:]]
        largest = max(batches, key=lambda batch: sum(part.numel() for part in batch))
        return DataExample(names=names, batch=largest, varying=tuple(_varying(column) for column in zip(*shapes, strict=True)))

    def _same_columns(self, indices: Sequence[int], first: Mapping[Any, Tensor]) -> tuple[Tensor, ...]:
        found = self._read(indices)
        for name, part in first.items():
            if name not in found or found[name].dim() != part.dim():
                raise InvalidDataError(f"{self._what}: samples {list(indices)[:4]}... differ from the first ones in {name!r}")
        return tuple(found[name] for name in first)

    def _read(self, indices: Sequence[int]) -> dict[Any, Tensor]:
        """Return the batch by column: names, or positions 0, 1, and so on."""
        if self._columns is not None:
            index = torch.as_tensor(indices, dtype=torch.int64)
            return {name: self._checked(part[index], indices) for name, part in self._columns.items()}
        samples = [self._sample(index) for index in indices]
        if self._collate is not None:
            return self._collated(samples, indices)
        kinds = {isinstance(sample, Mapping) for sample in samples}
        widths = {frozenset(sample) if isinstance(sample, Mapping) else len(sample) for sample in samples}
        if len(kinds) != 1 or len(widths) != 1:
            found = sorted(str(sorted(width)) if isinstance(width, frozenset) else str(width) for width in widths)
            raise InvalidDataError(f"{self._what}: samples have different numbers of elements: [{', '.join(found)}]")
        if isinstance(samples[0], Mapping):
            return {name: self._stack([sample[name] for sample in samples], indices) for name in samples[0]}
        return {position: self._stack(column, indices) for position, column in enumerate(zip(*samples, strict=True))}

    def _collated(self, samples: list[Any], indices: Sequence[int]) -> dict[Any, Tensor]:
        assert self._collate is not None
        try:
            batch = self._collate(samples)
        except InvalidDataError as error:
            raise InvalidDataError(f"{self._what}: samples {list(indices)[:4]}...: {error.message}", hint=error.hint) from error
        except Exception as error:
            raise InvalidDataError(
                f"{self._what}: the collate function raised {type(error).__name__} for samples {list(indices)[:4]}...: {error}",
                hint="Call it on these samples, [dataset[i] for i in ...], without Roost.",
            ) from error
        columns = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch)) if isinstance(batch, tuple | list) else {}
        wrong = next((name for name, part in columns.items() if not isinstance(part, Tensor) or part.dim() == 0), None)
        if not columns or wrong is not None:
            found = type(batch).__name__ if wrong is None else f"{type(columns[wrong]).__name__} for {wrong!r}"
            raise InvalidDataError(
                f"{self._what}: the collate function gave a {found}, not a tuple or dict of tensors with the samples first"
            )
        return {name: self._checked(part, indices) for name, part in columns.items()}

    def _sample(self, index: int) -> Any:
        try:
            sample = self._dataset[index]
        except Exception as error:
            raise InvalidDataError(
                f"{self._what}: reading sample {index} raised {type(error).__name__}: {error}",
                hint=f"Look at what the dataset does for index {index}: dataset[{index}] raises without Roost, too.",
            ) from error
        if self._collate is not None:
            return sample
        if isinstance(sample, Mapping):
            if not sample or not all(isinstance(name, str) for name in sample):
                raise InvalidDataError(f"{self._what}: sample {index} is a dict without names of inputs")
            return sample
        if not isinstance(sample, (tuple, list)):
            raise InvalidDataError(f"{self._what}: sample {index} is a {type(sample).__name__}, not a tuple of inputs and a label")
        if len(sample) < 2:
            raise InvalidDataError(f"{self._what}: sample {index} has {len(sample)} element(s), not inputs and a label")
        return sample

    def _stack(self, column: Sequence[Any], indices: Sequence[int]) -> Tensor:
        try:
            stacked = torch.stack([torch.as_tensor(value) for value in column])
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidDataError(
                f"{self._what}: samples {list(indices)[:4]}... cannot be stacked: {error}",
                hint="If their lengths differ, give the job a collate function that pads them.",
            ) from error
        return self._checked(stacked, indices)

    def _checked(self, tensor: Tensor, indices: Sequence[int]) -> Tensor:
        if tensor.dtype not in WIRE_DTYPES:
            raise InvalidDataError(f"{self._what}: samples have dtype {tensor.dtype}, which is not supported")
        if len(tensor) != len(indices):
            raise InvalidDataError(f"{self._what}: asked for {len(indices)} samples, got {len(tensor)}")
        return tensor.detach().cpu().contiguous()


def _columns(dataset: Any) -> dict[Any, Tensor] | None:
    """Return the columns of a dataset that is a tuple or dict of whole tensors, None for any other dataset."""
    if isinstance(dataset, tuple) and all(isinstance(part, Tensor) for part in dataset):
        return dict(enumerate(dataset))
    if type(dataset) is dict and dataset and all(isinstance(name, str) and isinstance(part, Tensor) for name, part in dataset.items()):
        return dict(dataset)
    return None


def _fits(batch: Sequence[Tensor], expected: Sequence[tuple[torch.dtype, Shape]]) -> bool:
    return len(batch) == len(expected) and all(
        part.dtype == dtype
        and part.dim() == len(shape)
        and all(wanted in (None, size) for size, wanted in zip(part.shape, shape, strict=True))
        for part, (dtype, shape) in zip(batch, expected, strict=True)
    )


def _varying(shapes: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return the dimensions, counted with the samples' as 0, in which shapes without the samples' dimension differ."""
    return frozenset(1 + dimension for dimension, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1)


def _described(parts: Any) -> str:
    described = (f"{str(dtype).removeprefix('torch.')} {['*' if size is None else size for size in shape[1:]]}" for dtype, shape in parts)
    return "(" + ", ".join(described).replace("'", "") + ")"
