from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from stage_kit import LOSS, X
from torch.nn import Parameter

from roost.config import OPTIMIZERS
from roost.errors import CheckpointMismatchError, InvalidConfigError
from roost.pipeline.correction_factory import make_correction
from roost.pipeline.optimizer import StageOptimizer, check_optimizer
from roost.pipeline.stage_runner import StageRunner

FIRST_TWO = (0, 1)


def corrected(make, correction: str, **arguments):
    return dataclasses.replace(make.config(**arguments), correction=correction)


def cubic_runner(make, config) -> StageRunner:
    """A stage of one weight w = 1 with loss mean(w * w * x) / 2: its gradient is w * mean(x)."""
    program = make.program(
        body=lambda values, tensors, training: {LOSS: (tensors["w"].square() * values[X]).mean() / 2},
        tensors=make.records({"w": torch.ones(1)}),
        receives={-1: (X,)},
        is_last=True,
        loss_value=LOSS,
    )
    return StageRunner(program, {"w": torch.ones(1)}, config, 1.0)


def run_with_delay(make, runner: StageRunner, *, delay: int, count: int) -> list[float]:
    """Train on ones with `delay` updates between forward and update; return the weight after each update."""
    seen = []
    for number in range(delay):
        runner.forward(make.micro_batch(number), {X: torch.ones(1)}, None)
    for number in range(count):
        runner.forward(make.micro_batch(number + delay), {X: torch.ones(1)}, None)
        runner.backward(number, {})
        runner.update(number)
        seen.append(float(runner.state()["w"]))
    return seen


def test_rate_by_delay_divides_the_rate_by_the_measured_delay(make):
    seen = run_with_delay(make, cubic_runner(make, corrected(make, "rate_by_delay", lr=0.1)), delay=2, count=4)
    rates = [0.1, 0.1, 0.05, 0.05]  # the first micro-batches come before any update: delays 0, 1, 2, 2
    expected, weights = 1.0, [1.0, 1.0, 1.0]
    for number, rate in enumerate(rates):
        expected -= rate * weights[number]
        weights.append(expected)
    assert seen == pytest.approx(weights[3:])


def test_rate_warmup_ends_with_its_share_of_the_job(make):
    config = dataclasses.replace(corrected(make, "rate_warmup", lr=0.1), samples=320, batch_size=32)
    correction = make_correction(config)
    assert correction.rate_factor(4.0, 0) == 1 / 4
    assert correction.rate_factor(4.0, 1) == pytest.approx(4 ** -(1 - 1 / 2.5))
    assert correction.rate_factor(4.0, 3) == 1.0
    assert correction.rate_factor(0.0, 0) == 1.0


def test_a_scaled_rate_leaves_the_schedule_as_it_is(make):
    config = corrected(make, "rate_by_delay", lr=1.0, schedule="ExponentialLR", schedule_arguments=(("gamma", 0.5),))
    parameter = Parameter(torch.zeros(1))
    optimizer = StageOptimizer({"w": parameter}, config, 1.0)
    optimizer.step({"w": torch.ones(1)}, delay=4.0)
    assert (parameter.item(), optimizer.learning_rate) == (-0.25, 0.5)


def test_prediction_goes_forward_on_the_weights_expected_at_the_update(make):
    runner = cubic_runner(make, corrected(make, "prediction", lr=0.1))
    run_with_delay(make, runner, delay=2, count=3)
    before = float(runner.state()["w"])
    moved = float(runner._correction.state("w")["displacement"])
    runner.forward(make.micro_batch(9), {X: torch.ones(1)}, None)
    used = runner._in_flight[9].version.tensors["w"]
    assert used.item() == pytest.approx(before + 2 * moved)
    assert float(runner.state()["w"]) == before
    assert used.requires_grad


def test_micro_batches_between_two_updates_share_predicted_weights_and_averages_end_them(make):
    runner = cubic_runner(make, corrected(make, "prediction", lr=0.1))
    run_with_delay(make, runner, delay=1, count=2)
    for number in (7, 8):
        runner.forward(make.micro_batch(number), {X: torch.ones(1)}, None)
    first, second = (runner._in_flight[number].version.tensors["w"] for number in (7, 8))
    assert first is second
    snapshot = runner.snapshot(["w"])
    runner.apply_average({"w": snapshot["w"] + 1}, snapshot)
    runner.forward(make.micro_batch(9), {X: torch.ones(1)}, None)
    assert runner._in_flight[9].version.tensors["w"].item() == pytest.approx(first.item() + 1)


def test_predicted_versions_are_dropped_with_their_micro_batches(make):
    runner = cubic_runner(make, corrected(make, "prediction", lr=0.1))
    run_with_delay(make, runner, delay=3, count=10)
    assert runner.versions_alive <= 1 + runner.in_flight
    for number in range(10, 13):
        runner.backward(number, {})
        runner.update(number)
    assert runner.versions_alive == 1


def test_compensation_adds_the_diagonal_taylor_term(make):
    runner = cubic_runner(make, corrected(make, "compensation", lr=0.1))
    seen = run_with_delay(make, runner, delay=1, count=2)
    # The second gradient is 1 (at w = 1); w moved by -0.1; g * g over its own root mean square is 1.
    assert seen[1] == pytest.approx(0.9 - 0.1 * (1 + 2.0 * 1.0 * -0.1), rel=1e-5)


def test_compensation_is_the_same_for_a_batch_in_parts(make):
    runner = cubic_runner(make, corrected(make, "compensation", lr=0.1))
    runner.forward(make.micro_batch(0), {X: torch.ones(1)}, None)
    for position in FIRST_TWO:
        header = make.micro_batch(1 + position, batch=1, position=position, count=2, batch_samples=8)
        runner.forward(header, {X: torch.ones(1)}, None)
    runner.backward(0, {})
    runner.update(0)
    for number in (1, 2):
        runner.backward(number, {})
    runner.update(1)
    assert float(runner.state()["w"]) == pytest.approx(0.9 - 0.1 * (1 + 2.0 * 1.0 * -0.1), rel=1e-5)


@pytest.mark.parametrize("correction", ["rate_by_delay", "rate_warmup", "prediction", "compensation", "rate_warmup+prediction"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_without_delay_corrections_change_no_bit(make, correction, optimizer):
    plain = run_with_delay(make, cubic_runner(make, make.config(optimizer=optimizer, lr=0.1)), delay=0, count=6)
    assert run_with_delay(make, cubic_runner(make, corrected(make, correction, optimizer=optimizer, lr=0.1)), delay=0, count=6) == plain


@pytest.mark.parametrize(
    "correction", ["rate_by_delay", "rate_warmup", "nesterov", "prediction", "compensation", "rotation", "nesterov+rate_warmup+rotation"]
)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_every_correction_works_with_an_optimizer_the_same_twice_or_refuses_it(make, correction, optimizer):
    config = corrected(make, correction, optimizer=optimizer, lr=0.01)
    try:
        check_optimizer(config)
    except InvalidConfigError as error:
        assert optimizer in str(error)
        return
    runs = [run_with_delay(make, cubic_runner(make, config), delay=2, count=8) for _ in range(2)]
    assert runs[0] == runs[1]
    assert all(math.isfinite(weight) for weight in runs[0])


def test_nesterov_turns_adamw_into_nadam_with_a_slow_first_moment(make):
    config = corrected(make, "nesterov", optimizer="AdamW", lr=0.01, betas=(0.9, 0.95), weight_decay=0.2)
    found = make_correction(config).arguments(config.optimizer)
    assert found.name == "NAdam"
    assert found.as_dict() == {"lr": 0.01, "weight_decay": 0.2, "decoupled_weight_decay": True, "betas": (0.99, 0.95)}


def test_nesterov_keeps_the_sum_of_a_gradients_steps_of_sgd(make):
    seen = []
    for correction in ("none", "nesterov"):
        parameter = Parameter(torch.zeros(1))
        optimizer = StageOptimizer({"w": parameter}, corrected(make, correction, lr=0.1, momentum=0.9), 1.0)
        optimizer.step({"w": torch.ones(1)})
        for _ in range(3000):
            optimizer.step({"w": torch.zeros(1)})
        seen.append(parameter.item())
    assert seen[1] == pytest.approx(seen[0], rel=1e-3)


def test_nesterov_refuses_a_schedule_that_moves_the_momentum(make):
    arguments = (("max_lr", 0.02), ("total_steps", 25))
    config = corrected(make, "nesterov", optimizer="AdamW", lr=0.01, schedule="OneCycleLR", schedule_arguments=arguments)
    with pytest.raises(InvalidConfigError, match="cycle_momentum"):
        check_optimizer(config)


@pytest.mark.parametrize("correction", ["prediction", "compensation", "rotation", "nesterov+rotation"])
def test_a_resumed_stage_has_the_state_of_its_correction(make, correction):
    config = corrected(make, correction, optimizer="AdamW", lr=0.01)
    gradients = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(24)]

    def build() -> tuple[Parameter, StageOptimizer]:
        parameter = Parameter(torch.ones(3, 4))
        return parameter, StageOptimizer({"w": parameter}, config, 1.0)

    through, optimizer = build()
    for gradient in gradients[:11]:
        if optimizer.correction.compensates:
            optimizer.correction.compensated("w", gradient, gradient, 1.0)
        optimizer.step({"w": gradient.clone()})
    other, resumed = build()
    other.data.copy_(through.data)
    resumed.load_state({key: tensor.clone() for key, tensor in optimizer.state(["w"]).items()})
    assert resumed.state(["w"]).keys() == optimizer.state(["w"]).keys()
    for gradient in gradients[11:]:
        for stage in (optimizer, resumed):
            stage.step({"w": gradient.clone()})
    assert torch.equal(through, other)
    _, plain = build()
    with pytest.raises(CheckpointMismatchError):
        plain.load_state({"w/velocity": torch.ones(3, 4)})


def test_joined_corrections_multiply_their_rates(make):
    config = dataclasses.replace(corrected(make, "rate_by_delay+rate_warmup", lr=0.1), samples=320)
    assert make_correction(config).rate_factor(4.0, 0) == pytest.approx(1 / 16)


@pytest.mark.parametrize("name", ["fresh", "none+nesterov", "nesterov+nesterov", ""])
def test_a_correction_that_does_not_exist_is_refused(make, name):
    with pytest.raises(InvalidConfigError, match="correction"):
        corrected(make, name)


def test_clipping_equals_torch_for_a_whole_model(make):
    config = dataclasses.replace(make.config(lr=1.0), clip_norm=0.5)
    ours = [Parameter(torch.zeros(3)), Parameter(torch.zeros(2, 2))]
    theirs = [Parameter(torch.zeros(3)), Parameter(torch.zeros(2, 2))]
    gradients = [torch.tensor([1.0, -2.0, 3.0]), torch.tensor([[4.0, 0.5], [0.25, -1.0]])]
    optimizer = StageOptimizer({"a": ours[0], "b": ours[1]}, config, 1.0)
    optimizer.step({"a": gradients[0].clone(), "b": gradients[1].clone()})
    for parameter, gradient in zip(theirs, gradients, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    torch.optim.SGD(theirs, lr=1.0).step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_stage_clips_to_the_root_of_its_share_of_the_parameters(make):
    config = dataclasses.replace(make.config(lr=1.0), clip_norm=1.0)
    parameter = Parameter(torch.zeros(2))
    optimizer = StageOptimizer({"w": parameter}, config, 1.0, parameter_share=0.25)
    optimizer.step({"w": torch.tensor([3.0, 4.0])})
    assert float(parameter.detach().norm()) == pytest.approx(0.5, rel=1e-5)


def test_two_parameters_that_autograd_gives_one_gradient_are_clipped_once_each(make):
    config = dataclasses.replace(make.config(lr=1.0), clip_norm=1.0)
    tensors = {"a": torch.zeros(1), "b": torch.zeros(1)}
    program = make.program(
        body=lambda values, weights, training: {9: 3.0 * (weights["a"] + weights["b"]).sum()},
        tensors=make.records(tensors),
        is_last=True,
        loss_value=9,
        differentiable=frozenset({9}),
    )
    runner = StageRunner(program, tensors, config, 1.0)
    runner.forward(make.micro_batch(0), {}, None)
    runner.backward(0, {})
    runner.update(0)
    after = runner.state()
    assert after["a"].item() == after["b"].item() == pytest.approx(-math.sqrt(0.5), rel=1e-5)


def test_state_of_another_optimizer_is_refused_when_it_is_loaded(make):
    def stage(correction: str) -> StageOptimizer:
        return StageOptimizer({"w": Parameter(torch.ones(3))}, corrected(make, correction, optimizer="AdamW", lr=0.01), 1.0)

    plain = stage("none")
    plain.step({"w": torch.ones(3)})
    with pytest.raises(CheckpointMismatchError, match="mu_product"):
        stage("nesterov").load_state(plain.state(["w"]))
