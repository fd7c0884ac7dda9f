"""Runs a process's main coroutine until it ends, Ctrl+C, SIGTERM, or the end of the process that started it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

try:
    import resource
except ImportError:
    # Windows has no such limit.
    resource = None  # type: ignore[assignment]

MOST_FILES = 65_536


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Let SIGTERM do what Ctrl+C does while the context lasts: raise KeyboardInterrupt in the main thread."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def run_until_stopped(
    work: Coroutine[Any, Any, None], *, exit_with_parent: bool, on_first_interrupt: Callable[[], bool] = lambda: False
) -> None:
    """Run `work`; a request to stop cancels it and returns normally once it has cleaned up. What it raises is raised.

    `on_first_interrupt` is called at the first Ctrl+C; if it returns True, `work` is to end by itself, and only a second one stops it.
    """
    allow_many_files()
    asyncio.run(_supervise(work, exit_with_parent=exit_with_parent, on_first_interrupt=on_first_interrupt))


def allow_many_files() -> None:
    """Let this process have up to MOST_FILES files open, if the system allows it: connections of strangers take some for a while."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some systems name a hard limit that they do not grant.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _supervise(work: Coroutine[Any, Any, None], *, exit_with_parent: bool, on_first_interrupt: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    interrupts = itertools.count()

    def interrupted() -> None:
        if next(interrupts) > 0 or not on_first_interrupt():
            stop.set()

    for number, handle in ((signal.SIGINT, interrupted), (signal.SIGTERM, stop.set)):
        # Windows has no signal handlers on the loop: there Ctrl+C raises KeyboardInterrupt out of asyncio.run.
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, handle)
    if exit_with_parent:
        threading.Thread(target=_watch_parent, args=(loop, stop), name="parent-watch", daemon=True).start()
    task = asyncio.create_task(work, name="main")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        task.result()
        return
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _watch_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    # The parent holds the other end of standard input: however it ends, the pipe is closed.
    while sys.stdin.buffer.read(1024):
        continue
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(stop.set)
