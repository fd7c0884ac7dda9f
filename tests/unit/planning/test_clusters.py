"""Which nodes form a cluster together."""

from __future__ import annotations

import random

import pytest
from synthetic import MB, all_links, even_model, job, model, node, random_pool, unit

from roost.planning.clusters import ClusterSearch
from roost.planning.cost import link_table, unit_costs
from roost.planning.memory import MemoryModel
from roost.planning.stages import ClusterCut, StageCutter
from roost.types import ModelProfile, NodeProfile


def search(profile: ModelProfile, nodes: list[NodeProfile], *, fewest: int = 1, most: int = 0) -> list[ClusterCut] | None:
    costs = unit_costs(profile, job())
    links = link_table(all_links(nodes))
    cutter = StageCutter(costs=costs, memory=MemoryModel(costs=costs, optimizer_copies=0), links=links, in_flight_bound=0)
    found = ClusterSearch(nodes=tuple(nodes), cutter=cutter, min_clusters=fewest, max_clusters=most, rng=random.Random(0))
    return found.best()


def names(clusters: list[ClusterCut] | None) -> list[set[str]]:
    assert clusters is not None
    return [{member.node_id for member in cluster.nodes} for cluster in clusters]


def test_nodes_that_hold_the_model_alone_form_clusters_alone() -> None:
    assert names(search(even_model(6), [node("a", speed=2.0), node("b"), node("c", speed=1.5)])) == [{"a"}, {"c"}, {"b"}]


def test_the_bound_on_clusters_is_kept() -> None:
    assert len(names(search(even_model(6), [node("a"), node("b"), node("c")], most=1))) == 1
    assert len(names(search(even_model(6), [node("a"), node("b"), node("c")], most=2))) == 2


def test_nodes_of_similar_speed_work_together() -> None:
    fast = [node(f"fast-{index}", memory=16 * MB, speed=1.0) for index in range(2)]
    slow = [node(f"slow-{index}", memory=16 * MB, speed=0.2) for index in range(2)]
    clusters = names(search(even_model(6), [*fast, *slow]))
    assert clusters == [{"fast-0", "fast-1"}, {"slow-0", "slow-1"}]


def test_a_cluster_that_adds_next_to_nothing_is_left_out() -> None:
    assert names(search(even_model(6), [node("a"), node("snail", speed=1e-4)])) == [{"a"}]


def test_a_slow_cluster_is_kept_if_it_is_needed_to_reach_the_lower_bound() -> None:
    assert names(search(even_model(6), [node("a"), node("snail", speed=1e-4)], fewest=2)) == [{"a"}, {"snail"}]


def test_no_partition_is_returned_if_no_group_holds_the_model() -> None:
    assert search(even_model(6), [node("a", memory=5 * MB), node("b", memory=5 * MB)]) is None
    assert search(even_model(6), [node("a"), node("b", memory=5 * MB)], fewest=2) is None


def test_a_tight_pool_is_searched_in_every_order_of_its_nodes() -> None:
    # Large nodes usually come first, but here only the last unit needs one.
    profile = model([unit(0, parameters=MB), unit(1, parameters=6 * MB)])
    clusters = search(profile, [node("a", memory=14 * MB), node("b", memory=5 * MB)])
    assert clusters is not None
    assert [member.node_id for member in clusters[0].nodes] == ["b", "a"]


@pytest.mark.parametrize("seed", range(3))
def test_a_large_pool_reaches_nearly_what_its_nodes_can_compute(seed: int) -> None:
    nodes = random_pool(random.Random(seed), 30, least=12 * MB, most=40 * MB, spread=4)
    clusters = search(even_model(12, crossing=1000), nodes)
    assert clusters is not None
    ideal = sum(member.flop_per_s for member in nodes) / (0.003 * 12 * 1e9)
    assert sum(1 / cluster.period_s for cluster in clusters) > 0.75 * ideal
