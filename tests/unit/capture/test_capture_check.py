"""The check at submission finds what capture cannot see, and changes nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from capture_models import EXAMPLES, example
from torch import Tensor, nn

from roost.capture.check import check_against_eager
from roost.capture.export import capture
from roost.errors import CaptureMismatchError


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_faithful_graph_passes_and_the_model_is_left_as_it_was(name: str) -> None:
    case = example(name)
    captured = case.captured()
    case.model.eval()
    state = {key: item.clone() for key, item in case.model.state_dict().items()}
    generator = torch.get_rng_state()
    report = check_against_eager(case.model, case.loss, captured, (case.inputs,), (case.labels,), seed=4)
    assert report.same_loss and report.max_relative_gradient_error == 0.0
    assert not any(part.training for part in case.model.modules())
    assert all(torch.equal(state[key], item) for key, item in case.model.state_dict().items())
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_wrong_gradient_names_the_parameter() -> None:
    case = example("perceptron")
    captured = case.captured()
    nodes = tuple(
        dataclasses.replace(node, op="aten.detach.default") if node.op == "aten.tanh.default" else node for node in captured.graph.nodes
    )
    broken = dataclasses.replace(captured, graph=dataclasses.replace(captured.graph, nodes=nodes))
    with pytest.raises(CaptureMismatchError, match="parameter 'layers"):
        check_against_eager(case.model, case.loss, broken, (case.inputs,), (case.labels,), seed=4)


def test_code_that_looks_at_the_training_flag_is_found() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if self.training else self.linear(x) * 2

    torch.manual_seed(0)
    model, x, y = Branching(), torch.randn(8, 4), torch.randn(8, 4)
    captured = capture(model, nn.MSELoss(), (x,), (y,))
    with pytest.raises(CaptureMismatchError, match="in evaluation"):
        check_against_eager(model, nn.MSELoss(), captured, (x,), (y,), seed=0)


def test_code_that_holds_only_for_some_batch_sizes_is_found() -> None:
    class Even(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * (1.0 if x.shape[0] % 2 == 0 else 3.0)

    torch.manual_seed(0)
    model, x, y = Even(), torch.randn(8, 4), torch.randn(8, 4)
    captured = capture(model, nn.MSELoss(), (x,), (y,))
    with pytest.raises(CaptureMismatchError, match="7 instead of 8 samples"):
        check_against_eager(model, nn.MSELoss(), captured, (x,), (y,), seed=0)
