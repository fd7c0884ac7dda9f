"""`roost join`: the agent's process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout
from rich.console import Console

from roost.cli.lifetime import run_until_stopped
from roost.config import AgentConfig, TransportConfig, format_bytes
from roost.errors import CredentialsError, ForbiddenError, InvalidConfigError
from roost.transport.addresses import host_towards
from roost.transport.enrolment_client import Enrolment, enrol_once
from roost.transport.grpc_transport import GrpcTransport
from roost.transport.renewal import renewing
from roost.types import Role

if TYPE_CHECKING:
    from roost.agent.service import Agent

ENROL_S = 20.0
LEAST_MESSAGE_BYTES = 64 << 20
"""A node takes messages of this size however little it lends: the graph, and what links are measured with."""
AGENT_LOCK = "agent.lock"
"""In a node's state directory: held while its agent runs."""


def default_name() -> str:
    """Return the host's name as a node name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()).strip("-._")[:64] or "node"


def default_state_dir(address: str, name: str) -> Path:
    """Return the folder where this node's certificate for a coordinator is kept."""
    return node_dirs() / f"{name}@{address.replace(':', '_')}"


def node_dirs() -> Path:
    """Return where the state directories of this user's nodes are, each called NAME@ADDRESS, unless they were put elsewhere."""
    return Path.home() / ".roost" / "node"


def run(config: AgentConfig, *, address: str, token: str, exit_with_parent: bool) -> None:
    """Enrol if a token is given, measure the machine, and serve until stopped."""
    directory = Path(config.state_dir)
    running: list[Agent] = []

    def leave() -> bool:
        """Give the stage to another node first, unless whoever started this process ends it."""
        if exit_with_parent or not running:
            return False
        Console(highlight=False).print("leaving: another node takes over what this one has; Ctrl+C again stops at once")
        running[0].leave()
        return True

    with _only_agent(directory, config.node_id):
        work = _serve(config, directory, address=address, token=token, running=running)
        run_until_stopped(work, exit_with_parent=exit_with_parent, on_first_interrupt=leave)


@contextlib.contextmanager
def _only_agent(directory: Path, name: str) -> Iterator[None]:
    """Hold the state directory: a second agent with the same certificate would leave a dead address behind when it ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(directory / AGENT_LOCK)
        lock.acquire(timeout=0)
    except Timeout:
        raise InvalidConfigError(
            f"node {name} is already running with the state directory {directory}",
            hint="Stop the other 'roost join' first, or join under another --name.",
        ) from None
    except OSError as error:
        raise CredentialsError(f"the state directory {directory} cannot be used: {error}", hint="Name another with --state-dir.") from error
    try:
        yield
    finally:
        lock.release()


async def _serve(config: AgentConfig, directory: Path, *, address: str, token: str, running: list[Agent]) -> None:
    if token:
        enrolment = await enrol_once(address, token, name=config.node_id, state_dir=directory, deadline_s=ENROL_S)
    else:
        enrolment = _known(directory, address)
    if enrolment.credentials.role is not Role.NODE:
        raise ForbiddenError(
            f"the token made {enrolment.credentials.peer_id} a {enrolment.credentials.role}, not a node",
            hint="Join with a node token ('roost token --role node') and another --name.",
        )
    # Only now, so that a wrong token is told at once: importing torch takes seconds.
    from roost.agent.hardware import check_device, default_threads, profile_node
    from roost.agent.limits import limit_memory, limit_threads
    from roost.agent.service import Agent

    check_device(config.device, config.memory_bytes)
    config = dataclasses.replace(config, node_id=enrolment.credentials.peer_id, threads=config.threads or default_threads())
    limit_threads(config.threads)
    profile = await asyncio.to_thread(profile_node, config)
    if config.memory_bytes:
        limit_memory(config.memory_bytes, config.device, profile.threads)
    transport = GrpcTransport(
        enrolment.credentials,
        config=TransportConfig(
            # A message that does not fit what this node lends cannot be meant for its stage.
            max_message_bytes=min(TransportConfig().max_message_bytes, max(profile.memory_bytes, LEAST_MESSAGE_BYTES)),
            uplink_bytes_per_s=config.uplink_bytes_per_s,
            downlink_bytes_per_s=config.downlink_bytes_per_s,
            latency_s=config.latency_s,
        ),
        host=config.host or host_towards(enrolment.coordinator.address),
        port=config.port,
        advertise=config.advertise,
    )
    agent = Agent(config=config, transport=transport, coordinator=enrolment.coordinator, profile=profile)
    running.append(agent)
    declared = " (declared)" if profile.emulated else ""
    Console(highlight=False).print(
        f"node {config.node_id}: {profile.flop_per_s / 1e9:.1f} GFLOP/s, {format_bytes(profile.memory_bytes)}{declared}; "
        f"lent to {address} until Ctrl+C",
        soft_wrap=True,
    )
    async with renewing(transport, enrolment.coordinator, enrolment.credentials, directory):
        await agent.run()


def _known(directory: Path, address: str) -> Enrolment:
    try:
        return Enrolment.load(directory)
    except CredentialsError as error:
        raise CredentialsError(
            f"this machine has not joined {address} before: {error.message}",
            hint="Join once with a token: roost join ADDRESS TOKEN ('roost token' on the coordinator's machine prints one).",
        ) from error
