"""What a node says of its machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from filelock import FileLock

from roost.agent import hardware
from roost.agent.hardware import host_name, profile_node, usable_cores
from roost.config import AgentConfig


@pytest.fixture(autouse=True)
def _own_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "PROBE_LOCK", tmp_path / "state" / "probe.lock")
    monkeypatch.setattr(hardware, "SPEED_BUDGET_S", 0.02)
    monkeypatch.setattr(hardware, "UPDATE_BUDGET_S", 0.02)


def test_the_name_of_the_machine_is_the_same_each_time_and_does_not_tell_it() -> None:
    assert host_name() == host_name()
    assert socket.gethostname() not in host_name()
    assert len(host_name()) == 16


def test_without_a_boot_id_the_machine_still_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "BOOT_ID", tmp_path / "none")
    assert host_name() == host_name()


def test_a_profile_has_every_measured_field() -> None:
    profile = profile_node(AgentConfig(node_id="a", threads=1))
    assert profile.flop_per_s > 0 and profile.memory_bytes_per_s > 0 and profile.memory_bytes > 0
    assert profile.host == host_name() and profile.host_cores == usable_cores() >= 1
    assert profile.relative_speed == 1 and not profile.emulated


def test_an_emulated_machine_is_slower_in_everything() -> None:
    whole = profile_node(AgentConfig(node_id="a", threads=1))
    slow = profile_node(AgentConfig(node_id="a", threads=1, relative_speed=0.01))
    assert slow.relative_speed == 0.01 and slow.emulated
    assert slow.flop_per_s < whole.flop_per_s / 10 and slow.memory_bytes_per_s < whole.memory_bytes_per_s / 10


def test_a_node_that_waits_too_long_for_others_measures_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "PROBE_WAIT_S", 0.0)
    hardware.PROBE_LOCK.parent.mkdir()
    with FileLock(hardware.PROBE_LOCK):
        assert profile_node(AgentConfig(node_id="a", threads=1)).flop_per_s > 0
