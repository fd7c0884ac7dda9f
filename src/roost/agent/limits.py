"""What the owner of a machine lends, held to by the process as a whole. Called once, when the agent starts."""

from __future__ import annotations

import asyncio
import logging
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import torch

from roost.config import format_bytes

logger = logging.getLogger(__name__)

HELPERS = 2
"""Threads beside the one that computes: they add what averaging receives, and copy. Each computes with one thread."""
STACK_BYTES = 8 << 20
"""What Linux counts for a thread, though most of it is never touched."""
THREADS_BESIDE = 64
"""Threads of gRPC, Python and torch that are left room for."""


def limit_threads(threads: int) -> None:
    """Let torch compute with that many threads in this process; call it in the event loop before torch has computed anything.

    The thread that computes uses `threads`, each helper one.
    """
    torch.set_num_threads(threads)
    # torch keeps this number for good once it has used it; operations that run side by side must not add threads to those of the owner.
    torch.set_num_interop_threads(1)
    helpers = ThreadPoolExecutor(max_workers=HELPERS, thread_name_prefix="roost-helper", initializer=torch.set_num_threads, initargs=(1,))
    asyncio.get_running_loop().set_default_executor(helpers)


def limit_memory(lent_bytes: int, device: str, threads: int) -> None:
    """Let this process take no more than it has now, `lent_bytes` and room for threads: what is asked for beyond fails.

    It is the last resort: a stage that needs more is refused before. On cuda torch's allocator keeps to `lent_bytes` of the device
    (torch.cuda.set_per_process_memory_fraction); on the cpu the system does, on Linux (setrlimit(2), RLIMIT_DATA).
    """
    if device == "cuda":
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, lent_bytes / total))
        return
    if device != "cpu" or sys.platform != "linux":
        return
    import resource

    taken = psutil.Process().memory_info().data
    room = STACK_BYTES * (threads + THREADS_BESIDE)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = taken + lent_bytes + room
    if hard != resource.RLIM_INFINITY and hard < most:
        return
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    logger.info("memory_limited lent=%s most=%s", format_bytes(lent_bytes), format_bytes(most))
