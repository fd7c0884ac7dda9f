"""Who is doubted, and after how long a wait."""

from __future__ import annotations

import asyncio

import pytest

from hand_clock import HandClock
from roost.agent import doubts
from roost.agent.doubts import LEAST_S, LONGER, Doubts


def test_what_is_there_already_is_taken_at_once_and_nobody_is_doubted() -> None:
    named: list[str] = []

    async def main() -> int:
        queue: asyncio.Queue[int] = asyncio.Queue()
        queue.put_nowait(1)
        return await Doubts(named.append).next_of(queue, "barn")

    assert asyncio.run(main()) == 1
    assert named == []


def test_who_sends_nothing_for_too_long_is_named_once_and_what_comes_then_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts, "LEAST_S", 0.001)
    named: list[str] = []

    async def main() -> int:
        queue: asyncio.Queue[int] = asyncio.Queue()

        def doubted(peer: str) -> None:
            named.append(peer)
            queue.put_nowait(1)

        return await Doubts(doubted).next_of(queue, "barn")

    assert asyncio.run(main()) == 1
    assert named == ["barn"]


def test_a_wait_for_nobody_doubts_nobody_and_ends_with_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts, "LEAST_S", 0.001)
    named: list[str] = []

    async def main() -> None:
        await Doubts(named.append).next_of(asyncio.Queue(), "", within_s=0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert named == []


def test_a_wait_that_is_doubted_still_ends_with_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts, "LEAST_S", 0.001)
    named: list[str] = []

    async def main() -> None:
        await Doubts(named.append).next_of(asyncio.Queue(), "barn", within_s=0.2)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert named == ["barn"]


def test_long_waits_that_are_usual_are_not_doubted_and_one_long_absence_is_not_taken_for_usual() -> None:
    clock = HandClock()
    watch = Doubts(lambda peer: None, clock)

    async def waited(seconds: float) -> None:
        queue: asyncio.Queue[int] = asyncio.Queue()
        task = asyncio.create_task(watch.next_of(queue, "barn"))
        await asyncio.sleep(0)
        clock.now += seconds
        queue.put_nowait(1)
        await task

    assert watch.allowed_s == LEAST_S
    asyncio.run(waited(0.25))
    assert watch.allowed_s == LONGER * 0.25
    asyncio.run(waited(60.0))
    assert watch.allowed_s == LONGER * LONGER * 0.25
