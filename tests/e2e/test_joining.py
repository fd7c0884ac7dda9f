"""Who is let in: tokens and certificates between real processes. No torch is needed to be turned away."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e_kit import Command, Machine, fresh_token, refused

from roost.cli.coordinator import DATABASE
from roost.coordinator.store import Store


@dataclass
class Door:
    """A coordinator without nodes."""

    machine: Machine
    coordinator: Command
    address: str
    state: Path

    def token(self, role: str = "node") -> str:
        return fresh_token(self.state, role)


def opened(machine: Machine, name: str) -> Door:
    state = machine.home / name
    command = machine.start("coordinator", "--port", 0, "--json", "--tokens", 0, "--state-dir", state)
    return Door(machine=machine, coordinator=command, address=json.loads(command.until("ready"))["address"], state=state)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    machine = Machine(tmp_path_factory.mktemp("door"))
    door = opened(machine, "coordinator")
    yield door
    door.coordinator.signal(signal.SIGINT)
    assert door.coordinator.wait().code == 0
    machine.assert_nothing_runs()


def test_a_coordinator_never_imports_torch() -> None:
    program = "import sys, roost.cli.main, roost.cli.coordinator, roost.cli.status; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_a_token_that_was_used_is_refused_to_everybody_else(door: Door, machine: Machine) -> None:
    token = door.token("requester")
    assert machine.run("status", door.address, "--token", token).code == 0
    refused(machine.run("join", door.address, token, "--name", "late"), "R401", "used before, by ", "roost token")


def test_a_token_whose_time_is_over_is_refused(door: Door, machine: Machine) -> None:
    # Long over by the time the process that shows it has started.
    token = machine.run("token", "--ttl", 0.001, "--state-dir", door.state).out.strip()
    refused(machine.run("join", door.address, token, "--name", "late"), "R402", "ran out")


def test_a_made_up_token_is_refused(door: Door, machine: Machine) -> None:
    prefix, secret, fingerprint = door.token().split("-", 2)
    token = f"{prefix}-{'0' * len(secret)}-{fingerprint}"
    refused(machine.run("join", door.address, token, "--name", "guesser"), "R401", "has not issued this token")


def test_a_coordinator_with_another_certificate_is_not_shown_the_token(door: Door, machine: Machine) -> None:
    other = opened(machine, "other")
    try:
        refused(machine.run("join", other.address, door.token(), "--name", "a"), "R403", "fingerprint", "Check the address")
    finally:
        other.coordinator.signal(signal.SIGTERM)
        assert other.coordinator.wait().code == 0


def test_a_requester_token_makes_no_node(door: Door, machine: Machine) -> None:
    result = machine.run("join", door.address, door.token("requester"), "--name", "a")
    refused(result, "R404", "requester", "roost token --role node")


def test_a_node_token_makes_no_requester(door: Door, machine: Machine) -> None:
    refused(machine.run("status", door.address, "--token", door.token("node")), "R404", "node", "--role requester")


def test_a_name_that_is_taken_leaves_the_token_good(door: Door, machine: Machine) -> None:
    assert machine.run("status", door.address, "--token", door.token("requester")).code == 0
    with Store(door.state / DATABASE) as store:
        taken = store.peers()[0].peer_id
    token = door.token()
    for _ in range(2):
        refused(machine.run("join", door.address, token, "--name", taken), "R404", f"the name {taken} belongs to", "Choose another name")


def test_a_port_that_is_in_use_is_named(door: Door, machine: Machine) -> None:
    port = int(door.address.rpartition(":")[2])
    result = machine.run("coordinator", "--port", port, "--state-dir", machine.home / "second")
    refused(result, "R101", f"cannot listen on 127.0.0.1 port {port}")


def test_where_nothing_listens_the_address_is_named_at_once(machine: Machine, door: Door) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    result = machine.run("join", address, door.token(), "--name", "a")
    refused(result, "R501", f"the coordinator at {address} cannot be reached")


def test_a_machine_that_never_enrolled_is_told_how(machine: Machine, door: Door) -> None:
    refused(machine.run("status", door.address), "R405", f"has not enrolled with {door.address}", "--token")
