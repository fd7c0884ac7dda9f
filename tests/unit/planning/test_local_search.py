"""Pools that are too large to try everything."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable

import pytest
from synthetic import KB, MB, Scene, all_links, even_model, job, link, node, random_pool, random_scene, scene

from roost.planning.groups import Group, GroupSearch
from roost.planning.local_search import LocalSearch
from roost.planning.partitions import Bounds

FREE = Bounds(least=1, most=0, slowest=0.0)
LITTLE = 6_000_000


def local(made: Scene, *, bounds: Bounds = FREE, budget: int = LITTLE, seed: int = 0, clusters: int = 3) -> LocalSearch:
    return LocalSearch(groups=made.groups(), bounds=bounds, rng=random.Random(seed), budget=budget, clusters=clusters)


def total(groups: GroupSearch, partition: Iterable[Group], clusters: int = 3) -> float:
    found = [groups.rough(group, clusters) for group in partition]
    return math.fsum(result.value if result else -math.inf for result in found)


def pool_of(size: int, seed: int) -> Scene:
    """Return a pool in which two to four nodes make a cluster, with links of every kind."""
    rng = random.Random(seed)
    nodes = random_pool(rng, size, least=10 * MB, most=40 * MB, spread=5.0)
    links = [link(a.node_id, b.node_id, rate=rng.choice([5e6, 20e6, 125e6])) for a in nodes for b in nodes if a is not b]
    return scene(even_model(10, crossing=20 * KB), nodes, links)


def check(made: Scene, partition: tuple[Group, ...], bounds: Bounds) -> None:
    """Assert that the groups are disjoint, hold the model and are as many as allowed."""
    places = [place for group in partition for place in group]
    assert len(set(places)) == len(places)
    assert set(places) <= set(range(len(made.nodes)))
    assert bounds.allow(len(partition))
    assert total(made.groups(), partition) > 0


@pytest.mark.parametrize(("size", "seed"), [(9, 0), (10, 1), (12, 3)])
def test_what_is_found_is_never_worse_than_any_start(size: int, seed: int) -> None:
    made = pool_of(size, seed)
    search = local(made, seed=seed)
    starts = [start for start in local(made)._starts() if start]
    found = search.best()
    assert found is not None
    check(made, found, FREE)
    assert starts
    for start in starts:
        assert total(made.groups(), found) >= total(made.groups(), start) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_more_work_finds_more_on_the_way_and_never_less_than_none(seed: int) -> None:
    made = pool_of(11, 10 + seed)
    values = []
    for budget in (0, LITTLE, 4 * LITTLE):
        found = local(made, budget=budget).best()
        assert found is not None
        values.append(total(made.groups(), found))
    assert values[0] <= min(values) * (1 + 1e-9)
    # No plan beats what all nodes together can compute.
    assert max(values) <= 8 * sum(member.flop_per_s for member in made.nodes) / (10 * 0.003 * 1e9) * (1 + 1e-9)


def test_equal_seeds_find_equal_partitions() -> None:
    made = pool_of(12, 7)
    first, again = local(made, seed=5), local(made, seed=5)
    assert first.best() == again.best()
    assert first.groups.spent == again.groups.spent


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 2), (2, 2), (3, 0), (4, 4)])
def test_the_bounds_on_clusters_are_kept(least: int, most: int) -> None:
    nodes = random_pool(random.Random(3), 10, least=30 * MB, most=60 * MB, spread=3.0)
    made, bounds = scene(even_model(10, crossing=KB), nodes), Bounds(least=least, most=most, slowest=0.0)
    search = local(made, bounds=bounds)
    assert search.feasible()
    found = search.best()
    assert found is not None
    check(made, found, bounds)


def test_nothing_is_found_where_the_pool_holds_no_or_too_few_replicas() -> None:
    tiny = scene(even_model(10), [node(f"n{index}", memory=1 * MB) for index in range(9)])
    assert local(tiny).best() is None
    assert not local(tiny).feasible()
    nodes = [*(node(f"n{index}", memory=1 * MB) for index in range(8)), node("large")]
    bounds = Bounds(least=2, most=0, slowest=0.0)
    assert not local(scene(even_model(10), nodes), bounds=bounds).feasible()
    assert local(scene(even_model(10), nodes), bounds=bounds).best() is None


def test_nodes_that_hold_the_model_alone_stay_alone() -> None:
    made = scene(even_model(8), [node(f"n{index}", speed=1.0 + index % 3) for index in range(9)])
    found = local(made, clusters=9).best()
    assert found is not None
    assert sorted(sorted(group) for group in found) == [[place] for place in range(9)]


def test_nodes_at_one_site_work_together_where_sites_are_far_apart() -> None:
    nodes = [node(f"n{index}", memory=16 * MB) for index in range(9)]
    sites = [{0, 3, 6}, {1, 4, 7}, {2, 5, 8}]
    near = [(a, b) for site in sites for a in site for b in site if a != b]
    links = [*all_links(nodes, rate=1e5, latency=0.2), *(link(f"n{a}", f"n{b}") for a, b in near)]
    made = scene(even_model(9, crossing=100 * KB), nodes, links, config=job(max_in_flight=3))
    found = local(made, budget=3 * LITTLE).best()
    assert found is not None
    for group in found:
        assert any(group <= site for site in sites)


def best_by_rough_values(groups: GroupSearch, clusters: int) -> float:
    """Return the most that so many disjoint groups of six nodes are worth together, if each is valued as the search values it."""
    best = -math.inf
    for owners in itertools.product(range(-1, clusters), repeat=6):
        used = list(dict.fromkeys(owner for owner in owners if owner >= 0))
        if used == list(range(clusters)):
            best = max(best, total(groups, (frozenset(p for p in range(6) if owners[p] == number) for number in used), clusters))
    return best


@pytest.mark.parametrize("seed", range(9))
def test_it_comes_near_the_best_of_a_pool_in_which_everything_can_be_tried(seed: int) -> None:
    made = random_scene(random.Random(6000 + seed), nodes=6, units=6)
    clusters = 1 + seed % 3
    bounds = Bounds(least=clusters, most=clusters, slowest=0.0)
    search = local(made, clusters=clusters, bounds=bounds)
    found, groups = search.best(), made.groups()
    best = best_by_rough_values(groups, clusters)
    assert (found is None) == math.isinf(best)
    if found is not None:
        check(made, found, bounds)
        assert 0.95 * best <= total(groups, found, clusters) <= best * (1 + 1e-9)


def test_a_pool_of_thirty_reaches_nearly_what_its_nodes_can_compute() -> None:
    nodes = random_pool(random.Random(0), 30, least=12 * MB, most=40 * MB, spread=4)
    made = scene(even_model(12, crossing=1000), nodes, config=job(averaging_interval=1000))
    found = local(made, budget=2 * LITTLE, clusters=10).best()
    assert found is not None
    ideal = 8 * sum(member.flop_per_s for member in nodes) / (0.003 * 12 * 1e9)
    assert total(made.groups(), found, 10) > 0.7 * ideal
