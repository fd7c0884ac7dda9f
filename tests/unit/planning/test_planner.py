"""From profiles to a plan."""

from __future__ import annotations

import dataclasses
import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import KB, MB, all_links, even_model, job, model, node, random_pool, unit

from roost.config import JobConfig
from roost.errors import EmptyPoolError, InvalidConfigError, NodeTooSmallError, PlanningError, PoolTooSmallError
from roost.planning import make_plan
from roost.types import LinkProfile, ModelProfile, NodeProfile, Plan


def plan_for(
    profile: ModelProfile, nodes: list[NodeProfile], config: JobConfig | None = None, links: list[LinkProfile] | None = None
) -> Plan:
    return make_plan(profile, nodes, all_links(nodes) if links is None else links, config or job(), random.Random(0))


def five_nodes() -> list[NodeProfile]:
    large = [node(f"large-{index}", memory=34 * MB, speed=1.0) for index in (1, 2)]
    small = [node(f"small-{index}", memory=26 * MB, speed=0.4) for index in (1, 2, 3)]
    return [*large, *small]


def check(plan: Plan, profile: ModelProfile, nodes: list[NodeProfile]) -> None:
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
            assert 1 <= stage.max_in_flight <= len(cluster.stages) - index
        assert cluster.samples_per_s > 0
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
    assert [stage.node_id for stage in first.stages] == ["large-1", "large-2"]
    assert [stage.node_id for stage in second.stages] == ["small-1", "small-2", "small-3"]
    assert [stage.first_unit for stage in first.stages] == [0, 6]
    assert [stage.first_unit for stage in second.stages] == [0, 4, 8]
    assert [stage.max_in_flight for stage in first.stages] == [2, 1]
    assert [stage.max_in_flight for stage in second.stages] == [3, 2, 1]
    rates = [first.samples_per_s, second.samples_per_s]
    assert [first.share, second.share] == pytest.approx([rate / sum(rates) for rate in rates])
    assert first.share == pytest.approx(0.625, abs=0.01)
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
    profile = even_model(12)
    plan = plan_for(profile, five_nodes(), job(max_in_flight=2))
    assert [stage.max_in_flight for stage in plan.clusters[1].stages] == [2, 2, 1]


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
    # The last unit alone: parameters and gradients, one micro-batch in flight, two values arriving.
    assert f"({2 * MB + 100 * KB + 20 * KB - 1 * MB} bytes) short" in note


def test_a_node_that_would_slow_its_cluster_down_is_a_backup() -> None:
    nodes = [node("a", memory=30 * MB), node("b", memory=30 * MB), node("slow", memory=10 * MB, speed=0.001)]
    plan = plan_for(even_model(8), nodes, job(max_clusters=1))
    assert plan.backups == ("slow",)
    assert any(note.startswith("slow is a backup: no cluster would gain") for note in plan.notes)


def test_the_order_in_which_nodes_are_given_does_not_matter() -> None:
    nodes = random_pool(random.Random(3), 7, least=8 * MB, most=30 * MB, spread=5)
    assert plan_for(even_model(9), nodes) == plan_for(even_model(9), list(reversed(nodes)))


def test_a_model_of_many_units_is_cut_exactly() -> None:
    profile = even_model(150, parameters=100 * KB, saved=KB, crossing=KB)
    nodes = [node("a", speed=1.0, memory=40 * MB), node("b", speed=0.51, memory=40 * MB)]
    plan = plan_for(profile, nodes, job(max_clusters=1))
    check(plan, profile, nodes)
    assert plan.samples_per_s == pytest.approx(8 / (0.003 * 99.5), rel=0.01)


def test_a_hundred_nodes_are_planned_in_seconds_and_alike_each_time() -> None:
    nodes = random_pool(random.Random(1), 100, least=20 * MB, most=200 * MB, spread=10)
    profile = even_model(100)
    before = time.process_time()
    plan = plan_for(profile, nodes, links=[])
    assert time.process_time() - before < 6
    check(plan, profile, nodes)
    assert plan == plan_for(profile, nodes, links=[])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 7),
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
        plan = make_plan(profile, nodes, links, config, random.Random(seed))
    except PlanningError as error:
        assert isinstance(error, EmptyPoolError) or error.short_bytes > 0  # type: ignore[attr-defined]
        return
    check(plan, profile, nodes)
    assert bounds[0] <= len(plan.clusters) <= (bounds[1] or size)
    assert plan == make_plan(profile, nodes, links, config, random.Random(seed))


@pytest.mark.parametrize("size", [1, 3, 9, 12])
def test_degenerate_pools_get_a_plan(size: int) -> None:
    for nodes in (
        [node(f"n{index}") for index in range(size)],
        [node(f"n{index}", speed=10_000.0 ** (index / max(1, size - 1))) for index in range(size)],
    ):
        for units in (1, 3):
            profile = even_model(units)
            check(plan_for(profile, nodes), profile, nodes)
