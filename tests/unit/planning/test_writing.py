"""How a plan is written down."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from synthetic import KB, MB, Scene, all_links, even_model, job, link, model, node, scene, unit

from roost.config import PlanningConfig
from roost.planning.writing import write_plan
from roost.types import BackupPlan, NodeProfile, Plan

BARE = PlanningConfig(headroom=1.0, staleness_cost=0.0)


def plan_of(made: Scene, *clusters: tuple[str, tuple[int, ...]]) -> Plan:
    """Return the plan of these clusters: names of one letter each, and first units of the stages behind the first."""
    cutter, nodes = made.cutter(), {member.node_id: member for member in made.nodes}
    cuts = []
    for names, inner in clusters:
        cut = cutter.predict([nodes[name] for name in names], (0, *inner, len(made.profile.units)), len(clusters))
        assert cut is not None
        cuts.append(cut)
    return write_plan(made.profile, cutter, cuts)


def notes_about(plan: Plan, start: str) -> list[str]:
    return [note for note in plan.notes if note.startswith(start)]


# ------------------------------------------------------------ rates and shares


def test_shares_are_in_proportion_to_samples_per_second() -> None:
    plan = plan_of(scene(even_model(4), [node("a", speed=2.0), node("b")]), ("a", ()), ("b", ()))
    assert [cluster.samples_per_s for cluster in plan.clusters] == pytest.approx([8 / 0.006, 8 / 0.012])
    assert [cluster.share for cluster in plan.clusters] == pytest.approx([2 / 3, 1 / 3])
    assert plan.samples_per_s == pytest.approx(8 / 0.006 + 8 / 0.012)
    assert [cluster.index for cluster in plan.clusters] == [0, 1]


def test_a_stage_says_which_part_of_the_graph_it_runs_where_and_with_how_much() -> None:
    nodes = [node("a"), node("b")]
    made = scene(even_model(6, crossing=0), nodes, all_links(nodes, latency=0.0), config=job(batch_size=16), options=BARE)
    plan = plan_of(made, ("ab", (2,)))
    first, second = plan.stages
    assert [(stage.cluster, stage.index, stage.node_id) for stage in plan.stages] == [(0, 0, "a"), (0, 1, "b")]
    assert [(stage.first_unit, stage.last_unit, stage.start, stage.stop) for stage in plan.stages] == [(0, 2, 0, 4), (2, 6, 4, 12)]
    # 12 ms at b bind; 6 + 12 ms hidden take two in flight, and one older version.
    assert (first.max_in_flight, first.versions) == (2, 2)
    assert (second.max_in_flight, second.versions) == (1, 1)
    assert plan.clusters[0].staleness == 1
    assert first.memory_needed_bytes == 2 * MB * 3 + MB + 2 * 200 * KB + 2 * 2 * 10 * KB
    assert second.memory_needed_bytes == 4 * MB * 2 + MB + 400 * KB
    assert first.memory_available_bytes == 100 * MB
    assert (first.busy, second.busy) == (pytest.approx(0.5), pytest.approx(1.0))
    assert (first.compute_s, second.compute_s) == (pytest.approx(0.006), pytest.approx(0.012))
    assert plan.clusters[0].bottleneck == "compute of b"


def test_one_cluster_averages_nothing() -> None:
    plan = plan_of(scene(even_model(4), [node("a")]), ("a", ()))
    assert (plan.round_s, plan.round_updates) == (0.0, 0.0)
    assert plan.stages[0].sent_bytes_per_s == 0.0
    assert plan.stages[0].received_bytes_per_s == pytest.approx(10 * KB / 0.012)
    assert plan.rings == ()


# ------------------------------------------------------------ bytes and rounds


def test_bytes_per_second_are_those_of_the_pipeline_and_of_a_round_every_interval() -> None:
    plan = plan_of(scene(even_model(4), [node("a", speed=2.0), node("b")]), ("a", ()), ("b", ()))
    # 4 MB at 125 MB/s and two steps of 0.1 ms: well within 16 updates of the faster cluster.
    assert plan.round_s == pytest.approx(4 / 125 + 2e-4)
    assert plan.round_updates == 16
    averaged = 4 * MB / (16 * 0.006)
    fast, slow = plan.stages
    assert fast.sent_bytes_per_s == slow.sent_bytes_per_s == pytest.approx(averaged)
    assert fast.received_bytes_per_s == pytest.approx(averaged + 10 * KB / 0.006)
    assert slow.received_bytes_per_s == pytest.approx(averaged + 10 * KB / 0.012)
    assert not notes_about(plan, "an averaging round")


def test_a_stage_in_the_middle_sends_and_receives_values_and_gradients() -> None:
    nodes = [node(name) for name in "abc"]
    plan = plan_of(scene(even_model(6), nodes, options=PlanningConfig(activation_compression=0.5)), ("abc", (2, 4)))
    period = 8 / plan.clusters[0].samples_per_s
    assert [stage.sent_bytes_per_s * period for stage in plan.stages] == pytest.approx([5 * KB, 10 * KB, 5 * KB])
    assert [stage.received_bytes_per_s * period for stage in plan.stages] == pytest.approx([10 * KB, 10 * KB, 5 * KB])


def test_rounds_that_take_longer_than_their_interval_follow_each_other_and_a_note_says_so() -> None:
    nodes = [node("a", speed=2.0), node("b")]
    plan = plan_of(scene(even_model(4, crossing=0), nodes, all_links(nodes, rate=1e6)), ("a", ()), ("b", ()))
    # 4 s on the ring; meanwhile the first cluster, which receives 10 kB of data for each update, makes one every 20 ms.
    period = max(0.006, 2 * 10 * KB / 1e6)
    assert plan.round_s == pytest.approx(4.0002)
    assert plan.round_updates == pytest.approx(4.0002 / period)
    (note,) = notes_about(plan, "an averaging round")
    assert (
        note
        == "an averaging round takes 4 s on the slowest ring, longer than 16 updates: rounds follow each other, about every 200 updates"
    )
    # All the time a round is under way.
    assert plan.stages[0].sent_bytes_per_s == pytest.approx(4 * MB / 4.0002)


def test_an_update_is_as_long_as_all_its_micro_batches() -> None:
    nodes = [node("a"), node("b")]
    made = scene(even_model(4), nodes, all_links(nodes, rate=1e7), config=job(batch_size=32, averaging_interval=2))
    plan = plan_of(made, ("a", ()), ("b", ()))
    assert plan.round_updates == pytest.approx(plan.round_s / (4 * 0.012))
    assert plan.round_s == pytest.approx(0.4002)


def test_the_pipeline_takes_its_part_of_the_line_from_a_round() -> None:
    nodes = [node(name) for name in "abcd"]
    made = scene(even_model(4, crossing=20 * KB), nodes, all_links(nodes, rate=10e6), config=job(averaging_interval=10_000))
    plan = plan_of(made, ("ab", (2,)), ("cd", (2,)))
    # Each sends 20 kB every 6 ms; two MB are averaged over the rest of 10 MB/s.
    period = 8 / plan.clusters[0].samples_per_s
    assert plan.round_s == pytest.approx(2 * MB / (10e6 - 20 * KB / period))


# ------------------------------------------------------------ what binds


def bindings(plan: Plan) -> dict[str, str]:
    return {stage.node_id: stage.binding for stage in plan.stages}


def test_the_slower_node_is_bound_by_compute_and_the_other_by_nothing() -> None:
    plan = plan_of(scene(even_model(6), [node("a"), node("b")]), ("ab", (2,)))
    assert bindings(plan) == {"a": "", "b": "compute"}
    assert plan.notes[0] == f"cluster 0 is bound by the compute of b: {8 / 0.012:.4g} samples/s"


def test_a_node_on_a_slow_link_is_bound_by_its_uplink() -> None:
    nodes = [node("a"), node("b"), node("c")]
    slow = [*all_links(nodes), link("a", "b", rate=1e6)]
    plan = plan_of(scene(even_model(6, crossing=50 * KB), nodes, slow), ("abc", (2, 4)))
    assert plan.clusters[0].bottleneck == "link a -> b"
    assert bindings(plan) == {"a": "uplink", "b": "", "c": ""}


def test_a_node_that_waits_for_its_gradients_is_bound_by_the_round_trip() -> None:
    nodes = [node("a"), node("b")]
    made = scene(even_model(4), nodes, all_links(nodes, latency=0.1), config=job(max_in_flight=1))
    assert bindings(plan_of(made, ("ab", (2,)))) == {"a": "round trip", "b": ""}


def test_a_note_names_the_node_whose_memory_is_full() -> None:
    # One unit of 1 MB: a could compute four times as much, but holds no second one.
    nodes = [node("a", speed=4.0, memory=5 * MB), node("b")]
    made = scene(even_model(5), nodes, all_links(nodes, latency=0.0), config=job(max_in_flight=2))
    plan = plan_of(made, ("ab", (1,)))
    assert bindings(plan) == {"a": "memory", "b": "compute"}
    full = plan.stages[0].memory_needed_bytes
    (note,) = notes_about(plan, "a could compute more")
    assert note == f"a could compute more (6% busy), but its memory is full: {full / 1e6:.1f} MB of 5.0 MB"
    # With room for one unit more nothing is noted.
    roomy = [node("a", speed=4.0, memory=9 * MB), node("b")]
    free = plan_of(scene(even_model(5), roomy, all_links(roomy, latency=0.0), config=job(max_in_flight=2)), ("ab", (1,)))
    assert bindings(free) == {"a": "", "b": "compute"}
    assert not notes_about(free, "a could")


# ------------------------------------------------------------ nodes without a stage


def with_backups(used: Sequence[NodeProfile], *backups: NodeProfile) -> Plan:
    made = scene(even_model(6, crossing=0), [*used, *backups], config=job(max_in_flight=1))
    return plan_of(made, ("ab", (2,)), ("c", ()))


USED = [node("a", reliability=0.9), node("b", reliability=0.5), node("c", reliability=0.7)]


def test_a_backup_stands_by_for_the_least_reliable_stage() -> None:
    plan = with_backups(USED, node("x"))
    assert plan.backups == ("x",)
    assert plan.backup_stages == (BackupPlan(node_id="x", cluster=0, stage=1),)


def test_the_fastest_backup_chooses_first_and_no_stage_has_two() -> None:
    plan = with_backups(USED, node("w", speed=0.5), node("x", speed=1.0), node("y", speed=2.0), node("z", speed=0.1))
    assert {backup.node_id: (backup.cluster, backup.stage) for backup in plan.backup_stages} == {"y": (0, 1), "x": (1, 0), "w": (0, 0)}
    assert plan.backups == ("w", "x", "y", "z")


def test_a_backup_stands_by_only_for_what_it_can_hold() -> None:
    plan = with_backups(USED, node("x", memory=10 * MB), node("y", memory=1 * MB))
    needs = {(stage.cluster, stage.index): stage.memory_needed_bytes for stage in plan.stages}
    # The units of b take four copies of 4 MB with averaging; those of a half of that.
    assert needs[0, 1] > 10 * MB >= needs[0, 0]
    assert plan.backup_stages == (BackupPlan(node_id="x", cluster=0, stage=0),)


def test_notes_say_why_a_node_is_not_used() -> None:
    plan = plan_of(scene(even_model(6), [node("a"), node("tiny", memory=MB), node("x")]), ("a", ()))
    # The last unit alone: parameters, gradients and one being found, one micro-batch in flight, two values arriving.
    short = 3 * MB + 100 * KB + 20 * KB - MB
    (tiny,) = notes_about(plan, "tiny")
    assert tiny == (
        f"tiny is a backup: the smallest stage needs 3.1 MB ({3 * MB + 120 * KB} bytes) and it lends 1.0 MB ({MB} bytes), "
        f"2.1 MB ({short} bytes) short"
    )
    (spare,) = notes_about(plan, "x is")
    assert spare.startswith("x is a backup: no cluster would gain from it")


def test_numbers_stay_finite_for_a_model_that_costs_nothing() -> None:
    profile = model([unit(0, seconds=0.0, parameters=0, saved=0, crossing=0)], input_bytes=0)
    plan = plan_of(scene(profile, [node("a"), node("b")]), ("a", ()), ("b", ()))
    assert math.isfinite(plan.samples_per_s)
    assert plan.round_s == 0.0
    assert all(0 <= stage.busy <= 1 for stage in plan.stages)
