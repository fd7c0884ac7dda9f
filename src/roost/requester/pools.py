"""Where agents come from: a coordinator's address that people join, or processes on this machine.

A pool is entered for one run: it yields who the requester is and where the coordinator is, and cleans up behind itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from roost.config import NodeOptions, parse_bytes, require
from roost.errors import CredentialsError, DeadlineError, ForbiddenError, RoostError, StageFailedError
from roost.transport.addresses import host_towards
from roost.transport.enrolment_client import Enrolment, enrol, enrol_once
from roost.transport.grpc_transport import GrpcTransport
from roost.transport.interface import Transport
from roost.transport.renewal import renewing
from roost.types import Peer, Role

logger = logging.getLogger(__name__)

START_S = 60.0
ENROL_S = 20.0
STOP_S = 10.0
LOG_TAIL = 15
"""Lines of a dead process's log that its error quotes."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """What a pool gives the requester."""

    transport: Transport
    """The requester's own endpoint, not started yet."""
    coordinator: Peer
    wait_nodes: int
    """Nodes to wait for before planning."""


class Pool(Protocol):
    """Where agents come from."""

    def enter(self, *, on_failure: Callable[[RoostError], None]) -> contextlib.AbstractAsyncContextManager[Membership]:
        """Return a context in which the pool can be used; `on_failure` hears of a pool that breaks meanwhile."""


@dataclass(frozen=True, kw_only=True)
class RemotePool:
    """A coordinator that somebody started with `roost coordinator`."""

    address: str
    """host:port that `roost coordinator` printed."""
    token: str = ""
    """A one-time requester token; not needed again, though it may still be given, once this machine has enrolled."""
    nodes: int = 1
    """Nodes to wait for."""
    state_dir: str = ""
    """Where the requester's certificate for this coordinator is kept."""

    def __post_init__(self) -> None:
        require(":" in self.address, f"pool address {self.address!r} must be host:port")
        require(self.nodes >= 1, "nodes must be at least 1")

    @contextlib.asynccontextmanager
    async def enter(self, *, on_failure: Callable[[RoostError], None]) -> AsyncIterator[Membership]:
        """Enrol with the token, or use the certificate of an earlier enrolment. Raises SecurityError."""
        directory = Path(self.state_dir) if self.state_dir else requester_dir(self.address)
        if self.token:
            name = _requester_name(directory)
            enrolment = await enrol_once(self.address, self.token, name=name, state_dir=directory, deadline_s=ENROL_S)
        else:
            try:
                enrolment = Enrolment.load(directory)
            except CredentialsError as error:
                raise CredentialsError(
                    f"this machine has not enrolled with {self.address}: {error.message}",
                    hint="Pass a requester token once (--token, or RemotePool(token=...)); 'roost token --role requester' prints one.",
                ) from error
        if enrolment.credentials.role is not Role.REQUESTER:
            raise ForbiddenError(f"the token made this machine a {enrolment.credentials.role}, not a requester")
        transport = GrpcTransport(enrolment.credentials, host=host_towards(enrolment.coordinator.address))
        async with renewing(transport, enrolment.coordinator, enrolment.credentials, directory):
            yield Membership(transport=transport, coordinator=enrolment.coordinator, wait_nodes=self.nodes)


class LocalPool:
    """A coordinator and agents as processes of this machine, on loopback; they end with the run or with this process."""

    def __init__(self, nodes: Sequence[NodeOptions], *, state_dir: str = "") -> None:
        self._nodes = tuple(nodes)
        self._state_dir = state_dir

    @property
    def size(self) -> int:
        return len(self._nodes)

    @property
    def paced(self) -> bool:
        """True if some node emulates a slower machine by sleeping."""
        return any(options.relative_speed < 1 for options in self._nodes)

    @contextlib.asynccontextmanager
    async def enter(self, *, on_failure: Callable[[RoostError], None]) -> AsyncIterator[Membership]:
        """Start all processes; stop them at the end. Raises StageFailedError if one does not start."""
        root = Path(self._state_dir) if self._state_dir else Path(tempfile.mkdtemp(prefix="roost-local-"))
        root.mkdir(parents=True, exist_ok=True)
        # Of this entry alone: two runs may use one pool, each with processes of its own.
        processes: list[ChildProcess] = []
        try:
            yield await self._start(root, processes, on_failure)
        finally:
            await asyncio.gather(*(process.stop() for process in reversed(processes)))
            if not self._state_dir:
                shutil.rmtree(root, ignore_errors=True)

    async def _start(self, root: Path, processes: list[ChildProcess], on_failure: Callable[[RoostError], None]) -> Membership:
        coordinator = ChildProcess("coordinator", root / "coordinator.log", on_failure)
        processes.append(coordinator)
        arguments = ["coordinator", "--json", "--port", "0", "--state-dir", str(root / "coordinator")]
        await coordinator.start([*arguments, "--tokens", str(len(self._nodes)), "--exit-with-parent"], {})
        ready = await coordinator.first_line()
        for index, options in enumerate(self._nodes):
            name = options.name or f"node-{index + 1}"
            process = ChildProcess(name, root / f"{name}.log", on_failure)
            processes.append(process)
            environment = {"ROOST_TOKEN": ready["node_tokens"][index], "OMP_NUM_THREADS": str(options.threads)}
            await process.start(join_arguments(ready["address"], name, options, root), environment)
        enrolment = await enrol(
            ready["address"], ready["requester_token"], name="requester", state_dir=root / "requester", deadline_s=ENROL_S
        )
        transport = GrpcTransport(enrolment.credentials, host="127.0.0.1")
        return Membership(transport=transport, coordinator=enrolment.coordinator, wait_nodes=len(self._nodes))


def join_arguments(address: str, name: str, options: NodeOptions, root: Path) -> list[str]:
    """Return the arguments of `roost` that start a node of this machine, with its state directory under `root`."""
    arguments = ["join", address, "--name", name, "--state-dir", str(root / name), "--host", "127.0.0.1", "--exit-with-parent"]
    arguments += ["--threads", str(options.threads)]
    memory = parse_bytes(options.memory)
    if memory:
        arguments += ["--memory", str(memory)]
    if options.relative_speed < 1:
        arguments += ["--relative-speed", str(options.relative_speed)]
    if options.uplink_mbit:
        arguments += ["--uplink-mbit", str(options.uplink_mbit)]
    if options.downlink_mbit:
        arguments += ["--downlink-mbit", str(options.downlink_mbit)]
    if options.latency_ms:
        arguments += ["--latency-ms", str(options.latency_ms)]
    return [*arguments, *options.extra]


class ChildProcess:
    """One `roost` process that ends when this process does: it watches the pipe that is its standard input."""

    def __init__(self, name: str, log: Path, on_failure: Callable[[RoostError], None], *, module: str = "roost") -> None:
        """`on_failure` hears of it if it ends without having been stopped; `module` is what Python runs."""
        self._name = name
        self._log = log
        self._on_failure = on_failure
        self._module = module
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self, arguments: list[str], environment: dict[str, str]) -> None:
        """Start it with the arguments of `roost`; standard error goes to the log file."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environment},
                # Ctrl+C is for the requester, who then stops its processes in order.
                start_new_session=True,
            )
        self._watch = asyncio.create_task(self._report_end(), name=f"watch-{self._name}")

    @property
    def pid(self) -> int:
        """The process's id. Only after `start`."""
        assert self._process is not None, "start() first"
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal; one that has ended gets none."""
        assert self._process is not None, "start() first"
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def first_line(self) -> dict[str, Any]:
        """Return the JSON object of its first line. Raises StageFailedError if it ends or is silent."""
        assert self._process is not None and self._process.stdout is not None, "start() first"
        try:
            async with asyncio.timeout(START_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise DeadlineError(f"the {self._name} process was not ready after {START_S:.0f} s") from None
        if not line:
            raise StageFailedError(f"the {self._name} process ended at once; its log ends with:\n{self._tail()}")
        return json.loads(line)

    async def stop(self) -> None:
        """Ask it to end by closing its standard input, then insist."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            logger.warning("process_killed name=%s", self._name)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._watch is not None:
            await self._watch

    async def _report_end(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        if not self._stopping:
            self._on_failure(StageFailedError(f"the {self._name} process ended (exit code {code}); its log ends with:\n{self._tail()}"))

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(f"    {line}" for line in lines[-LOG_TAIL:])


def local(nodes: int | Sequence[NodeOptions | dict[str, object]] = 2, *, state_dir: str = "") -> LocalPool:
    """Return a pool of processes on this machine.

    `nodes` is a number of equal nodes, or one NodeOptions (or a dict of its fields) per node. With `state_dir` the
    processes' logs and keys stay there; otherwise they are in a temporary directory that is removed.
    """
    if isinstance(nodes, int):
        require(1 <= nodes <= 256, f"a local pool has 1 to 256 nodes, not {nodes}")
        return LocalPool([NodeOptions() for _ in range(nodes)], state_dir=state_dir)
    require(isinstance(nodes, Sequence) and not isinstance(nodes, str), "nodes must be a number or a list of NodeOptions")
    require(len(nodes) > 0, "a local pool needs at least one node")
    options = [_options(node) for node in nodes]
    names = [option.name or f"node-{index + 1}" for index, option in enumerate(options)]
    require(len(set(names)) == len(names), f"two nodes of the local pool have the same name: {sorted(names)}")
    return LocalPool(options, state_dir=state_dir)


def _options(node: NodeOptions | dict[str, object]) -> NodeOptions:
    if isinstance(node, NodeOptions):
        return node
    require(isinstance(node, dict), f"a node must be a NodeOptions or a dict of its fields, not {node!r}")
    known = {field.name for field in fields(NodeOptions)}
    unknown = sorted(set(node) - known)
    require(not unknown, f"a node has no field {unknown[:1]}; there are {sorted(known)}")
    return NodeOptions(**node)  # type: ignore[arg-type]


def requester_dir(address: str) -> Path:
    """Return the folder where this user's requester certificate for a coordinator is kept."""
    return Path.home() / ".roost" / "requester" / address.replace(":", "_").replace("/", "_")


def _requester_name(directory: Path) -> str:
    """Return the name this requester had before, or a new one: nobody is refused for a name that was made for him."""
    with contextlib.suppress(CredentialsError):
        known = Enrolment.load(directory).credentials
        if known.role is Role.REQUESTER:
            return known.peer_id
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A user id without a name, as in some containers.
        user = "requester"
    place = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{user}-{socket.gethostname()}").lstrip("-._")[:56]
    return f"{place or 'requester'}-{secrets.token_hex(3)}"
