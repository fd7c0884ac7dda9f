"""A stage that runs its forwards a second time gives what one that keeps its activations gives."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from captured_kit import build, data, every_cut, no_cut
from stage_kit import LOSS, X
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from roost.errors import StageFailedError
from roost.pipeline.stage_runner import StageRunner

IN_FLIGHT = 4


def trained(make, config, cuts, *, recompute, whole=None, batches=None):
    """Train with IN_FLIGHT micro-batches in flight; return the losses, the final state, and the pipeline."""
    batches = data(14) if batches is None else batches
    pipeline = build(config, cuts, whole=whole, example=batches[0], recompute=recompute)
    headers = [make.micro_batch(number, samples=len(batches[0][1])) for number in range(len(batches))]
    losses = []
    for number, header in enumerate(headers):
        losses.append(pipeline.forward(header, batches[number]))
        if number >= IN_FLIGHT - 1:
            pipeline.backward_and_update(headers[number - IN_FLIGHT + 1])
    for header in headers[1 - IN_FLIGHT :]:
        pipeline.backward_and_update(header)
    return losses, pipeline.state(), pipeline


def assert_same_bits(make, config, cuts, **model):
    kept, again = (trained(make, config, cuts, recompute=recompute, **model) for recompute in (False, True))
    assert kept[0] == again[0]
    assert kept[1].keys() == again[1].keys()
    for name, tensor in kept[1].items():
        assert torch.equal(tensor, again[1][name]), name
    assert all(runner.versions_alive == 1 for runner in again[2].runners)


@pytest.mark.parametrize("cuts", [no_cut, every_cut])
@pytest.mark.parametrize("correction", ["none", "prediction", "compensation"])
def test_a_model_with_dropout_batch_norm_and_tied_weights_trains_to_the_same_bits(make, cuts, correction):
    config = dataclasses.replace(make.config(optimizer="AdamW", lr=0.01), correction=correction)
    assert_same_bits(make, config, cuts)


@pytest.mark.parametrize("cuts", [no_cut, every_cut])
def test_a_model_in_bfloat16_trains_to_the_same_bits(make, cuts):
    config = dataclasses.replace(make.config(optimizer="AdamW", lr=0.01), precision="bf16")
    assert_same_bits(make, config, cuts)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout2d(0.2), nn.Flatten())
        self.head = nn.Linear(144, 5)

    def forward(self, images):
        return self.head(self.body(images))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(6, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, steps):
        return self.head(self.layers(steps)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, tokens):
        query, key, value = self.mix(tokens).reshape(tokens.shape[0], -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.2, is_causal=True)
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(Convolutions, (1, 8, 8)), (Recurrent, (7, 6)), (Attention, (9, 8))],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_kinds_of_models_train_to_the_same_bits(make, kind, shape):
    torch.manual_seed(4)
    batches = [(torch.randn(6, *shape), torch.randint(5, (6,))) for _ in range(8)]
    assert_same_bits(make, make.config(optimizer="SGD", lr=0.1), every_cut, whole=kind(), batches=batches)


def test_running_statistics_are_updated_once_per_micro_batch(make):
    _, state, _ = trained(make, make.config(lr=0.01), no_cut, recompute=True)
    assert int(state["norm.num_batches_tracked"]) == 14


@pytest.mark.parametrize("recompute", [True, False])
def test_only_a_stage_that_keeps_its_activations_has_a_graph_between_forward_and_backward(make, recompute):
    pipeline = build(make.config(), no_cut, recompute=recompute)
    saved = []

    def note(tensor):
        # Not the tensor itself: an operation that saves its own result would keep itself alive.
        kept = tensor.detach()
        saved.append(weakref.ref(kept))
        return kept

    with saved_tensors_hooks(note, lambda tensor: tensor):
        pipeline.forward(make.micro_batch(0, samples=6), data(1)[0])
        assert any(reference() is not None for reference in saved) is not recompute
        pipeline.backward_and_update(make.micro_batch(0, samples=6))


def runner_of(make, body, state, buffers=(), **fields) -> StageRunner:
    program = make.program(
        body=body, tensors=make.records(state, buffers=buffers), receives={-1: (X,)}, is_last=True, loss_value=LOSS, **fields
    )
    return StageRunner(program, state, make.config(lr=1.0), 1.0, recompute=True)


def test_a_buffer_that_the_forward_reads_and_changes_has_its_first_value_the_second_time(make):
    def body(values, tensors, training):
        tensors["scale"].mul_(2)
        return {LOSS: (values[X] * tensors["w"] * tensors["scale"]).sum()}

    state = {"w": torch.ones(3), "scale": torch.ones(3)}
    runner = runner_of(make, body, state, ("scale",), changed_tensors=frozenset({"scale"}))
    for number in range(3):
        runner.forward(make.micro_batch(number), {X: torch.ones(3)}, None)
    for number in range(3):
        runner.backward(number, {})
        assert torch.equal(runner._batches[number].sums["w"], torch.full((3,), 2.0 ** (number + 1)))
    assert torch.equal(runner.state()["scale"], torch.full((3,), 8.0))


def test_an_input_that_the_forward_changes_in_place_is_the_same_the_second_time(make):
    def body(values, tensors, training):
        return {LOSS: (values[X].add_(1) * tensors["w"]).sum()}

    runner = runner_of(make, body, {"w": torch.ones(3)}, changed_values=frozenset({X}))
    runner.forward(make.micro_batch(0), {X: torch.ones(3)}, None)
    runner.backward(0, {})
    assert torch.equal(runner._batches[0].sums["w"], torch.full((3,), 2.0))


def test_the_stages_of_a_real_cut_say_what_they_change(make):
    programs = build(make.config(), every_cut).programs
    names = {name for program in programs for name in program.changed_tensors}
    assert names == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert all(program.changed_tensors <= {record.name for record in program.tensors} for program in programs)


def test_an_operation_that_fails_the_second_time_ends_the_job_with_the_stages_error(make):
    runs = []

    def body(values, tensors, training):
        runs.append(training)
        if len(runs) > 1:
            raise RuntimeError("out of memory")
        return {LOSS: tensors["w"].sum()}

    runner = runner_of(make, body, {"w": torch.ones(3)})
    runner.forward(make.micro_batch(0), {X: torch.ones(3)}, None)
    with pytest.raises(StageFailedError, match="second forward of micro-batch 0: out of memory"):
        runner.backward(0, {})
