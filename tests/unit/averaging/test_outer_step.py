from __future__ import annotations

import pytest
import torch

from roost.averaging.outer_step import OuterStep


@pytest.mark.parametrize(("learning_rate", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.3, 0.5)])
def test_it_steps_as_nesterov_sgd_does_on_the_negative_difference(learning_rate: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(40, generator=generator)
    parameter = torch.nn.Parameter(start.clone())
    reference = torch.optim.SGD([parameter], lr=learning_rate, momentum=momentum, nesterov=momentum > 0)
    step, base = OuterStep(learning_rate=learning_rate, momentum=momentum), start.clone()
    for _ in range(5):
        difference = torch.randn(40, generator=generator)
        step.apply(base, difference, [slice(0, 40)])
        parameter.grad = -difference
        reference.step()
        torch.testing.assert_close(base, parameter.detach())


def test_what_is_no_parameter_takes_the_average() -> None:
    step, base = OuterStep(learning_rate=0.5, momentum=0.9), torch.zeros(6)
    step.apply(base, torch.ones(6), [slice(1, 2), slice(3, 5)])
    assert base.tolist() == [1.0, pytest.approx(0.95), 1.0, pytest.approx(0.95), pytest.approx(0.95), 1.0]


def test_after_a_reset_there_is_no_momentum() -> None:
    step, base = OuterStep(learning_rate=1.0, momentum=0.9), torch.zeros(3)
    step.apply(base, torch.ones(3), [slice(0, 3)])
    step.reset()
    before = base.clone()
    step.apply(base, torch.zeros(3), [slice(0, 3)])
    assert torch.equal(base, before)


def test_large_segments_give_the_same_as_small_ones() -> None:
    size = (1 << 20) + 7
    difference = torch.randn(size, generator=torch.Generator().manual_seed(2))
    whole, part = torch.zeros(size), torch.zeros(9)
    step, small = OuterStep(learning_rate=0.7, momentum=0.9), OuterStep(learning_rate=0.7, momentum=0.9)
    for _ in range(2):
        step.apply(whole, difference, [slice(0, size)])
        small.apply(part, difference[-9:], [slice(0, 9)])
    assert torch.equal(whole[-9:], part)
