"""Nodes that share a machine's cores."""

from __future__ import annotations

import dataclasses
import random

import pytest
from synthetic import all_links, even_model, job, node

from roost.planning import make_plan
from roost.planning.sharing import USABLE
from roost.types import ModelProfile, NodeProfile, Plan

MODEL = even_model(8)


def here(name: str, *, cores: int, speed: float = 1.0, memory: int = 25_000_000) -> NodeProfile:
    """Return a node on a machine that it shares; below 1, its speed is emulated."""
    profile = node(name, memory=memory, speed=speed)
    return dataclasses.replace(profile, host="pc", host_cores=cores, relative_speed=min(1.0, speed))


def plan_of(nodes: list[NodeProfile], profile: ModelProfile = MODEL) -> Plan:
    return make_plan(profile, nodes, all_links(nodes), job(), random.Random(0))


def apart(nodes: list[NodeProfile]) -> list[NodeProfile]:
    return [dataclasses.replace(profile, host="", host_cores=0) for profile in nodes]


def test_nodes_that_ask_for_more_cores_than_there_are_get_their_part() -> None:
    nodes = [here(f"n{index}", cores=2) for index in range(4)]
    crowded, free = plan_of(nodes), plan_of(apart(nodes))
    asked = sum(stage.busy for stage in free.stages)
    assert asked > 2
    assert crowded.samples_per_s == pytest.approx(free.samples_per_s * USABLE * 2 / asked)
    assert any("too few cores" in note for note in crowded.notes)


def test_enough_cores_change_nothing() -> None:
    nodes = [here(f"n{index}", cores=8) for index in range(4)]
    assert plan_of(nodes) == plan_of(apart(nodes))


def test_a_node_that_sleeps_to_seem_slower_needs_that_much_less_of_a_core() -> None:
    nodes = [here(f"n{index}", cores=2, speed=0.25) for index in range(4)]
    assert plan_of(nodes) == plan_of(apart(nodes))


def test_unknown_cores_count_as_enough() -> None:
    nodes = [here(f"n{index}", cores=0) for index in range(4)]
    assert plan_of(nodes) == plan_of(apart(nodes))


def test_a_machine_that_is_short_of_cores_slows_only_its_own_clusters() -> None:
    shared = [here(f"n{index}", cores=1, memory=200_000_000) for index in range(3)]
    alone = node("z", memory=200_000_000)
    plan = plan_of([*shared, alone])
    rates = {cluster.stages[0].node_id: cluster.samples_per_s for cluster in plan.clusters}
    assert [len(cluster.stages) for cluster in plan.clusters] == [1, 1, 1, 1]
    assert rates["n0"] == pytest.approx(rates["z"] * USABLE / 3)
    assert sum(cluster.share for cluster in plan.clusters) == pytest.approx(1)
