"""An emulated distance: what arrives is handed on a fixed time later, in order, while more arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

MAX_ON_THE_WAY = 1024
"""Frames that may be on the emulated way; then the real network is made to wait."""

Read = Callable[[], Awaitable[Any]]


class DelayLine:
    """Frames of one stream, and its end or failure, each handed out `latency_s` seconds after it came."""

    def __init__(self, read: Read, latency_s: float) -> None:
        """Start reading; close() ends that."""
        self._read = read
        self._latency_s = latency_s
        self._on_the_way: asyncio.Queue[tuple[float, asyncio.Future[Any]]] = asyncio.Queue(MAX_ON_THE_WAY)
        self._reading = asyncio.get_running_loop().create_task(self._fill())

    async def read(self) -> Any:
        """Return the next frame. Raises what reading it raised."""
        due, frame = await self._on_the_way.get()
        wait = due - asyncio.get_running_loop().time()
        if wait > 0:
            await asyncio.sleep(wait)
        return frame.result()

    def close(self) -> None:
        """Stop reading."""
        self._reading.cancel()

    async def _fill(self) -> None:
        clock = asyncio.get_running_loop().time
        failed = False
        while not failed:
            frame = asyncio.ensure_future(self._read())
            try:
                await asyncio.wait({frame})
            finally:
                frame.cancel()
            failed = frame.cancelled() or frame.exception() is not None
            await self._on_the_way.put((clock() + self._latency_s, frame))
