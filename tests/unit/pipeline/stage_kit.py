"""Small models as one stage or two, for the tests of stage runners."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from roost.pipeline.stage_runner import StageRunner

X, Y, HIDDEN, LOSS, METRIC = 0, 1, 2, 3, 4


SPLIT = ("0.weight", "0.bias")


def mlp(dropout: float = 0.3) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3), nn.Dropout(dropout / 2))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def first_half(values, tensors, training):
    hidden = functional.linear(values[X], tensors["0.weight"], tensors["0.bias"]).relu()
    return {HIDDEN: functional.dropout(hidden, 0.3, training), Y: values[Y]}


def second_half(values, tensors, training):
    out = functional.linear(values[HIDDEN], tensors["3.weight"], tensors["3.bias"])
    out = functional.dropout(out, 0.15, training)
    return {LOSS: functional.cross_entropy(out, values[Y]), METRIC: (out.argmax(1) == values[Y]).float().mean()}


def whole(values, tensors, training):
    return second_half({**values, **first_half(values, tensors, training)}, tensors, training)


def whole_runner(make, model, config, **options) -> StageRunner:
    program = make.program(
        body=whole,
        tensors=make.records(weights(model)),
        receives={-1: (X, Y)},
        draws_random=True,
        is_last=True,
        loss_value=LOSS,
        metric_value=METRIC,
    )
    return StageRunner(program, weights(model), config, options.pop("share", 1.0), **options)


def two_stages(make, model, config) -> tuple[StageRunner, StageRunner]:
    state = weights(model)
    front = {name: state[name] for name in SPLIT}
    back = {name: state[name] for name in state if name not in SPLIT}
    first = make.program(
        body=first_half,
        tensors=make.records(front),
        receives={-1: (X, Y)},
        sends={1: (HIDDEN, Y)},
        differentiable=frozenset({HIDDEN, LOSS}),
        draws_random=True,
    )
    last = make.program(
        body=second_half,
        index=1,
        tensors=make.records(back),
        receives={0: (HIDDEN, Y)},
        differentiable=frozenset({HIDDEN, LOSS}),
        draws_random=True,
        is_last=True,
        loss_value=LOSS,
        metric_value=METRIC,
    )
    return StageRunner(first, front, config, 1.0, carries_rng=True), StageRunner(last, back, config, 1.0)


def batches(count: int, samples: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)) for _ in range(count)]
