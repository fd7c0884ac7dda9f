"""Which stages recompute, and which nodes can compute in the precision of a job."""

from __future__ import annotations

import dataclasses
import random

import pytest
from synthetic import MB, all_links, even_model, job, node, scene

from roost.errors import EmptyPoolError
from roost.planning.cost import unit_costs
from roost.planning.memory import MemoryModel
from roost.planning.planner import make_plan
from roost.types import Plan


def planned(memory: int) -> Plan:
    """Return the plan of six equal units, 4 MB of activations each, on two nodes that must share them."""
    nodes = [node("a", memory=memory), node("b", memory=memory)]
    made = scene(even_model(6, saved=4 * MB), nodes, all_links(nodes))
    config = dataclasses.replace(made.config, max_clusters=1)
    return make_plan(made.profile, made.nodes, made.links, config, random.Random(0), options=made.options)


def test_a_stage_recomputes_where_its_activations_do_not_fit_as_often_as_the_pipeline_needs() -> None:
    short, plenty = planned(24 * MB), planned(1000 * MB)
    assert [stage.recompute for stage in plenty.stages] == [False, False]
    assert [stage.recompute for stage in short.stages] == [True, False]
    first = short.stages[0]
    assert first.max_in_flight > 1
    assert first.memory_needed_bytes <= 24 * MB
    assert f"recomputed on {first.node_id}: " in " ".join(short.notes)


def test_a_stage_keeps_its_activations_where_another_cut_reaches_as_much() -> None:
    assert not any(stage.recompute for stage in planned(26 * MB).stages)


def test_a_recomputing_stage_keeps_what_arrives_per_micro_batch_and_activations_once() -> None:
    memory = MemoryModel(costs=unit_costs(even_model(6, saved=4 * MB, crossing=MB), job()), optimizer_copies=0)
    kept, again = (
        [float(memory.stage_bytes(2, 4, count, averaging=False, recompute=recompute)) for count in (1, 5)] for recompute in (False, True)
    )
    older = 4 * 2 * MB
    assert kept[1] - kept[0] == 4 * 2 * 4 * MB + older
    assert again[1] - again[0] == 4 * MB + older
    assert again[0] - kept[0] == MB
    assert memory.most_in_flight(kept[1], averaging=False, recompute=True)[2, 4] > 5


def test_a_stage_that_recomputes_takes_longer_by_its_forward() -> None:
    made = scene(even_model(6), [node("a"), node("b")], all_links([node("a"), node("b")]))
    cutter = made.cutter()
    kept = cutter.tables(1)
    forward = sum(unit.forward_s for unit in made.profile.units[1:4]) * made.profile.reference_flop_per_s / made.nodes[0].flop_per_s
    assert kept.again.compute[0, 1, 4] - kept.compute[0, 1, 4] == pytest.approx(forward)


def in_bf16(speeds: dict[str, float]) -> Plan:
    nodes = [dataclasses.replace(node(name), bf16_flop_per_s=speed) for name, speed in speeds.items()]
    made = scene(even_model(6), nodes, all_links(nodes))
    config = dataclasses.replace(made.config, precision="bf16")
    return make_plan(made.profile, made.nodes, made.links, config, random.Random(0), options=made.options)


def test_nodes_that_cannot_compute_in_the_jobs_precision_are_left_out_and_named() -> None:
    plan = in_bf16({"a": 1e9, "b": 0.0, "c": 1e9})
    assert {stage.node_id for stage in plan.stages} <= {"a", "c"}
    assert "b" in plan.backups
    assert "b is left out: its device cannot compute in bf16" in plan.notes
    assert "b" not in {backup.node_id for backup in plan.backup_stages}


def test_the_speed_that_counts_is_that_in_the_jobs_precision() -> None:
    slow, fast = in_bf16({"a": 1e9}), in_bf16({"a": 4e9})
    assert fast.samples_per_s > 2 * slow.samples_per_s


def test_a_pool_in_which_no_node_can_is_refused_with_their_names() -> None:
    with pytest.raises(EmptyPoolError, match="no node can compute in bf16: not a, b"):
        in_bf16({"a": 0.0, "b": 0.0})
