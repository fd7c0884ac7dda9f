"""Stages that compute in bfloat16 train as one process under autocast does."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from captured_kit import build, data, every_cut, model, no_cut
from torch.nn import functional

from roost.pipeline.precision import can_compute, computing
from roost.pipeline.probe import measure

CPU = torch.device("cpu")
ROUNDING = 2**-8
"""Relative distance of neighbours in bfloat16."""


def mixed(make, **arguments):
    return dataclasses.replace(make.config(**arguments), precision="bf16")


def plain_loop(make, config, batches):
    whole = model()
    optimizer = getattr(torch.optim, config.optimizer.name)(whole.parameters(), **config.optimizer.as_dict())
    losses = []
    for number, (tokens, labels) in enumerate(batches):
        torch.manual_seed(make.micro_batch(number).seed)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(whole(tokens), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return whole, losses


@pytest.mark.parametrize("cuts", [no_cut, every_cut])
def test_captured_stages_follow_a_plain_loop_under_autocast(make, cuts):
    config, batches = mixed(make, optimizer="SGD", lr=0.1), data(12)
    pipeline = build(config, cuts)
    losses = []
    for number, inputs in enumerate(batches):
        header = make.micro_batch(number, samples=6)
        losses.append(pipeline.forward(header, inputs))
        pipeline.backward_and_update(header)
    whole, expected = plain_loop(make, config, batches)
    assert losses == pytest.approx(expected, rel=ROUNDING)
    state = pipeline.state()
    for name, tensor in whole.named_parameters():
        assert state[name].dtype is torch.float32
        assert (state[name] - tensor).norm() <= ROUNDING * tensor.norm(), name
    whole.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        evaluated = functional.cross_entropy(whole(batches[0][0]), batches[0][1]).item()
    assert pipeline.evaluate(make.micro_batch(99, samples=6), batches[0]).loss == pytest.approx(evaluated, rel=ROUNDING)


def test_values_and_gradients_cross_in_bfloat16_and_parameters_get_float32_gradients(make):
    pipeline = build(mixed(make, lr=0.1), every_cut)
    header, (tokens, labels) = make.micro_batch(0, samples=6), data(1)[0]
    crossing, back = [], []
    first = pipeline.runners[0]
    run, differentiate = first.forward, first.backward

    def forward(*given):
        result = run(*given)
        crossing.extend(result.outputs.values())
        return result

    for runner in pipeline.runners[1:]:

        def backward(number, gradients, runner=runner, differentiate=runner.backward):
            result = differentiate(number, gradients)
            back.extend(gradient.dtype for part in result.values() for gradient in part.values())
            assert all(tensor.dtype is torch.float32 for tensor in runner._batches[0].sums.values())
            return result

        runner.backward = backward
    first.forward, first.backward = forward, differentiate
    pipeline.forward(header, (tokens, labels))
    pipeline.backward_and_update(header)
    assert torch.bfloat16 in back
    assert {tensor.dtype for tensor in crossing if tensor.is_floating_point()} <= {torch.bfloat16, torch.float32}


def test_a_cpu_computes_in_both_precisions_and_a_device_without_autocast_in_one():
    assert can_compute("float32", CPU)
    assert can_compute("bf16", CPU)
    assert can_compute("float32", torch.device("meta"))
    assert not can_compute("bf16", torch.device("meta"))


def test_products_are_in_bfloat16_inside_the_context_and_as_they_were_outside():
    matrix = torch.ones(3, 3)
    with computing("bf16", CPU):
        assert (matrix @ matrix).dtype is torch.bfloat16
    with computing("float32", CPU):
        assert (matrix @ matrix).dtype is torch.float32
    assert (matrix @ matrix).dtype is torch.float32


def test_the_speed_in_bfloat16_is_measured_like_that_in_float32():
    speed = measure(threads=1, budget_s=0.0, precision="bf16")
    assert min(speed.matmul_flop_per_s, speed.convolution_flop_per_s) <= speed.flop_per_s
    assert speed.flop_per_s > 0
