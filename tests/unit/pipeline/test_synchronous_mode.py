"""A pipeline with flush equals one device; the stages are driven by the schedule itself."""

from __future__ import annotations

import dataclasses
import math
from collections import deque

import pytest
import torch
from stage_kit import X, Y, batches, mlp, two_stages, whole_runner

from roost.pipeline.stage_runner import StageRunner, add_gradients
from roost.protocol import pipeline_schedule as schedules

COUNT = 3


def headers(make, number: int):
    batch, position = divmod(number, COUNT)
    return make.micro_batch(number, batch=batch, position=position, count=COUNT, batch_samples=4 * COUNT)


class TwoStagePipeline:
    """Two runners under two schedules; what happens is taken in the order in which it was caused."""

    def __init__(self, runners: tuple[StageRunner, StageRunner], *, flush: bool) -> None:
        self.runners = runners
        self.most_in_flight = 0
        self.staleness: list[int] = []
        self._schedules = (
            schedules.PipelineSchedule(0, 2, frozenset({schedules.DATA}), frozenset({1}), 2, flush=flush),
            schedules.PipelineSchedule(1, 2, frozenset({0}), frozenset(), 1, flush=flush),
        )
        self._values: list[dict] = [{}, {}]
        self._rng: dict = {}
        self._gradients: dict = {}
        self._events: deque = deque()

    def train(self, make, data) -> None:
        for number, (x, y) in enumerate(data):
            self._values[0][number] = {X: x, Y: y}
            self._events.append((0, schedules.ValuesArrived(micro_batch=headers(make, number), source=schedules.DATA)))
        while self._events:
            stage, event = self._events.popleft()
            for computation in self._schedules[stage].handle(event):
                self._compute(stage, computation)

    def _compute(self, stage: int, computation) -> None:
        runner = self.runners[stage]
        send = None
        match computation:
            case schedules.RunForward(micro_batch=header):
                result = runner.forward(header, self._values[stage].pop(header.number), self._rng.pop(header.number, None))
                if stage == 0:
                    self._values[1][header.number] = result.outputs
                    self._rng[header.number] = result.rng_state
                    send = (1, schedules.ValuesArrived(micro_batch=header, source=0))
            case schedules.RunBackward(micro_batch=header):
                back = runner.backward(header.number, add_gradients(self._gradients.pop(header.number, {})))
                if stage == 1:
                    self._gradients[header.number] = {1: back[0]}
                    send = (0, schedules.GradientsArrived(number=header.number, source=1))
            case schedules.RunUpdate(batch=batch, staleness=staleness):
                runner.update(batch)
                self.staleness += staleness
        self.most_in_flight = max(self.most_in_flight, self.runners[0].in_flight)
        self._events.append((stage, schedules.ComputeFinished()))
        if send is not None:
            self._events.append(send)


@pytest.mark.parametrize("options", [{"optimizer": "AdamW", "lr": 0.01}, {"optimizer": "SGD", "lr": 0.1, "momentum": 0.9}])
@pytest.mark.parametrize("correction", ["none", "prediction", "compensation", "rate_by_delay"])
def test_a_flushed_pipeline_equals_one_device_bit_for_bit(make, options, correction):
    config = dataclasses.replace(make.config(**options), mode="sync", correction=correction)
    data = batches(8 * COUNT)
    single = whole_runner(make, mlp(), make.config(**options))
    for number, (x, y) in enumerate(data):
        single.forward(headers(make, number), {X: x, Y: y}, None)
        single.backward(number, {})
        if number % COUNT == COUNT - 1:
            single.update(number // COUNT)
    pipeline = TwoStagePipeline(two_stages(make, mlp(), config), flush=True)
    pipeline.train(make, data)
    assert pipeline.most_in_flight == 2
    assert set(pipeline.staleness) == {0}
    state = {**pipeline.runners[0].state(), **pipeline.runners[1].state()}
    for name, tensor in single.state().items():
        assert torch.equal(state[name], tensor), name


def test_the_norm_of_all_stages_clips_as_torch_clips_the_whole_model(make):
    config = dataclasses.replace(make.config(optimizer="SGD", lr=1.0), mode="sync", clip_norm=0.2)
    (x, y) = batches(1)[0]
    single = whole_runner(make, mlp(), config)
    single.forward(make.micro_batch(0), {X: x, Y: y}, None)
    single.backward(0, {})
    single.update(0)
    first, last = two_stages(make, mlp(), config)
    sent = first.forward(make.micro_batch(0), {X: x, Y: y}, None)
    last.forward(make.micro_batch(0), sent.outputs, sent.rng_state)
    first.backward(0, add_gradients({1: last.backward(0, {})[0]}))
    norm = math.sqrt(first.gradient_square(0) + last.gradient_square(0))
    assert norm > config.clip_norm
    for runner in (first, last):
        runner.update(0, norm)
    for name, tensor in single.state().items():
        torch.testing.assert_close({**first.state(), **last.state()}[name], tensor, rtol=1e-6, atol=1e-7)


def test_a_background_average_waits_for_the_end_of_a_batch_in_synchronous_mode(make):
    config = dataclasses.replace(make.config(lr=0.0), mode="sync")
    runner = whole_runner(make, mlp(), config)
    (x, y) = batches(1)[0]
    snapshot = runner.snapshot(["0.bias"])
    raised = {"0.bias": snapshot["0.bias"] + 1}
    for position in range(2):
        runner.forward(make.micro_batch(position, batch=0, position=position, count=2, batch_samples=8), {X: x, Y: y}, None)
        runner.backward(position, {})
        if position == 0:
            runner.apply_average(raised, snapshot)
            assert torch.equal(runner.state()["0.bias"], snapshot["0.bias"])
    runner.update(0)
    assert torch.equal(runner.state()["0.bias"], raised["0.bias"])
    runner.apply_average(snapshot, runner.snapshot(["0.bias"]))
    assert torch.equal(runner.state()["0.bias"], snapshot["0.bias"])
