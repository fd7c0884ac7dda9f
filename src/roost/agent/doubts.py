"""When to doubt a peer that should have sent something: long before its heartbeats are missed, somebody waits for it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

LEAST_S = 0.3
"""Nobody is doubted sooner."""
LONGER = 2.0
"""A wait is doubtful once it is so many times as long as the longest of the last ones."""
KEPT_WAITS = 32

Item = TypeVar("Item")


class Doubts:
    """Learns how long waits take, and names the peer once in each that takes much longer.

    Being named costs a peer nothing but an answer: the coordinator asks it whether it is there.
    """

    def __init__(self, name: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`name` is told who is doubted; `clock` gives seconds."""
        self._name = name
        self._clock = clock
        self._waits: deque[float] = deque(maxlen=KEPT_WAITS)

    @property
    def allowed_s(self) -> float:
        """Seconds that a wait may take before somebody is doubted."""
        return max(LEAST_S, LONGER * max(self._waits, default=0.0))

    async def next_of(self, queue: asyncio.Queue[Item], peer: str, *, within_s: float | None = None) -> Item:
        """Return the next item of a queue that `peer`, if it is not empty, has to fill. Raises TimeoutError after `within_s`."""
        if not queue.empty():
            return queue.get_nowait()
        began, allowed_s = self._clock(), self.allowed_s
        async with asyncio.timeout(within_s):
            if not peer or (within_s is not None and within_s <= allowed_s):
                return await queue.get()
            try:
                async with asyncio.timeout(allowed_s):
                    return await queue.get()
            except TimeoutError:
                self._name(peer)
            finally:
                # One that was doubted may have been away: its wait says little of what is usual.
                self._waits.append(min(self._clock() - began, allowed_s))
            return await queue.get()
