"""What torch.export would get silently wrong is refused, with the line that does it; what only looks like that works."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable
from random import randint

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.random import rand
from torch import Tensor, nn

from roost.capture.check import check_against_eager
from roost.capture.export import Captured, capture
from roost.errors import CaptureError, CaptureMismatchError, NotCapturableError, UnsupportedOpError

HERE = "test_silent_traps.py:"


class Trapped(nn.Module):
    """A linear layer, and a forward that the test gives."""

    def __init__(self, function: Callable[[Trapped, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.embedding = nn.Embedding(10, 4)
        self.register_buffer("average", torch.zeros(4))
        self.generator = torch.Generator()
        self.numpy_generator = np.random.default_rng(0)
        self.calls = 0
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 3


def case(function: Callable[[Trapped, Tensor], Tensor]) -> tuple[Trapped, Tensor, Tensor]:
    torch.manual_seed(0)
    return Trapped(function), torch.randn(8, 4), torch.randn(8, 4)


def captured(function: Callable[[Trapped, Tensor], Tensor]) -> Captured:
    model, x, y = case(function)
    return capture(model, nn.MSELoss(), (x,), (y,))


def custom_function(self: Trapped, x: Tensor) -> Tensor:
    return Tripled.apply(self.linear(x))


def reentrant_checkpoint(self: Trapped, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=True)


def python_random(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) * random.random()


def python_random_by_name(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) * randint(1, 5)


def numpy_random(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) * np.random.rand()


def numpy_random_by_name(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) + torch.from_numpy(rand(4)).float()


def fresh_numpy_generator(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) * np.random.default_rng().random()


def own_generator(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) * torch.rand(4, generator=self.generator)


def seeded_inside(self: Trapped, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(self.linear(x), 0.5)


def autocast(self: Trapped, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.linear(x).float()


def autocast_inside_disabled(self: Trapped, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = self.linear(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(y).float()


def condition(self: Trapped, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (self.linear(x),))


def parameter_in_place(self: Trapped, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.linear.weight.clamp_min_(0)
    return self.linear(x)


def parameter_data_in_place(self: Trapped, x: Tensor) -> Tensor:
    self.linear.weight.data.mul_(0.9)
    return self.linear(x)


def data_replaced(self: Trapped, x: Tensor) -> Tensor:
    h = self.linear(x)
    h.data = h.data * 2
    return h


def number_taken_out(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) * x.max().item()


def decision_by_value(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) if bool(x.sum() > 0) else x


def decision_by_samples(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) if x.shape[0] > 4 else self.linear(x) * 2


def samples_written_down(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x).view(8, 4)


def size_by_value(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) + (x[:, 0] > 0).nonzero().sum()


def boolean_index(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) + self.linear(x[x[:, 0] > 0]).sum()


def unlisted_operation(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) + torch.linalg.svd(x)[1].sum()


def sparse_matrix(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) + torch.sparse.mm(torch.eye(4).to_sparse(), x.T).T


def sparse_gradient(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) + F.embedding(x.abs().long().clamp(0, 9)[:, 0], self.embedding.weight, sparse=True)


def complex_numbers(self: Trapped, x: Tensor) -> Tensor:
    return torch.fft.fft(self.linear(x)).abs()


def gradient_hook(self: Trapped, x: Tensor) -> Tensor:
    h = self.linear(x)
    h.register_hook(lambda gradient: gradient * 3)
    return h


def gradient_inside(self: Trapped, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = self.linear(x)
    return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def inference_mode(self: Trapped, x: Tensor) -> Tensor:
    with torch.inference_mode():
        mean = self.linear(x).mean(0)
    return self.linear(x) - mean


def buffer_assigned(self: Trapped, x: Tensor) -> Tensor:
    self.average = self.average * 0.9 + x.mean(0) * 0.1
    return self.linear(x) + self.average


REFUSED = {
    custom_function: "custom autograd function Tripled",
    reentrant_checkpoint: "custom autograd function CheckpointFunction",
    python_random: "random.random would become a constant",
    python_random_by_name: "draws from random, which would become a constant",
    numpy_random: "numpy.random.rand would become a constant",
    numpy_random_by_name: "draws from numpy.random, which would become a constant",
    fresh_numpy_generator: "numpy.random.default_rng would become a constant",
    own_generator: "uses a Generator",
    seeded_inside: "seeds the generator",
    autocast: "enables autocast",
    autocast_inside_disabled: "enables autocast",
    condition: "",
    parameter_in_place: "parameter 'linear.weight' in place",
    parameter_data_in_place: "uses .data",
    data_replaced: "uses .data",
    number_taken_out: "depends on the values of the data",
    decision_by_value: "decides by the values of a tensor",
    decision_by_samples: "decides by the batch size",
    samples_written_down: "batch size 8 of data input 0",
    size_by_value: "depends on the values of the data",
    boolean_index: "depends on the values of the data",
    sparse_matrix: "",
    sparse_gradient: "sparse gradient",
    gradient_hook: "gradient hook",
    gradient_inside: "computes gradients",
    inference_mode: "inference_mode would be lost",
    buffer_assigned: "buffer 'average' is assigned anew",
}


@pytest.mark.parametrize("function", REFUSED)
def test_a_silent_trap_is_refused_with_the_users_line(function: Callable[[Trapped, Tensor], Tensor]) -> None:
    with pytest.raises(NotCapturableError) as caught:
        captured(function)
    first, last = function.__code__.co_firstlineno, max(line for _, _, line in function.__code__.co_lines() if line)
    assert REFUSED[function] in caught.value.message
    place = caught.value.message.partition(HERE)[2]
    assert place, caught.value.message
    assert first < int(place.split(":")[0]) <= last


@pytest.mark.parametrize("function", [unlisted_operation, complex_numbers])
def test_an_operation_that_nodes_do_not_run_is_refused_with_the_users_line(function: Callable[[Trapped, Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedOpError, match=HERE):
        captured(function)


def test_a_hook_on_a_parameter_is_refused_by_its_name() -> None:
    model, x, y = case(lambda self, x: self.linear(x))
    model.linear.bias.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(NotCapturableError, match=r"'linear\.bias' has a hook"):
        capture(model, nn.MSELoss(), (x,), (y,))


def test_a_sparse_parameter_is_refused() -> None:
    model, x, y = case(lambda self, x: self.linear(x))
    model.weights = nn.Parameter(torch.eye(4).to_sparse())
    with pytest.raises(CaptureError, match="sparse"):
        capture(model, nn.MSELoss(), (x,), (y,))


def by_the_clock(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) * (time.perf_counter() % 1)


def by_the_date(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) * (1 + datetime.datetime.now().microsecond)


def kept_numpy_generator(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) * self.numpy_generator.random()


def counted_calls(self: Trapped, x: Tensor) -> Tensor:
    self.calls += 1
    return self.linear(x) * self.calls


@pytest.mark.parametrize("function", [by_the_clock, by_the_date, kept_numpy_generator, counted_calls])
def test_what_is_another_in_each_call_is_found_by_the_check_with_the_users_line(function: Callable[[Trapped, Tensor], Tensor]) -> None:
    model, x, y = case(function)
    graph = capture(model, nn.MSELoss(), (x,), (y,))
    with pytest.raises(CaptureMismatchError) as caught:
        check_against_eager(model, nn.MSELoss(), graph, (x,), (y,), seed=1)
    assert int(caught.value.hint.partition(HERE)[2].split(":")[0]) > function.__code__.co_firstlineno


def enabled_inside_no_grad(self: Trapped, x: Tensor) -> Tensor:
    with torch.no_grad():
        a = self.linear(x)
        with torch.enable_grad():
            b = self.linear(a)
    return a + b + self.linear(x)


def changed_inside_no_grad(self: Trapped, x: Tensor) -> Tensor:
    h = self.linear(x)
    with torch.no_grad():
        h.clamp_(min=0)
    return h * 2


def column_changed_inside_no_grad(self: Trapped, x: Tensor) -> Tensor:
    h = self.linear(x) * 1
    with torch.no_grad():
        h[:, 0].zero_()
    return h * self.embedding.weight[0]


def handed_through_no_grad(self: Trapped, x: Tensor) -> Tensor:
    h = self.linear(x)
    with torch.no_grad():
        mean, same = h.mean(0), h
    return same - mean


def no_grad_as_decorator(self: Trapped, x: Tensor) -> Tensor:
    @torch.no_grad()
    def mean(h: Tensor) -> Tensor:
        return h.mean(0)

    return self.linear(x) - mean(self.linear(x))


def disabled_autocast(self: Trapped, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return self.linear(x.float())


def buffer_in_place(self: Trapped, x: Tensor) -> Tensor:
    if self.training:
        with torch.no_grad():
            self.average.copy_(self.average * 0.9 + x.mean(0) * 0.1)
    return self.linear(x) + self.average


def kept_for_later(self: Trapped, x: Tensor) -> Tensor:
    self.seen = self.linear(x)
    return self.seen


def empty_then_filled(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x) + torch.empty(4).fill_(1.0)


def shuffled(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x)[torch.randperm(x.shape[0])]


def noise_of_gumbel(self: Trapped, x: Tensor) -> Tensor:
    return F.gumbel_softmax(self.linear(x), tau=0.5)


def dtype_of_another(self: Trapped, x: Tensor) -> Tensor:
    return self.linear(x.double().type_as(x)) + self.linear(x).to(self.average)


def checked_sizes(self: Trapped, x: Tensor) -> Tensor:
    torch._check(x.shape[0] * 2 >= 2)
    return self.linear(x)


@pytest.mark.parametrize(
    "function",
    [
        enabled_inside_no_grad,
        changed_inside_no_grad,
        column_changed_inside_no_grad,
        handed_through_no_grad,
        no_grad_as_decorator,
        disabled_autocast,
        buffer_in_place,
        kept_for_later,
        empty_then_filled,
        shuffled,
        noise_of_gumbel,
        dtype_of_another,
        checked_sizes,
    ],
)
def test_what_only_looks_like_a_trap_trains_as_in_eager(function: Callable[[Trapped, Tensor], Tensor]) -> None:
    model, x, y = case(function)
    graph = capture(model, nn.MSELoss(), (x,), (y,))
    report = check_against_eager(model, nn.MSELoss(), graph, (x,), (y,), seed=1)
    assert report.same_loss and report.max_relative_gradient_error == 0


def test_capture_leaves_no_empty_tensors_in_plain_attributes() -> None:
    model, x, y = case(kept_for_later)
    capture(model, nn.MSELoss(), (x,), (y,))
    assert not hasattr(model, "seen")


def test_all_guards_are_gone_after_a_capture_and_after_a_refusal() -> None:
    captured(disabled_autocast)
    with pytest.raises(NotCapturableError):
        captured(gradient_hook)
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda gradient: gradient * 2)
    Tripled.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [6.0, 6.0, 6.0]
    assert 0 <= random.random() < 1 and 0 <= np.random.rand() < 1
    assert "data" not in vars(Tensor)
    model, _, _ = case(disabled_autocast)
    model.average = torch.ones(4)
    with torch.inference_mode():
        assert torch.autograd.grad is not None
