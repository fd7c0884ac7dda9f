"""What an endpoint sends and receives: counted, and held to the limits of its line."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

from roost.transport.interface import Lane, Traffic
from roost.transport.shaping import TokenBucket


class Meter:
    """Counts the traffic of one endpoint; everything it sends, replies included, shares one uplink, what it receives one downlink.

    Bytes are those of frames; what TLS, HTTP/2, TCP and IP put around them comes on top (docs/nodes.md).

    Averaging gives way to what else is sent: before each of its parts it waits until nothing else is under way, but no longer
    than its part before took, so that a pipeline that could fill the line leaves it half.
    """

    def __init__(self, uplink_bytes_per_s: float, downlink_bytes_per_s: float = 0.0) -> None:
        """A rate of 0 means no limit."""
        self._up = TokenBucket(uplink_bytes_per_s)
        self._down = TokenBucket(downlink_bytes_per_s)
        self._urgent = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._patience_s = 0.0
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

    @contextlib.contextmanager
    def message(self, lane: Lane) -> Iterator[None]:
        """Let averaging give way while a message of another lane is sent."""
        if lane is Lane.AVERAGING:
            yield
            return
        self._urgent += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._urgent -= 1
            if self._urgent == 0:
                self._quiet.set()

    @contextlib.asynccontextmanager
    async def frame(self, nbytes: int, lane: Lane) -> AsyncIterator[None]:
        """Do what `sending` does, then let the frame be sent."""
        if lane is not Lane.AVERAGING:
            await self.sending(nbytes)
            yield
            return
        if self._up.limited:
            await self.sending(nbytes, gives_way=True)
            yield
            return
        await self._give_way()
        began = time.monotonic()
        await self.sending(nbytes)
        yield
        self._patience_s = time.monotonic() - began

    @property
    def pipeline_sends(self) -> bool:
        """True while a message of another lane than averaging's is being sent."""
        return self._urgent > 0

    async def _give_way(self) -> None:
        if self.pipeline_sends:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience_s):
                    await self._quiet.wait()

    async def sending(self, nbytes: int, *, gives_way: bool = False) -> None:
        """Count bytes that are about to be sent, after waiting until the uplink would have let them through."""
        await self._pass(self._up, nbytes, gives_way=gives_way)
        self._bytes_sent += nbytes

    async def receiving(self, nbytes: int) -> None:
        """Count bytes that have arrived, after waiting until the downlink would have let them through.

        Whoever waits here does not read on, so that the network makes the sender wait.
        """
        await self._pass(self._down, nbytes)
        self._bytes_received += nbytes

    async def _pass(self, line: TokenBucket, nbytes: int, *, gives_way: bool = False) -> None:
        if not line.limited:
            return
        clock = asyncio.get_running_loop().time
        now = clock()
        for piece in line.pieces(nbytes):
            if gives_way and self.pipeline_sends:
                await self._give_way()
                now = max(now, clock())
            began = now
            # From when the piece before should have left, not from when the timer fired: lateness does not add up.
            now += line.reserve(piece, now)
            if (wait := now - clock()) > 0:
                await asyncio.sleep(wait)
            if gives_way:
                self._patience_s = now - began

    def message_sent(self) -> None:
        self._messages_sent += 1

    def message_received(self) -> None:
        self._messages_received += 1
