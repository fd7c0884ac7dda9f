from __future__ import annotations

import torch
from stage_kit import HIDDEN, LOSS, SPLIT, X, Y, batches, mlp, two_stages, weights, whole_runner
from torch import nn
from torch.nn import functional

from roost.pipeline.stage_runner import StageRunner


def test_a_backward_uses_the_weights_of_its_forward_bit_for_bit(make):
    data = batches(4)
    first, _ = two_stages(make, mlp(), make.config(optimizer="AdamW", lr=0.5))
    before = {name: tensor.clone() for name, tensor in first.state().items()}
    gradient = torch.randn(4, 16)
    for number in range(4):
        first.forward(make.micro_batch(number), {X: data[number][0], Y: data[number][1]}, None)
    for number in range(3):
        first.backward(number, {HIDDEN: gradient})
        first.update(number)
    assert first.versions_alive == 2
    assert not torch.equal(first.state()["0.weight"], before["0.weight"])
    first.backward(3, {HIDDEN: gradient})
    assert first.versions_alive == 1
    found = dict(first._batches[3].sums)
    fresh = two_stages(make, mlp(), make.config())[0]
    fresh.forward(make.micro_batch(3), {X: data[3][0], Y: data[3][1]}, None)
    fresh.backward(3, {HIDDEN: gradient})
    for name, tensor in fresh._batches[3].sums.items():
        assert torch.equal(found[name], tensor), name


def test_the_gradient_sent_back_is_that_of_the_old_weights(make):
    data = batches(3)
    _, last = two_stages(make, mlp(), make.config(lr=1.0))
    hidden = [torch.randn(4, 16) for _ in data]
    for number, (_, y) in enumerate(data):
        last.forward(make.micro_batch(number), {HIDDEN: hidden[number], Y: y}, None)
    for number in range(2):
        last.backward(number, {})
        last.update(number)
    late = last.backward(2, {})[0][HIDDEN]
    fresh = two_stages(make, mlp(), make.config())[1]
    fresh.forward(make.micro_batch(2), {HIDDEN: hidden[2], Y: data[2][1]}, None)
    assert torch.equal(late, fresh.backward(2, {})[0][HIDDEN])


def test_versions_stay_bounded_by_the_micro_batches_in_flight(make):
    runner = whole_runner(make, mlp(), make.config())
    data = batches(30)
    for number, (x, y) in enumerate(data):
        runner.forward(make.micro_batch(number), {X: x, Y: y}, None)
        if number >= 3:
            runner.backward(number - 3, {})
            runner.update(number - 3)
        assert runner.versions_alive <= 4
    assert runner.versions_alive == 4
    for number in range(27, 30):
        runner.backward(number, {})
    assert runner.versions_alive == 1


def test_without_micro_batches_in_flight_weights_are_updated_in_place(make):
    runner = whole_runner(make, mlp(), make.config())
    place = runner.state()["0.weight"].data_ptr()
    (x, y) = batches(1)[0]
    runner.forward(make.micro_batch(0), {X: x, Y: y}, None)
    runner.backward(0, {})
    runner.update(0)
    assert runner.state()["0.weight"].data_ptr() == place


def test_an_average_lands_while_micro_batches_keep_their_weights(make):
    data = batches(2)
    first, _ = two_stages(make, mlp(), make.config(lr=1.0))
    gradient = torch.randn(4, 16)
    snapshot = first.snapshot(["0.weight"])
    for number in range(2):
        first.forward(make.micro_batch(number), {X: data[number][0], Y: data[number][1]}, None)
    first.apply_average({"0.weight": snapshot["0.weight"] * 0.5}, snapshot)
    assert torch.equal(first.state()["0.weight"], snapshot["0.weight"] * 0.5)
    first.backward(0, {HIDDEN: gradient})
    first.update(0)
    # The bias was not averaged, so it is still shared with the version in flight and must move before its update.
    first.backward(1, {HIDDEN: gradient})
    fresh = two_stages(make, mlp(), make.config())[0]
    fresh.forward(make.micro_batch(1), {X: data[1][0], Y: data[1][1]}, None)
    fresh.backward(1, {HIDDEN: gradient})
    for name in SPLIT:
        assert torch.equal(first._batches[1].sums[name], fresh._batches[1].sums[name]), name


def test_an_average_keeps_the_updates_made_during_the_round(make):
    runner = whole_runner(make, mlp(), make.config())
    names = ["0.weight", "3.bias"]
    snapshot = runner.snapshot(names)
    (x, y) = batches(1)[0]
    runner.forward(make.micro_batch(0), {X: x, Y: y}, None)
    runner.backward(0, {})
    runner.update(0)
    updated = runner.snapshot(names)
    average = {name: tensor + 0.25 for name, tensor in snapshot.items()}
    runner.apply_average(average, snapshot)
    for name in names:
        assert torch.equal(runner.state()[name], updated[name] + (average[name] - snapshot[name]))


def test_an_average_without_updates_in_between_becomes_the_weights_exactly(make):
    runner = whole_runner(make, mlp(), make.config())
    snapshot = runner.snapshot(["0.weight"])
    average = {"0.weight": torch.randn(16, 6) * 1e3}
    runner.apply_average(average, snapshot)
    assert torch.equal(runner.state()["0.weight"], average["0.weight"])


def test_training_goes_on_from_an_average_with_the_optimizers_momentum(make):
    """The optimizer must go on updating the very weights that the average was written to."""
    config = make.config(optimizer="SGD", lr=0.1, momentum=0.9)
    runner, model, data = whole_runner(make, mlp(), config), mlp(), batches(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, (x, y) in enumerate(data):
        runner.forward(make.micro_batch(number), {X: x, Y: y}, None)
        runner.backward(number, {})
        runner.update(number)
        snapshot = runner.snapshot(runner.state())
        runner.apply_average({name: tensor * 0.5 for name, tensor in snapshot.items()}, snapshot)
        torch.manual_seed(make.micro_batch(number).seed)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    for name, tensor in weights(model).items():
        assert torch.equal(runner.state()[name], tensor), name


def test_batch_norm_statistics_change_in_place_and_can_be_averaged_while_in_flight(make):
    norm = nn.BatchNorm1d(5)
    state = {name: tensor.clone() for name, tensor in norm.state_dict().items()}

    def body(values, tensors, training):
        if training:
            tensors["num_batches_tracked"].add_(1)
        out = functional.batch_norm(
            values[X], tensors["running_mean"], tensors["running_var"], tensors["weight"], tensors["bias"], training, 0.1, 1e-5
        )
        return {LOSS: out.square().mean()}

    buffers = ("running_mean", "running_var", "num_batches_tracked")
    program = make.program(body=body, tensors=make.records(state, buffers=buffers), receives={-1: (X,)}, is_last=True, loss_value=LOSS)
    runner = StageRunner(program, state, make.config(), 1.0)
    inputs = [torch.randn(4, 5) for _ in range(3)]
    for number, x in enumerate(inputs):
        runner.forward(make.micro_batch(number), {X: x}, None)
        norm(x)
    for name in buffers:
        assert torch.equal(runner.state()[name], norm.state_dict()[name]), name
    snapshot = runner.snapshot(["running_mean"])
    runner.apply_average({"running_mean": snapshot["running_mean"] + 1}, snapshot)
    assert torch.equal(runner.state()["running_mean"], norm.running_mean + 1)
    for number in range(3):
        runner.backward(number, {})
        runner.update(number)
    runner.evaluate(make.micro_batch(9), {X: inputs[0]})
    assert int(runner.state()["num_batches_tracked"]) == 3


def test_a_buffer_that_the_program_rewrites_and_differentiates_through_works_with_several_in_flight(make):
    state = {"w": torch.ones(3), "scale": torch.ones(3)}

    def body(values, tensors, training):
        tensors["scale"].mul_(2)
        return {LOSS: (values[X] * tensors["w"] * tensors["scale"]).sum()}

    program = make.program(body=body, tensors=make.records(state, buffers=("scale",)), receives={-1: (X,)}, is_last=True, loss_value=LOSS)
    runner = StageRunner(program, state, make.config(lr=1.0), 1.0)
    for number in range(3):
        runner.forward(make.micro_batch(number), {X: torch.ones(3)}, None)
    for number in range(3):
        runner.backward(number, {})
        assert torch.equal(runner._batches[number].sums["w"], torch.full((3,), 2.0 ** (number + 1)))
    assert torch.equal(runner.state()["scale"], torch.full((3,), 8.0))


def test_micro_batches_of_a_batch_may_straddle_an_update(make):
    runner = whole_runner(make, mlp(), make.config())
    (x, y) = batches(1)[0]
    header = {"batch": 1, "count": 2, "batch_samples": 8}
    runner.forward(make.micro_batch(0), {X: x, Y: y}, None)
    runner.forward(make.micro_batch(1, position=0, **header), {X: x, Y: y}, None)
    runner.backward(0, {})
    runner.update(0)
    runner.forward(make.micro_batch(2, position=1, **header), {X: x, Y: y}, None)
    runner.backward(1, {})
    runner.backward(2, {})
    runner.update(1)
    assert (runner.updates, runner.samples, runner.versions_alive) == (2, 12, 1)
