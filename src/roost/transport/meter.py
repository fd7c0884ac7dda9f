"""What an endpoint sends and receives: counted, and held to its emulated uplink."""

from __future__ import annotations

import asyncio

from roost.transport.interface import Traffic
from roost.transport.shaping import TokenBucket


class Meter:
    """Counts the traffic of one endpoint; everything it sends, replies included, shares one uplink."""

    def __init__(self, uplink_bytes_per_s: float) -> None:
        self._bucket = TokenBucket(uplink_bytes_per_s)
        self._shaped = uplink_bytes_per_s > 0
        self._bytes_sent = 0
        self._bytes_received = 0
        self._messages_sent = 0
        self._messages_received = 0

    @property
    def traffic(self) -> Traffic:
        return Traffic(
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            messages_sent=self._messages_sent,
            messages_received=self._messages_received,
        )

    async def sending(self, nbytes: int) -> None:
        """Count bytes that are about to be sent, after waiting until the uplink would have let them through."""
        if self._shaped:
            clock = asyncio.get_running_loop().time
            now = clock()
            for piece in self._bucket.pieces(nbytes):
                # From when the piece before should have left, not from when the timer fired: lateness does not add up.
                now += self._bucket.reserve(piece, now)
                if (wait := now - clock()) > 0:
                    await asyncio.sleep(wait)
        self._bytes_sent += nbytes

    def received(self, nbytes: int) -> None:
        self._bytes_received += nbytes

    def message_sent(self) -> None:
        self._messages_sent += 1

    def message_received(self) -> None:
        self._messages_received += 1
