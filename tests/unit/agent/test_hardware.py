"""What a node says of its machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from roost.agent import hardware
from roost.agent.hardware import check_device, host_name, profile_node, usable_cores
from roost.config import AgentConfig
from roost.errors import InvalidConfigError
from roost.pipeline.probe import free_memory_bytes


@pytest.fixture(autouse=True)
def _own_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "PROBE_LOCK", tmp_path / "state" / "probe.lock")
    monkeypatch.setattr(hardware, "SPEED_BUDGET_S", 0.02)
    monkeypatch.setattr(hardware, "UPDATE_BUDGET_S", 0.02)
    monkeypatch.setattr(hardware, "MIXED_BUDGET_S", 0.02)


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


def test_a_device_that_cannot_compute_in_bfloat16_has_no_speed_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profile_node(AgentConfig(node_id="a", threads=1, relative_speed=0.5)).bf16_flop_per_s > 0
    monkeypatch.setattr(hardware, "can_compute", lambda precision, device: False)
    assert profile_node(AgentConfig(node_id="a", threads=1)).bf16_flop_per_s == 0


def test_the_limits_of_the_line_are_what_the_planner_counts_with() -> None:
    profile = profile_node(AgentConfig(node_id="a", threads=1, uplink_bytes_per_s=1e6, downlink_bytes_per_s=2e6))
    assert (profile.up_bytes_per_s, profile.down_bytes_per_s) == (1e6, 2e6)


@pytest.mark.parametrize(
    ("device", "built", "reason"), [("cuda", None, "without CUDA"), ("cuda", "13.0", "finds no GPU"), ("mps", None, "Apple silicon")]
)
def test_a_device_that_is_not_there_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, device: str, built: str | None, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    with pytest.raises(InvalidConfigError, match=f"cannot compute on {device}.*{reason}"):
        check_device(device, 0)


def test_of_a_gpu_its_own_memory_is_lent_and_no_more_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (6 * 10**9, 8 * 10**9))
    check_device("cuda", 8 * 10**9)
    with pytest.raises(InvalidConfigError, match=r"the GPU has 8.0 GB, so 9.0 GB of it cannot be lent"):
        check_device("cuda", 9 * 10**9)
    assert free_memory_bytes("cuda") == 6 * 10**9


def test_the_cpu_is_always_there() -> None:
    check_device("cpu", 10**15)


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
