"""What is noticed before training: in the loss, in the sizes of batches, in where weights and validation data come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roost.api import Job, check, micro_batch_sizes
from roost.config import JobConfig, NamedArguments
from roost.errors import RoostError


def job(samples: int = 32, **changes: Any) -> Job:
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)),
        "loss": functional.cross_entropy,
        "data": (torch.randn(samples, 8), torch.randint(4, (samples,))),
        "batch_size": 8,
    }
    return Job(**{**fields, **changes})


def summed(output: Tensor, label: Tensor) -> Tensor:
    return functional.cross_entropy(output, label, reduction="sum")


def with_nan() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(32, 8)
    inputs[3, 1] = float("nan")
    return inputs, torch.randint(4, (32,))


def ignored() -> tuple[Tensor, Tensor]:
    return torch.randn(32, 8), torch.full((32,), -100)


def test_a_job_in_order_passes() -> None:
    report = check(job()).rehearsed.report
    assert report is not None
    assert report.same_loss


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"loss": summed}, "R201", "is the sum of the losses of 4 and of 4 of them"),
        ({"data": with_nan()}, "R601", "'input_0' has NaN or infinite values in the first batch"),
        ({"data": ignored()}, "R601", "the loss of the first batch is nan"),
        ({"weights": "nowhere/model.safetensors"}, "R101", "nowhere/model.safetensors"),
        ({"validation": (torch.zeros(0, 8), torch.zeros(0).long())}, "R101", "validation data is empty"),
    ],
)
def test_what_could_not_be_trained_is_refused_by_the_check(changes: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(RoostError, match=message) as caught:
        check(job(**changes))
    assert caught.value.code == code


def test_a_rest_of_one_sample_that_batch_norm_cannot_train_on_is_refused() -> None:
    with pytest.raises(RoostError, match=r"fail in training on 1 sample\(s\).*Expected more than 1 value per channel") as caught:
        check(job(samples=33))
    assert caught.value.code == "R201"


def test_weights_that_are_no_path_are_refused() -> None:
    with pytest.raises(RoostError, match="weights must be a path, not 5"):
        job(weights=5)


@pytest.mark.parametrize(
    ("samples", "batch", "micro", "sizes"),
    [(32, 8, 8, (8,)), (33, 8, 8, (1, 8)), (32, 8, 3, (2, 3)), (37, 8, 4, (1, 4)), (5, 8, 4, (1, 4))],
)
def test_the_sizes_of_an_epoch_s_micro_batches_are_known(samples: int, batch: int, micro: int, sizes: tuple[int, ...]) -> None:
    config = JobConfig(job_id="job", optimizer=NamedArguments(name="SGD"), batch_size=batch, micro_batch_size=micro, samples=samples)
    assert micro_batch_sizes(config) == sizes
