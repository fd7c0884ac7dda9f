"""Jobs whose model has no weights on the requester's machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import roost
from roost.api import Job, check, prepare
from roost.errors import CheckpointError, MissingWeightsError, NotCapturableError

DATA = (torch.arange(24.0).reshape(6, 4) / 24, torch.tensor([0, 1, 2, 0, 1, 2]))


class Rotating(nn.Module):
    """Has a buffer that no checkpoint holds, a tied parameter, and a constant in its code."""

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 3)
        self.register_buffer("turn", torch.arange(4.0).cos(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.where(x > 0.5, self.second(self.first(x) * self.turn), torch.tensor(0.25)))


def deferred(build: Callable[[], nn.Module] = Rotating) -> nn.Module:
    torch.manual_seed(5)
    with roost.deferred_init():
        return build()


def eager() -> nn.Module:
    torch.manual_seed(5)
    return Rotating()


def job(model: nn.Module, weights: Path | None = None) -> Job:
    return Job(model=model, loss=nn.CrossEntropyLoss(), data=DATA, batch_size=3, weights=weights)


def test_a_model_without_weights_makes_the_same_graph_and_the_same_initial_weights() -> None:
    real, without = prepare(job(eager()), saves=False), prepare(job(deferred()), saves=False)
    assert without.graph == real.graph
    expected, found = real.weights.read(real.weights.names), without.weights.read(without.weights.names)
    assert expected.keys() == found.keys() == {"first.weight", "head.weight", "head.bias", "turn", *real.extras}
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_costs_of_a_model_without_weights_are_counted() -> None:
    real, without = prepare(job(eager()), saves=False).profile, prepare(job(deferred()), saves=False).profile
    assert [unit.tensors for unit in without.units] == [unit.tensors for unit in real.units]
    assert [unit.crossing_bytes for unit in without.units] == [unit.crossing_bytes for unit in real.units]
    assert [unit.saved_bytes for unit in without.units] == [unit.saved_bytes for unit in real.units]
    assert sum(unit.forward_flop for unit in without.units) == sum(unit.forward_flop for unit in real.units)
    assert all(unit.backward_s == 2 * unit.forward_s > 0 for unit in without.units)


def test_a_model_without_weights_is_captured_and_not_compared() -> None:
    model = deferred()
    assert check(job(model)).rehearsed.report is None
    assert all(parameter.is_meta for parameter in model.parameters())


def test_initial_weights_can_come_from_a_checkpoint(tmp_path: Path) -> None:
    state = {name: tensor + 1 for name, tensor in eager().state_dict().items() if name != "second.weight"}
    save_file(state, tmp_path / "model.safetensors")
    for model in (eager(), deferred()):
        package = prepare(job(model, tmp_path), saves=False)
        found = package.weights.read(package.weights.names)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        assert torch.equal(found["turn"], torch.arange(4.0).cos())


def test_a_checkpoint_of_another_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    save_file({"first.weight": torch.zeros(4, 4), "head.weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"head\.bias"):
        prepare(job(eager(), tmp_path), saves=False)


def test_a_model_on_meta_that_nobody_recorded_is_refused() -> None:
    with torch.device("meta"):
        model = Rotating()
    model.turn = torch.arange(4.0).cos()
    with pytest.raises(MissingWeightsError, match=r"'first\.weight'"):
        prepare(job(model), saves=False)


def test_a_model_that_is_half_on_meta_is_refused() -> None:
    model = deferred()
    model.get_submodule("head").to_empty(device="cpu")
    with pytest.raises(NotCapturableError, match=r"'head\.weight' has values and others are on meta"):
        prepare(job(model), saves=False)
