"""Datasets as tensors: reads samples by index and makes batches of them.

A dataset is a tuple of equally long tensors, or anything with `len()` and `[index]` that gives a tuple of tensors, arrays or
numbers. The last element of a sample is its label; all before it are the model's inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from roost.config import require
from roost.errors import InvalidDataError
from roost.types import DTYPE_BYTES

WIRE_DTYPES = frozenset(getattr(torch, name) for name in DTYPE_BYTES)


class SampleSource:
    """Batches of a dataset by sample indices; the same indices give the same tensors."""

    def __init__(self, dataset: Any, *, what: str) -> None:
        self._dataset = dataset
        self._what = what
        self._tensors = dataset if isinstance(dataset, tuple) and all(isinstance(part, Tensor) for part in dataset) else None
        self._expected: list[tuple[torch.dtype, torch.Size]] | None = None

    def __len__(self) -> int:
        """Return the number of samples. Raises InvalidDataError."""
        if self._tensors is None:
            return self._length_of_dataset()
        if len(self._tensors) < 2:
            raise InvalidDataError(f"{self._what} must have at least two tensors: inputs and labels")
        if any(part.dim() == 0 for part in self._tensors):
            raise InvalidDataError(f"{self._what} has a tensor without dimensions; the first dimension must be the samples")
        lengths = [len(part) for part in self._tensors]
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

    def expect(self, example: Sequence[Tensor]) -> None:
        """Let batches pass from now on only if they differ from `example` in nothing but the number of samples."""
        self._expected = [(part.dtype, part.shape[1:]) for part in example]

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return one tensor per input and label, stacked over `indices` along dimension 0. Raises InvalidDataError."""
        batch = self._read(indices)
        found = [(part.dtype, part.shape[1:]) for part in batch]
        if self._expected is not None and found != self._expected:
            raise InvalidDataError(
                f"{self._what}: samples {list(indices)[:4]}... are {_described(found)}, the first training samples are "
                f"{_described(self._expected)}",
                hint="Every sample must have the same number of elements, shapes and dtypes: pad, crop or convert them in the dataset.",
            )
        return batch

    def _read(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        if self._tensors is not None:
            index = torch.as_tensor(indices, dtype=torch.int64)
            return tuple(self._checked(part[index], indices) for part in self._tensors)
        samples = [self._sample(index) for index in indices]
        widths = {len(sample) for sample in samples}
        if len(widths) != 1:
            raise InvalidDataError(f"{self._what}: samples have different numbers of elements: {sorted(widths)}")
        return tuple(self._stack(column, indices) for column in zip(*samples, strict=True))

    def _sample(self, index: int) -> tuple[Any, ...]:
        try:
            sample = self._dataset[index]
        except Exception as error:
            raise InvalidDataError(
                f"{self._what}: reading sample {index} raised {type(error).__name__}: {error}",
                hint=f"Look at what the dataset does for index {index}: dataset[{index}] raises without Roost, too.",
            ) from error
        if not isinstance(sample, (tuple, list)):
            raise InvalidDataError(f"{self._what}: sample {index} is a {type(sample).__name__}, not a tuple of inputs and a label")
        if len(sample) < 2:
            raise InvalidDataError(f"{self._what}: sample {index} has {len(sample)} element(s), not inputs and a label")
        return tuple(sample)

    def _stack(self, column: Sequence[Any], indices: Sequence[int]) -> Tensor:
        try:
            stacked = torch.stack([torch.as_tensor(value) for value in column])
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidDataError(f"{self._what}: samples {list(indices)[:4]}... cannot be stacked: {error}") from error
        return self._checked(stacked, indices)

    def _checked(self, tensor: Tensor, indices: Sequence[int]) -> Tensor:
        if tensor.dtype not in WIRE_DTYPES:
            raise InvalidDataError(f"{self._what}: samples have dtype {tensor.dtype}, which is not supported")
        if len(tensor) != len(indices):
            raise InvalidDataError(f"{self._what}: asked for {len(indices)} samples, got {len(tensor)}")
        return tensor.detach().cpu().contiguous()


def _described(parts: Sequence[tuple[torch.dtype, torch.Size]]) -> str:
    return "(" + ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in parts) + ")"


def example_batch(source: SampleSource, samples: int) -> tuple[Tensor, ...]:
    """Return the first `samples` samples as one batch, to capture and measure the model with."""
    require(len(source) > 0, "the training data is empty")
    return source.batch(range(min(samples, len(source))))
