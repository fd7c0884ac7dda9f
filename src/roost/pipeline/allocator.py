"""What the C library does with memory that is freed, which decides how fast small models train on a CPU."""

from __future__ import annotations

import torch

KEPT_BYTES = 28 << 20
"""Below the 32 MiB up to which glibc takes the size of freed blocks as a sign (mallopt(3), M_MMAP_THRESHOLD)."""


def keep_freed_memory() -> None:
    """Let this process keep what it frees: blocks of up to KEPT_BYTES, and twice that at the end of its heap.

    By default glibc gives freed blocks back at once, and the system clears every page that is asked for again: convolutions
    and optimizer steps were seen to take between 1.3 and 4 times as long. Freeing one large block raises glibc's own limits;
    elsewhere this does nothing.
    """
    block = torch.empty(KEPT_BYTES, dtype=torch.uint8)
    del block
