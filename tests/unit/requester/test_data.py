from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from roost.errors import InvalidConfigError, InvalidDataError
from roost.requester.data import SampleSource

WHAT = "the training data"


class Listed:
    """A map-style dataset of given samples."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        sample = self._samples[index]
        if isinstance(sample, Exception):
            raise sample
        return sample


def source(data: Any) -> SampleSource:
    return SampleSource(data, what=WHAT)


def test_tensors_are_read_by_index_in_the_order_asked_for() -> None:
    inputs, labels = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    batch = source((inputs, labels)).batch([4, 0, 4])
    assert torch.equal(batch[0], inputs[[4, 0, 4]])
    assert torch.equal(batch[1], torch.tensor([4, 0, 4]))
    assert all(part.is_contiguous() for part in batch)


def test_tensors_that_need_gradients_are_served_without_them() -> None:
    batch = source((torch.zeros(3, 2, requires_grad=True), torch.zeros(3))).batch([1])
    assert not batch[0].requires_grad


def test_a_dataset_of_arrays_and_numbers_becomes_tensors() -> None:
    data = source(Listed([(np.full(3, i, dtype=np.float32), i, True) for i in range(5)]))
    assert len(data) == 5
    first, second, third = data.batch([3, 1])
    assert torch.equal(first, torch.tensor([[3.0] * 3, [1.0] * 3]))
    assert (second.dtype, second.tolist()) == (torch.int64, [3, 1])
    assert (third.dtype, third.tolist()) == (torch.bool, [True, True])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "NoneType, which has no"),
        (iter([]), "which has no"),
        ((torch.zeros(3),), "at least two tensors"),
        ((torch.zeros(3), torch.zeros(4)), r"different lengths: \[3, 4\]"),
        ((torch.tensor(1.0), torch.zeros(4)), "without dimensions"),
    ],
)
def test_what_is_no_dataset_is_refused(data: Any, message: str) -> None:
    with pytest.raises(InvalidDataError, match=f"{WHAT}.*{message}"):
        len(source(data))


def test_a_dataset_without_a_length_is_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([])

    with pytest.raises(InvalidDataError, match="Stream"):
        len(source(Stream()))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([torch.zeros(2), torch.zeros(2)], "sample 0 is a Tensor, not a tuple"),
        ([(torch.zeros(2),), (torch.zeros(2),)], r"sample 0 has 1 element\(s\), not inputs and a label"),
        ([(torch.zeros(2), 0), ValueError("no such file")], "reading sample 1 raised ValueError: no such file"),
        ([(torch.zeros(2), 0), (torch.zeros(3), 0)], r"samples \[0, 1\]... cannot be stacked"),
        ([(torch.zeros(2), 0), (torch.zeros(2), 0, 1)], "different numbers of elements"),
        ([("a cat", 0), ("a dog", 0)], "cannot be stacked"),
        ([(torch.zeros(2, dtype=torch.complex64), 0)] * 2, "complex64, which is not supported"),
    ],
)
def test_samples_that_make_no_batch_are_refused_with_the_reason(samples: list[Any], message: str) -> None:
    with pytest.raises(InvalidDataError, match=message):
        source(Listed(samples)).batch([0, 1])


def test_later_samples_must_look_like_the_example() -> None:
    data = source(Listed([(torch.zeros(2), 0), (torch.zeros(2), 0), (torch.zeros(3), 0), (torch.zeros(2), 0.5)]))
    data.expect([(torch.float32, (None, 2)), (torch.int64, (None,))])
    data.batch([1, 0])
    with pytest.raises(
        InvalidDataError, match=r"samples \[2\]\.\.\. are \(float32 \[3\], int64 \[\]\), .* captured for \(float32 \[2\], int64 \[\]\)"
    ):
        data.batch([2])
    with pytest.raises(InvalidDataError, match=r"\(float32 \[2\], float32 \[\]\)"):
        data.batch([3])


def test_the_example_has_as_many_samples_as_there_are() -> None:
    data = source((torch.zeros(3, 2), torch.zeros(3)))
    assert [len(part) for part in data.example(2).batch] == [2, 2]
    assert [len(part) for part in data.example(8).batch] == [3, 3]
    assert data.example(2).names is None
    assert data.example(2).varying == (frozenset(), frozenset())
    with pytest.raises(InvalidConfigError, match="training data is empty"):
        source((torch.zeros(0, 2), torch.zeros(0))).example(2)


def test_a_dict_of_tensors_and_a_dataset_of_dicts_have_columns_by_name() -> None:
    columns = {"x": torch.arange(8.0).reshape(4, 2), "labels": torch.arange(4)}
    listed = source(Listed([{name: part[index] for name, part in columns.items()} for index in range(4)]))
    for data in (source(columns), listed):
        assert len(data) == 4
        assert data.example(2).names == ("x", "labels")
        data.select(("labels", "x"))
        labels, x = data.batch([3, 0])
        assert torch.equal(labels, columns["labels"][[3, 0]])
        assert torch.equal(x, columns["x"][[3, 0]])


def test_a_sample_without_a_column_that_the_model_needs_is_refused() -> None:
    data = source(Listed([{"x": 1.0, "y": 2.0}, {"x": 1.0}]))
    data.select(("x", "y"))
    with pytest.raises(InvalidDataError, match="have no 'y'"):
        data.batch([1])
    with pytest.raises(InvalidDataError, match="different numbers of elements"):
        data.batch([0, 1])


def padded(samples: list[list[int]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(sample) for sample in samples]
    return {"ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), "labels": torch.zeros(len(rows))}


def test_a_collate_function_pads_and_the_dimensions_that_vary_are_found() -> None:
    data = SampleSource([[1] * length for length in (2, 3, 7, 4)], what=WHAT, collate=padded)
    example = data.example(2)
    assert example.varying == (frozenset({1}), frozenset())
    assert example.batch[0].shape == (2, 7), "the largest batch is the one to plan for"
    data.select(("ids", "labels"))
    data.expect([(torch.int64, (None, None)), (torch.float32, (None,))])
    assert data.batch([0, 1])[0].shape == (2, 3)
    data.expect([(torch.int64, (None, 3)), (torch.float32, (None,))])
    with pytest.raises(InvalidDataError, match=r"int64 \[7\]"):
        data.batch([2])


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda samples: 1 / 0, "collate function raised ZeroDivisionError"),
        (lambda samples: None, "gave a NoneType"),
        (lambda samples: {"x": 3}, "gave a int for 'x'"),
        (lambda samples: (torch.zeros(1, 2),), "asked for 2 samples, got 1"),
    ],
)
def test_a_collate_function_that_fails_is_named(collate: Any, message: str) -> None:
    with pytest.raises(InvalidDataError, match=f"{WHAT}.*{message}"):
        SampleSource([0, 1], what=WHAT, collate=collate).batch([0, 1])
