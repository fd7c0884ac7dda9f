"""A node that its owner pauses in the middle of a run, with real processes."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import torch
from e2e_kit import START_S, Machine
from torch.nn import functional

import roost
from inproc_pool import nodes_for_stages
from roost.cli.pause import pause
from roost.config import NodeOptions
from roost.demo.digits import DigitsCNN
from roost.requester.run import Run, RunMetrics
from roost.types import ModelProfile, NodeProfile, Plan

NODES = ("one", "two", "three")
SAMPLES, EPOCHS = 400, 8
STILL_REPORTS = 5
"""Progress reports, half a second apart, through which a paused job is watched."""


class Watcher:
    """An observer that a test waits on."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self.seen: list[RunMetrics] = []

    def planned(self, plan: Plan, nodes: tuple[NodeProfile, ...], profile: ModelProfile) -> None:
        """Nothing."""

    def updated(self, metrics: RunMetrics) -> None:
        with self._moved:
            self.seen.append(metrics)
            self._moved.notify_all()

    def samples(self, reports: int) -> int:
        """Return the samples that the last stage had computed after so many more reports."""
        with self._moved:
            target = len(self.seen) + reports
            assert self._moved.wait_for(lambda: len(self.seen) >= target, START_S)
            return max((stage.samples for stage in self.seen[-1].stages), default=0)

    def until_paused(self, *nodes: str) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: bool(self.seen) and self.seen[-1].paused == nodes, START_S)

    def until_trained(self, samples: int) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: bool(self.seen) and self.seen[-1].samples >= samples, START_S)


def agent_of(name: str) -> psutil.Process:
    """Return the process of a node of this process's pool."""
    (found,) = (child for child in psutil.Process().children() if "join" in child.cmdline() and name in child.cmdline())
    return found


def job_in_three_stages(directory: Path) -> tuple[roost.Job, list[NodeOptions]]:
    """Return a job of which the same data gives the same bits, and nodes of which no two hold its model."""
    torch.manual_seed(0)
    job = roost.Job(
        model=DigitsCNN(),
        loss=functional.cross_entropy,
        data=(torch.rand(SAMPLES, 1, 8, 8), torch.randint(10, (SAMPLES,))),
        batch_size=16,
        epochs=EPOCHS,
        optimizer="SGD",
        optimizer_args={"lr": 0.05},
        max_in_flight=1,
        max_clusters=1,
        checkpoint_dir=str(directory),
    )
    memory = nodes_for_stages(job, list(NODES))[0].memory_bytes
    return job, [NodeOptions(name=name, memory=memory) for name in NODES]


def test_a_paused_node_computes_nothing_and_the_run_ends_as_if_it_had_not_been_paused(machine: Machine, tmp_path: Path) -> None:
    job, nodes = job_in_three_stages(tmp_path / "undisturbed")
    undisturbed = roost.train(job, roost.local(nodes)).wait(START_S)
    job, nodes = job_in_three_stages(tmp_path / "paused")
    pool, watcher = tmp_path / "pool", Watcher()
    run: Run = roost.train(job, roost.local(nodes, state_dir=str(pool)), observer=watcher)
    assert run.plan is not None
    assert [len(cluster.stages) for cluster in run.plan.clusters] == [3]
    middle = run.plan.clusters[0].stages[1].node_id
    watcher.until_trained(1)
    # Not as a command, which takes as long to start as the run to end.
    pause(name="", state_dir=pool / middle)
    watcher.until_paused(middle)
    # What was reported last may be a heartbeat old, and one micro-batch may have been on its way.
    before = watcher.samples(STILL_REPORTS)
    assert before < EPOCHS * SAMPLES, "the run was over before it was paused"
    agent = agent_of(middle)
    cpu = sum(agent.cpu_times()[:2])
    after = watcher.samples(STILL_REPORTS)
    assert after == before
    assert sum(agent.cpu_times()[:2]) - cpu < 0.1 * STILL_REPORTS / 2
    assert not run.ended
    assert machine.run("resume", "--state-dir", pool / middle).code == 0
    run.wait(START_S)
    assert watcher.seen[-1].paused == ()
    assert run.metrics().samples == EPOCHS * SAMPLES
    expected, found = undisturbed.state_dict(), run.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
