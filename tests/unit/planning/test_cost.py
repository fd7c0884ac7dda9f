"""What units cost."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from synthetic import KB, MB, even_model, job, model, parameter, unit

from roost.planning.cost import merge_units, unit_costs
from roost.types import TensorKind, TensorRecord


def test_a_stage_is_a_difference_of_two_sums() -> None:
    costs = unit_costs(model([unit(0, seconds=0.003), unit(1, seconds=0.006), unit(2, seconds=0.012)]), job())
    assert list(costs.seconds) == pytest.approx([0.0, 0.003, 0.009, 0.021])
    assert list(costs.tensor_bytes) == list(costs.trainable_bytes) == list(costs.averaged_bytes) == [0, MB, 2 * MB, 3 * MB]
    assert list(costs.saved_bytes) == [0, 100 * KB, 200 * KB, 300 * KB]


def test_the_updates_that_were_measured_and_the_bytes_of_the_others_are_kept_apart() -> None:
    profile = model([unit(0, update=0.5), unit(1), unit(2, update=0.25, parameters=2 * MB)], stage=0.125)
    costs = unit_costs(profile, job(micro_batch_size=4))
    # An update and the start of a stage take as long whatever the micro-batch size is.
    assert list(costs.update_seconds) == [0, 0.5, 0.5, 0.75]
    assert list(costs.unmeasured_bytes) == [0, 0, MB, MB]
    assert costs.stage_seconds == 0.125


def test_what_a_stage_pays_once_per_batch_is_spread_over_its_micro_batches() -> None:
    profile = dataclasses.replace(even_model(2), stage_s=0.125, stage_update_s=0.5)
    assert unit_costs(profile, job(micro_batch_size=2)).stage_seconds == 0.125 + 0.5 / 4


def test_inputs_cross_the_cut_before_the_first_unit_and_nothing_crosses_the_end() -> None:
    costs = unit_costs(model([unit(0, crossing=1), unit(1, crossing=2), unit(2, crossing=3)], input_bytes=7), job())
    assert list(costs.crossing_bytes) == [7, 1, 2, 0]


def test_costs_scale_with_the_micro_batch_size_of_the_job() -> None:
    costs = unit_costs(even_model(4), job(micro_batch_size=4))
    assert costs.seconds[-1] == pytest.approx(0.006)
    assert list(costs.crossing_bytes) == [5 * KB, 5 * KB, 5 * KB, 5 * KB, 0]
    assert list(costs.saved_bytes) == [0, 50 * KB, 100 * KB, 150 * KB, 200 * KB]
    assert costs.tensor_bytes[-1] == 4 * MB


@pytest.mark.parametrize(("batch", "micro", "count"), [(8, 8, 1), (16, 8, 2), (17, 8, 3)])
def test_a_batch_has_as_many_micro_batches_as_it_takes(batch: int, micro: int, count: int) -> None:
    assert unit_costs(even_model(2), job(batch_size=batch, micro_batch_size=micro)).micro_batches_per_batch == count


def test_frozen_weights_buffers_and_counters_are_held_but_not_all_are_trained_or_averaged() -> None:
    extra = [
        TensorRecord(name="frozen", dtype="float32", shape=(250,), kind=TensorKind.PARAMETER, trainable=False),
        TensorRecord(name="running", dtype="float32", shape=(25,), kind=TensorKind.BUFFER, trainable=False),
        TensorRecord(name="steps", dtype="int64", shape=(1,), kind=TensorKind.BUFFER, trainable=False),
        parameter("weight", 4000),
    ]
    costs = unit_costs(model([unit(0, parameters=0, extra=extra)]), job())
    assert costs.tensor_bytes[-1] == 1000 + 100 + 8 + 4000
    assert costs.trainable_bytes[-1] == 4000
    assert costs.averaged_bytes[-1] == 4000 + 100


def test_merged_units_keep_the_totals_and_end_where_little_crosses() -> None:
    units = [unit(index, crossing=1 if index % 10 == 7 else 1000 * KB) for index in range(100)]
    costs = unit_costs(model(units), job())
    merged, places = merge_units(costs, 10)
    assert merged.units == len(places) - 1 <= 10
    assert merged.seconds[-1] == costs.seconds[-1]
    assert merged.tensor_bytes[-1] == costs.tensor_bytes[-1]
    assert places[0] == 0
    assert places[-1] == 100
    assert all(costs.crossing_bytes[place] == 1 for place in places[1:-1])


def test_a_merged_unit_costs_what_its_units_cost_together() -> None:
    units = [unit(index, seconds=0.001 * (1 + index % 5), saved=KB * (1 + index % 7)) for index in range(60)]
    costs = unit_costs(model(units), job())
    merged, places = merge_units(costs, 12)
    for index, (first, last) in enumerate(itertools.pairwise(places)):
        assert merged.seconds[index + 1] - merged.seconds[index] == pytest.approx(costs.seconds[last] - costs.seconds[first])
        assert merged.saved_bytes[index + 1] - merged.saved_bytes[index] == costs.saved_bytes[last] - costs.saved_bytes[first]
    assert list(merged.crossing_bytes) == [costs.crossing_bytes[place] for place in places]


def test_merging_units_without_any_cost_still_gives_contiguous_runs() -> None:
    costs = unit_costs(model([unit(index, seconds=0.0, parameters=0, saved=0) for index in range(200)]), job())
    merged, places = merge_units(costs, 16)
    assert all(first < last for first, last in itertools.pairwise(places))
    assert merged.units <= 16


def test_few_units_are_not_merged() -> None:
    costs = unit_costs(even_model(4), job())
    assert merge_units(costs, 4) == (costs, (0, 1, 2, 3, 4))
