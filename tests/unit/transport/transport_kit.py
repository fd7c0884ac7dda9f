"""What the transport tests share: a recording handler, and endpoints of either kind behind one interface."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from roost.config import TransportConfig
from roost.messages import Done, Message, RingChunk, TensorsReply
from roost.transport.authority import Authority, create_authority
from roost.transport.grpc_transport import GrpcTransport
from roost.transport.inproc import InprocNetwork, InprocTransport
from roost.transport.interface import Buffer, ReceivedBuffer, Sender, Transport
from roost.types import Peer, Role

WAIT_S = 20.0
"""Deadline of a test's own waits; none is reached unless something is broken."""


@dataclass
class Recorder:
    """Keeps what arrives; a test may hold it up or make it fail."""

    error: Exception | None = None
    reply: tuple[Message, Sequence[Buffer]] | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Queue[tuple[Sender, Message, list[ReceivedBuffer]]] = field(default_factory=asyncio.Queue)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    most_running: int = 0
    finished: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    async def on_message(self, sender: Sender, message: Message, buffers: list[ReceivedBuffer]) -> None:
        await self._handle(sender, message, buffers)

    async def on_call(self, sender: Sender, message: Message, buffers: list[ReceivedBuffer]) -> tuple[Message, Sequence[Buffer]]:
        await self._handle(sender, message, buffers)
        return self.reply if self.reply is not None else (TensorsReply(tensors=()) if buffers else Done(), buffers)

    async def _handle(self, sender: Sender, message: Message, buffers: list[ReceivedBuffer]) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.entered.set()
        try:
            await self.gate.wait()
            self.arrived.put_nowait((sender, message, buffers))
            if self.error is not None:
                raise self.error
            self.finished += 1
        finally:
            self.running -= 1

    async def next(self) -> tuple[Sender, Message, list[ReceivedBuffer]]:
        async with asyncio.timeout(WAIT_S):
            return await self.arrived.get()


def chunk(step: int) -> RingChunk:
    """Return a message that nodes may send, told apart by `step`."""
    return RingChunk(job_id="job", segment=0, round=0, step=step, chunk=0, weight=1.0, dtype="float32")


def peer_of(transport: Transport) -> Peer:
    return Peer(peer_id=transport.peer_id, address=transport.address)


class Fleet(Protocol):
    """Makes endpoints that reach each other, and stops them at the end."""

    def make(self, peer_id: str, role: Role = Role.NODE, config: TransportConfig | None = None) -> Transport: ...

    async def stop(self) -> None: ...


class GrpcFleet:
    def __init__(self, directory: Path) -> None:
        self.authority: Authority = create_authority(directory)
        self._members: list[GrpcTransport] = []

    def make(self, peer_id: str, role: Role = Role.NODE, config: TransportConfig | None = None) -> GrpcTransport:
        member = GrpcTransport(self.authority.create_credentials(peer_id, role), config=config)
        self._members.append(member)
        return member

    async def stop(self) -> None:
        await asyncio.gather(*(member.stop() for member in self._members))


class InprocFleet:
    def __init__(self) -> None:
        self.network = InprocNetwork()
        self._members: list[InprocTransport] = []

    def make(self, peer_id: str, role: Role = Role.NODE, config: TransportConfig | None = None) -> InprocTransport:
        member = InprocTransport(peer_id, role, self.network, config=config)
        self._members.append(member)
        return member

    async def stop(self) -> None:
        await asyncio.gather(*(member.stop() for member in self._members))


@contextlib.asynccontextmanager
async def stopping(fleet: Fleet) -> AsyncIterator[None]:
    """Stop the fleet at the end, and check that nothing of it is left running."""
    try:
        yield
    finally:
        await fleet.stop()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        # A task that has been told to end may need a turn of the loop.
        _, left = await asyncio.wait(left, timeout=1)
    assert not left, f"still running: {left}"
