"""A whole job in bfloat16, with values that cross between nodes in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import roost
from inproc_pool import InprocPool, nodes_for_stages
from roost.api import prepare
from roost.demo.digits import accuracy, load_digits
from roost.errors import InvalidConfigError, NotCapturableError


class DigitsMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.second(self.first(pixels.flatten(1)).relu()).relu())


def digits_job(tmp_path: Path, precision: str = "bf16") -> roost.Job:
    torch.manual_seed(5)
    training, validation = load_digits()
    return roost.Job(
        model=DigitsMLP(),
        loss=functional.cross_entropy,
        metric=accuracy,
        data=training,
        validation=validation,
        optimizer="AdamW",
        optimizer_args={"lr": 3e-3},
        batch_size=32,
        epochs=6,
        max_clusters=1,
        precision=precision,
        checkpoint_dir=str(tmp_path / "checkpoints"),
    )


def test_digits_are_learned_by_two_stages_in_bfloat16(tmp_path: Path) -> None:
    job = digits_job(tmp_path)
    run = roost.train(job, InprocPool(nodes_for_stages(job, ["a", "b"]), tmp_path)).wait(120)
    assert run.plan is not None
    assert len(run.plan.stages) == 2
    last = run.metrics().history[-1]
    assert last.metric is not None
    assert last.metric > 0.9
    assert {tensor.dtype for tensor in run.state_dict().values()} == {torch.float32}


def test_a_model_is_measured_in_the_precision_of_its_job(tmp_path: Path) -> None:
    mixed, plain = (prepare(digits_job(tmp_path, precision)).profile for precision in ("bf16", "float32"))
    crossing = [(one.crossing_bytes, other.crossing_bytes) for one, other in zip(mixed.units, plain.units, strict=True)]
    labels = 8 * 32
    # What a linear layer makes crosses in half the bytes; the pixels and the labels do not change.
    assert (64 * 2 * 32 + labels, 64 * 4 * 32 + labels) in crossing
    assert all(one <= other for one, other in crossing)
    assert sum(unit.forward_flop for unit in mixed.units) == sum(unit.forward_flop for unit in plain.units)


def test_a_precision_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="precision 'fp8' is not one of"):
        prepare(digits_job(tmp_path, "fp8"))


class Scattering(nn.Module):
    """Writes a product, which autocast makes in bfloat16, into float32 memory that takes no other dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        logits = self.head(pixels.flatten(1))
        return torch.zeros_like(pixels.flatten(1)[:, :10]).masked_scatter(torch.ones_like(pixels.flatten(1)[:, :10]) > 0, logits)


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Scattering(), "cannot compute in bf16"), (DigitsMLP().bfloat16(), "keeps parameters in float32, but 'first.weight' is bfloat16")],
    ids=["scattering", "bfloat16 parameters"],
)
def test_a_model_that_cannot_is_refused_before_it_is_trained(tmp_path: Path, model: nn.Module, reason: str) -> None:
    generator = torch.Generator().manual_seed(1)
    data = (torch.rand(8, 1, 8, 8, generator=generator).to(next(model.parameters()).dtype), torch.randint(10, (8,), generator=generator))
    job = roost.Job(model=model, loss=functional.cross_entropy, data=data, batch_size=4, precision="bf16", checkpoint_dir=str(tmp_path))
    with pytest.raises(NotCapturableError, match=reason):
        prepare(job)
