"""Everything that can be refused before training is, with a code, a reason and what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from requester_kit import CLASSES, FEATURES, job, perceptron, samples
from torch import Tensor, nn
from torch.nn import functional

import roost
from inproc_pool import InprocPool, node
from roost.api import prepare
from roost.errors import RoostError


class Branching(nn.Module):
    """Decides by the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.layer(x)
        return self.layer(-x)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return Double.apply(self.layer(x))


class WrongSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES + 1, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def vector_metric(output: Tensor, label: Tensor) -> Tensor:
    return (output.argmax(1) == label).float()


def raising_metric(output: Tensor, label: Tensor) -> Tensor:
    raise KeyError("top5")


class Ragged:
    """Samples of different lengths."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(FEATURES + index), 0


INPUTS, LABELS = samples()
EMPTY = torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.int64)

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "batch size 0": ({"batch_size": 0}, "R101", "batch_size must be positive, not 0"),
    "negative batch size": ({"batch_size": -4}, "R101", "batch_size must be positive, not -4"),
    "micro-batch size 0": ({"micro_batch_size": 0}, "R101", "micro_batch_size 0 must be in"),
    "micro-batch over batch": ({"micro_batch_size": 9}, "R101", "micro_batch_size 9 is larger than batch_size 8"),
    "epochs 0": ({"epochs": 0}, "R101", "epochs must be positive, not 0"),
    "sync interval 0": ({"sync_interval": 0}, "R101", "sync_interval must be positive"),
    "negative seed": ({"seed": -1}, "R101", "seed must be in"),
    "bounds that contradict": ({"min_clusters": 3, "max_clusters": 2}, "R101", "max_clusters must be 0 or at least min_clusters"),
    "unknown optimizer": ({"optimizer": "Adamw"}, "R101", "optimizer 'Adamw' is not one of"),
    "optimizer argument": ({"optimizer_args": {"learning_rate": 0.1}}, "R101", "AdamW(learning_rate=0.1): "),
    "optimizer argument type": ({"optimizer_args": {"lr": "fast"}}, "R101", "AdamW(lr='fast'): "),
    "infinite learning rate": ({"optimizer_args": {"lr": float("nan")}}, "R101", "lr=nan must be finite"),
    "unknown schedule": ({"schedule": "Cosine"}, "R101", "schedule 'Cosine' is not one of"),
    "schedule argument": ({"schedule": "StepLR", "schedule_args": {}}, "R101", "StepLR(): "),
    "empty data": ({"data": EMPTY}, "R101", "the training data is empty"),
    "no data": ({"data": None}, "R103", "the training data is a NoneType"),
    "lengths that differ": ({"data": (INPUTS, LABELS[:5])}, "R103", "tensors of different lengths: [24, 5]"),
    "ragged samples": ({"data": Ragged()}, "R103", "the training data: samples [0, 1, 2, 3]... cannot be stacked"),
    "float labels": ({"data": (INPUTS, LABELS.double())}, "R201", "torch.export refuses the model"),
    "labels out of range": ({"data": (INPUTS, LABELS + CLASSES)}, "R103", "IndexError: Target 3 is out of bounds"),
    "input of another size": ({"model": WrongSize()}, "R201", "torch.export refuses the model"),
    "empty validation data": ({"validation": EMPTY}, "R101", "the validation data is empty"),
    "validation of another shape": ({"validation": samples(features=FEATURES + 1)}, "R103", "the validation data: samples [0]... are"),
    "validation of another dtype": ({"validation": (INPUTS.double(), LABELS)}, "R103", "float64"),
    "metric that raises": ({"metric": raising_metric}, "R201", "top5"),
    "metric that gives a vector": ({"metric": vector_metric}, "R201", "metric"),
    "loss that gives a vector": ({"loss": nn.CrossEntropyLoss(reduction="none")}, "R201", "reduction='none'"),
    "control flow": ({"model": Branching()}, "R201", "decides by the values of a tensor"),
    "custom autograd function": ({"model": WithFunction()}, "R201", "custom autograd function Double would lose its backward"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_that_cannot_be_trained_is_refused_with_code_reason_and_advice(tmp_path: Path, name: str) -> None:
    changes, code, reason = REFUSED[name]
    with pytest.raises(RoostError, match=re.escape(reason)) as caught:
        prepare(job(tmp_path, **changes))
    assert caught.value.code == code
    assert "What to do: " in str(caught.value)
    assert len(caught.value.hint) > 10


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": functional.relu}, "model must be a torch.nn.Module, not a"),
        ({"model": perceptron}, "model must be a torch.nn.Module, not a"),
        ({"loss": "mse"}, "loss must be callable"),
        ({"metric": "accuracy"}, "metric must be callable"),
        ({"batch_size": "32"}, "batch_size must be a whole number, not '32'"),
        ({"epochs": 1.5}, "epochs must be a whole number, not 1.5"),
        ({"epochs": True}, "epochs must be a whole number, not True"),
        ({"micro_batch_size": 2.0}, "micro_batch_size must be a whole number or None"),
        ({"optimizer_args": 0.1}, "optimizer_args must be a dict"),
    ],
)
def test_fields_of_the_wrong_type_are_refused_when_the_job_is_made(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RoostError, match=re.escape(reason)):
        job(tmp_path, **changes)


def test_a_checkpoint_directory_that_cannot_be_written_is_refused_before_the_model_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(RoostError, match="checkpoints cannot be written to") as caught:
        prepare(job(tmp_path, model=Branching(), checkpoint_dir=str(tmp_path / "file" / "checkpoints")))
    assert caught.value.code == "R700"
    assert "checkpoint_dir" in caught.value.hint


@pytest.mark.parametrize("pool", ["nonsense", 3, object()])
def test_what_is_no_pool_is_refused(tmp_path: Path, pool: Any) -> None:
    with pytest.raises(RoostError, match="pool") as caught:
        roost.train(job(tmp_path), pool)
    assert caught.value.code == "R101"


def test_a_job_without_a_pool_says_how_to_give_one(tmp_path: Path) -> None:
    with pytest.raises(RoostError, match="no pool") as caught:
        roost.train(job(tmp_path))
    assert "roost.local(nodes=2)" in caught.value.hint


def test_a_pool_of_tiny_nodes_refuses_the_job_with_bytes_and_leaves_nothing_running(tmp_path: Path) -> None:
    pool = InprocPool([node("tiny", memory=100), node("small", memory=200)], tmp_path)
    with pytest.raises(RoostError, match=r"cannot be cut further and needs .*small, lends 200 B \(200 bytes\).*bytes\) short") as caught:
        roost.train(job(tmp_path), pool)
    assert caught.value.code == "R302"
