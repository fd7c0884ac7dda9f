from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import Parameter

from roost.pipeline.optimizer import StageOptimizer
from roost.pipeline.rotation import REFRESH_INTERVAL


def rotated(make, shape: tuple[int, ...], *, lr: float = 0.01, start: torch.Tensor | None = None) -> tuple[Parameter, StageOptimizer]:
    parameter = Parameter(torch.zeros(shape) if start is None else start.clone())
    config = dataclasses.replace(make.config(optimizer="AdamW", lr=lr), correction="rotation")
    return parameter, StageOptimizer({"w": parameter}, config, 1.0)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (2, 3, 5), (4, 2, 3, 3)])
def test_training_does_not_depend_on_how_the_smaller_side_is_turned(make, shape):
    torch.manual_seed(1)
    matrix_shape = shape if len(shape) in (2, 3) else (shape[0], 18)
    left = matrix_shape[-2] <= matrix_shape[-1]
    turn = torch.linalg.qr(torch.randn(min(matrix_shape[-2:]), min(matrix_shape[-2:]))).Q
    plain, optimizer = rotated(make, shape)
    turned, other = rotated(make, shape)
    for _ in range(2 * REFRESH_INTERVAL + 3):
        gradient = torch.randn(matrix_shape) * torch.linspace(0.2, 2.0, matrix_shape[-1])
        optimizer.step({"w": gradient.reshape(shape)})
        other.step({"w": (turn @ gradient if left else gradient @ turn.mT).reshape(shape)})
    found, expected = turned.detach().reshape(matrix_shape), plain.detach().reshape(matrix_shape)
    assert torch.allclose(found, turn @ expected if left else expected @ turn.mT, atol=2e-3)


def test_the_basis_stays_orthogonal_and_no_larger_than_twice_the_parameter(make):
    torch.manual_seed(2)
    parameter, optimizer = rotated(make, (6, 9))
    for _ in range(5 * REFRESH_INTERVAL):
        optimizer.step({"w": torch.randn(6, 9)})
    state = optimizer.state(["w"])
    basis = state["w/basis"]
    assert torch.allclose(basis @ basis.mT, torch.eye(6), atol=1e-5)
    assert basis.numel() + state["w/covariance"].numel() <= 2 * parameter.numel()


def test_an_update_without_gradient_turns_weights_back_without_rounding(make):
    torch.manual_seed(3)
    start = torch.randn(4, 4)
    parameter, optimizer = rotated(make, (4, 4), lr=0.0, start=start)
    for _ in range(2 * REFRESH_INTERVAL):
        optimizer.step({"w": torch.randn(4, 4)})
    assert torch.equal(parameter.detach(), start)


def test_vectors_and_single_rows_are_left_to_the_optimizer(make):
    parameter, optimizer = rotated(make, (1, 6))
    optimizer.step({"w": torch.ones(1, 6)})
    plain = Parameter(torch.zeros(1, 6))
    plain.grad = torch.ones(1, 6)
    torch.optim.AdamW([plain], lr=0.01).step()
    assert torch.equal(parameter, plain)
    assert "w/basis" not in optimizer.state(["w"])
