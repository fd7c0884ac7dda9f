"""What a stage computes next."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roost.errors import IllegalTransitionError, ProtocolError
from roost.protocol.pipeline_schedule import (
    DATA,
    ComputeFinished,
    GradientsArrived,
    NormArrived,
    PipelineSchedule,
    RunBackward,
    RunEvaluation,
    RunForward,
    RunUpdate,
    ValuesArrived,
    bubble_free_in_flight,
)
from roost.types import MicroBatch


def header(number: int, *, batch: int | None = None, position: int = 0, count: int = 1, training: bool = True) -> MicroBatch:
    return MicroBatch(
        number=number,
        batch=(number if batch is None else batch) if training else -1,
        position=position,
        count=count,
        samples=4,
        batch_samples=4 * count,
        training=training,
        seed=0,
        lease=0,
    )


def first_stage(*, max_in_flight: int = 2, targets: frozenset[int] = frozenset({1})) -> PipelineSchedule:
    return PipelineSchedule(0, 2, frozenset({DATA}), targets, max_in_flight)


def data(number: int, **fields: int) -> ValuesArrived:
    return ValuesArrived(micro_batch=header(number, **fields), source=DATA)


def gradients(number: int, source: int = 1) -> GradientsArrived:
    return GradientsArrived(number=number, source=source)


def test_the_last_stage_goes_forward_backward_and_updates_without_waiting() -> None:
    stage = PipelineSchedule(1, 2, frozenset({0}), frozenset(), 1)
    arrived = ValuesArrived(micro_batch=header(0), source=0)
    assert stage.handle(arrived) == [RunForward(micro_batch=header(0))]
    assert stage.handle(ComputeFinished()) == [RunBackward(micro_batch=header(0))]
    assert stage.handle(ComputeFinished()) == [RunUpdate(batch=0, staleness=(0,))]
    assert not stage.idle
    assert stage.handle(ComputeFinished()) == []
    assert stage.idle


def test_a_single_stage_runs_from_data_to_update() -> None:
    stage = PipelineSchedule(0, 1, frozenset({DATA}), frozenset(), 1)
    kinds = [type(stage.handle(data(0))[0]), *(type(stage.handle(ComputeFinished())[0]) for _ in range(2))]
    assert kinds == [RunForward, RunBackward, RunUpdate]


def test_nothing_is_issued_while_a_computation_is_outstanding() -> None:
    stage = first_stage()
    assert stage.handle(data(0)) == [RunForward(micro_batch=header(0))]
    assert stage.handle(data(1)) == []
    assert stage.computing
    assert stage.handle(ComputeFinished()) == [RunForward(micro_batch=header(1))]


def test_forward_waits_for_the_bound_on_in_flight_micro_batches() -> None:
    stage = first_stage(max_in_flight=2)
    for number in range(3):
        stage.handle(data(number))
    stage.handle(ComputeFinished())
    assert stage.handle(ComputeFinished()) == []
    assert stage.in_flight == 2
    assert stage.handle(gradients(0)) == [RunBackward(micro_batch=header(0))]
    assert stage.handle(ComputeFinished()) == [RunUpdate(batch=0, staleness=(0,))]
    assert stage.handle(ComputeFinished()) == [RunForward(micro_batch=header(2))]


def test_staleness_counts_updates_between_forward_and_own_update() -> None:
    stage = first_stage(max_in_flight=2)
    stage.handle(data(0))
    stage.handle(data(1))
    stage.handle(ComputeFinished())
    stage.handle(ComputeFinished())
    stage.handle(gradients(0))
    stage.handle(ComputeFinished())
    stage.handle(ComputeFinished())
    stage.handle(gradients(1))
    assert stage.handle(ComputeFinished()) == [RunUpdate(batch=1, staleness=(1,))]


def test_backward_goes_before_evaluation_and_evaluation_before_forward() -> None:
    stage = first_stage(max_in_flight=3)
    stage.handle(data(0))
    stage.handle(ComputeFinished())
    stage.handle(data(1))
    stage.handle(data(2))
    stage.handle(ValuesArrived(micro_batch=header(3, training=False), source=DATA))
    stage.handle(gradients(0))
    order = [stage.handle(ComputeFinished())[0] for _ in range(4)]
    assert [type(step) for step in order] == [RunBackward, RunUpdate, RunEvaluation, RunForward]


def test_a_batch_of_several_micro_batches_updates_once_after_the_last() -> None:
    stage = PipelineSchedule(0, 1, frozenset({DATA}), frozenset(), 1)
    issued = []
    for position in range(3):
        issued += stage.handle(data(position, batch=0, position=position, count=3))
    while not stage.idle:
        issued += stage.handle(ComputeFinished())
    assert [type(step) for step in issued] == [RunForward, RunBackward] * 3 + [RunUpdate]
    assert issued[-1] == RunUpdate(batch=0, staleness=(0, 0, 0))


def test_forward_waits_for_the_values_of_all_sources() -> None:
    stage = PipelineSchedule(2, 3, frozenset({0, 1}), frozenset(), 1)
    assert stage.handle(ValuesArrived(micro_batch=header(0), source=0)) == []
    assert not stage.idle
    assert stage.handle(ValuesArrived(micro_batch=header(0), source=1)) == [RunForward(micro_batch=header(0))]


def test_backward_waits_for_the_gradients_of_all_targets() -> None:
    stage = first_stage(targets=frozenset({1, 2}))
    stage.handle(data(0))
    stage.handle(ComputeFinished())
    assert stage.handle(gradients(0, 2)) == []
    assert stage.handle(gradients(0, 1)) == [RunBackward(micro_batch=header(0))]


def test_micro_batches_that_overtake_each_other_go_forward_in_order_of_their_numbers() -> None:
    stage = first_stage()
    assert stage.handle(data(1)) == []
    assert stage.handle(data(0)) == [RunForward(micro_batch=header(0))]
    assert stage.handle(ComputeFinished()) == [RunForward(micro_batch=header(1))]


def test_evaluation_runs_though_the_in_flight_bound_is_reached() -> None:
    stage = first_stage(max_in_flight=1)
    stage.handle(data(0))
    stage.handle(ComputeFinished())
    evaluation = ValuesArrived(micro_batch=header(1, training=False), source=DATA)
    assert stage.handle(evaluation) == [RunEvaluation(micro_batch=evaluation.micro_batch)]
    assert stage.in_flight == 1


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (data(0), "values of micro-batch 0 from -1 came twice"),
        (ValuesArrived(micro_batch=header(1), source=7), "came from 7"),
        (gradients(0, 5), "came from 5"),
        (gradients(9), "micro-batch 9 .* not in flight"),
    ],
)
def test_a_repeated_or_unknown_arrival_is_named(event: ValuesArrived | GradientsArrived, words: str) -> None:
    stage = first_stage()
    stage.handle(data(0))
    with pytest.raises(ProtocolError, match=words):
        stage.handle(event)


def test_gradients_that_arrive_twice_are_refused() -> None:
    stage = first_stage(targets=frozenset({1, 2}))
    stage.handle(data(0))
    stage.handle(gradients(0, 1))
    with pytest.raises(ProtocolError, match="gradients of micro-batch 0 from 1 came twice"):
        stage.handle(gradients(0, 1))


def test_two_headers_for_one_micro_batch_are_refused() -> None:
    stage = PipelineSchedule(2, 3, frozenset({0, 1}), frozenset(), 1)
    stage.handle(ValuesArrived(micro_batch=header(0), source=0))
    with pytest.raises(ProtocolError, match="two headers"):
        stage.handle(ValuesArrived(micro_batch=header(0, batch=4), source=1))


def test_a_batch_that_is_skipped_is_refused() -> None:
    stage = first_stage()
    stage.handle(data(0))
    stage.handle(data(1, batch=5))
    with pytest.raises(ProtocolError, match="does not follow"):
        stage.handle(ComputeFinished())


def test_finishing_without_a_computation_is_illegal() -> None:
    with pytest.raises(IllegalTransitionError):
        first_stage().handle(ComputeFinished())


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_the_bubble_free_bound_falls_by_one_per_stage(stages: int) -> None:
    assert [bubble_free_in_flight(stage, stages) for stage in range(stages)] == list(range(stages, 0, -1))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), max_in_flight=st.integers(1, 5), count=st.integers(1, 3), batches=st.integers(1, 8))
def test_every_micro_batch_goes_forward_and_backward_once_within_the_bounds(
    seed: int, max_in_flight: int, count: int, batches: int
) -> None:
    rng = random.Random(seed)
    stage = first_stage(max_in_flight=max_in_flight)
    total = batches * count
    incoming = [data(number, batch=number // count, position=number % count, count=count) for number in range(total)]
    rng.shuffle(incoming)
    owed: list[int] = []
    issued: list[RunForward | RunBackward | RunEvaluation | RunUpdate] = []
    while incoming or owed or stage.computing:
        choices = ["data"] * bool(incoming) + ["gradients"] * bool(owed) + ["finish"] * stage.computing
        choice = rng.choice(choices)
        if choice == "data":
            issued += stage.handle(incoming.pop())
        elif choice == "gradients":
            issued += stage.handle(gradients(owed.pop(rng.randrange(len(owed)))))
        else:
            finished = issued[-1]
            if isinstance(finished, RunForward):
                owed.append(finished.micro_batch.number)
            issued += stage.handle(ComputeFinished())
        assert stage.in_flight <= max_in_flight
    assert stage.idle
    for kind in (RunForward, RunBackward):
        assert [step.micro_batch.number for step in issued if isinstance(step, kind)] == list(range(total))
    updates = [step for step in issued if isinstance(step, RunUpdate)]
    assert [update.batch for update in updates] == list(range(batches))
    bound = -(-(max_in_flight - 1) // count)
    assert all(0 <= staleness <= bound for update in updates for staleness in update.staleness)


def test_with_flush_a_batch_goes_forward_only_after_the_update_of_the_batch_before() -> None:
    stage = PipelineSchedule(0, 2, frozenset({DATA}), frozenset({1}), 2, flush=True)
    first, second, third = (header(number, batch=number // 2, position=number % 2, count=2) for number in range(3))
    assert stage.handle(ValuesArrived(micro_batch=first, source=DATA)) == [RunForward(micro_batch=first)]
    assert stage.handle(ValuesArrived(micro_batch=second, source=DATA)) == []
    assert stage.handle(ValuesArrived(micro_batch=third, source=DATA)) == []
    assert stage.handle(ComputeFinished()) == [RunForward(micro_batch=second)]
    assert stage.handle(ComputeFinished()) == []
    assert stage.handle(gradients(0)) == [RunBackward(micro_batch=first)]
    assert stage.handle(ComputeFinished()) == []
    assert stage.handle(gradients(1)) == [RunBackward(micro_batch=second)]
    assert stage.handle(ComputeFinished()) == [RunUpdate(batch=0, staleness=(0, 0))]
    assert stage.handle(ComputeFinished()) == [RunForward(micro_batch=third)]


def test_an_update_waits_for_the_norms_of_the_other_stages() -> None:
    stage = PipelineSchedule(1, 3, frozenset({0}), frozenset({2}), 1, flush=True, norm_sources=frozenset({0, 2}))
    assert stage.handle(ValuesArrived(micro_batch=header(0), source=0)) == [RunForward(micro_batch=header(0))]
    assert stage.handle(ComputeFinished()) == []
    assert stage.handle(NormArrived(batch=0, source=2)) == []
    assert stage.handle(GradientsArrived(number=0, source=2)) == [RunBackward(micro_batch=header(0))]
    assert stage.handle(ComputeFinished()) == []
    assert not stage.idle
    assert stage.handle(NormArrived(batch=0, source=0)) == [RunUpdate(batch=0, staleness=(0,))]
    assert stage.handle(ComputeFinished()) == []
    assert stage.idle


@pytest.mark.parametrize("event", [NormArrived(batch=1, source=2), NormArrived(batch=0, source=1), NormArrived(batch=0, source=0)])
def test_norms_that_were_not_to_come_are_refused(event: NormArrived) -> None:
    stage = PipelineSchedule(1, 3, frozenset({0}), frozenset({2}), 1, flush=True, norm_sources=frozenset({0, 2}))
    stage.handle(ValuesArrived(micro_batch=header(0), source=0))
    stage.handle(NormArrived(batch=0, source=0))
    with pytest.raises(ProtocolError, match="norm of batch"):
        stage.handle(event)
