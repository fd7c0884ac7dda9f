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


def test_ctrl_c_stops_training_cleanly_and_leaves_a_checkpoint(machine: Machine, tmp_path: Path) -> None:
    script = machine.script("roost.train(job)\n")
    command = machine.start("train", script, "--local", 1, 400, 100_000, tmp_path / "checkpoints")
    children = trains(command)
    command.signal(signal.SIGINT)
    result = command.wait(60)
    assert result.code == 0, result.err
    assert "stopped after" in result.out
    assert "Traceback" not in result.err
    assert not any(process.is_running() for process in children)
    newest = max(checkpoints(tmp_path / "checkpoints"), key=lambda path: path.stat().st_mtime)
    assert f"{newest}/model.safetensors" in result.out
    loads(newest)


def test_sigterm_while_the_pool_starts_leaves_nothing(machine: Machine, tmp_path: Path) -> None:
    script = machine.script("print('ready', flush=True)\nroost.train(job)\n")
    command = machine.start("train", script, "--local", 2, 400, 100_000, tmp_path / "checkpoints")
    command.until("ready")
    command.signal(signal.SIGTERM)
    result = command.wait(60)
    assert result.code != 0
    assert "Traceback" not in result.err
    assert machine.processes() == []


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
    result = machine.start(script, 80, 3, tmp_path / "checkpoints", python=True).wait(START_S)
    assert (result.code, result.out) == (0, "the script is over\n")
    assert result.err == ""
    assert machine.processes() == []
    assert checkpoints(tmp_path / "checkpoints")[-1].name == "epoch-0003"


class KillCoordinator:
    """An observer that kills the coordinator of this process's pool once samples have been trained."""

    def __init__(self) -> None:
        self._killed = False

    def planned(self, plan: Plan, nodes: tuple[NodeProfile, ...], profile: ModelProfile) -> None:
        """Nothing."""

    def updated(self, metrics: RunMetrics) -> None:
        """Kill it at the first update with samples."""
        if metrics.samples and not self._killed:
            self._killed = True
            (process,) = (child for child in psutil.Process().children() if "coordinator" in child.cmdline())
            process.kill()


def test_a_killed_coordinator_ends_the_run_and_the_pool(machine: Machine, tmp_path: Path) -> None:
    job = small_job(tmp_path / "checkpoints", samples=400, epochs=100_000)
    run: Run = roost.train(job, roost.local(1), observer=KillCoordinator())
    with pytest.raises(RoostError, match=r"the coordinator process ended \(exit code -9\)") as caught:
        run.wait(60)
    assert caught.value.code == "R603"
    assert run.ended
    assert machine.processes() == []
