"""Pools of processes on this machine: how they end, whatever happens to whom."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from e2e_kit import GONE_S, START_S, Command, Machine, small_job, small_model
from safetensors.torch import load_file

import roost
from roost.errors import RoostError
from roost.requester.run import Run, RunMetrics
from roost.types import ModelProfile, NodeProfile, Plan


def checkpoints(directory: Path) -> list[Path]:
    return sorted(path.parent for path in directory.glob("*/*/checkpoint.json"))


def loads(checkpoint: Path) -> None:
    small_model().load_state_dict(load_file(checkpoint / "model.safetensors"), strict=True)


def trains(command: Command) -> list[psutil.Process]:
    """Wait until a command trains, and return the processes of its pool."""
    command.until(r"epoch [0-9]+/")
    children = command.children()
    assert sum("join" in process.cmdline() for process in children) == 1
    assert sum("coordinator" in process.cmdline() for process in children) == 1
    return children


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_stops_training_cleanly_and_leaves_a_checkpoint(machine: Machine, tmp_path: Path, number: signal.Signals) -> None:
    script = machine.script("roost.train(job)\n")
    command = machine.start("train", script, "--local", 1, 400, 100_000, tmp_path / "checkpoints")
    children = trains(command)
    command.signal(number)
    result = command.wait(GONE_S + 15)
    assert result.code == 0, result.err
    assert "stopped after" in result.out
    assert "Traceback" not in result.err
    assert not any(process.is_running() for process in children)
    newest = max(checkpoints(tmp_path / "checkpoints"), key=lambda path: path.stat().st_mtime)
    assert f"{newest}/model.safetensors" in result.out
    loads(newest)


def test_when_the_requester_is_killed_its_pool_ends_by_itself(machine: Machine, tmp_path: Path) -> None:
    script = machine.script("roost.train(job)\n")
    command = machine.start("train", script, "--local", 1, 400, 100_000, tmp_path / "checkpoints")
    children = trains(command)
    command.signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=GONE_S)
    assert alive == []
    assert command.wait().code == -signal.SIGKILL


def test_a_plain_script_that_raises_leaves_nothing_running(machine: Machine, tmp_path: Path) -> None:
    script = machine.script("run = roost.train(job, roost.local(1))\nraise KeyError('oops')\n")
    result = machine.start(script, 400, 100_000, tmp_path / "checkpoints", python=True).wait(START_S)
    assert result.code == 1
    assert "KeyError: 'oops'" in result.err
    assert machine.processes() == []
    for checkpoint in checkpoints(tmp_path / "checkpoints"):
        loads(checkpoint)


def test_a_plain_script_that_does_not_wait_trains_to_the_end(machine: Machine, tmp_path: Path) -> None:
    script = machine.script("roost.train(job, roost.local(1))\nprint('the script is over')\n")
    result = machine.start(script, 80, 20, tmp_path / "checkpoints", python=True).wait(START_S)
    assert (result.code, result.out) == (0, "the script is over\n")
    assert result.err == ""
    assert machine.processes() == []
    assert checkpoints(tmp_path / "checkpoints")[-1].name == "epoch-0020"


class KillWhenTraining:
    """An observer that kills a process of this process's pool once samples have been trained."""

    def __init__(self, word: str) -> None:
        self._word = word
        self._killed = False

    def planned(self, plan: Plan, nodes: tuple[NodeProfile, ...], profile: ModelProfile) -> None:
        """Nothing."""

    def updated(self, metrics: RunMetrics) -> None:
        """Kill it at the first update with samples."""
        if metrics.samples and not self._killed:
            self._killed = True
            (process,) = (child for child in psutil.Process().children() if self._word in child.cmdline())
            process.kill()


@pytest.mark.parametrize("victim", ["join", "coordinator"])
def test_a_killed_process_of_the_pool_ends_the_run_with_its_name(machine: Machine, tmp_path: Path, victim: str) -> None:
    pool = roost.local([{"name": "shed"}])
    job = small_job(tmp_path / "checkpoints", samples=400, epochs=100_000)
    run: Run = roost.train(job, pool, observer=KillWhenTraining(victim))
    with pytest.raises(RoostError) as caught:
        run.wait(60)
    assert caught.value.code in ("R602", "R603")
    assert ("shed" if victim == "join" else "coordinator") in caught.value.message
    assert run.ended
    assert machine.processes() == []


def test_a_node_that_cannot_start_is_named_with_the_end_of_its_log(machine: Machine, tmp_path: Path) -> None:
    pool = roost.local([{"name": "shed", "extra": ("--port", "1", "--host", "192.0.2.1")}])
    with pytest.raises(RoostError, match="the shed process ended") as caught:
        roost.train(small_job(tmp_path / "checkpoints"), pool)
    assert "shed cannot listen on 192.0.2.1 port 1" in caught.value.message
    assert machine.processes() == []
