"""How many bytes a stage needs."""

from __future__ import annotations

import math

import pytest
from synthetic import KB, MB, even_model, job, model, unit

from roost.config import ArgumentValue, NamedArguments
from roost.planning.cost import unit_costs
from roost.planning.memory import MemoryModel, older_versions, optimizer_copies
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
    expected = 2 * MB * (1 + 1 + 2 + 2) + 3 * 200 * KB + 2 * 10 * KB + 2 * 10 * KB
    assert float(memory.stage_bytes(2, 4, 3, averaging=False)) == expected
    assert float(memory.stage_bytes(2, 4, 3, averaging=True)) == expected + 2 * 2 * MB


def test_the_first_stage_holds_two_batches_of_inputs_and_the_last_sends_nothing() -> None:
    memory = memory_of(even_model(2), micro_batch_size=8, batch_size=32)
    assert float(memory.stage_bytes(0, 2, 1, averaging=False)) == 2 * 2 * MB + 200 * KB + 2 * 4 * 10 * KB


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
    least = memory.least_for_units(0, averaging=False)
    # Units 1 and 2 together are smaller than either with 50 MB at its end; the last two need one micro-batch in flight only.
    assert least[1] == min(
        memory.stage_bytes(1, 3, 2, averaging=False),
        memory.stage_bytes(0, 3, 2, averaging=False),
        memory.stage_bytes(1, 4, 1, averaging=False),
    )
    assert least[3] == memory.stage_bytes(3, 4, 1, averaging=False)
