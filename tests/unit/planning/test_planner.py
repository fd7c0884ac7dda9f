"""From profiles to a plan."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import pytest
from by_hand import best_partition
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import KB, MB, all_links, even_model, job, link, model, node, random_pool, random_scene, scene, unit

from roost.config import JobConfig, PlanningConfig
from roost.errors import EmptyPoolError, InvalidConfigError, NodeTooSmallError, PlanningError, PoolTooSmallError
from roost.planning import make_plan
from roost.planning.planner import SEARCHED_UNITS, Planner
from roost.types import LinkProfile, ModelProfile, NodeProfile, Plan

LITTLE = PlanningConfig(effort=0.02)


def plan_for(
    profile: ModelProfile,
    nodes: Sequence[NodeProfile],
    config: JobConfig | None = None,
    links: Sequence[LinkProfile] | None = None,
    options: PlanningConfig = LITTLE,
) -> Plan:
    return make_plan(profile, nodes, all_links(nodes) if links is None else links, config or job(), random.Random(0), options=options)


def five_nodes() -> list[NodeProfile]:
    large = [node(f"large-{index}", memory=36 * MB, speed=1.0) for index in (1, 2)]
    small = [node(f"small-{index}", memory=28 * MB, speed=0.4) for index in (1, 2, 3)]
    return [*large, *small]


def check(plan: Plan, profile: ModelProfile, nodes: Sequence[NodeProfile]) -> None:
    """Assert what must hold for every plan."""
    memory = {member.node_id: member.memory_bytes for member in nodes}
    assert sorted([*(stage.node_id for stage in plan.stages), *plan.backups]) == sorted(memory)
    for cluster in plan.clusters:
        owned = [index for stage in cluster.stages for index in range(stage.first_unit, stage.last_unit)]
        assert owned == list(range(len(profile.units)))
        for index, stage in enumerate(cluster.stages):
            assert (stage.cluster, stage.index) == (cluster.index, index)
            assert stage.memory_needed_bytes <= stage.memory_available_bytes == memory[stage.node_id]
            assert (stage.start, stage.stop) == (profile.units[stage.first_unit].start, profile.units[stage.last_unit - 1].stop)
            assert stage.max_in_flight >= 1
        assert cluster.samples_per_s > 0
        assert [stage.max_in_flight for stage in cluster.stages] == sorted((stage.max_in_flight for stage in cluster.stages), reverse=True)
    assert math.fsum(cluster.share for cluster in plan.clusters) == pytest.approx(1.0)
    assert plan.samples_per_s == pytest.approx(sum(cluster.samples_per_s for cluster in plan.clusters))
    check_segments(plan, profile)


def check_segments(plan: Plan, profile: ModelProfile) -> None:
    unit_of = {tensor.name: index for index, part in enumerate(profile.units) for tensor in part.tensors}
    averaged = [tensor.name for part in profile.units for tensor in part.tensors if tensor.averaged]
    assert sorted(name for segment in plan.segments for name in segment.tensors) == sorted(averaged)
    for segment in plan.segments:
        for name in segment.tensors:
            owners = [stage.node_id for stage in plan.stages if stage.first_unit <= unit_of[name] < stage.last_unit]
            assert sorted(segment.members) == sorted(owners)
            assert len(owners) == len(plan.clusters)


def test_two_large_fast_and_three_small_slow_nodes_form_two_clusters_that_are_cut_differently() -> None:
    profile, nodes = even_model(12), five_nodes()
    plan = plan_for(profile, nodes)
    check(plan, profile, nodes)
    first, second = plan.clusters
    assert {stage.node_id for stage in first.stages} == {"large-1", "large-2"}
    assert {stage.node_id for stage in second.stages} == {"small-1", "small-2", "small-3"}
    assert [stage.first_unit for stage in first.stages] == [0, 6]
    assert [stage.first_unit for stage in second.stages] == [0, 4, 8]
    rates = [first.samples_per_s, second.samples_per_s]
    assert [first.share, second.share] == pytest.approx([rate / sum(rates) for rate in rates])
    assert [len(segment.tensors) for segment in plan.segments] == [4, 2, 2, 4]
    assert plan.backups == ()


def test_a_prediction_says_how_fast_and_what_binds() -> None:
    plan = plan_for(even_model(4), [node("a")])
    (cluster,) = plan.clusters
    assert cluster.samples_per_s == pytest.approx(8 / 0.012)
    assert cluster.bottleneck == "compute of a"
    assert cluster.stages[0].compute_s == pytest.approx(0.012)
    assert cluster.stages[0].send_s == 0.0
    assert any("compute of a" in note for note in plan.notes)


def test_the_bound_of_the_job_on_in_flight_micro_batches_is_kept() -> None:
    plan = plan_for(even_model(12), five_nodes(), job(max_in_flight=2))
    assert max(stage.max_in_flight for stage in plan.stages) == 2


@pytest.mark.parametrize("seed", range(6))
def test_a_small_pool_gets_the_best_of_all_plans(seed: int) -> None:
    made = random_scene(random.Random(7000 + seed), nodes=4, units=4)
    best = best_partition(made)
    if best is None:
        with pytest.raises((NodeTooSmallError, PoolTooSmallError)):
            plan_for(made.profile, made.nodes, made.config, made.links, made.options)
        return
    planner = Planner.of(made.profile, made.nodes, made.links, made.config, made.options)
    orders = planner.search(random.Random(0))
    assert orders is not None
    cuts = planner.exact_cuts(orders)
    assert math.fsum(cut.value for cut in cuts) == pytest.approx(best[0], rel=1e-6)
    plan = plan_for(made.profile, made.nodes, made.config, made.links, made.options)
    check(plan, made.profile, made.nodes)
    assert [tuple(stage.node_id for stage in cluster.stages) for cluster in plan.clusters] == [
        tuple(member.node_id for member in cut.nodes) for cut in cuts
    ]
    assert plan.samples_per_s == pytest.approx(math.fsum(8 / cut.period_s for cut in cuts))


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(EmptyPoolError, match="no node has joined"):
        plan_for(even_model(2), [])


def test_fewer_nodes_than_clusters_are_refused() -> None:
    with pytest.raises(EmptyPoolError, match="1 nodes cannot form the 2 clusters"):
        plan_for(even_model(2), [node("a")], job(min_clusters=2))


def test_two_nodes_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="same name"):
        plan_for(even_model(2), [node("a"), node("a")])


def test_a_unit_that_fits_nowhere_is_named_with_the_bytes_it_is_short() -> None:
    profile = model([unit(0), unit(1, parameters=40 * MB), unit(2)])
    nodes = [node("a", memory=50 * MB), node("b", memory=30 * MB)]
    with pytest.raises(NodeTooSmallError, match=r"'layers.1' cannot be cut further.*largest node, a,") as caught:
        plan_for(profile, nodes)
    enough = dataclasses.replace(nodes[0], memory_bytes=50 * MB + caught.value.short_bytes - 1)
    with pytest.raises(NodeTooSmallError, match="1 bytes"):
        plan_for(profile, [enough, nodes[1]])


def test_a_pool_that_is_too_small_says_how_much_more_would_be_enough() -> None:
    profile = even_model(12)
    nodes = [node("a", memory=9 * MB), node("b", memory=8 * MB)]
    with pytest.raises(PoolTooSmallError, match="more on a") as caught:
        plan_for(profile, nodes)
    short = caught.value.short_bytes
    larger = dataclasses.replace(nodes[0], memory_bytes=9 * MB + short)
    check(plan_for(profile, [larger, nodes[1]]), profile, [larger, nodes[1]])
    still_short = dataclasses.replace(nodes[0], memory_bytes=int(9 * MB + short * 0.98))
    with pytest.raises(PoolTooSmallError):
        plan_for(profile, [still_short, nodes[1]])


def test_clusters_that_cannot_be_formed_say_how_much_more_would_be_enough() -> None:
    profile = even_model(6)
    nodes = [node("a", memory=20 * MB), node("b", memory=20 * MB), node("c", memory=5 * MB)]
    with pytest.raises(PoolTooSmallError, match="the 2 clusters that min_clusters asks for.*each of a, b") as caught:
        plan_for(profile, nodes, job(min_clusters=2))
    extra = caught.value.short_bytes // 2
    larger = [dataclasses.replace(member, memory_bytes=member.memory_bytes + extra) for member in nodes[:2]]
    assert len(plan_for(profile, [*larger, nodes[2]], job(min_clusters=2)).clusters) == 2


def test_a_node_too_small_for_any_stage_is_a_backup_and_the_note_says_by_how_much() -> None:
    profile, nodes = even_model(6), [node("a"), node("tiny", memory=1 * MB)]
    plan = plan_for(profile, nodes)
    assert plan.backups == ("tiny",)
    (note,) = [note for note in plan.notes if note.startswith("tiny")]
    # The last unit alone: parameters, gradients, one gradient that is being found, one micro-batch in flight, two values arriving.
    assert f"({3 * MB + 100 * KB + 20 * KB - 1 * MB} bytes) short" in note


def test_a_node_that_would_slow_its_cluster_down_is_a_backup() -> None:
    nodes = [node("a", memory=30 * MB), node("b", memory=30 * MB), node("slow", memory=10 * MB, speed=0.001)]
    plan = plan_for(even_model(8), nodes, job(max_clusters=1))
    assert plan.backups == ("slow",)
    assert any(note.startswith("slow is a backup: no cluster would gain") for note in plan.notes)


def test_the_order_in_which_nodes_are_given_does_not_matter() -> None:
    nodes = random_pool(random.Random(3), 6, least=8 * MB, most=30 * MB, spread=5)
    assert plan_for(even_model(9), nodes) == plan_for(even_model(9), list(reversed(nodes)))


def test_a_model_of_many_units_is_cut_between_any_two_of_them() -> None:
    profile = even_model(150, parameters=100 * KB, saved=KB, crossing=KB)
    assert SEARCHED_UNITS[0][1] < 150
    nodes = [node("a", speed=1.0, memory=60 * MB), node("b", speed=0.5152, memory=60 * MB)]
    plan = plan_for(profile, nodes, job(max_clusters=1), options=PlanningConfig(effort=0.02, staleness_cost=0.0))
    check(plan, profile, nodes)
    # 99 units on a and 51 on b take 297 ms on either; every other cut takes longer.
    assert plan.samples_per_s == pytest.approx(8 / 0.297, rel=1e-6)
    assert sorted(stage.last_unit - stage.first_unit for stage in plan.stages) == [51, 99]


def test_nodes_that_are_only_just_large_enough_are_cut_between_units_that_a_search_would_merge() -> None:
    sizes = [100 * KB] * 150
    profile = model([unit(index, parameters=size, saved=0, crossing=0) for index, size in enumerate(sizes)], input_bytes=0)
    # 73 and 77 units, to the byte, with one micro-batch in flight.
    nodes = [node("a", memory=(2 * 73 + 1) * 100 * KB), node("b", memory=(2 * 77 + 1) * 100 * KB)]
    plan = plan_for(profile, nodes)
    check(plan, profile, nodes)
    assert {stage.node_id: stage.last_unit - stage.first_unit for stage in plan.stages} == {"a": 73, "b": 77}


def test_pools_beyond_an_exact_search_are_planned_alike_each_time_and_within_the_bounds() -> None:
    nodes = random_pool(random.Random(1), 12, least=10 * MB, most=40 * MB, spread=5)
    profile = even_model(10)
    for fields in ({}, {"max_clusters": 1}, {"min_clusters": 2, "max_clusters": 2}):
        config = job(**fields)
        plan = plan_for(profile, nodes, config)
        check(plan, profile, nodes)
        assert config.min_clusters <= len(plan.clusters) <= (config.max_clusters or 12)
        assert plan == plan_for(profile, list(reversed(nodes)), config)


def test_one_cluster_is_formed_of_a_large_pool_whose_memory_has_no_room_for_averaging() -> None:
    # One unit, its gradients and activations fill a node: two clusters would need as much again for the snapshot and the sum.
    nodes = [node(f"n{index}", memory=int(3.3 * MB)) for index in range(9)]
    plan = plan_for(even_model(9), nodes, job(max_in_flight=1))
    check(plan, even_model(9), nodes)
    assert len(plan.clusters) == 1
    assert len(plan.stages) == 9


def test_fast_clusters_come_first() -> None:
    plan = plan_for(even_model(6), [node("a"), node("b", speed=3.0), node("c", speed=2.0)])
    assert [cluster.stages[0].node_id for cluster in plan.clusters] == ["b", "c", "a"]


def test_a_cluster_that_adds_next_to_nothing_is_left_out_unless_it_is_asked_for() -> None:
    nodes = [node("a"), node("snail", speed=1e-4)]
    assert plan_for(even_model(6), nodes).backups == ("snail",)
    assert plan_for(even_model(6), nodes, job(min_clusters=2)).backups == ()
    large = [*(node(f"n{index}") for index in range(9)), node("snail", speed=1e-4)]
    assert plan_for(even_model(6), large).backups == ("snail",)


def test_links_to_nodes_that_are_gone_are_ignored() -> None:
    nodes = [node("a", memory=16 * MB), node("b", memory=16 * MB)]
    links = all_links(nodes)
    ghosts = [link("a", "ghost", rate=1.0), link("ghost", "b", rate=1e12)]
    assert plan_for(even_model(6), nodes, links=[*ghosts, *links]) == plan_for(even_model(6), nodes, links=links)


def test_merged_units_are_searched_and_all_units_are_cut() -> None:
    made = scene(even_model(150), [node("a"), node("b")])
    planner = Planner.of(made.profile, made.nodes, made.links, made.config, made.options)
    assert planner.fine.costs.units == 150
    assert planner.coarse.costs.units <= SEARCHED_UNITS[0][1]
    few = scene(even_model(20), [node("a"), node("b")])
    planner = Planner.of(few.profile, few.nodes, few.links, few.config, few.options)
    assert planner.coarse is planner.fine


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5),
    units=st.integers(1, 10),
    spread=st.sampled_from([1.0, 10.0, 10_000.0]),
    optimizer=st.sampled_from(["SGD", "AdamW"]),
    bounds=st.sampled_from([(1, 0), (1, 1), (2, 0), (2, 3)]),
)
def test_every_plan_is_sound_and_every_refusal_is_a_planning_error(
    seed: int, size: int, units: int, spread: float, optimizer: str, bounds: tuple[int, int]
) -> None:
    rng = random.Random(seed)
    parts = [
        unit(
            index,
            seconds=rng.choice([0.0, 0.001, 0.02]),
            parameters=rng.choice([0, 4 * KB, MB, 3 * MB]),
            saved=rng.choice([0, 100 * KB, MB]),
            crossing=rng.choice([0, KB, 500 * KB]),
        )
        for index in range(units)
    ]
    profile = model(parts)
    nodes = random_pool(rng, size, least=2 * MB, most=60 * MB, spread=spread)
    config = job(optimizer=optimizer, min_clusters=bounds[0], max_clusters=bounds[1])
    links = [link for link in all_links(nodes, rate=rng.choice([1e5, 1e9])) if rng.random() < 0.7]
    try:
        plan = make_plan(profile, nodes, links, config, random.Random(seed), options=LITTLE)
    except PlanningError as error:
        assert isinstance(error, EmptyPoolError) or error.short_bytes > 0  # type: ignore[attr-defined]
        return
    check(plan, profile, nodes)
    assert bounds[0] <= len(plan.clusters) <= (bounds[1] or size)
    assert plan == make_plan(profile, nodes, links, config, random.Random(seed), options=LITTLE)


@pytest.mark.parametrize("size", [1, 3, 9, 12])
def test_degenerate_pools_get_a_plan(size: int) -> None:
    for nodes in (
        [node(f"n{index}") for index in range(size)],
        [node(f"n{index}", speed=10_000.0 ** (index / max(1, size - 1))) for index in range(size)],
    ):
        for units in (1, 3):
            profile = even_model(units)
            check(plan_for(profile, nodes), profile, nodes)


def test_a_node_alone_is_planned_on_the_line_that_its_links_tell() -> None:
    profile = even_model(2, crossing=10 * KB)
    slow = [link("a", "b", rate=1e5), link("b", "a", rate=1e5)]
    alone = make_plan(profile, [node("a")], slow, job(), random.Random(0))
    # 10 KB of data per micro-batch of 8 over 100 KB/s.
    assert alone.samples_per_s == pytest.approx(80.0)
    assert alone.clusters[0].bottleneck == "downlink of a"


def test_a_model_that_costs_nothing_is_planned_for_many_nodes() -> None:
    profile = model([unit(index, seconds=0.0, parameters=0, saved=0, crossing=0) for index in range(3)], input_bytes=0)
    plan = make_plan(profile, [node(f"n{index}") for index in range(10)], [], job(), random.Random(0))
    assert plan.samples_per_s > 0


def test_unreliable_nodes_are_never_taken_for_small_ones() -> None:
    nodes = [dataclasses.replace(node(f"n{index}", memory=12 * MB), reliability=1e-6) for index in range(5)]
    assert make_plan(even_model(8), nodes, [], job(), random.Random(0)).clusters
