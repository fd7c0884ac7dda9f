"""Sends to other stages in order, while the stage goes on computing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from roost.errors import RoostError
from roost.messages import Message
from roost.transport.interface import Buffer, Lane, Transport
from roost.types import Peer


class Outbox:
    """One ordered queue per peer; how much waits in it is bounded by the micro-batches in flight."""

    def __init__(self, transport: Transport, *, on_failure: Callable[[RoostError], None]) -> None:
        self._transport = transport
        self._on_failure = on_failure
        self._queues: dict[str, asyncio.Queue[tuple[Peer, Message, Sequence[Buffer]]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def put(self, peer: Peer, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Queue one message for `peer`; a failure to send is reported to `on_failure`."""
        queue = self._queues.get(peer.peer_id)
        if queue is None:
            queue = self._queues[peer.peer_id] = asyncio.Queue()
            self._tasks.append(asyncio.create_task(self._send_all(queue), name=f"outbox-{peer.peer_id}"))
        queue.put_nowait((peer, message, buffers))

    async def close(self) -> None:
        """Stop sending; what still waits is dropped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._queues.clear()

    async def _send_all(self, queue: asyncio.Queue[tuple[Peer, Message, Sequence[Buffer]]]) -> None:
        while True:
            peer, message, buffers = await queue.get()
            try:
                await self._transport.send(peer, message, buffers, lane=Lane.TRAINING)
            except RoostError as error:
                self._on_failure(error)
                return
