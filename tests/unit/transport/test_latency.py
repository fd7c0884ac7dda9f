from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from roost.transport.latency import DelayLine


class SkippingSelector(selectors.SelectSelector):
    """Waits for nothing: the clock moves on by what would have been waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits for something that never comes"
        self.now += timeout
        return []


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run `work` on a clock of its own."""
    selector = SkippingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def test_frames_arrive_later_in_order_and_do_not_wait_for_each_other() -> None:
    async def times() -> list[tuple[float, int]]:
        clock = asyncio.get_running_loop().time
        numbers = iter(range(4))

        async def read() -> int:
            await asyncio.sleep(0.01)
            return next(numbers)

        line = DelayLine(read, 0.5)
        found = []
        for _ in range(4):
            frame = await line.read()
            found.append((round(clock(), 6), frame))
        line.close()
        return found

    assert run(times()) == [(0.51, 0), (0.52, 1), (0.53, 2), (0.54, 3)]


def test_an_end_of_the_stream_comes_after_what_was_sent_before_it() -> None:
    async def read_all() -> list[int]:
        frames = iter([1, 2])

        async def read() -> int:
            try:
                return next(frames)
            except StopIteration:
                raise ConnectionError("cut") from None

        line = DelayLine(read, 0.2)
        found = [await line.read(), await line.read()]
        with pytest.raises(ConnectionError, match="cut"):
            await line.read()
        return found

    assert run(read_all()) == [1, 2]
