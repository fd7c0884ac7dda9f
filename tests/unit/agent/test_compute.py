"""Pacing: an emulated machine ends its work when the slower machine would have, whatever else happens on this one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from roost.agent import compute
from roost.agent.compute import MOST_LATE_S, ComputeThread


class FakeTime:
    """Clocks that move only when the test or a sleep moves them."""

    def __init__(self, *, oversleep: float = 0.0) -> None:
        self.wall = 100.0
        self.cpu = 0.0
        self.oversleep = oversleep

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.cpu

    def sleep(self, seconds: float) -> None:
        self.wall += seconds + (self.oversleep if seconds > 0 else 0.0)

    def work(self, cpu: float, waiting: float = 0.0) -> Callable[[], None]:
        """Return work that takes so much CPU time, and waits for its core so long."""

        def run() -> None:
            self.cpu += cpu
            self.wall += cpu + waiting

        return run


@contextmanager
def running(clock: FakeTime, monkeypatch: pytest.MonkeyPatch, *, relative_speed: float) -> Iterator[ComputeThread]:
    monkeypatch.setattr(compute, "time", clock)
    thread = ComputeThread(threads=1, relative_speed=relative_speed)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop()


def test_a_piece_takes_as_long_as_on_the_slower_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    with running(clock, monkeypatch, relative_speed=0.25) as thread:
        asyncio.run(thread.run(clock.work(0.1)))
    assert clock.wall == pytest.approx(100.4)
    assert thread.busy_s == pytest.approx(0.4)


def test_waiting_for_a_core_is_part_of_the_emulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    with running(clock, monkeypatch, relative_speed=0.25) as thread:
        asyncio.run(thread.run(clock.work(0.1, waiting=0.2)))
    assert clock.wall == pytest.approx(100.4)


def test_what_one_piece_is_late_the_next_makes_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime(oversleep=0.01)
    with running(clock, monkeypatch, relative_speed=0.5) as thread:
        for _ in range(10):
            asyncio.run(thread.run(clock.work(0.1)))
    assert clock.wall == pytest.approx(100.0 + 10 * 0.2 + 0.01)


def test_no_more_than_a_bound_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    with running(clock, monkeypatch, relative_speed=0.5) as thread:
        asyncio.run(thread.run(clock.work(0.1, waiting=5.0)))
        late = clock.wall
        asyncio.run(thread.run(clock.work(0.1)))
    assert clock.wall - late == pytest.approx(0.2 - MOST_LATE_S)


def test_idle_time_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    with running(clock, monkeypatch, relative_speed=0.5) as thread:
        asyncio.run(thread.run(clock.work(0.1)))
        clock.wall += 10.0
        begun = clock.wall
        asyncio.run(thread.run(clock.work(0.1)))
    assert clock.wall - begun == pytest.approx(0.2)


def test_what_is_not_training_is_not_slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    with running(clock, monkeypatch, relative_speed=0.25) as thread:
        asyncio.run(thread.run(clock.work(0.1), paced=False))
    assert clock.wall == pytest.approx(100.1)
