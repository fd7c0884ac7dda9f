"""A local pool whose processes and links can be broken while it trains. Linux and macOS; no special rights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import psutil

from roost.chaos.lease_watch import LeaseWatch
from roost.chaos.links import LOOPBACK, LinkState, RelayedLinks
from roost.config import NodeOptions
from roost.errors import CredentialsError, RoostError
from roost.requester.pools import ENROL_S, ChildProcess, Membership, join_arguments
from roost.transport.enrolment_client import Enrolment, enrol
from roost.transport.grpc_transport import GrpcTransport
from roost.types import Peer

logger = logging.getLogger(__name__)

COORDINATOR = "coordinator"
REQUESTER = "requester"
SUPERVISOR_PAUSE_S = 1.0
"""A process that ended by itself is started again after that."""
MEMORY_EVERY_S = 2.0

MemoryCurve = list[tuple[float, int]]
"""Unix times, and the bytes that a process held in memory then."""


class BreakablePool:
    """A coordinator and nodes as processes; every one is reached through a relay, so that links can be cut.

    It may be entered again: its processes are then started with the state directories and ports that they had. Between `enter` and its
    end, everything else is called on the loop that entered it.
    """

    def __init__(self, nodes: Sequence[NodeOptions], directory: Path, *, module: str = "roost") -> None:
        """State directories and logs are in `directory`; `module` is what Python runs for a node."""
        self._options = {options.name or f"node-{index + 1}": options for index, options in enumerate(nodes)}
        self._directory = directory
        self._module = module
        self._ports: dict[str, int] = {}
        self._processes: dict[str, ChildProcess] = {}
        self._down: set[str] = set()  # what was killed on purpose
        self._links = RelayedLinks(self._owners)
        self._addresses: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_failure: Callable[[RoostError], None] = lambda error: None
        self._closing = False
        self.watch: LeaseWatch | None = None
        """The requester's transport of the last entry."""
        self.crashes: list[str] = []
        """What ended by itself, and the end of its log."""
        self.memory: dict[tuple[str, int], MemoryCurve] = {}
        """By name and process id."""

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes."""
        return tuple(self._options)

    @property
    def paced(self) -> bool:
        """True if some node emulates a slower machine by sleeping."""
        return any(options.relative_speed < 1 for options in self._options.values())

    def log_of(self, name: str) -> Path:
        """Return the log of a node, or of the coordinator."""
        return self._directory / f"{name}.log"

    # ------------------------------------------------------------ life

    @contextlib.asynccontextmanager
    async def enter(self, *, on_failure: Callable[[RoostError], None]) -> AsyncIterator[Membership]:
        """Start all processes; stop them at the end. Raises StageFailedError if one does not start."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._on_failure, self._closing = on_failure, False
        self._links = RelayedLinks(self._owners)
        self._choose_ports()
        try:
            membership = await self._start()
            self._spawn(self._note_memory())
            yield membership
        finally:
            self._closing = True
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for process in self._processes.values():
                process.send_signal(signal.SIGCONT)
            await asyncio.gather(*(process.stop() for process in self._processes.values()))
            self._processes.clear()
            self._down.clear()
            await self._links.close()

    def _choose_ports(self) -> None:
        if not self._ports:
            free = iter(_free_ports(len(self._options) + 1))
            self._ports = {name: next(free) for name in (*self._options, REQUESTER)}
            self._ports[COORDINATOR] = _free_pair()

    async def _start(self) -> Membership:
        for name, port in self._ports.items():
            # Peers talk to a coordinator on the port after the one that they enrol at.
            self._addresses[name] = await self._links.listen(name, port + (name == COORDINATOR))
        ready = await self._start_coordinator()
        tokens = dict(zip(self._options, ready["node_tokens"], strict=True))
        for name in self._options:
            await self._enrolled(name, str(tokens[name]))
            await self.start(name)
        enrolment = await self._enrolled(REQUESTER, str(ready["requester_token"]))
        transport = GrpcTransport(enrolment.credentials, host=LOOPBACK, port=self._ports[REQUESTER], advertise=self._addresses[REQUESTER])
        self.watch = LeaseWatch(transport)
        return Membership(transport=self.watch, coordinator=enrolment.coordinator, wait_nodes=len(self._options))

    async def _enrolled(self, name: str, token: str) -> Enrolment:
        """Return who a peer is; it reaches the coordinator through a relay."""
        directory = self._directory / name
        try:
            known = Enrolment.load(directory)
        except CredentialsError:
            address = f"{LOOPBACK}:{self._ports[COORDINATOR]}"
            known = await enrol(address, token, name=name, state_dir=directory, deadline_s=ENROL_S)
        coordinator = Peer(peer_id=known.coordinator.peer_id, address=self._addresses[COORDINATOR])
        relayed = Enrolment(credentials=known.credentials, coordinator=coordinator)
        relayed.save(directory)
        return relayed

    async def _start_coordinator(self) -> dict[str, list[str] | str]:
        arguments = ["coordinator", "--json", "--port", str(self._ports[COORDINATOR]), "--verbose", "--exit-with-parent"]
        arguments += ["--state-dir", str(self._directory / COORDINATOR), "--tokens", str(len(self._options))]
        process = ChildProcess(COORDINATOR, self.log_of(COORDINATOR), lambda error: self._ended(COORDINATOR, error))
        self._processes[COORDINATOR] = process
        await process.start(arguments, {})
        return await process.first_line()

    def _owners(self) -> Mapping[int, str]:
        return {psutil.Process().pid: REQUESTER, **{process.pid: name for name, process in self._processes.items()}}

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ processes

    async def start(self, name: str) -> None:
        """Start a node, or the coordinator, that does not run."""
        self._down.discard(name)
        if name == COORDINATOR:
            await self._start_coordinator()
            return
        options = self._options[name]
        process = ChildProcess(name, self.log_of(name), lambda error: self._ended(name, error), module=self._module)
        arguments = join_arguments(f"{LOOPBACK}:{self._ports[COORDINATOR]}", name, options, self._directory)
        arguments += ["--verbose", "--port", str(self._ports[name]), "--advertise", self._addresses[name]]
        self._processes[name] = process
        await process.start(arguments, {"OMP_NUM_THREADS": str(options.threads)})

    def kill(self, name: str) -> None:
        """End a process at once."""
        self._down.add(name)
        self._processes[name].send_signal(signal.SIGKILL)

    def freeze(self, name: str) -> None:
        """Let a process stand still."""
        self._processes[name].send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Let it go on."""
        self._processes[name].send_signal(signal.SIGCONT)

    def fail(self, error: RoostError) -> None:
        """End the run, as if the requester had been killed, too."""
        self._on_failure(error)

    def _ended(self, name: str, error: RoostError) -> None:
        if self._closing or name in self._down:
            return
        logger.warning("process_crashed name=%s error=%s", name, error.message)
        self.crashes.append(error.message)
        self._spawn(self._start_again(name))

    async def _start_again(self, name: str) -> None:
        await asyncio.sleep(SUPERVISOR_PAUSE_S)
        await self.start(name)

    # ------------------------------------------------------------ links

    def set_link(self, one: str, other: str, state: LinkState) -> None:
        """Let the link between two of nodes, coordinator and requester be in this state."""
        self._links.set_state(one, other, state)

    def set_cable(self, name: str, state: LinkState) -> None:
        """Let all links of a node be in this state."""
        for other in self._ports:
            if other != name:
                self._links.set_state(name, other, state)

    # ------------------------------------------------------------ what is watched

    async def _note_memory(self) -> None:
        while True:
            for name, process in self._processes.items():
                with contextlib.suppress(psutil.Error):
                    self.memory.setdefault((name, process.pid), []).append((time.time(), psutil.Process(process.pid).memory_info().rss))
            await asyncio.sleep(MEMORY_EVERY_S)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _free_pair() -> int:
    """Return a port that is free, and so is the one after it."""
    while True:
        (port,) = _free_ports(1)
        with contextlib.suppress(OSError), socket.socket() as after:
            after.bind((LOOPBACK, port + 1))
            return port
