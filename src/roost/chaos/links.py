"""The links of a local pool, which can be cut: every endpoint is reached through a relay that this process runs.

A relay passes bytes on and reads none of them: what peers say to each other stays encrypted, and their certificates are checked as
ever. Who has dialled is told by the process that owns the other end of the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from enum import StrEnum

import psutil

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PIECE_BYTES = 256 << 10
CONNECT_S = 5.0


class LinkState(StrEnum):
    """What a link does with what is sent over it."""

    OPEN = "open"
    CUT = "cut"
    """Connections are closed, and new ones refused."""
    SILENT = "silent"
    """Nothing arrives, and nobody is told."""


class Relay:
    """One connection through this process; made by RelayedLinks."""

    def __init__(self, ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self._ends = ends

    def abort(self) -> None:
        """Close both ends at once."""
        for writer in self._ends:
            writer.transport.abort()


class RelayedLinks:
    """A relay in front of every endpoint, and the state of the link between every two."""

    def __init__(self, processes: Callable[[], Mapping[int, str]]) -> None:
        """`processes` returns the name of the endpoint that each process is, by process id."""
        self._processes = processes
        self._servers: dict[str, asyncio.Server] = {}
        self._states: dict[frozenset[str], LinkState] = {}
        self._passable: dict[frozenset[str], asyncio.Event] = {}
        self._relays: dict[frozenset[str], set[Relay]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, name: str, port: int) -> str:
        """Relay to the endpoint `name`, which listens on `port` of this machine; return the address that leads there."""

        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # A task that asyncio makes of this itself would be reported when it is cancelled.
            task = asyncio.create_task(self._relay(name, port, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        server = await asyncio.start_server(serve, LOOPBACK, 0)
        self._servers[name] = server
        return f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop all relays."""
        for server in self._servers.values():
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------ faults

    def set_state(self, one: str, other: str, state: LinkState) -> None:
        """Let the link between two endpoints be in this state from now on."""
        pair = frozenset((one, other))
        self._states[pair] = state
        passable = self._gate(pair)
        (passable.clear if state is LinkState.SILENT else passable.set)()
        if state is LinkState.CUT:
            for relay in self._relays.get(pair, ()):
                relay.abort()

    def _state(self, pair: frozenset[str]) -> LinkState:
        return self._states.get(pair, LinkState.OPEN)

    def _gate(self, pair: frozenset[str]) -> asyncio.Event:
        if pair not in self._passable:
            self._passable[pair] = asyncio.Event()
            self._passable[pair].set()
        return self._passable[pair]

    # ------------------------------------------------------------ connections

    async def _relay(self, name: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._join_ends(name, port, reader, writer)
        finally:
            writer.transport.abort()

    async def _join_ends(self, name: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialler = await asyncio.to_thread(self._owner, writer.get_extra_info("peername")[1])
        pair = frozenset((dialler, name))
        gate = self._gate(pair)
        await gate.wait()
        if self._state(pair) is LinkState.CUT:
            return
        try:
            async with asyncio.timeout(CONNECT_S):
                far_reader, far_writer = await asyncio.open_connection(LOOPBACK, port)
        except OSError:
            # Nobody listens: whoever has dialled is told so, as without a relay.
            return
        relay = Relay((writer, far_writer))
        relays = self._relays.setdefault(pair, set())
        relays.add(relay)
        try:
            await self._pump_both((reader, far_writer), (far_reader, writer), gate)
        finally:
            relays.discard(relay)
            relay.abort()

    async def _pump_both(
        self,
        there: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        back: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        gate: asyncio.Event,
    ) -> None:
        pumps = [asyncio.create_task(_pump(reader, writer, gate)) for reader, writer in (there, back)]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def _owner(self, port: int) -> str:
        """Return the endpoint whose process has a connection from this port of the machine."""
        for pid, name in self._processes().items():
            with contextlib.suppress(psutil.Error):
                if any(found.laddr and found.laddr.port == port for found in psutil.Process(pid).net_connections("tcp")):
                    return name
        return ""


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
    """Pass on what comes, while the link lets it, until one end is closed."""
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE_BYTES):
            await gate.wait()
            writer.write(data)
            await writer.drain()
