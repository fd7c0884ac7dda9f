"""What one peer may take of an endpoint: messages and calls a second, streams, calls and bytes at a time. Pure; `now` is monotonic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from roost.config import TransportConfig
from roost.errors import MessageTooLargeError, PeerUnreachableError

BURST_S = 2.0
"""Seconds of its rate that a peer that was quiet may use at once."""
LOGGED_PER_S = 1.0
LOG_BURST = 20.0
"""Refusals of one peer that are logged: a peer must not fill the disk either."""


class RateLimit:
    """A token bucket that says how long to wait instead of refusing: whoever waits does not read, so that the sender has to wait."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst_s = burst / per_s
        self._free_at = float("-inf")

    def take(self, now: float) -> float:
        """Take one token and return the seconds from `now` until it was due; 0 within the rate."""
        self._free_at = max(self._free_at, now - self._burst_s) + 1 / self._per_s
        return max(0.0, self._free_at - now)

    def has_one(self, now: float) -> bool:
        """Take one token if there is one at once; return whether there was."""
        if max(self._free_at, now - self._burst_s) + 1 / self._per_s > now:
            return False
        self.take(now)
        return True


class PeerGuard:
    """One peer's account."""

    def __init__(self, peer_id: str, config: TransportConfig) -> None:
        self._peer_id = peer_id
        self._config = config
        self._messages = RateLimit(config.peer_messages_per_s, BURST_S * config.peer_messages_per_s)
        self._calls = RateLimit(config.peer_calls_per_s, BURST_S * config.peer_calls_per_s)
        self._log = RateLimit(LOGGED_PER_S, LOG_BURST)
        self._streams_open = 0
        self._calls_open = 0
        self._held_bytes = 0

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream of one-way messages while it is open. Raises PeerUnreachableError if the peer has too many."""
        if self._streams_open >= self._config.peer_streams:
            raise PeerUnreachableError(f"{self._peer_id} has {self._streams_open} streams open here, which is the limit")
        self._streams_open += 1
        try:
            yield
        finally:
            self._streams_open -= 1

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Count a call until it is answered. Raises PeerUnreachableError if the peer has too many."""
        if self._calls_open >= self._config.peer_calls:
            raise PeerUnreachableError(f"{self._peer_id} has {self._calls_open} calls open here, which is the limit")
        self._calls_open += 1
        try:
            yield
        finally:
            self._calls_open -= 1

    def message_delay(self, now: float) -> float:
        """Count a one-way message; return the seconds to wait before the next one is read."""
        return self._messages.take(now)

    def call_delay(self, now: float) -> float:
        """Count a call; return the seconds to wait before it is read."""
        return self._calls.take(now)

    def may_log(self, now: float) -> bool:
        """Return whether a refusal of this peer should be logged."""
        return self._log.has_one(now)

    def hold(self, nbytes: int) -> None:
        """Count bytes that have arrived and are not dealt with yet. Raises MessageTooLargeError if the peer has too many."""
        if self._held_bytes + nbytes > self._config.peer_bytes:
            raise MessageTooLargeError(
                f"{self._peer_id} has {self._held_bytes} bytes under way to here, and {self._config.peer_bytes} are the limit",
                hint="Send less at a time; a node takes as much as it lends.",
            )
        self._held_bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Give back what `hold` counted."""
        self._held_bytes -= nbytes


class Guard:
    """The accounts of all peers. There are no more of them than the authority has issued certificates."""

    def __init__(self, config: TransportConfig) -> None:
        self._config = config
        self._peers: dict[str, PeerGuard] = {}

    def of(self, peer_id: str) -> PeerGuard:
        """Return a peer's account."""
        if peer_id not in self._peers:
            self._peers[peer_id] = PeerGuard(peer_id, self._config)
        return self._peers[peer_id]
