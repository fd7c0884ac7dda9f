"""What units and links cost."""

from __future__ import annotations

import itertools

import pytest
from synthetic import KB, even_model, job, link, model, node, unit

from roost.planning.cost import DEFAULT_BYTES_PER_S, DEFAULT_LATENCY_S, link_table, merge_units, unit_costs


def test_compute_time_follows_the_measured_speed_of_the_node() -> None:
    costs = unit_costs(even_model(4), job())
    assert costs.compute_s(1, 3, node("a", speed=1.0)) == pytest.approx(0.006)
    assert costs.compute_s(1, 3, node("a", speed=0.25)) == pytest.approx(0.024)


def test_costs_scale_with_the_micro_batch_size_of_the_job() -> None:
    costs = unit_costs(even_model(4), job(micro_batch_size=4))
    assert costs.seconds[-1] == pytest.approx(0.006)
    assert list(costs.crossing_bytes) == [5 * KB, 5 * KB, 5 * KB, 5 * KB, 0]
    assert costs.micro_batches_per_batch == 2


def test_unknown_links_are_assumed_to_be_the_median_of_the_known_ones() -> None:
    table = link_table([link("a", "b", rate=1e6), link("b", "a", rate=3e6), link("a", "c", rate=50e6)])
    assert table.bytes_per_s("a", "b") == 1e6
    assert table.bytes_per_s("c", "b") == 3e6
    assert table.latency_s("c", "b") == 1e-4
    assert not table.uniform


def test_without_any_measured_link_the_documented_defaults_are_assumed() -> None:
    table = link_table([])
    assert table.seconds("a", "b", 1e6) == pytest.approx(DEFAULT_LATENCY_S + 1e6 / DEFAULT_BYTES_PER_S)
    assert table.uniform


def test_merged_units_keep_the_totals_and_end_where_little_crosses() -> None:
    units = [unit(index, crossing=1 if index % 10 == 7 else 1000 * KB) for index in range(100)]
    costs = unit_costs(model(units), job())
    merged, places = merge_units(costs, 10)
    assert merged.units <= 10
    assert merged.seconds[-1] == costs.seconds[-1]
    assert merged.tensor_bytes[-1] == costs.tensor_bytes[-1]
    assert places[0] == 0
    assert places[-1] == 100
    assert all(costs.crossing_bytes[place] == 1 for place in places[1:-1])


def test_merging_units_without_any_cost_still_gives_contiguous_runs() -> None:
    costs = unit_costs(model([unit(index, seconds=0.0, parameters=0, saved=0) for index in range(200)]), job())
    _, places = merge_units(costs, 16)
    assert all(first < last for first, last in itertools.pairwise(places))


def test_few_units_are_not_merged() -> None:
    costs = unit_costs(even_model(4), job())
    assert merge_units(costs, 4) == (costs, (0, 1, 2, 3, 4))
