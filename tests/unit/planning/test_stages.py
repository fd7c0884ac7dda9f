"""The best cut for nodes in a given order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import KB, MB, all_links, even_model, job, link, model, node, unit

from roost.planning.cost import link_table, unit_costs
from roost.planning.memory import MemoryModel
from roost.planning.stages import StageCutter, stage_in_flight
from roost.types import LinkProfile, ModelProfile, NodeProfile


def cutter_for(profile: ModelProfile, links: Sequence[LinkProfile] = (), **fields: int) -> StageCutter:
    config = job(**fields)
    costs = unit_costs(profile, config)
    return StageCutter(
        costs=costs, memory=MemoryModel(costs=costs, optimizer_copies=0), links=link_table(links), in_flight_bound=config.max_in_flight
    )


def test_each_node_gets_work_in_proportion_to_its_speed() -> None:
    nodes = [node("fast", speed=2.0), node("slow", speed=1.0)]
    cut = cutter_for(even_model(12), all_links(nodes)).cut(nodes, averaging=False)
    assert cut is not None
    assert cut.cuts == (0, 8, 12)
    assert cut.compute_s == pytest.approx((0.012, 0.012))


def test_memory_that_is_short_moves_the_cut() -> None:
    nodes = [node("a", memory=8 * MB), node("b")]
    cut = cutter_for(even_model(12), all_links(nodes)).cut(nodes, averaging=False)
    assert cut is not None
    # Two older-version-free copies and one stashed version: three times 1 MB a unit, so two units fit.
    assert cut.cuts == (0, 2, 12)


def test_no_cut_is_returned_if_memory_cannot_suffice() -> None:
    nodes = [node("a", memory=8 * MB), node("b", memory=8 * MB)]
    assert cutter_for(even_model(12)).cut(nodes, averaging=False) is None


def test_more_nodes_than_units_cannot_all_have_a_stage() -> None:
    assert cutter_for(even_model(2)).cut([node("a"), node("b"), node("c")], averaging=False) is None


def test_a_slow_link_is_crossed_where_little_has_to_cross() -> None:
    units = [unit(index, crossing=10 if index == 1 else 10 * MB) for index in range(6)]
    nodes = [node("a"), node("b")]
    cut = cutter_for(model(units), all_links(nodes, rate=1e6)).cut(nodes, averaging=False)
    assert cut is not None
    assert cut.cuts == (0, 2, 6)


def test_among_equally_fast_cuts_polish_takes_the_one_with_least_traffic() -> None:
    # Unit 0 binds whatever follows; only the place of the second cut is free.
    units = [unit(0, seconds=1.0), *(unit(index, crossing=10 * KB if index == 3 else 500 * KB) for index in range(1, 6))]
    nodes = [node("a"), node("b"), node("c")]
    cut = cutter_for(model(units), all_links(nodes)).cut(nodes, averaging=False, polish=True)
    assert cut is not None
    assert cut.cuts == (0, 1, 4, 6)


def test_the_bottleneck_is_the_slowest_node() -> None:
    nodes = [node("a"), node("b", speed=0.1)]
    cut = cutter_for(model([unit(0), unit(1)]), all_links(nodes)).cut(nodes, averaging=False)
    assert cut is not None
    assert cut.bottleneck == "compute of b"
    assert cut.period_s == pytest.approx(0.03)


def test_the_bottleneck_is_a_link_that_carries_more_than_it_can() -> None:
    nodes = [node("a"), node("b"), node("c")]
    slow = [link("a", "b", rate=1e6), link("b", "a"), link("b", "c"), link("c", "b")]
    cut = cutter_for(even_model(3, crossing=50 * KB), slow, max_in_flight=100).cut(nodes, averaging=False)
    assert cut is not None
    assert cut.send_s[0] == pytest.approx(0.0501)
    # With three in flight from the first stage, the way there and back is covered and the link itself binds.
    assert cut.bottleneck == "link a -> b"
    assert cut.period_s == pytest.approx(0.05)


def test_one_micro_batch_in_flight_means_waiting_for_the_round_trip() -> None:
    nodes = [node("a"), node("b")]
    cut = cutter_for(even_model(2, crossing=0), all_links(nodes, latency=0.01), max_in_flight=1).cut(nodes, averaging=False)
    assert cut is not None
    assert cut.in_flight == (1, 1)
    assert cut.bottleneck == "round trip from a with 1 in flight"
    assert cut.period_s == pytest.approx(0.026)


@pytest.mark.parametrize(("bound", "expected"), [(0, [4, 3, 2, 1]), (2, [2, 2, 2, 1]), (1, [1, 1, 1, 1])])
def test_in_flight_falls_towards_the_last_stage_and_keeps_its_bound(bound: int, expected: list[int]) -> None:
    assert [stage_in_flight(index, 4, bound) for index in range(4)] == expected


@settings(max_examples=60, deadline=None)
@given(
    seconds=st.lists(st.integers(1, 20), min_size=3, max_size=8),
    speeds=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=3),
    memories=st.lists(st.integers(4, 40), min_size=3, max_size=3),
)
def test_no_cut_is_faster_than_the_one_found(seconds: list[int], speeds: list[float], memories: list[int]) -> None:
    profile = model([unit(index, seconds=value / 1000, crossing=0) for index, value in enumerate(seconds)], input_bytes=0)
    nodes = [node(f"n{index}", speed=speed, memory=memories[index] * MB) for index, speed in enumerate(speeds)]
    cutter = cutter_for(profile)
    found = cutter.cut(nodes, averaging=False, polish=True)
    slowest = _slowest_by_trying_all(cutter, nodes, len(seconds))
    assert (found is None) == (slowest is None)
    if found is not None and slowest is not None:
        assert max(found.compute_s) == pytest.approx(slowest)


def _slowest_by_trying_all(cutter: StageCutter, nodes: Sequence[NodeProfile], units: int) -> float | None:
    results = []
    for inner in itertools.combinations(range(1, units), len(nodes) - 1):
        cuts = (0, *inner, units)
        fits = all(
            cutter.memory.stage_bytes(cuts[k], cuts[k + 1], len(nodes) - k, averaging=False) <= nodes[k].memory_bytes
            for k in range(len(nodes))
        )
        if fits:
            results.append(max(cutter.costs.compute_s(cuts[k], cuts[k + 1], nodes[k]) for k in range(len(nodes))))
    return min(results, default=None)
