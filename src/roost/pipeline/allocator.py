"""What the C library does with memory that is freed, which decides how fast small models train on a CPU, and what they take."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import torch
from torch.nn import Parameter

KEPT_BYTES = 28 << 20
"""Below the 32 MiB that glibc allows as a threshold (mallopt(3), M_MMAP_THRESHOLD)."""
KEPT_LEAST = 256 << 10
KEPT_PART = 128
"""Blocks of up to this part of the memory that a node lends are kept: what lies free between blocks in use stays a small part of it."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Names of glibc's malloc.h."""
ARENAS = 2
"""Heaps of a process with little memory: what one heap has free does not serve another."""


def keep_freed_memory(lent_bytes: int = 0) -> None:
    """Let this process keep what it frees: blocks of up to KEPT_BYTES, and twice that at the end of its heap.

    By default glibc gives freed blocks back at once, and the system clears every page that is asked for again: convolutions
    and optimizer steps were seen to take between 1.3 and 4 times as long. Kept blocks cost memory, since new ones do not always
    fit between those in use: a node that lends `lent_bytes` keeps smaller ones only if that is little (0: not known). Where the C
    library is not glibc this does nothing.
    """
    kept = min(KEPT_BYTES, max(KEPT_LEAST, lent_bytes // KEPT_PART)) if lent_bytes else KEPT_BYTES
    mallopt = _function("mallopt")
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, kept)
        mallopt(M_TRIM_THRESHOLD, 2 * kept)
        if kept < KEPT_BYTES:
            mallopt(M_ARENA_MAX, ARENAS)


def release_freed_memory() -> None:
    """Give the system back what this process has freed and kept: once, after work whose memory training does not use again."""
    malloc_trim = _function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def load_optimizers() -> None:
    """Load what torch loads with the first optimizer of a process: its compiler, about 75 MB and more than a second.

    A node does it before it says what memory it has; the stage that it is given later then takes what the stage needs.
    """
    parameter = Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()


def _function(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None if it has none of that name."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
