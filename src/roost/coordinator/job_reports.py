"""Tells the requester how its job is doing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from roost import messages as m
from roost.errors import RoostError
from roost.transport.interface import Transport
from roost.types import Peer

logger = logging.getLogger(__name__)

UPDATE_S = 0.5
"""Seconds between progress reports."""
DEADLINE_S = 5.0


class JobReports:
    """Sends an update when something has changed, and every UPDATE_S."""

    def __init__(self, requester: Peer, transport: Transport, make: Callable[[], m.JobUpdate]) -> None:
        """`make` returns the update of this moment."""
        self._requester = requester
        self._transport = transport
        self._make = make
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Something has happened that the requester wants to know soon."""
        self._changed.set()

    async def run(self, ended: Callable[[], bool]) -> None:
        """Report until the job has ended."""
        while not ended():
            await self.send()
            self._changed.clear()
            try:
                async with asyncio.timeout(UPDATE_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def send(self) -> None:
        """Send one update; a requester that cannot be reached misses it."""
        update = self._make()
        try:
            await self._transport.send(self._requester, update, deadline_s=DEADLINE_S)
        except RoostError as error:
            logger.warning("update_not_sent job=%s error=%s", update.job_id, error.message)
