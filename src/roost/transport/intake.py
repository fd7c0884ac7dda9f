"""Reads the messages of one stream or call: in time, in size, and on the account of the peer that sends them."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import grpc.aio

from roost.config import TransportConfig
from roost.errors import DeadlineError, MalformedMessageError
from roost.messages import Message
from roost.transport.framing import Assembler
from roost.transport.guard import PeerGuard
from roost.transport.interface import ReceivedBuffer, Sender
from roost.transport.latency import Read
from roost.transport.meter import Meter


class Intake:
    """A context manager: what has arrived and was not dealt with is given back to the account at the end."""

    def __init__(
        self, read: Read, assembler: Assembler, *, sender: Sender, guard: PeerGuard, config: TransportConfig, meter: Meter
    ) -> None:
        self._read = read
        self._assembler = assembler
        self._sender = sender
        self._guard = guard
        self._config = config
        self._meter = meter
        self._held = 0

    def __enter__(self) -> Intake:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.dealt_with()

    async def next_message(self, *, begun: bool = False) -> tuple[Message, list[ReceivedBuffer]] | None:
        """Return the next message, or None at the end of the stream; `begun` says that it is due now.

        Raises DeadlineError, naming the sender, if it stops in the middle of a message or takes too long for it,
        MalformedMessageError if the stream ends there, and what the assembler and the account of the peer raise.
        """
        if not begun:
            frame = await self._read()
            if frame is grpc.aio.EOF:
                return None
            if (message := self._take(frame)) is not None:
                return message
        loop = asyncio.get_running_loop()
        due = loop.time() + self._config.message_s
        while True:
            try:
                async with asyncio.timeout_at(min(due, loop.time() + self._config.idle_s + self._config.latency_s)):
                    frame = await self._read()
            except TimeoutError:
                raise DeadlineError(f"{self._sender.peer_id} did not finish a message that it had begun") from None
            if frame is grpc.aio.EOF:
                if self._assembler.idle:
                    return None
                raise MalformedMessageError(f"{self._sender.peer_id} ended a stream in the middle of a message")
            if (message := self._take(frame)) is not None:
                return message

    def dealt_with(self) -> None:
        """What has arrived so far takes no memory here any more."""
        self._guard.release(self._held)
        self._held = 0

    def _take(self, frame: Any) -> tuple[Message, list[ReceivedBuffer]] | None:
        self._guard.hold(len(frame))
        self._held += len(frame)
        message = self._assembler.feed(frame)
        if message is not None:
            self._meter.message_received()
        return message
