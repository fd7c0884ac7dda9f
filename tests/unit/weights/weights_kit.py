"""Builds the same model twice, eagerly and deferred, and compares every tensor bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

import roost
from roost.weights.source import TensorSource, source_of


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def deferred(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with roost.deferred_init():
        return make()


def source(model: nn.Module) -> TensorSource:
    return source_of(model, tensors_of(model))


def assert_same_bits(make: Callable[[], nn.Module], *, seed: int = 0, order: int = 0) -> None:
    """Compare, asking for one tensor after the other in an order of its own."""
    torch.manual_seed(seed)
    wanted = tensors_of(make())
    model = deferred(make, seed)
    held = tensors_of(model)
    assert list(held) == list(wanted)
    for name, buffer in model.named_buffers():
        assert buffer.device.type == "cpu" and torch.equal(buffer, wanted[name]), name
    found = source(model)
    names = list(wanted)
    random.Random(order).shuffle(names)
    for name in names:
        made = found.read([name])[name]
        assert made.dtype is wanted[name].dtype, name
        assert torch.equal(made, wanted[name].detach()), name
