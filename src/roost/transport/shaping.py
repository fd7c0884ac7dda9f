"""An emulated uplink: how long bytes must wait so that an endpoint sends no faster than a given rate. Pure."""

from __future__ import annotations

BURST_S = 0.005
"""Seconds of unused rate that may be saved up: it pays for timers that fire late."""


class TokenBucket:
    """Shares a rate among everything that reserves from it, in the order of the reservations."""

    def __init__(self, bytes_per_s: float) -> None:
        """A rate of 0 means no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_at = float("-inf")

    def reserve(self, nbytes: int, now: float) -> float:
        """Take room for `nbytes` and return the seconds from `now` until the last of them has left."""
        if self._bytes_per_s <= 0:
            return 0.0
        self._free_at = max(self._free_at, now - BURST_S) + nbytes / self._bytes_per_s
        return max(0.0, self._free_at - now)
