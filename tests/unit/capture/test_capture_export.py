"""What capture takes, what it refuses, and that it leaves the user's model alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import random as imported_by_name

import pytest
import torch
import torch.nn.functional as F
from capture_models import EXAMPLES, VOCABULARY, accuracy, example, train_step, training_tensors
from torch import Tensor, nn

from roost.capture.export import Captured, capture
from roost.errors import NotCapturableError, UnsupportedOpError
from roost.types import TensorKind


class Custom(nn.Module):
    """A linear layer, and a forward that the test gives."""

    def __init__(self, function: Callable[[Custom, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        self.constant = torch.arange(4.0)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def capture_function(function: Callable[[Custom, Tensor], Tensor], samples: int = 8) -> tuple[Custom, Captured]:
    torch.manual_seed(0)
    model = Custom(function)
    return model, capture(model, nn.MSELoss(), (torch.randn(samples, 4),), (torch.randn(samples, 4),))


def assert_gradients_equal(model: Custom, captured: Captured) -> None:
    for samples in (1, 5, 8):
        x, y = torch.randn(samples, 4), torch.randn(samples, 4)
        tensors = training_tensors(captured)
        loss = train_step(captured, [], (x, y), tensors, seed=1)
        model.zero_grad()
        model.count.zero_()
        torch.manual_seed(1)
        expected = nn.MSELoss()(model(x), y)
        expected.backward()
        assert torch.equal(loss, expected.detach())
        assert torch.equal(tensors["linear.weight"].grad, model.linear.weight.grad)


@pytest.mark.parametrize("name", EXAMPLES)
def test_tensors_carry_the_models_own_names_and_initial_values(name: str) -> None:
    case = example(name)
    captured = case.captured()
    state = case.model.state_dict()
    assert set(captured.tensors) - captured.extras == set(state) - set(captured.aliases)
    for key in set(captured.tensors) - captured.extras:
        assert torch.equal(captured.tensors[key], state[key])
        assert captured.tensors[key].data_ptr() != state[key].data_ptr()
    kinds = {record.name: record.kind for record in captured.graph.tensors}
    assert all((kinds[key] is TensorKind.PARAMETER) == (key in dict(case.model.named_parameters())) for key in kinds)


def test_capture_leaves_modes_weights_gradients_and_generators_as_they_were() -> None:
    case = example("convnet")
    case.model.eval()
    case.model.features[4].train()
    modes = [part.training for part in case.model.modules()]
    state = {key: item.clone() for key, item in case.model.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate()
    case.captured()
    assert [part.training for part in case.model.modules()] == modes
    assert all(torch.equal(state[key], item) for key, item in case.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert all(parameter.grad is None and parameter.requires_grad for parameter in case.model.parameters())


def test_capture_twice_gives_the_same_graph() -> None:
    case = example("gpt")
    assert case.captured().graph == case.captured().graph


def test_one_example_sample_is_enough() -> None:
    model, captured = capture_function(lambda self, x: self.linear(x), samples=1)
    assert_gradients_equal(model, captured)


def test_a_function_is_a_loss_like_a_module() -> None:
    torch.manual_seed(0)
    captured = capture(nn.Linear(4, 3), F.cross_entropy, (torch.randn(8, 4),), (torch.randint(0, 3, (8,)),), metric=accuracy)
    assert captured.graph.metric is not None and captured.extras == frozenset()


def test_the_buffers_of_a_loss_are_extras_whose_names_do_not_collide() -> None:
    class HasLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.loss(x)

    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    captured = capture(HasLoss(), loss, (torch.randn(8, 4),), (torch.randint(0, 4, (8,)),))
    assert captured.extras == {"loss_2.weight"}
    assert {"loss.weight", "loss.bias", "loss_2.weight"} == set(captured.tensors)


def test_frozen_parameters_are_not_trainable() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    captured = capture(model, nn.MSELoss(), (torch.randn(8, 4),), (torch.randn(8, 4),))
    assert {record.name for record in captured.graph.tensors if record.trainable} == {"1.weight", "1.bias"}


def test_unused_parameters_stay_out_of_the_graph_but_keep_their_values() -> None:
    model, captured = capture_function(lambda self, x: self.linear(x))
    assert "count" not in {record.name for record in captured.graph.tensors}
    assert "count" in captured.tensors


def test_labels_of_nodes_are_module_paths() -> None:
    labels = {node.label for node in example("gpt").captured().graph.nodes}
    assert {"tokens", "blocks.0.qkv", "blocks.1.mlp.0", "head"} <= labels


def set_item(self: Custom, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 6)
    out[:, 1:5] = self.linear(x)
    return out[:, :4] * out[:, 2:]


def without_grad(self: Custom, x: Tensor) -> Tensor:
    with torch.no_grad():
        mean = self.linear(x).mean(0)
    return self.linear(x) - mean + self.linear(x).detach()


def moving_average(self: Custom, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.count.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return self.linear(x) + self.count


def drop_path(self: Custom, x: Tensor) -> Tensor:
    keep = x.new_empty((x.shape[0], 1)).bernoulli_(0.8)
    return self.linear(x) * keep.div_(0.8)


@pytest.mark.parametrize(
    "function",
    [
        set_item,
        without_grad,
        moving_average,
        drop_path,
        lambda self, x: self.linear(x) + self.constant + torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda self, x: self.linear(x).masked_fill(torch.ones(4, 4, dtype=torch.bool).tril()[1], float("-inf")).softmax(-1),
        lambda self, x: torch.einsum("bi,bj->bj", x, self.linear(x)) / x.shape[0],
        lambda self, x: torch.cat([part * 2 for part in self.linear(x).chunk(2, dim=-1)], dim=-1),
        lambda self, x: torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False),
        lambda self, x: self.linear(x.double().float().to(x.device)),
        lambda self, x: self.linear(x)[torch.arange(x.shape[0])][..., None].flatten(1),
    ],
)
def test_captured_functions_are_bit_identical_to_eager(function: Callable[[Custom, Tensor], Tensor]) -> None:
    model, captured = capture_function(function)
    assert_gradients_equal(model, captured)


def test_constants_become_extra_tensors() -> None:
    _, captured = capture_function(lambda self, x: self.linear(x) + self.constant)
    assert captured.extras == {"constant"}


class DoubledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 3


def data_dependent(self: Custom, x: Tensor) -> Tensor:
    if self.linear(x).sum() > 0:
        return x
    return self.linear(x)


def batch_dependent(self: Custom, x: Tensor) -> Tensor:
    return self.linear(x) if x.shape[0] > 4 else self.linear(x) * 2


def autocast(self: Custom, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.linear(x)


def clamped_weight(self: Custom, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.linear.weight.clamp_min_(0)
    return self.linear(x)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda self, x: DoubledBackward.apply(self.linear(x)), "custom autograd function DoubledBackward"),
        (data_dependent, "test_capture_export.py:.*if self.linear"),
        (batch_dependent, "decides by the batch size"),
        (lambda self, x: self.linear(x.view(8, 4)), "batch size 8"),
        (lambda self, x: self.linear(x) * random.random(), "random.random would become a constant at .*test_capture_export"),
        (lambda self, x: self.linear(x) * imported_by_name(), "draws from random.*at .*test_capture_export"),
        (autocast, "enables autocast.*at .*test_capture_export"),
        (clamped_weight, "parameter 'linear.weight' in place at .*test_capture_export.*clamp_min_"),
        (lambda self, x: x, "no trainable parameter"),
        (lambda self, x: self.linear(x.view(3, 5)), "torch.export refuses the model at .*test_capture_export"),
        (lambda self, x: self.linear(x).to(torch.complex64).abs(), "complex64"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(function: Callable[[Custom, Tensor], Tensor], words: str) -> None:
    with pytest.raises((NotCapturableError, UnsupportedOpError), match=words):
        capture_function(function)


def test_guards_are_removed_after_a_refusal() -> None:
    with pytest.raises(NotCapturableError):
        capture_function(lambda self, x: DoubledBackward.apply(self.linear(x)))
    assert 0 <= random.random() < 1
    assert float(DoubledBackward.apply(torch.ones(()))) == 2


def test_a_refused_operation_is_named_with_the_users_line() -> None:
    with pytest.raises(UnsupportedOpError, match=r"aten\.linalg_svd.*test_capture_export\.py"):
        capture_function(lambda self, x: self.linear(x) + torch.linalg.svd(x)[1].sum())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.MSELoss(reduction="sum"), "reduction='sum'"),
        (lambda output, labels: (output - labels).abs(), "the loss must be a tensor with one number"),
    ],
)
def test_a_loss_that_is_no_mean_over_samples_is_refused(loss: Callable[..., Tensor], words: str) -> None:
    with pytest.raises(NotCapturableError, match=words):
        capture(nn.Linear(4, 4), loss, (torch.randn(8, 4),), (torch.randn(8, 4),))


def test_a_trainable_loss_is_refused() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, labels: Tensor) -> Tensor:
            return (output - labels).square().mean() * self.scale

    with pytest.raises(NotCapturableError, match="trainable parameter"):
        capture(nn.Linear(4, 4), Learned(), (torch.randn(8, 4),), (torch.randn(8, 4),))


def test_data_without_samples_or_of_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(NotCapturableError, match="no dimension"):
        capture(nn.Linear(4, 4), nn.MSELoss(), (torch.tensor(1.0),), ())
    with pytest.raises(NotCapturableError, match="complex64"):
        capture(nn.Linear(4, 4), nn.MSELoss(), (torch.zeros(8, 4, dtype=torch.complex64),), ())
    with pytest.raises(NotCapturableError, match="no inputs"):
        capture(nn.Linear(4, 4), nn.MSELoss(), (), ())


def test_recurrent_layers_are_captured_and_left_intact() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.out = nn.Embedding(VOCABULARY, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.lstm(self.embed(ids))[0][:, -1])

    torch.manual_seed(0)
    model, ids, labels = Reader(), torch.randint(0, VOCABULARY, (8, 6)), torch.randint(0, 3, (8,))
    captured = capture(model, nn.CrossEntropyLoss(), (ids,), (labels,))
    tensors = training_tensors(captured)
    loss = train_step(captured, [1], (ids[:3], labels[:3]), tensors, seed=0)
    expected = nn.CrossEntropyLoss()(model(ids[:3]), labels[:3])
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert torch.equal(tensors["lstm.weight_hh_l0"].grad, model.lstm.weight_hh_l0.grad)
