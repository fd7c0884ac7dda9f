"""What a group of nodes can reach as one cluster."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random

import numpy as np
import pytest
from by_hand import ByHand, Reached
from synthetic import KB, MB, Scene, all_links, even_model, job, link, model, node, random_scene, scene, unit

from roost.config import PlanningConfig
from roost.planning.groups import EXACT_ORDER, PERMUTED, Group, GroupSearch

SEEDS = range(10)


@functools.cache
def small(seed: int) -> Scene:
    """Return a scene of four nodes, of which every group is tried by hand."""
    return random_scene(random.Random(1000 + seed), nodes=4, units=5, links="equal" if seed % 4 == 0 else "mixed")


@functools.cache
def by_hand(seed: int, group: Group, clusters: int) -> tuple[Reached, ...]:
    return tuple(ByHand(small(seed), clusters).everything(itertools.permutations(sorted(group))))


def groups_of(count: int) -> list[Group]:
    return [frozenset(chosen) for size in range(1, count + 1) for chosen in itertools.combinations(range(count), size)]


def best_value(reached: tuple[Reached, ...]) -> float:
    return max((one.value for one in reached), default=0.0)


# ------------------------------------------------------------ against trying everything


@pytest.mark.parametrize("seed", SEEDS)
def test_no_order_cut_or_depth_of_a_group_is_worth_more_than_its_exact_result(seed: int) -> None:
    for clusters in (1, 2):
        search = small(seed).groups()
        for group in groups_of(4):
            best, found = best_value(by_hand(seed, group, clusters)), search.exact(group, clusters)
            assert (found is None) == (best == 0)
            if found is not None:
                assert found.exact
                assert set(found.order) == group
                assert found.value == pytest.approx(best, rel=3e-7)
                cut = search.cut_of(found, clusters)
                assert cut.value >= found.value * (1 - 1e-8)
                assert tuple(search.cutter.nodes[place] for place in found.order) == cut.nodes


@pytest.mark.parametrize(("seed", "nodes"), [*((seed, 5) for seed in range(8)), (0, 6), (1, 6)])
def test_groups_beyond_those_tried_in_every_order_are_searched_exactly_too(seed: int, nodes: int) -> None:
    made = random_scene(random.Random(2000 + seed), nodes=nodes, units=nodes + (nodes == 5), links="mixed" if seed % 3 else "equal")
    group = frozenset(range(nodes))
    assert PERMUTED < nodes <= EXACT_ORDER
    best = ByHand(made, 2).best_of_group(group)
    found = made.groups().exact(group, 2)
    assert (found is None) == (best is None)
    assert made.groups().holds(group, 2) == (best is not None)
    if found is not None and best is not None:
        assert found.value == pytest.approx(best.value, rel=3e-7)
        assert made.groups().can_exceed(group, 2, best.value * (1 - 1e-6))
        if best.staleness == 0:
            assert not made.groups().can_exceed(group, 2, best.value * (1 + 1e-6))


def test_many_rare_scenes_of_five_nodes_are_as_exact() -> None:
    # Memory so short that only few orders fit: those that the plain orders miss.
    sizes = [MB, 6 * MB, 2 * MB, 4 * MB, 3 * MB]
    profile = model([unit(index, parameters=size) for index, size in enumerate(sizes)])
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 7):
        pool = [node(f"n{place}", memory=3 * sizes[order[place]] + MB, speed=1.0 + place) for place in range(5)]
        made = scene(profile, pool, config=job(max_in_flight=1))
        found = made.groups().exact(frozenset(range(5)), 1)
        assert found is not None
        assert [sizes[order[place]] for place in found.order] == sizes
        assert made.groups().holds(frozenset(range(5)), 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_faster_or_worth_more_than_the_bounds_say(seed: int) -> None:
    for clusters in (1, 3):
        search = small(seed).groups()
        for group in groups_of(4):
            reached = by_hand(seed, group, clusters)
            least = min((one.period_s for one in reached), default=math.inf)
            assert search.least_period(group, clusters) <= least * (1 + 1e-9)
            assert search.line_period(group, clusters) <= least * (1 + 1e-9)
            assert search.most_value(group, clusters) >= best_value(reached) * (1 - 1e-9)


def test_the_bound_of_a_group_that_only_computes_is_what_it_reaches() -> None:
    search = scene(
        even_model(12, crossing=0), [node("a", speed=2.0), node("b")], config=job(), options=PlanningConfig(headroom=1.0)
    ).groups()
    group = frozenset((0, 1))
    assert search.least_period(group, 1) == pytest.approx(0.012)
    found = search.exact(group, 1)
    assert found is not None
    assert found.period_s == pytest.approx(0.012)


@pytest.mark.parametrize("seed", SEEDS)
def test_whether_a_group_can_exceed_a_value_is_never_denied_wrongly(seed: int) -> None:
    for clusters in (1, 2):
        for group in groups_of(4):
            best = best_value(by_hand(seed, group, clusters))
            if best == 0:
                assert not small(seed).groups().can_exceed(group, clusters, 1e-9)
                continue
            for value in (best * 0.5, best * (1 - 1e-6)):
                assert small(seed).groups().can_exceed(group, clusters, value)
            # And it is denied where it is clear: a value above what the bounds allow.
            assert not small(seed).groups().can_exceed(group, clusters, small(seed).groups().most_value(group, clusters) * (1 + 1e-9))


@pytest.mark.parametrize("seed", SEEDS)
def test_whether_a_group_reaches_a_value_is_never_denied_wrongly(seed: int) -> None:
    made = small(seed)
    for group in groups_of(4):
        search = made.groups()
        if len(group) < 2:
            continue
        best = best_value(tuple(ByHand(made, 2).everything(list(itertools.permutations(sorted(group))))))
        if best == 0:
            assert not search.reaches(group, 2, 1e-9)
            continue
        assert search.reaches(group, 2, best * (1 - 1e-6))
        assert not search.reaches(group, 2, search.most_value(group, 2) * 1.5)
        # What was denied once must not deny less.
        assert search.reaches(group, 2, best * (1 - 1e-6))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rough_result_is_real_and_nearly_the_best_of_its_orders(seed: int) -> None:
    made = small(seed)
    for group in groups_of(4):
        search = made.groups()
        found = search.rough(group, 2)
        if found is None:
            continue
        best = best_value(by_hand(seed, group, 2))
        assert found.value <= best * (1 + 3e-7)
        reached = ByHand(made, 2).best([found.order])
        assert reached is not None
        assert found.value <= reached.value * (1 + 3e-7)
        assert search.rough(group, 2) is found
        assert search.reaches(group, 2, found.value)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_group_holds_the_model_if_some_order_does(seed: int) -> None:
    search = small(seed).groups()
    for group in groups_of(4):
        assert search.holds(group, 2) == bool(by_hand(seed, group, 2))


@pytest.mark.parametrize("seed", range(8))
def test_the_result_of_one_order_is_the_best_of_its_cuts_and_depths(seed: int) -> None:
    made = small(seed)
    for order in [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)]:
        found = made.groups().of_order(order, 2)
        best = ByHand(made, 2).best([order])
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            assert found.order == order
            assert found.value == pytest.approx(best.value, rel=3e-7)


# ------------------------------------------------------------ orders


def test_nodes_that_are_alike_are_not_exchanged_on_equal_links() -> None:
    nodes = [node("a"), node("b"), node("c", speed=2.0)]
    assert len(scene(even_model(6), nodes).groups().orders(frozenset(range(3)))) == 3
    assert len(scene(even_model(6), nodes, [*all_links(nodes), link("a", "b", rate=1e6)]).groups().orders(frozenset(range(3)))) == 6


@pytest.mark.parametrize("change", [{"memory_bytes": 1}, {"flop_per_s": 1.0}, {"message_s": 1.0}, {"memory_bytes_per_s": 1.0}])
def test_nodes_that_differ_in_anything_that_costs_are_exchanged(change: dict[str, float]) -> None:
    nodes = [node("a"), dataclasses.replace(node("b"), **change)]
    assert len(scene(even_model(6), nodes).groups().orders(frozenset((0, 1)))) == 2


def test_plain_orders_start_with_memory_and_follow_fast_links() -> None:
    nodes = [node("a", memory=80 * MB), node("b", speed=5.0), node("c", memory=90 * MB, speed=2.0), node("d", memory=70 * MB, speed=0.5)]
    links = [link(s, t, rate=1e6) for s in "abcd" for t in "abcd" if s != t]
    links += [link(s, t, rate=1e8) for s, t in ("bd", "db", "da", "ad", "ac", "ca")]
    plain = [tuple(order) for order in scene(even_model(6), nodes, links).groups().plain_orders(frozenset(range(4))).tolist()]
    assert plain[0] == (1, 2, 0, 3)
    assert (1, 2, 0, 3)[::-1] not in plain or plain.index((1, 2, 0, 3)) == 0
    # From the largest along the fast links: b, d, a, c.
    assert (1, 3, 0, 2) in plain
    assert len(set(plain)) == len(plain)


def test_large_groups_are_tried_in_plain_orders_only() -> None:
    nodes = [node(f"n{index}", memory=(20 + index) * MB, speed=1.0 + index % 4) for index in range(10)]
    search = scene(even_model(12), nodes).groups()
    group = frozenset(range(10))
    found = search.exact(group, 1)
    assert found is not None
    assert not found.exact
    assert set(found.order) == group
    assert len(search.orders(group)) < 10


# ------------------------------------------------------------ estimates and work


def test_the_estimate_lets_full_nodes_take_what_their_memory_holds() -> None:
    # A fast node that holds a quarter of the model: the slow one must do the rest.
    profile = even_model(8, crossing=0, saved=0)
    nodes = [node("fast", memory=4_250 * KB, speed=3.0), node("slow", memory=100 * MB)]
    search = scene(profile, nodes, options=PlanningConfig(headroom=1.0)).groups()
    group = frozenset((0, 1))
    whole = 8 * 0.003
    assert search.most_value(group, 1) == pytest.approx(8 / (whole / 4), rel=1e-6)
    assert search.likely_value(group, 1) == pytest.approx(8 / (whole * 0.75), rel=1e-2)


def test_the_estimate_is_nothing_for_groups_whose_memory_is_short() -> None:
    search = scene(even_model(8), [node("a", memory=5 * MB), node("b", memory=5 * MB), node("c")]).groups()
    assert search.likely_value(frozenset((0, 1)), 1) == 0.0
    assert search.most_value(frozenset((0, 1)), 1) == 0.0
    assert search.likely_value(frozenset((0, 2)), 1) > 0.0


def test_what_a_group_holds_is_its_memory_relative_to_the_model() -> None:
    search = scene(even_model(10, saved=0), [node("a", memory=10_500 * KB), node("b", memory=30_500 * KB)]).groups()
    # Parameters and gradients: 20 MB, and 1 MB of a gradient that is being found; with averaging two copies more.
    assert search.held(frozenset((0,)), 1) == pytest.approx(0.5)
    assert search.held(frozenset((0, 1)), 2) == pytest.approx(1.0)


def test_results_are_remembered_and_work_is_counted() -> None:
    search: GroupSearch = small(1).groups()
    group = frozenset(range(4))
    first = search.exact(group, 1)
    spent = search.spent[0]
    assert spent > 0
    assert search.exact(group, 1) is first
    assert search.spent[0] == spent
    search.spend_call()
    assert search.spent[0] > spent


def test_groups_that_were_cut_are_listed_with_their_values() -> None:
    search = scene(even_model(6), [node("a"), node("b", memory=2 * MB), node("c")]).groups()
    for group in (frozenset((0,)), frozenset((1,)), frozenset((0, 2))):
        search.rough(group, 2)
    search.rough(frozenset((2,)), 1)
    listed = search.cut_groups(2)
    assert [group for group, _ in listed] == [frozenset((0,)), frozenset((0, 2))]
    assert [value for _, value in listed] == [search.rough(group, 2).value for group, _ in listed]  # type: ignore[union-attr]


def test_of_equally_good_cuts_the_one_that_sends_least_is_taken() -> None:
    units = [unit(0, seconds=1.0), *(unit(index, crossing=10 if index == 3 else 500_000) for index in range(1, 6))]
    search = scene(model(units), [node("a"), node("b"), node("c")], options=PlanningConfig(staleness_cost=0.0)).groups()
    found = search.of_order((0, 1, 2), 1)
    assert found is not None
    assert search.cut_of(found, 1).cuts == (0, 1, 4, 6)
    assert np.isclose(search.cut_of(found, 1).period_s, 1.0)
