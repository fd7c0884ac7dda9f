"""The one thread that computes, and its pacing when a slower machine is emulated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


MOST_LATE_S = 0.1
"""What an emulated machine makes up for at most."""


class ComputeThread:
    """Runs torch work one piece at a time, off the event loop.

    With `relative_speed` below 1 a slower machine is emulated: each piece ends, after a sleep, when it would have ended on a
    machine of that fraction of this one's speed. CPU time is the measure, so other processes of this machine make no
    difference as long as the work and its sleep fit in that time; where they do not, the pieces that follow make up for it.
    """

    def __init__(self, *, threads: int, relative_speed: float) -> None:
        self._threads = threads
        self._relative_speed = relative_speed
        self._executor: ThreadPoolExecutor | None = None
        self._due = 0.0
        self._late_s = 0.0
        self._may_train = asyncio.Event()
        self._may_train.set()
        self.busy_s = 0.0

    def start(self) -> None:
        """Start the thread, with torch limited to this many CPU threads."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roost-compute", initializer=self._initialise)

    def stop(self) -> None:
        """Let the running piece finish and end the thread."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def pause(self) -> None:
        """Let `permission` wait from now on; what runs already runs to its end."""
        self._may_train.clear()

    def resume(self) -> None:
        """Undo `pause`."""
        self._may_train.set()

    async def permission(self) -> None:
        """Return when training may go on: at once, unless the owner has paused the node."""
        await self._may_train.wait()

    async def run(self, work: Callable[[], Result], *, paced: bool = True) -> Result:
        """Return the result of `work`, which ran after all work given earlier; `paced` False is for what is not training."""
        assert self._executor is not None, "start() first"
        if not paced:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._paced, work, time.perf_counter())

    def _initialise(self) -> None:
        torch.set_num_threads(self._threads)

    def _paced(self, work: Callable[[], Result], given: float) -> Result:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return work()
        finally:
            if self._relative_speed < 1:
                worked = time.thread_time() - cpu if self._threads == 1 else time.perf_counter() - wall
                self._due = max(self._due, given - self._late_s) + worked / self._relative_speed
                time.sleep(max(0.0, self._due - time.perf_counter()))
                self._late_s = min(MOST_LATE_S, max(0.0, time.perf_counter() - self._due))
            self.busy_s += time.perf_counter() - wall
