from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roost.errors import InvalidConfigError, InvalidDataError
from roost.requester.huggingface import ModelCollator, accepted_columns, collator_for

ACCEPTED = frozenset({"input_ids", "attention_mask", "labels", "pixel_values"})


def collate(samples: list[Any], **options: Any) -> dict[str, Tensor]:
    return ModelCollator(accepted=ACCEPTED, pad_token_id=9, **options)(samples)


def test_rows_of_different_lengths_are_padded_and_masked() -> None:
    batch = collate([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4], "labels": [4]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_a_mask_that_the_samples_bring_is_kept() -> None:
    batch = collate([{"input_ids": [1, 2], "attention_mask": [0, 1]}, {"input_ids": [4], "attention_mask": [1]}])
    assert batch["attention_mask"].tolist() == [[0, 1], [1, 0]]


def test_columns_that_the_model_does_not_take_are_left_out_and_label_becomes_labels() -> None:
    batch = collate([{"pixel_values": torch.ones(3, 2, 2), "label": 4, "file": "a.png"}])
    assert sorted(batch) == ["labels", "pixel_values"]
    assert batch["labels"].tolist() == [4]
    assert batch["pixel_values"].shape == (1, 3, 2, 2)


def test_another_collator_gets_the_model_s_columns_and_its_tensors_are_taken() -> None:
    seen: list[Any] = []

    def other(samples: list[Any]) -> dict[str, Any]:
        seen.extend(samples)
        return {"input_ids": torch.zeros(len(samples), 2), "texts": ["a"], "extra": torch.zeros(1)}

    assert list(collate([{"input_ids": [1], "text": "x"}], collate=other)) == ["input_ids"]
    assert seen == [{"input_ids": [1]}]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([[1, 2]], "a sample is a list, not a dict"),
        ([{"text": "x"}], "has text, and the model takes none of it"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}], "sample 1 of the batch has no 'labels'"),
        ([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}], "sample 0 of the batch has no 'labels'"),
        ([{"input_ids": [1, 2]}, {"input_ids": []}], "sample 1 of the batch is empty in 'input_ids'"),
        ([{"pixel_values": torch.ones(2, 3)}, {"pixel_values": torch.ones(2, 4)}], "cannot be padded"),
    ],
)
def test_samples_that_make_no_batch_are_refused(samples: list[Any], message: str) -> None:
    with pytest.raises(InvalidDataError, match=message):
        collate(samples)


class Inner(nn.Module):
    def forward(self, input_ids: Tensor, *, labels: Tensor | None = None, **others: Any) -> Tensor:
        return input_ids


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def get_base_model(self) -> nn.Module:
        return self.inner

    def forward(self, *args: Any, **others: Any) -> Any:
        return self.inner(*args, **others)


class Anything(nn.Module):
    def forward(self, **others: Any) -> None:
        return None


def test_the_names_of_the_forward_are_accepted_also_through_an_adapter() -> None:
    assert accepted_columns(Inner()) == {"input_ids", "labels"}
    assert accepted_columns(Adapter()) == {"input_ids", "labels"}


def test_a_forward_that_names_nothing_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="forward of Anything names no inputs"):
        accepted_columns(Anything())


def test_a_model_without_a_padding_token_is_padded_with_zero() -> None:
    batch = collator_for(Inner(), None)([{"input_ids": [1, 2]}, {"input_ids": [3]}])
    assert batch["input_ids"].tolist() == [[1, 2], [3, 0]]
