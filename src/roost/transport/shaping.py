"""A limited line: how long bytes must wait so that an endpoint sends, or takes, no more than a given rate. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from roost.config import TransportConfig

BURST_S = 0.01
"""Seconds of unused rate that may be saved up: it pays for timers that fire late."""


PACKET_BYTES = 16 << 10
"""Least that is reserved at once."""
PIECE_S = 0.005
"""Seconds of the rate that are reserved at once, if that is more: timers are not finer than that."""


def piece_bytes(bytes_per_s: float) -> int:
    """Return the bytes that are reserved at once on a line of that rate."""
    return max(PACKET_BYTES, int(PIECE_S * bytes_per_s))


def frame_bytes(config: TransportConfig, bytes_per_s: float) -> int:
    """Return the size of frames over a line of that rate (0: no limit): a frame goes as a whole, so it is no larger than a piece."""
    return min(config.frame_bytes, piece_bytes(bytes_per_s)) if bytes_per_s > 0 else config.frame_bytes


class TokenBucket:
    """Shares a rate among everything that reserves from it, in the order of the reservations.

    Over any time t no more than rate x (t + BURST_S) passes, and one piece.
    """

    def __init__(self, bytes_per_s: float) -> None:
        """A rate of 0 means no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_at = float("-inf")

    @property
    def limited(self) -> bool:
        return self._bytes_per_s > 0

    def pieces(self, nbytes: int) -> Iterator[int]:
        """Yield sizes that add up to `nbytes`, to be reserved one after the other.

        Whoever shares the line reserves in between, as packets of several connections take turns on a real one: a
        large message does not hold up small ones until all of it has left.
        """
        step = piece_bytes(self._bytes_per_s)
        for sent in range(0, nbytes, step):
            yield min(step, nbytes - sent)

    def reserve(self, nbytes: int, now: float) -> float:
        """Take room for `nbytes` and return the seconds from `now` until the last of them has passed."""
        if self._bytes_per_s <= 0:
            return 0.0
        self._free_at = max(self._free_at, now - BURST_S) + nbytes / self._bytes_per_s
        return max(0.0, self._free_at - now)
