"""Sends to other stages in order, while the stage goes on computing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roost.errors import RoostError
from roost.messages import Message
from roost.transport.interface import Buffer, Lane, Transport
from roost.types import Peer


@dataclass(frozen=True, kw_only=True, eq=False)
class Letter:
    """A message that waits to be sent."""

    peer: Peer
    message: Message
    buffers: Sequence[Buffer]
    wait: Callable[[], None] | None
    """Returns once the buffers are filled; None: they are."""


class Outbox:
    """One ordered queue per peer; how much waits in it is bounded by the micro-batches in flight."""

    def __init__(self, transport: Transport, *, on_failure: Callable[[RoostError, str], None]) -> None:
        self._transport = transport
        self._on_failure = on_failure
        self._queues: dict[str, asyncio.Queue[Letter]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def put(self, peer: Peer, message: Message, buffers: Sequence[Buffer] = (), wait: Callable[[], None] | None = None) -> None:
        """Queue one message for `peer`; a failure to send is reported to `on_failure`, with the peer's name.

        `wait` returns once the buffers are filled.
        """
        queue = self._queues.get(peer.peer_id)
        if queue is None:
            queue = self._queues[peer.peer_id] = asyncio.Queue()
            self._tasks.append(asyncio.create_task(self._send_all(queue), name=f"outbox-{peer.peer_id}"))
        queue.put_nowait(Letter(peer=peer, message=message, buffers=buffers, wait=wait))

    async def close(self) -> None:
        """Stop sending; what still waits is dropped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._queues.clear()

    async def _send_all(self, queue: asyncio.Queue[Letter]) -> None:
        while True:
            letter = await queue.get()
            if letter.wait is not None:
                await asyncio.to_thread(letter.wait)
            try:
                await self._transport.send(letter.peer, letter.message, letter.buffers, lane=Lane.TRAINING)
            except RoostError as error:
                self._on_failure(error, letter.peer.peer_id)
                return
