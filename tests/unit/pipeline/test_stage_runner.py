from __future__ import annotations

import pytest
import torch
from stage_kit import HIDDEN, LOSS, X, Y, batches, mlp, two_stages, weights, whole, whole_runner
from torch.nn import functional

from roost.errors import NonFiniteLossError, ProtocolError, StageFailedError
from roost.pipeline.stage_runner import StageRunner, add_gradients


def plain_loop(model, config, data, make) -> list[float]:
    """The same training as anybody would write it."""
    optimizer = getattr(torch.optim, config.optimizer.name)(model.parameters(), **config.optimizer.as_dict())
    schedule = None
    if config.schedule is not None:
        schedule = getattr(torch.optim.lr_scheduler, config.schedule.name)(optimizer, **config.schedule.as_dict())
    losses = []
    for number, (x, y) in enumerate(data):
        torch.manual_seed(make.micro_batch(number).seed)
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


CONFIGS = [
    {"optimizer": "AdamW", "lr": 0.01, "schedule": "CosineAnnealingLR", "schedule_arguments": (("T_max", 12),)},
    {"optimizer": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
    {"optimizer": "NAdam", "lr": 0.01, "betas": (0.9, 0.99)},
    {"optimizer": "AdamW", "lr": 0.01, "schedule": "OneCycleLR", "schedule_arguments": (("max_lr", 0.02), ("total_steps", 25))},
]


@pytest.mark.parametrize("options", CONFIGS)
def test_one_stage_trains_like_a_plain_loop_bit_for_bit(make, options):
    config, data, model = make.config(**options), batches(25), mlp()
    runner = whole_runner(make, mlp(), config)
    losses = []
    for number, (x, y) in enumerate(data):
        losses.append(runner.forward(make.micro_batch(number), {X: x, Y: y}, None).loss)
        runner.backward(number, {})
        runner.update(number)
    assert losses == plain_loop(model, config, data, make)
    for name, tensor in weights(model).items():
        assert torch.equal(runner.state()[name], tensor), name
    assert runner.versions_alive == 1
    assert (runner.updates, runner.samples, runner.schedule_steps) == (25, 100, 25)


@pytest.mark.parametrize("options", CONFIGS)
def test_two_stages_with_one_micro_batch_in_flight_train_like_a_plain_loop_bit_for_bit(make, options):
    config, data, model = make.config(**options), batches(25), mlp()
    first, last = two_stages(make, mlp(), config)
    for number, (x, y) in enumerate(data):
        sent = first.forward(make.micro_batch(number), {X: x, Y: y}, None)
        last.forward(make.micro_batch(number), sent.outputs, sent.rng_state)
        back = last.backward(number, {})
        last.update(number)
        assert first.backward(number, add_gradients({1: back[0]})) == {}
        first.update(number)
    plain_loop(model, config, data, make)
    for name, tensor in weights(model).items():
        assert torch.equal({**first.state(), **last.state()}[name], tensor), name


def test_unequal_micro_batches_accumulate_to_the_gradient_of_the_batch(make):
    (x, y) = batches(1, samples=10)[0]
    model = mlp(dropout=0.0)
    runner = whole_runner(make, model, make.config(lr=1.0))
    program_without_dropout(runner)
    for number, rows in enumerate((slice(0, 7), slice(7, 10))):
        samples = rows.stop - rows.start
        header = make.micro_batch(number, batch=0, position=number, count=2, samples=samples, batch_samples=10)
        runner.forward(header, {X: x[rows], Y: y[rows]}, None)
        runner.backward(number, {})
    runner.update(0)
    functional.cross_entropy(model(x), y).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(runner.state()[name], parameter.detach() - parameter.grad, atol=1e-6), name
    assert runner.samples == 10


def program_without_dropout(runner: StageRunner) -> None:
    runner._program.body = lambda values, tensors, training: whole(values, tensors, False)


def test_a_tied_weight_that_is_sent_gets_the_gradients_of_both_uses(make):
    table = torch.randn(5, 4)

    def embed(values, tensors, training):
        return {HIDDEN: functional.embedding(values[X], tensors["table"]), 9: tensors["table"]}

    def project(values, tensors, training):
        return {LOSS: functional.cross_entropy(values[HIDDEN] @ values[9].T, values[Y])}

    first = StageRunner(
        make.program(
            body=embed,
            tensors=make.records({"table": table}),
            receives={-1: (X,)},
            sends={1: (HIDDEN, 9)},
            differentiable=frozenset({HIDDEN, 9}),
        ),
        {"table": table.clone()},
        make.config(lr=1.0),
        1.0,
    )
    last = StageRunner(
        make.program(
            body=project, index=1, receives={0: (HIDDEN, 9), -1: (Y,)}, differentiable=frozenset({HIDDEN, 9}), is_last=True, loss_value=LOSS
        ),
        {},
        make.config(),
        1.0,
    )
    x, y = torch.tensor([1, 2, 1]), torch.tensor([0, 4, 2])
    sent = first.forward(make.micro_batch(0), {X: x}, None)
    last.forward(make.micro_batch(0), {**sent.outputs, Y: y}, None)
    back = last.backward(0, {})
    last.update(0)
    first.backward(0, back[0])
    first.update(0)
    leaf = table.clone().requires_grad_()
    functional.cross_entropy(functional.embedding(x, leaf) @ leaf.T, y).backward()
    assert torch.equal(first.state()["table"], table - leaf.grad)
    assert sorted(back) == [0]


def test_a_value_sent_to_several_stages_gets_the_sum_of_their_gradients():
    ones = torch.ones(2)
    total = add_gradients({1: {5: ones, 6: ones * 4}, 3: {5: ones * 2}, 2: {}})
    assert torch.equal(total[5], ones * 3)
    assert torch.equal(total[6], ones * 4)
    assert torch.equal(ones, torch.ones(2))


def test_a_stage_without_trainable_parameters_passes_gradients_through(make):
    frozen = {"w": torch.randn(4, 4)}
    program = make.program(
        body=lambda values, tensors, training: {HIDDEN: values[X] @ tensors["w"], Y: values[Y]},
        index=1,
        tensors=make.records(frozen, frozen=("w",)),
        receives={0: (X, Y)},
        sends={2: (HIDDEN, Y)},
        differentiable=frozenset({X, HIDDEN}),
    )
    runner = StageRunner(program, dict(frozen), make.config(), 1.0)
    gradient = torch.randn(4, 4)
    runner.forward(make.micro_batch(0), {X: torch.randn(4, 4), Y: torch.zeros(4, dtype=torch.int64)}, None)
    back = runner.backward(0, {HIDDEN: gradient})
    runner.update(0)
    assert list(back[0]) == [X]
    assert torch.equal(back[0][X], gradient @ frozen["w"].T)
    assert runner.updates == 1
    assert runner.optimizer_state(["w"]) == {}
    assert torch.equal(runner.state()["w"], frozen["w"])


def test_frozen_and_unused_parameters_stay_as_they_are(make):
    state = {"used": torch.ones(3), "unused": torch.ones(3), "frozen": torch.ones(3)}
    program = make.program(
        body=lambda values, tensors, training: {LOSS: (values[X] * tensors["used"] * tensors["frozen"]).sum()},
        tensors=make.records(state, frozen=("frozen",)),
        receives={-1: (X,)},
        is_last=True,
        loss_value=LOSS,
    )
    runner = StageRunner(program, state, make.config(optimizer="AdamW", lr=0.1, weight_decay=0.5), 1.0)
    runner.forward(make.micro_batch(0), {X: torch.ones(3)}, None)
    runner.backward(0, {})
    runner.update(0)
    assert torch.equal(runner.state()["unused"], torch.ones(3))
    assert torch.equal(runner.state()["frozen"], torch.ones(3))
    assert not torch.equal(runner.state()["used"], torch.ones(3))


def test_dropout_leaves_the_processs_own_random_numbers_alone(make):
    runner = whole_runner(make, mlp(), make.config())
    (x, y) = batches(1)[0]
    state = torch.get_rng_state()
    runner.forward(make.micro_batch(0), {X: x, Y: y}, None)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_stage_that_draws_nothing_passes_the_generators_state_on(make):
    def runner(index: int) -> StageRunner:
        program = make.program(body=lambda values, tensors, training: {HIDDEN: values[X]}, index=index, sends={index + 1: (HIDDEN,)})
        return StageRunner(program, {}, make.config(), 1.0, carries_rng=True)

    header = make.micro_batch(0)
    state = runner(0).forward(header, {X: torch.ones(1)}, None).rng_state
    torch.manual_seed(header.seed)
    assert torch.equal(state, torch.get_rng_state())
    assert runner(1).forward(header, {X: torch.ones(1)}, state).rng_state is state


def test_no_state_is_returned_when_no_later_stage_draws(make):
    runner = whole_runner(make, mlp(), make.config())
    (x, y) = batches(1)[0]
    assert runner.forward(make.micro_batch(0), {X: x, Y: y}, None).rng_state is None


def test_evaluation_uses_current_weights_without_dropout_and_keeps_nothing(make):
    model = mlp()
    first, last = two_stages(make, model, make.config())
    (x, y) = batches(1)[0]
    sent = first.evaluate(make.micro_batch(0), {X: x, Y: y})
    result = last.evaluate(make.micro_batch(0), sent.outputs)
    out = model.eval()(x)
    assert result.loss == functional.cross_entropy(out, y).item()
    assert result.metric == (out.argmax(1) == y).float().mean().item()
    assert (sent.loss, sent.metric, first.in_flight) == (None, None, 0)


def test_evaluation_copies_a_weight_that_is_sent(make):
    program = make.program(
        body=lambda values, tensors, training: {9: tensors["w"]}, tensors=make.records({"w": torch.ones(2)}), sends={1: (9,)}
    )
    runner = StageRunner(program, {"w": torch.ones(2)}, make.config(), 1.0)
    sent = runner.evaluate(make.micro_batch(0), {}).outputs[9]
    snapshot = runner.snapshot(["w"])
    runner.apply_average({"w": torch.zeros(2)}, snapshot)
    assert torch.equal(sent, torch.ones(2))


def test_a_loss_that_is_not_finite_names_the_micro_batch(make):
    runner = whole_runner(make, mlp(), make.config())
    (x, y) = batches(1)[0]
    with pytest.raises(NonFiniteLossError, match="micro-batch 5 "):
        runner.forward(make.micro_batch(5), {X: x * float("nan"), Y: y}, None)
    assert runner.in_flight == 0


def test_an_operation_that_fails_names_stage_and_micro_batch(make):
    runner = whole_runner(make, mlp(), make.config())
    with pytest.raises(StageFailedError, match="stage 0 .* cannot run the forward of micro-batch 2: mat1 and mat2"):
        runner.forward(make.micro_batch(2), {X: torch.ones(4, 5), Y: torch.zeros(4, dtype=torch.int64)}, None)
    assert runner.in_flight == 0


def test_a_gradient_of_the_wrong_shape_fails_the_stage(make):
    first, _ = two_stages(make, mlp(), make.config())
    (x, y) = batches(1)[0]
    first.forward(make.micro_batch(0), {X: x, Y: y}, None)
    with pytest.raises(StageFailedError, match="backward of micro-batch 0"):
        first.backward(0, {HIDDEN: torch.ones(4, 3)})


def test_calls_out_of_order_are_refused(make):
    runner = whole_runner(make, mlp(), make.config())
    (x, y) = batches(1)[0]
    with pytest.raises(ProtocolError, match="micro-batch 0 goes backward"):
        runner.backward(0, {})
    with pytest.raises(ProtocolError, match="batch 0"):
        runner.update(0)
    runner.forward(make.micro_batch(0), {X: x, Y: y}, None)
    with pytest.raises(ProtocolError, match="in flight already"):
        runner.forward(make.micro_batch(0), {X: x, Y: y}, None)


@pytest.mark.parametrize("tensors", [{}, {"w": torch.ones(3)}, {"w": torch.ones(2, dtype=torch.float64)}])
def test_tensors_that_differ_from_the_graph_are_refused_by_name(make, tensors):
    program = make.program(body=lambda values, tensors, training: {}, tensors=make.records({"w": torch.ones(2)}))
    with pytest.raises(StageFailedError, match="'w'"):
        StageRunner(program, tensors, make.config(), 1.0)


def test_optimizer_state_resumes_training_bit_for_bit(make):
    options = {"optimizer": "AdamW", "lr": 0.01, "schedule": "CosineAnnealingLR", "schedule_arguments": (("T_max", 12),)}
    data = batches(10)

    def train(runner: StageRunner, numbers: range) -> None:
        for number in numbers:
            runner.forward(make.micro_batch(number), {X: data[number][0], Y: data[number][1]}, None)
            runner.backward(number, {})
            runner.update(number)

    through = whole_runner(make, mlp(), make.config(**options))
    train(through, range(5))
    saved = {name: tensor.clone() for name, tensor in through.state().items()}
    optimizer = {name: tensor.clone() for name, tensor in through.optimizer_state(saved).items()}
    train(through, range(5, 10))
    resumed = whole_runner(make, mlp(), make.config(**options, start_updates=5))
    names = list(saved)
    snapshot = resumed.snapshot(names)
    resumed.apply_average(saved, snapshot)
    resumed.load_optimizer_state(optimizer)
    train(resumed, range(5, 10))
    assert resumed.schedule_steps == 10
    for name in names:
        assert torch.equal(resumed.state()[name], through.state()[name]), name


def test_the_gradient_of_a_received_value_keeps_the_order_in_memory_that_autograd_gave_it(make):
    """Accumulated by autograd it would take the order of the value: later sums would be rounded otherwise than in one process."""
    state = {"scale": torch.randn(4, 16)}

    def body(values, tensors, training):
        return {LOSS: (values[HIDDEN] * tensors["scale"]).sum()}

    program = make.program(
        body=body,
        index=1,
        tensors=make.records(state),
        receives={0: (HIDDEN,)},
        differentiable=frozenset({HIDDEN, LOSS}),
        is_last=True,
        loss_value=LOSS,
    )
    runner = StageRunner(program, state, make.config(), 1.0)
    hidden = torch.randn(16, 4).t()
    runner.forward(make.micro_batch(0), {HIDDEN: hidden}, None)
    gradient = runner.backward(0, {})[0][HIDDEN]
    assert torch.equal(gradient, state["scale"])
    assert gradient.stride() == (16, 1) != hidden.stride()
