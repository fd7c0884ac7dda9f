"""Virtual time for the scale benchmark: an event loop that jumps from event to event, and charges one process for the CPU it uses.

Everything that runs in `COORDINATOR`'s context is the coordinator's: it runs one thing at a time, and while it computes for a
second of real CPU time, a second of virtual time passes for it, in which whatever else it is asked has to wait.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import time
from collections import deque
from collections.abc import Callable
from typing import Any

_OWNED: contextvars.ContextVar[bool] = contextvars.ContextVar("owned", default=False)
COORDINATOR = contextvars.copy_context()
COORDINATOR.run(_OWNED.set, True)
"""What is started in a copy of this context is the coordinator's work."""
OTHERS = contextvars.copy_context()
"""The emulated nodes and the benchmark itself."""

REAL_CPU = time.thread_time
REAL_PROCESS = time.process_time


class VirtualClock(asyncio.BaseEventLoop):
    """Runs callbacks in the order of their virtual time. Work for threads runs inline and takes the virtual time it really took."""

    _scheduled: list[Any]
    _ready: deque[Any]

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.cpu_s = 0.0
        """Real CPU seconds of the coordinator's event loop."""
        self.thread_s = 0.0
        """Real seconds of the coordinator's work in threads: planning."""
        self.late_s = 0.0
        """The longest that something had to wait because the coordinator was busy."""
        self._free_at = 0.0
        self._queue: deque[tuple[float, asyncio.Handle]] = deque()

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        while self._scheduled and (self._scheduled[0]._cancelled or self._scheduled[0]._when <= self.now):
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False
            self._ready.append(handle)
        if not self._ready and not self._queue_is_due():
            self.now = self._next_time()
            return
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle._cancelled:
                continue
            if handle._context.get(_OWNED):
                self._queue.append((self.now, handle))
            else:
                handle._run()
        while self._queue_is_due():
            self._run_owned(*self._queue.popleft())

    def _queue_is_due(self) -> bool:
        return bool(self._queue) and self._free_at <= self.now

    def _next_time(self) -> float:
        times = [self._scheduled[0]._when] if self._scheduled else []
        if self._queue:
            times.append(self._free_at)
        return max(self.now, min(times))

    def _run_owned(self, since: float, handle: asyncio.Handle) -> None:
        if handle._cancelled:
            return
        self.late_s = max(self.late_s, self.now - since)
        threads, began = self.thread_s, REAL_CPU()
        handle._run()
        used = REAL_CPU() - began - (self.thread_s - threads)
        self.cpu_s += used
        self._free_at = max(self._free_at, self.now) + used

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when they come up."""

    def _process_events(self, event_list: Any) -> None:
        """There are no sockets."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run `func` now; its result arrives when the time that it really took has passed."""
        future = self.create_future()
        began = REAL_CPU()
        try:
            result, error = func(*args), None
        except Exception as raised:  # noqa: BLE001 - whoever waits for the thread gets it
            result, error = None, raised
        took = REAL_CPU() - began
        self.thread_s += took

        def report() -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(took, report)
        return future
