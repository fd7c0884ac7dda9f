"""Processes that are killed, frozen and started again in the middle of a job; found by id, on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from e2e_kit import MARK, Machine, small_job
from torch import nn

import roost
from inproc_pool import nodes_for_stages
from roost.chaos.schedule import Fault, FaultKind
from roost.chaos.session import ChaosResult, ChaosSession
from roost.config import NodeOptions

SAMPLES = 400
NAMES = ("attic", "barn", "cellar", "desk", "shed")
"""Two of them hold the model: two clusters, and one node to spare."""


def deep_job(directory: Path, **fields: object) -> roost.Job:
    """Return a job whose model two nodes can hold; it does not end by itself."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 64), *(nn.Linear(64, 64) for _ in range(6)), nn.Linear(64, 3)]
    settings: dict[str, object] = {"sync_interval": 2, "averaging_interval": 8, **fields}
    return small_job(directory, model=nn.Sequential(*layers), samples=SAMPLES, epochs=100_000, **settings)


def played(directory: Path, faults: list[Fault]) -> ChaosResult:
    """Return what became of a job on five paced nodes under these faults; it is stopped when they are over."""
    memory = nodes_for_stages(deep_job(directory, max_clusters=1), ["a", "b"])[0].memory_bytes * 8 // 5
    nodes = [NodeOptions(name=name, memory=memory, relative_speed=0.1) for name in NAMES]
    job = deep_job(directory, max_clusters=2)
    return ChaosSession(job, nodes, directory, faults, on_incident=lambda incident: None).run()


def fault(kind: FaultKind, *, at_s: float, lasts_s: float) -> Fault:
    return Fault(kind=kind, at_s=at_s, lasts_s=lasts_s, first=0.0, second=0.0)


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for processes that must all have ended after the tests."""
    machine = Machine(tmp_path_factory.mktemp("failover"))
    before = dict(os.environ)
    os.environ.update({MARK: machine.mark, "OMP_NUM_THREADS": "1"})
    try:
        yield machine.home
        machine.assert_nothing_runs()
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def broken_nodes(marked: Path) -> ChaosResult:
    """A node is frozen and goes on; then one is killed, and started again."""
    faults = [fault(FaultKind.FREEZE, at_s=2.0, lasts_s=8.0), fault(FaultKind.KILL, at_s=14.0, lasts_s=3.0)]
    return played(marked / "nodes", faults)


@pytest.fixture(scope="module")
def broken_coordinator(marked: Path) -> ChaosResult:
    """The coordinator is killed and started again; then everything is."""
    faults = [fault(FaultKind.COORDINATOR, at_s=4.0, lasts_s=1.0), fault(FaultKind.RESTART, at_s=12.0, lasts_s=0.5)]
    return played(marked / "coordinator", faults)


def nothing_is_lost(result: ChaosResult) -> None:
    assert result.finished, result.error
    assert result.crashes == ()
    assert (result.data.lost, result.data.applied_twice) == (0, 0)
    assert result.data.trained >= SAMPLES


def test_the_stages_of_a_frozen_and_of_a_killed_node_are_taken_over_and_no_sample_is_lost(broken_nodes: ChaosResult) -> None:
    frozen, killed = broken_nodes.recoveries
    assert (frozen.incident.had_stage, frozen.replanned) == (True, True)
    assert (killed.incident.had_stage, killed.replanned) == (True, True)
    nothing_is_lost(broken_nodes)


def test_a_frozen_node_is_given_up_while_it_is_frozen_and_joins_again_when_it_goes_on(broken_nodes: ChaosResult) -> None:
    incident = broken_nodes.incidents[0]
    plans = [event for event in broken_nodes.records if event["event"] == "plan_changed" and event["time"] > incident.began]
    assert incident.ended is not None and plans[0]["time"] < incident.ended
    assert incident.node not in {stage["node_id"] for cluster in plans[0]["plan"]["clusters"] for stage in cluster["stages"]}
    registered = [line for line in broken_nodes.logs if line.event == "registered" and line.fields["node"] == incident.node]
    assert registered[-1].at > incident.ended


def test_a_coordinator_that_is_killed_finds_its_job_again_and_no_stage_is_built_anew(broken_coordinator: ChaosResult) -> None:
    incident, restart = broken_coordinator.incidents
    assert incident.ended is not None
    between = [event for event in broken_coordinator.records if incident.began < event["time"] < restart.began]
    assert all(event["replayed"] == [] for event in between if event["event"] == "plan_changed")
    assert not [line for line in broken_coordinator.logs if line.event == "first_update" and incident.began < line.at < restart.began]
    kept = [line for line in broken_coordinator.logs if line.event == "registered" and incident.began < line.at < restart.began]
    assert {line.fields["node"] for line in kept if line.fields["kept"] == "True"}
    samples = [event["samples"] for event in between if event["event"] == "progress"]
    assert samples[-1] > samples[0]


def test_everything_is_killed_and_the_job_goes_on_from_its_last_checkpoint(broken_coordinator: ChaosResult) -> None:
    nothing_is_lost(broken_coordinator)
    epochs = [line.epoch for line in broken_coordinator.history]
    assert epochs == sorted(set(epochs))
    assert broken_coordinator.recoveries[-1].seconds is not None
