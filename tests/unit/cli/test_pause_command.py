"""`roost pause` and `roost resume` find the one node that is meant, and say why if they do not."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from filelock import FileLock

from roost.cli import pause as command
from roost.cli.join import AGENT_LOCK, default_state_dir
from roost.config import PAUSE_FILE
from roost.errors import InvalidConfigError


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)


def node_dir(name: str, address: str = "10.0.0.1:7700") -> Path:
    directory = default_state_dir(address, name)
    directory.mkdir(parents=True)
    return directory


def running(directory: Path) -> FileLock:
    """Return the lock that the agent of that directory would hold, held."""
    lock = FileLock(directory / AGENT_LOCK)
    lock.acquire(timeout=0)
    return lock


def test_the_only_agent_of_the_machine_is_paused_and_resumed_without_saying_which(capsys: pytest.CaptureFixture[str]) -> None:
    directory = node_dir("desk")
    node_dir("old")
    with running(directory):
        command.pause(name="", state_dir=None)
        assert (directory / PAUSE_FILE).exists()
        assert stat.S_IMODE((directory / PAUSE_FILE).stat().st_mode) == 0o600
        assert "node desk paused" in capsys.readouterr().out
        command.pause(name="", state_dir=None)
        command.resume(name="", state_dir=None)
        assert not (directory / PAUSE_FILE).exists()
        assert "node desk goes on" in capsys.readouterr().out
        command.resume(name="", state_dir=None)


def test_a_paused_node_whose_agent_has_ended_can_be_resumed() -> None:
    directory = node_dir("desk")
    (directory / PAUSE_FILE).touch()
    command.resume(name="", state_dir=None)
    assert not (directory / PAUSE_FILE).exists()


def test_of_several_agents_one_must_be_named() -> None:
    desk, lap = node_dir("desk"), node_dir("lap")
    with running(desk), running(lap):
        with pytest.raises(InvalidConfigError, match="2 agents run on this machine: .*desk.*lap"):
            command.pause(name="", state_dir=None)
        command.pause(name="lap", state_dir=None)
    assert [(path / PAUSE_FILE).exists() for path in (desk, lap)] == [False, True]


def test_two_nodes_of_one_name_at_two_coordinators_are_told_apart_by_their_directories() -> None:
    first, second = node_dir("desk", "10.0.0.1:7700"), node_dir("desk", "10.0.0.2:7700")
    with running(first), running(second):
        with pytest.raises(InvalidConfigError, match="2 agents called desk"):
            command.pause(name="desk", state_dir=None)
        command.pause(name="", state_dir=second)
    assert [(path / PAUSE_FILE).exists() for path in (first, second)] == [False, True]


def test_an_agent_that_does_not_run_is_not_paused(tmp_path: Path) -> None:
    directory = node_dir("desk")
    for name in ("", "desk", "nobody"):
        with pytest.raises(InvalidConfigError, match="no agent.* runs on this machine"):
            command.pause(name=name, state_dir=None)
    with pytest.raises(InvalidConfigError, match="no agent runs with the state directory"):
        command.pause(name="", state_dir=directory)
    with pytest.raises(InvalidConfigError, match="there is no state directory"):
        command.pause(name="", state_dir=tmp_path / "nowhere")
    assert not (directory / PAUSE_FILE).exists()
