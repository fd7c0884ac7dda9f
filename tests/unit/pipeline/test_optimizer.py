from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import Parameter

from roost.config import OPTIMIZERS
from roost.errors import CheckpointMismatchError, InvalidConfigError
from roost.pipeline.optimizer import StageOptimizer, check_optimizer


def build(config, share: float = 1.0) -> tuple[Parameter, StageOptimizer]:
    parameter = Parameter(torch.ones(3))
    return parameter, StageOptimizer({"layer.weight": parameter}, config, share)


def step(optimizer: StageOptimizer, times: int = 1) -> None:
    for _ in range(times):
        optimizer.step({"layer.weight": torch.ones(3)})


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_saves_and_resumes_bit_for_bit(make, name):
    config = make.config(optimizer=name, lr=0.01)
    check_optimizer(config)
    through, optimizer = build(config)
    step(optimizer, 3)
    other, resumed = build(config)
    other.data.copy_(through.data)
    state = {key: tensor.clone() for key, tensor in optimizer.state(["layer.weight", "unknown"]).items()}
    resumed.load_state(state)
    step(optimizer, 2)
    step(resumed, 2)
    assert torch.equal(through, other)


def test_the_schedule_counts_data_of_all_clusters(make):
    config = make.config(lr=1.0, schedule="ExponentialLR", schedule_arguments=(("gamma", 0.5),))
    _, optimizer = build(config, share=1 / 3)
    step(optimizer, 2)
    assert (optimizer.updates, optimizer.schedule_steps, optimizer.learning_rate) == (2, 6, 0.5**6)


def test_the_schedule_steps_floor_of_updates_over_share(make):
    config = make.config(lr=1.0, schedule="ExponentialLR", schedule_arguments=(("gamma", 0.5),))
    _, optimizer = build(config, share=0.4)
    steps = []
    for _ in range(4):
        step(optimizer)
        steps.append(optimizer.schedule_steps)
    assert steps == [2, 5, 7, 10]


def test_a_resumed_schedule_goes_on_where_it_was_without_warnings(make):
    arguments = {"lr": 1.0, "schedule": "MultiStepLR", "schedule_arguments": (("milestones", (2.0, 5.0)), ("gamma", 0.1))}
    _, through = build(make.config(**arguments))
    step(through, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, resumed = build(make.config(**arguments, start_updates=4))
        step(resumed, 2)
    assert resumed.schedule_steps == 6
    assert resumed.learning_rate == through.learning_rate == pytest.approx(0.01)


def test_a_one_cycle_schedule_holds_its_last_rate_when_a_cluster_is_faster_than_its_share(make):
    config = make.config(lr=1.0, schedule="OneCycleLR", schedule_arguments=(("max_lr", 1.0), ("total_steps", 4), ("cycle_momentum", False)))
    _, optimizer = build(config)
    step(optimizer, 9)
    assert (optimizer.updates, optimizer.schedule_steps) == (9, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "SGD", "lr": -1.0}, "Invalid learning rate"),
        ({"optimizer": "SGD", "learning_rate": 1.0}, "unexpected keyword argument"),
        ({"optimizer": "AdamW", "betas": 0.9}, "AdamW"),
        ({"schedule": "StepLR"}, "step_size"),
        ({"schedule": "StepLR", "schedule_arguments": (("step_size", 0),)}, "StepLR"),
        ({"optimizer": "Adagrad", "schedule": "OneCycleLR", "schedule_arguments": (("max_lr", 1.0), ("total_steps", 5))}, "momentum"),
        ({"optimizer": "Adam", "lr": 0.1, "differentiable": True}, "differentiable"),
    ],
)
def test_arguments_that_torch_refuses_are_reported_with_its_message(make, options, message):
    with pytest.raises(InvalidConfigError, match=message):
        check_optimizer(make.config(**options))


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_no_fraction_is_refused(make, share):
    with pytest.raises(InvalidConfigError, match="share"):
        build(make.config(), share)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"other/exp_avg": torch.ones(3)}, "other/exp_avg"),
        ({"layer.weight/momentum_buffer": torch.ones(3)}, "not of AdamW"),
        ({"layer.weight/exp_avg": torch.ones(4)}, "shape"),
    ],
)
def test_state_of_another_model_or_optimizer_is_refused(make, state, message):
    _, optimizer = build(make.config(optimizer="AdamW", lr=0.1))
    with pytest.raises(CheckpointMismatchError, match=message):
        optimizer.load_state(state)
