"""Small pools: the best way to group the nodes."""

from __future__ import annotations

import math
import random

import pytest
from by_hand import best_partition
from synthetic import MB, Scene, even_model, job, model, node, random_scene, scene, unit

from roost.config import PlanningConfig
from roost.planning.groups import GroupResult
from roost.planning.partitions import Bounds, PartitionSearch

ENOUGH = 10**12


def search(made: Scene, *, least: int = 1, most: int = 0, slowest: float = 0.0, budget: int = ENOUGH) -> tuple[GroupResult, ...] | None:
    bounds = Bounds(least=least, most=most, slowest=slowest)
    return PartitionSearch(groups=made.groups(), bounds=bounds, budget=budget).best()


def names(made: Scene, results: tuple[GroupResult, ...] | None) -> list[str]:
    assert results is not None
    return sorted("+".join(sorted(made.nodes[place].node_id for place in result.order)) for result in results)


@pytest.mark.parametrize(("seed", "least", "most"), [(s, a, b) for s in range(6) for a, b in ((1, 0), (1, 1), (2, 0), (1, 2), (3, 3))])
def test_no_partition_of_any_part_of_four_nodes_is_worth_more(seed: int, least: int, most: int) -> None:
    made = random_scene(random.Random(3000 + seed), nodes=4, units=4, links="mixed" if seed % 2 else "equal")
    found, best = search(made, least=least, most=most), best_partition(made, least=least, most=most)
    assert (found is None) == (best is None)
    bounds = Bounds(least=least, most=most, slowest=0.0)
    assert PartitionSearch(groups=made.groups(), bounds=bounds, budget=ENOUGH).feasible() == (best is not None)
    if found is not None and best is not None:
        assert math.fsum(result.value for result in found) == pytest.approx(best[0], rel=1e-6)
        places = [place for result in found for place in result.order]
        assert len(set(places)) == len(places)
        assert bounds.allow(len(found))


# Of these the second to fourth are better in other orders than the plain ones that the search starts from.
@pytest.mark.parametrize("seed", [0, 10, 17, 54])
def test_no_partition_of_any_part_of_five_nodes_is_worth_more(seed: int) -> None:
    made = random_scene(random.Random(4000 + seed), nodes=5, units=5)
    found, best = search(made), best_partition(made)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert math.fsum(result.value for result in found) == pytest.approx(best[0], rel=1e-6)


def test_nodes_that_hold_the_model_alone_form_clusters_alone() -> None:
    made = scene(even_model(6), [node("a", speed=2.0), node("b"), node("c", speed=1.5)])
    assert names(made, search(made)) == ["a", "b", "c"]


def test_nodes_that_hold_half_of_the_model_work_in_pairs() -> None:
    made = scene(even_model(6, crossing=0), [node(name, memory=16 * MB) for name in "abcd"], config=job(max_in_flight=2))
    found = search(made)
    assert found is not None
    assert [len(result.order) for result in found] == [2, 2]


def test_a_tight_pool_is_searched_in_every_order_of_its_nodes() -> None:
    profile = model([unit(0, parameters=MB), unit(1, parameters=6 * MB)])
    found = search(scene(profile, [node("a", memory=20 * MB), node("b", memory=5 * MB)]))
    assert found is not None
    assert [result.order for result in found] == [(1, 0)]


def test_the_bounds_on_clusters_are_kept() -> None:
    made = scene(even_model(6), [node("a"), node("b"), node("c")])
    for least, most in ((1, 1), (1, 2), (2, 2), (3, 0)):
        found = search(made, least=least, most=most)
        assert found is not None
        assert len(found) == (most or 3)


def test_a_cluster_that_is_far_slower_than_the_fastest_is_left_out_unless_it_is_asked_for() -> None:
    made = scene(even_model(6), [node("a"), node("snail", speed=0.015)])
    assert names(made, search(made, slowest=0.02)) == ["a"]
    assert names(made, search(made, slowest=0.01)) == ["a", "snail"]
    assert names(made, search(made, slowest=0.02, least=2)) == ["a", "snail"]


def test_between_equal_values_fewer_nodes_are_taken() -> None:
    # b computes so little that the model cannot be cut for it without a loss; c has no use at all.
    made = scene(even_model(1), [node("a"), node("b", memory=1 * MB), node("c", memory=1 * MB)])
    found = search(made)
    assert found is not None
    assert [result.order for result in found] == [(0,)]


def test_nothing_is_found_if_no_group_holds_the_model() -> None:
    made = scene(even_model(6), [node("a", memory=5 * MB), node("b", memory=5 * MB)])
    assert search(made) is None
    assert not PartitionSearch(groups=made.groups(), bounds=Bounds(least=1, most=0, slowest=0.0), budget=ENOUGH).feasible()
    two = scene(even_model(6), [node("a"), node("b", memory=5 * MB)])
    assert search(two, least=2) is None
    assert search(two) is not None


@pytest.mark.parametrize("seed", range(5))
def test_a_search_that_is_cut_short_still_returns_a_plan_and_never_a_better_one(seed: int) -> None:
    made = random_scene(random.Random(5000 + seed), nodes=5, units=6)
    short, full = search(made, budget=0), search(made)
    if full is None:
        return
    assert short is not None
    assert math.fsum(result.value for result in short) <= math.fsum(result.value for result in full) * (1 + 1e-6)


def test_reliability_decides_which_nodes_work_together() -> None:
    nodes = [node(name, memory=16 * MB, reliability=0.5 if name in "ad" else 1.0) for name in "abcd"]
    made = scene(even_model(6, crossing=0, saved=0), nodes, config=job(max_in_flight=2), options=PlanningConfig(slowest_cluster=0.0))
    # Two and two: both shaky ones in one cluster are worth 1 + 0.25 against 0.5 + 0.5.
    assert names(made, search(made, least=2)) == ["a+d", "b+c"]


def test_bounds_say_which_numbers_of_clusters_and_which_periods_are_allowed() -> None:
    bounds = Bounds(least=2, most=3, slowest=0.1)
    assert [bounds.allow(count) for count in range(5)] == [False, False, True, True, False]
    assert Bounds(least=1, most=0, slowest=0.0).allow(99)
    assert bounds.balanced([1.0, 1.0, 10.0])
    assert not bounds.balanced([1.0, 1.0, 10.1])
    assert bounds.balanced([1.0, 99.0])
