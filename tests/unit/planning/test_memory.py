"""How many bytes a stage needs."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import KB, MB, even_model, job, model, unit

from roost.config import ArgumentValue, NamedArguments, OuterOptimizer, RobustMethod, TensorCodec
from roost.planning.cost import unit_costs
from roost.planning.memory import IN_FLIGHT_LIMIT, MemoryModel, older_versions, optimizer_copies
from roost.types import ModelProfile


def memory_of(profile: ModelProfile, *, copies: int = 0, **fields: int) -> MemoryModel:
    return MemoryModel(costs=unit_costs(profile, job(**fields)), optimizer_copies=copies)


@pytest.mark.parametrize(
    ("name", "arguments", "copies"),
    [
        ("SGD", (), 0),
        ("SGD", (("momentum", 0.0),), 0),
        ("SGD", (("momentum", 0.9),), 1),
        ("Adam", (), 2),
        ("AdamW", (("amsgrad", True),), 3),
        ("NAdam", (), 2),
        ("RMSprop", (), 1),
        ("RMSprop", (("momentum", 0.9), ("centered", True)), 3),
        ("Adagrad", (), 1),
        ("Rprop", (), 2),
    ],
)
def test_the_optimizer_by_name_says_what_it_keeps(name: str, arguments: tuple[tuple[str, ArgumentValue], ...], copies: int) -> None:
    assert optimizer_copies(NamedArguments(name=name, arguments=arguments)) == copies


def test_a_stage_needs_what_the_formula_says() -> None:
    memory = memory_of(even_model(6), copies=2)
    # Two units in the middle, three in flight: parameters, gradients, 2 optimizer tensors and 2 older versions of 2 MB.
    # An update holds 2 tensors of 1 MB for a moment.
    expected = 2 * MB * (1 + 1 + 2 + 2) + 2 * MB + 3 * 200 * KB + 2 * 10 * KB + 2 * 10 * KB
    assert float(memory.stage_bytes(2, 4, 3, averaging=False)) == expected
    assert float(memory.stage_bytes(2, 4, 3, averaging=True)) == expected + 2 * 2 * MB


def test_the_first_stage_holds_two_batches_of_inputs_and_the_last_sends_nothing() -> None:
    memory = memory_of(even_model(2), micro_batch_size=8, batch_size=32)
    assert float(memory.stage_bytes(0, 2, 1, averaging=False)) == 2 * 2 * MB + MB + 200 * KB + 2 * 4 * 10 * KB


def test_several_micro_batches_per_batch_need_fewer_weight_versions() -> None:
    assert [older_versions(in_flight, 1) for in_flight in (1, 2, 5)] == [0, 1, 4]
    assert [older_versions(in_flight, 4) for in_flight in (1, 2, 5, 6)] == [0, 1, 1, 2]


def test_the_table_agrees_with_the_formula_and_forbids_empty_stages() -> None:
    memory = memory_of(even_model(5))
    table = memory.matrix(2, averaging=True)
    for first in range(6):
        for last in range(6):
            if last <= first:
                assert math.isinf(table[first, last])
            else:
                assert table[first, last] == memory.stage_bytes(first, last, 2, averaging=True)


def test_the_least_stage_around_a_unit_may_reach_to_where_little_crosses() -> None:
    units = [unit(0), unit(1, crossing=50 * MB), unit(2), unit(3)]
    memory = memory_of(model(units))
    least = memory.least_for_units(averaging=False)
    # Units 1 and 2 together are smaller than either with 50 MB at its end.
    for index in (1, 2):
        assert least[index] == memory.stage_bytes(1, 3, 1, averaging=False) == 2 * 2 * MB + MB + 2 * 100 * KB + 2 * 2 * 10 * KB
    assert least[3] == memory.stage_bytes(3, 4, 1, averaging=False)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.sampled_from([0, 4, 4 * KB, MB]), st.sampled_from([0, 1, 100 * KB])), min_size=1, max_size=4),
    memory_bytes=st.one_of(st.integers(1, 40 * MB), st.integers(1, 200 * KB)),
    micro_batches=st.sampled_from([1, 2, 5]),
    averaging=st.booleans(),
    copies=st.sampled_from([0, 2]),
)
def test_the_most_in_flight_are_as_many_as_still_fit(
    sizes: list[tuple[int, int]], memory_bytes: int, micro_batches: int, averaging: bool, copies: int
) -> None:
    profile = model([unit(index, parameters=parameters, saved=saved) for index, (parameters, saved) in enumerate(sizes)])
    memory = memory_of(profile, copies=copies, batch_size=8 * micro_batches)
    most = memory.most_in_flight(memory_bytes, averaging)
    for first, last in itertools.combinations(range(len(sizes) + 1), 2):
        count = int(most[first, last])
        assert 0 <= count <= IN_FLIGHT_LIMIT
        if count:
            assert memory.stage_bytes(first, last, count, averaging) <= memory_bytes
        if count < IN_FLIGHT_LIMIT:
            assert memory.stage_bytes(first, last, count + 1, averaging) > memory_bytes


def test_the_most_in_flight_agree_with_counting_up() -> None:
    memory = memory_of(even_model(3), batch_size=24)
    limits = [2 * MB, 5 * MB, 12 * MB, 30 * MB]
    most = memory.most_in_flight(limits, averaging=True)
    assert most.shape == (4, 4, 4)
    for row, limit in enumerate(limits):
        for first, last in itertools.combinations(range(4), 2):
            count = 0
            while memory.stage_bytes(first, last, count + 1, averaging=True) <= limit:
                count += 1
            assert most[row, first, last] == count


@pytest.mark.parametrize("in_flight", [1, 2, 3, 4, 7])
def test_memory_that_is_just_enough_is_enough_and_a_byte_less_is_not(in_flight: int) -> None:
    memory = memory_of(even_model(3), batch_size=24)
    needed = int(memory.stage_bytes(1, 3, in_flight, averaging=True))
    assert memory.most_in_flight(needed, averaging=True)[1, 3] == in_flight
    assert memory.most_in_flight(needed - 1, averaging=True)[1, 3] == in_flight - 1


def test_nothing_is_in_flight_in_an_empty_stage() -> None:
    most = memory_of(even_model(3)).most_in_flight(1000 * MB, averaging=False)
    assert all(most[first, last] == 0 for first in range(4) for last in range(first + 1))


def test_compression_and_an_outer_optimizer_need_more_copies_of_what_is_averaged() -> None:
    assert job().averaging_copies == 2
    assert job(averaging_compression=TensorCodec.FP16).averaging_copies == 3
    assert job(averaging_compression=TensorCodec.INT8).averaging_copies == 4
    assert job(averaging_compression=TensorCodec.INT8, outer_optimizer=OuterOptimizer.NESTEROV).averaging_copies == 5
    assert job(robust_averaging=RobustMethod.TRIMMED).averaging_copies == 4
    assert job(robust_averaging=RobustMethod.CLIPPED, averaging_compression=TensorCodec.FP16).averaging_copies == 4
    costs = unit_costs(even_model(6), job())
    plain, more = (MemoryModel(costs=costs, optimizer_copies=0, averaging_copies=copies) for copies in (2, 4))
    extra = more.stage_bytes(2, 4, 1, averaging=True) - plain.stage_bytes(2, 4, 1, averaging=True)
    assert float(extra) == 2 * 2 * MB
    assert more.stage_bytes(2, 4, 1, averaging=False) == plain.stage_bytes(2, 4, 1, averaging=False)
