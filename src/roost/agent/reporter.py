"""What the coordinator must not miss: told in order, and again until it has answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from roost.errors import DeadlineError, PeerUnreachableError, RoostError
from roost.messages import Message
from roost.transport.interface import Transport
from roost.types import Peer

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
MOST_PAUSE_S = 2.0
AWAY = (PeerUnreachableError, DeadlineError)
"""A peer that is not there now, and may come back."""


async def patiently(transport: Transport, peer: Peer, message: Message, *, deadline_s: float | None = None) -> Message:
    """Return the reply to a message without buffers, asked for again while `peer` cannot be reached. Raises what it reports."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return (await transport.call(peer, message, deadline_s=deadline_s)).message
        except AWAY as error:
            logger.info("waiting_for_peer peer=%s type=%s error=%s", peer.peer_id, type(message).__name__, error.message)
        await asyncio.sleep(pause_s)
        pause_s = min(MOST_PAUSE_S, 2 * pause_s)


class Reporter:
    """A queue of reports to the coordinator."""

    def __init__(self, transport: Transport, coordinator: Peer) -> None:
        self._transport = transport
        self._coordinator = coordinator
        self._waiting: asyncio.Queue[tuple[Message, Callable[[], None]]] = asyncio.Queue()

    def put(self, message: Message, noted: Callable[[], None] = lambda: None) -> None:
        """Queue a report; `noted` is called once the coordinator has taken note of it."""
        self._waiting.put_nowait((message, noted))

    async def run(self) -> None:
        """Report until cancelled; what the coordinator refuses it does not want to know any more."""
        while True:
            message, noted = await self._waiting.get()
            try:
                await patiently(self._transport, self._coordinator, message)
            except RoostError as error:
                logger.info("report_refused type=%s error=%s", type(message).__name__, error.message)
                continue
            noted()
