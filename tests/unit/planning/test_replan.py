"""A new plan for a pool that has changed."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import KB, MB, all_links, even_model, link, node, random_pool

from roost.config import JobConfig, PlanningConfig
from roost.errors import PlanningError
from roost.planning import make_plan, relocation
from roost.planning.planner import Planner
from roost.planning.relocation import Forecast, Layout
from roost.planning.replan import MOST_WAITING, PlanChange, predict_again, propose_change
from roost.types import LinkProfile, ModelProfile, NodeProfile, Plan

DEFAULTS, QUICK = PlanningConfig(), PlanningConfig(effort=0.1)


def job(**fields: object) -> JobConfig:
    """Return a job whose averaging costs next to nothing."""
    return synthetic.job(**{"averaging_interval": 10_000, **fields})  # type: ignore[arg-type]


Stages = list[list[tuple[str, int, int]]]


def plan_for(profile: ModelProfile, nodes: Sequence[NodeProfile], config: JobConfig, links: Sequence[LinkProfile] | None = None) -> Plan:
    return make_plan(profile, nodes, all_links(nodes) if links is None else links, config, random.Random(0), options=QUICK)


def built(profile: ModelProfile, nodes: Sequence[NodeProfile], config: JobConfig, *clusters: str) -> Plan:
    """Return the plan with these clusters, each given as the names of its nodes; the model is cut evenly."""
    forecast = Forecast(planner=Planner.of(profile, nodes, all_links(nodes), config, PlanningConfig()))
    layouts = []
    for names in (cluster.split() for cluster in clusters):
        layouts.append(Layout(tuple(names), tuple(len(profile.units) * place // len(names) for place in range(len(names) + 1))))
    return forecast.write(layouts)


def change_for(
    plan: Plan,
    profile: ModelProfile,
    nodes: Sequence[NodeProfile],
    config: JobConfig,
    links: Sequence[LinkProfile] | None = None,
    *,
    options: PlanningConfig = DEFAULTS,
    payback_s: float = 600.0,
    **more: Any,
) -> PlanChange | None:
    now = all_links(nodes) if links is None else links
    return propose_change(plan, profile, nodes, now, config, random.Random(0), options=options, payback_s=payback_s, **more)


def changed(*args: object, **fields: object) -> PlanChange:
    change = change_for(*args, **fields)  # type: ignore[arg-type]
    assert change is not None
    return change


def stages(plan: Plan) -> Stages:
    return [[(stage.node_id, stage.first_unit, stage.last_unit) for stage in cluster.stages] for cluster in plan.clusters]


def without(nodes: Sequence[NodeProfile], *names: str) -> list[NodeProfile]:
    return [member for member in nodes if member.node_id not in names]


def slowed(nodes: Sequence[NodeProfile], name: str, factor: float) -> list[NodeProfile]:
    return [dataclasses.replace(m, flop_per_s=m.flop_per_s * factor) if m.node_id == name else m for m in nodes]


def pairs(count: int, *, memory: int = 45 * MB) -> list[NodeProfile]:
    """Nodes of which two hold twelve units of 1 MB."""
    return [node(f"n{index}", memory=memory) for index in range(count)]


def check_moves(change: PlanChange, before: Plan, profile: ModelProfile, *, copies_per_parameter: int = 0) -> None:
    """Assert that what every node held and what it fetches cover its new stage, each unit once, and that bytes are right."""
    held = {stage.node_id: set(range(stage.first_unit, stage.last_unit)) for stage in before.stages}
    fetched: dict[str, list[int]] = {}
    for move in change.moves:
        fetched.setdefault(move.target, []).extend(range(move.first_unit, move.last_unit))
        units = profile.units[move.first_unit : move.last_unit]
        assert move.nbytes == sum(unit.tensor_bytes + copies_per_parameter * unit.trainable_bytes for unit in units)
        assert move.tensors == tuple(tensor.name for unit in units for tensor in unit.tensors)
        assert move.source != move.target
        assert move.source == "" or set(range(move.first_unit, move.last_unit)) <= held[move.source]
        assert 0 < move.seconds <= change.move_s * (1 + 1e-9)
    for stage in change.plan.stages:
        mine = set(range(stage.first_unit, stage.last_unit))
        assert sorted(fetched.pop(stage.node_id, [])) == sorted(mine - held.get(stage.node_id, set()))
    assert not fetched


# ------------------------------------------------------------ nodes that leave


def test_nothing_is_proposed_if_nothing_changed() -> None:
    profile, nodes = even_model(12), pairs(5)
    assert change_for(plan_for(profile, nodes, job()), profile, nodes, job()) is None


def test_a_backup_takes_the_stage_of_a_lost_node_as_it_is() -> None:
    profile, nodes = even_model(12), pairs(5)
    plan = built(profile, nodes, job(), "n0 n1", "n2 n3")
    change = changed(plan, profile, without(nodes, "n2"), job())
    assert change.forced
    assert stages(change.plan) == [[("n0", 0, 6), ("n1", 6, 12)], [("n4", 0, 6), ("n3", 6, 12)]]
    assert [(move.target, move.source, move.nbytes) for move in change.moves] == [("n4", "n0", 6 * MB)]
    assert change.gain_samples_per_s == pytest.approx(plan.clusters[1].samples_per_s, rel=0.01)
    assert "n4 takes over from n2" in change.reason
    check_moves(change, plan, profile)


def test_a_backup_with_a_copy_needs_no_move() -> None:
    profile, nodes = even_model(12), pairs(5)
    plan = built(profile, nodes, job(), "n0 n1", "n2 n3")
    change = changed(plan, profile, without(nodes, "n2"), job(), copies={"n4": (0, 6)})
    assert (change.moves, change.move_s, change.pays_back_s) == ((), 0.0, 0.0)
    assert "nothing has to move" in change.reason


def test_two_lost_nodes_of_two_clusters_are_both_replaced() -> None:
    profile, nodes = even_model(12), pairs(6)
    config = job(min_clusters=2)
    plan = built(profile, nodes, config, "n0 n1", "n2 n3")
    change = changed(plan, profile, without(nodes, "n0", "n3"), config)
    assert sorted(stage.node_id for stage in change.plan.stages) == ["n1", "n2", "n4", "n5"]
    # The first half is with n2, the second with n1, as before: two halves have to come.
    assert sum(move.nbytes for move in change.moves) == 12 * MB
    check_moves(change, plan, profile)


@pytest.mark.parametrize("improve", [True, False])
@pytest.mark.parametrize("waiting", ["n4", "n4 n5"])
def test_two_nodes_that_cannot_reach_each_other_are_never_in_one_cluster(waiting: str, improve: bool) -> None:
    profile = even_model(12)
    nodes = pairs(4 + len(waiting.split()))
    plan = built(profile, nodes, job(), "n0 n1", "n2 n3")
    apart = frozenset(("n0", "n1"))
    change = changed(plan, profile, nodes, job(), apart=[apart], improve=improve)
    assert change.forced
    assert all(not apart <= {stage.node_id for stage in cluster.stages} for cluster in change.plan.clusters)
    assert len(change.plan.clusters) == 2
    check_moves(change, plan, profile)


def test_a_pool_that_holds_the_model_only_with_two_that_cannot_reach_each_other_is_an_error() -> None:
    profile, nodes = even_model(12), pairs(2, memory=26 * MB)
    plan = built(profile, nodes, job(), "n0 n1")
    with pytest.raises(PlanningError, match="no plan was found that keeps nodes apart"):
        changed(plan, profile, nodes, job(), apart=[frozenset(("n0", "n1"))])


def test_a_cluster_is_cut_anew_for_the_nodes_it_has_left() -> None:
    profile, nodes = even_model(12), pairs(3)
    plan = built(profile, nodes, job(), "n0 n1 n2")
    change = changed(plan, profile, without(nodes, "n2"), job())
    assert change.forced
    assert {stage.node_id for stage in change.plan.stages} == {"n0", "n1"}
    assert change.gain_samples_per_s == pytest.approx(change.plan.samples_per_s)
    # Nobody else has what n2 held.
    assert {move.source for move in change.moves if move.last_unit > 8} == {""}
    check_moves(change, plan, profile)


def test_a_cluster_that_cannot_be_repaired_is_dissolved() -> None:
    profile, nodes = even_model(12), pairs(4)
    plan = built(profile, nodes, job(), "n0 n1", "n2 n3")
    change = changed(plan, profile, without(nodes, "n0", "n1"), job())
    assert change.forced
    assert stages(change.plan) == [[("n2", 0, 6), ("n3", 6, 12)]]
    assert (change.moves, change.pays_back_s) == ((), 0.0)
    assert "dissolved" in change.reason


def test_a_node_that_is_left_over_joins_where_its_bytes_are_of_use() -> None:
    profile, nodes = even_model(12, crossing=0), pairs(4)
    plan = built(profile, nodes, job(), "n0 n1", "n2 n3")
    left = without(nodes, "n1")
    change = changed(plan, profile, left, job(), all_links(left, rate=MB))
    assert stages(change.plan) == [[("n0", 0, 4), ("n2", 4, 8), ("n3", 8, 12)]]
    assert [(move.target, move.source, move.nbytes) for move in change.moves] == [("n2", "n3", 2 * MB)]


def test_a_pool_that_can_no_longer_hold_the_model_is_an_error() -> None:
    profile, nodes = even_model(12), pairs(2, memory=26 * MB)
    with pytest.raises(PlanningError):
        change_for(built(profile, nodes, job(), "n0 n1"), profile, without(nodes, "n1"), job())


def test_fewer_clusters_than_asked_for_are_an_error() -> None:
    profile, nodes, config = even_model(12), pairs(4), job(min_clusters=2)
    with pytest.raises(PlanningError):
        change_for(built(profile, nodes, config, "n0 n1", "n2 n3"), profile, without(nodes, "n1"), config)


# ------------------------------------------------------------ nodes that join, links and speeds that change


def test_nodes_that_join_form_a_cluster_and_the_others_go_on() -> None:
    profile, nodes = even_model(12), pairs(4)
    plan = built(profile, nodes[:2], job(), "n0 n1")
    change = changed(plan, profile, nodes, job())
    assert not change.forced
    assert stages(change.plan)[0] == stages(plan)[0]
    assert {name for name, _, _ in stages(change.plan)[1]} == {"n2", "n3"}
    assert change.gain_samples_per_s == pytest.approx(plan.samples_per_s, rel=0.1)
    # The cluster that runs does not stand still: what the new one trains is gained from its first moment on.
    assert change.pays_back_s == pytest.approx(change.move_s)
    check_moves(change, plan, profile)


def test_a_change_that_cannot_pay_for_its_moves_in_time_is_not_proposed() -> None:
    profile, nodes = even_model(12), pairs(4)
    plan = built(profile, nodes[:2], job(), "n0 n1")
    slow = all_links(nodes, rate=100 * KB)
    assert change_for(plan, profile, nodes, job(), slow, payback_s=50.0) is None
    assert change_for(plan, profile, nodes, job(), slow, payback_s=5000.0) is not None


def test_a_slow_node_gets_less_and_the_other_cluster_stays_as_it_is() -> None:
    profile, nodes, config = even_model(12, crossing=KB), pairs(4, memory=60 * MB), job(min_clusters=2, max_clusters=2)
    plan = built(profile, nodes, config, "n0 n1", "n2 n3")
    # With so little time, moving a few units is worth it, and moving whole stages is not.
    now = slowed(nodes, "n0", 0.5)
    change = changed(plan, profile, now, config, all_links(now, rate=MB), payback_s=20.0)
    assert not change.forced
    assert stages(change.plan)[1] == stages(plan)[1]
    assert stages(change.plan)[0] == [("n0", 0, 4), ("n1", 4, 12)]
    assert [(move.target, move.source, move.nbytes) for move in change.moves] == [("n1", "n0", 2 * MB)] or change.moves[0].source == "n2"
    check_moves(change, plan, profile)


def test_a_little_slower_is_left_as_it_is() -> None:
    profile, nodes = even_model(12), pairs(4)
    plan = built(profile, nodes, job(), "n0 n1", "n2 n3")
    assert change_for(plan, profile, slowed(nodes, "n0", 0.99), job(min_clusters=2)) is None


def test_a_waiting_node_takes_the_place_of_one_that_crawls() -> None:
    profile, nodes = even_model(12), pairs(5)
    plan = built(profile, nodes, job(), "n0 n1", "n2 n3")
    change = changed(plan, profile, slowed(nodes, "n1", 1e-4), job())
    assert change.plan.backups == ("n1",)
    assert stages(change.plan) == [[("n0", 0, 6), ("n4", 6, 12)], [("n2", 0, 6), ("n3", 6, 12)]]


def test_too_slow_a_cluster_is_not_formed() -> None:
    profile, nodes = even_model(12), [*pairs(2), node("slow", memory=80 * MB, speed=0.01)]
    plan = built(profile, nodes[:2], job(), "n0 n1")
    assert change_for(plan, profile, nodes, job()) is None


def test_a_node_left_without_memory_for_its_stage_forces_a_change() -> None:
    profile, nodes = even_model(12), pairs(4)
    plan = built(profile, nodes, job(), "n0 n1", "n2 n3")
    now = [dataclasses.replace(m, memory_bytes=MB) if m.node_id == "n3" else m for m in nodes]
    change = changed(plan, profile, now, job())
    assert change.forced
    assert "n3" not in {stage.node_id for stage in change.plan.stages}
    with pytest.raises(PlanningError, match="the cluster of n2, n3 cannot run on the pool as it is now"):
        predict_again(plan, profile, now, all_links(now), job())


def test_what_is_left_as_it_is_is_predicted_for_the_pool_as_it_is_now() -> None:
    profile, nodes = even_model(12), pairs(5)
    plan = built(profile, nodes[:4], job(), "n0 n1", "n2 n3")
    now = slowed(nodes, "n0", 0.5)
    again = predict_again(plan, profile, now, all_links(now), job())
    assert stages(again) == stages(plan)
    assert again.clusters[0].samples_per_s == pytest.approx(plan.clusters[0].samples_per_s / 2, rel=0.01)
    assert again.clusters[1].samples_per_s == pytest.approx(plan.clusters[1].samples_per_s)
    assert again.backups == ("n4",)
    assert "n4 is a backup: what it would add, if anything, is not worth the bytes that would have to move" in again.notes


def test_one_node_forms_a_cluster_and_two_form_one() -> None:
    profile, nodes = even_model(12), [*pairs(2), node("big", memory=90 * MB)]
    plan = built(profile, nodes[:2], job(), "n0 n1")
    assert "big forms a cluster" in changed(plan, profile, nodes, job()).reason
    more = pairs(4)
    assert "n2, n3 form a cluster" in changed(plan, profile, more, job()).reason


# ------------------------------------------------------------ moves


def test_bytes_come_over_the_fastest_link() -> None:
    profile, nodes = even_model(12, crossing=0), pairs(7)
    plan = built(profile, nodes, job(), "n0 n1", "n2 n3", "n4 n5")
    left = without(nodes, "n0")
    links = [one for one in all_links(left, rate=10 * MB) if (one.source, one.target) != ("n4", "n6")]
    change = changed(plan, profile, left, job(), [*links, link("n4", "n6", rate=20 * MB)])
    assert [(move.source, move.target) for move in change.moves] == [("n4", "n6")]
    assert change.move_s == pytest.approx(6 / 20, rel=1e-3)


def test_the_state_of_the_optimizer_moves_too() -> None:
    profile, nodes = even_model(12), pairs(5, memory=80 * MB)
    config = job(optimizer="AdamW", arguments=(("lr", 0.1),))
    plan = built(profile, nodes, config, "n0 n1", "n2 n3")
    change = changed(plan, profile, without(nodes, "n0"), config, payback_s=5.0)
    check_moves(change, plan, profile, copies_per_parameter=2)


def test_nodes_that_fetch_from_one_source_share_its_line() -> None:
    profile, nodes = even_model(12), pairs(6)
    plan = built(profile, nodes[:2], job(), "n0 n1")
    change = changed(plan, profile, nodes, job(), all_links(nodes, rate=10 * MB))
    assert len(change.plan.clusters) == 3
    # Both sources send their 6 MB twice.
    assert change.move_s == pytest.approx(1.2, rel=0.01)


def test_the_payback_time_is_when_both_have_trained_the_same() -> None:
    profile, nodes, config = even_model(12), pairs(4, memory=60 * MB), job(min_clusters=2, max_clusters=2)
    plan = built(profile, nodes, config, "n0 n1", "n2 n3")
    now = slowed(nodes, "n0", 0.25)
    change = changed(plan, profile, now, config, all_links(now, rate=MB), payback_s=20.0)
    kept = [cluster for cluster in change.plan.clusters if stages(change.plan)[cluster.index] in stages(plan)]
    (moved,) = [cluster for cluster in change.plan.clusters if cluster not in kept]
    before, time = change.plan.samples_per_s - change.gain_samples_per_s, change.pays_back_s
    trained = sum(cluster.samples_per_s for cluster in kept) * time + moved.samples_per_s * (time - change.move_s)
    assert 0 < change.move_s < time < 20.0
    assert trained == pytest.approx(before * time)


def test_planning_anew_leaves_nodes_where_they_are_if_their_names_do_not_matter() -> None:
    profile, nodes = even_model(12), pairs(6)
    plan = built(profile, nodes, job(), "n5 n2", "n0 n4", "n3 n1")
    change = changed(plan, profile, slowed(slowed(nodes, "n2", 0.01), "n4", 0.01), job(max_clusters=1))
    check_moves(change, plan, profile)
    assert sum(move.nbytes for move in change.moves) <= 12 * MB


# ------------------------------------------------------------ any change


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_any_change_of_a_pool_gives_a_plan_that_holds(seed: int) -> None:
    rng = random.Random(seed)
    profile = even_model(rng.randint(3, 12))
    pool = random_pool(rng, rng.randint(3, 7), least=12 * MB, most=60 * MB, spread=4.0)
    config = job(max_clusters=rng.choice([0, 1, 3]))
    start = pool[: rng.randint(2, len(pool))]
    try:
        plan = plan_for(profile, start, config)
    except PlanningError:
        return
    now = [dataclasses.replace(m, flop_per_s=m.flop_per_s * rng.choice([1.0, 1.0, 0.3])) for m in pool if rng.random() < 0.8]
    rate = 10.0 ** rng.uniform(5, 8)
    lost = {stage.node_id for stage in plan.stages} - {member.node_id for member in now}
    try:
        first, second = (change_for(plan, profile, now, config, all_links(now, rate=rate), options=QUICK) for _ in range(2))
    except PlanningError:
        assert lost or not now
        return
    assert first == second
    if first is None:
        assert not lost
        return
    assert first.forced == bool(lost)
    check_moves(first, plan, profile)
    check_plan(first.plan, profile, now)
    assert math.isfinite(first.move_s)
    assert first.forced or first.gain_samples_per_s > 0
    assert first.forced or first.pays_back_s <= 600.0


@pytest.mark.parametrize("seed", range(10))
def test_a_large_pool_is_predicted_without_its_tables_exactly_as_with_them(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    profile = even_model(rng.randint(6, 12))
    pool = random_pool(rng, 4, least=20 * MB, most=60 * MB, spread=4.0)
    names = tuple(member.node_id for member in pool)
    cuts = (0, *sorted(rng.sample(range(1, len(profile.units)), len(pool) - 1)), len(profile.units))
    found = []
    for most in (relocation.MOST_ENTRIES, 0):
        monkeypatch.setattr(relocation, "MOST_ENTRIES", most)
        forecast = Forecast(planner=Planner.of(profile, pool, all_links(pool), job(), PlanningConfig()))
        found.append([forecast.predict(Layout(names, cuts), clusters) for clusters in (1, 2, 5)])
    assert found[0] == found[1]


def test_where_many_nodes_wait_long_pipelines_are_not_tried_once_a_short_one_holds_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, config = even_model(12), job()
    pool = [node(f"n{index:02d}", memory=60 * MB) for index in range(12)]
    plan = built(profile, pool, config, "n00 n01 n02")
    tried = []
    cut = Forecast.cut

    def watched(forecast: Forecast, names: Sequence[str], *arguments: Any) -> Layout | None:
        tried.append(len(names))
        return cut(forecast, names, *arguments)

    monkeypatch.setattr(Forecast, "cut", watched)
    now = pool[1:]
    change = propose_change(plan, profile, now, all_links(now), config, random.Random(0), improve=False)
    assert change is not None
    assert max(tried) == 2 + MOST_WAITING


def check_plan(plan: Plan, profile: ModelProfile, nodes: Sequence[NodeProfile]) -> None:
    memory = {member.node_id: member.memory_bytes for member in nodes}
    assert sorted([*(stage.node_id for stage in plan.stages), *plan.backups]) == sorted(memory)
    for cluster in plan.clusters:
        assert [unit for stage in cluster.stages for unit in range(stage.first_unit, stage.last_unit)] == list(range(len(profile.units)))
        assert all(stage.memory_needed_bytes <= memory[stage.node_id] for stage in cluster.stages)
