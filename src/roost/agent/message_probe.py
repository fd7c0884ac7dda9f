"""Measures what sending and receiving costs this process: it sends itself what a stage sends its neighbour."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from roost import messages as m
from roost.errors import RoostError
from roost.transport.interface import Transport
from roost.types import MicroBatch, Peer, TensorSpec

logger = logging.getLogger(__name__)

WARM_UP = 5
MESSAGES = 50
LARGE_MESSAGES = 3
LARGE_BYTES = 2 << 20
LINK_S = 0.1
"""Seconds of a limited line that the large messages may take."""
DEADLINE_S = 3.0

_HEADER = MicroBatch(number=0, batch=0, position=0, count=1, samples=1, batch_samples=1, training=True, seed=0, lease=0)


@dataclass(frozen=True, kw_only=True)
class MessageCost:
    """CPU seconds of this process; 0 where it could not be measured."""

    message_s: float
    """Per small message, sent or received."""
    wire_s_per_byte: float
    """Per byte, sent or received."""


class MessageProbe:
    """Sends one message at a time to its own endpoint, as in training, where each one wakes its receiver.

    Process time is the clock, so that other processes do not count.
    """

    def __init__(self, transport: Transport, *, line_bytes_per_s: float) -> None:
        """`line_bytes_per_s` is the least of the endpoint's limits; 0 without any."""
        self._transport = transport
        self._large_bytes = min(LARGE_BYTES, int(LINK_S / LARGE_MESSAGES * line_bytes_per_s)) if line_bytes_per_s else LARGE_BYTES
        self._arrived = asyncio.Event()

    def arrived(self) -> None:
        """A message of this node to itself has arrived."""
        self._arrived.set()

    async def measure(self) -> MessageCost:
        """Return the costs; takes a fraction of a second, and no longer than a deadline."""
        own = Peer(peer_id=self._transport.peer_id, address=self._transport.address)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._seconds(own, WARM_UP, 0)
                small = await self._seconds(own, MESSAGES, 0)
                large = await self._seconds(own, LARGE_MESSAGES, self._large_bytes)
        except (RoostError, TimeoutError) as error:
            logger.warning("messages_unmeasured node=%s error=%s", own.peer_id, error)
            return MessageCost(message_s=0.0, wire_s_per_byte=0.0)
        finally:
            await self._transport.forget(own.peer_id)
        extra = max(0.0, large - small)
        return MessageCost(message_s=small / 2, wire_s_per_byte=extra / 2 / self._large_bytes if self._large_bytes else 0.0)

    async def _seconds(self, own: Peer, count: int, size: int) -> float:
        """Return the CPU seconds to send and receive one message with `size` bytes beside it, mean over `count`."""
        spec = TensorSpec(name="0", dtype="uint8", shape=(size,))
        message = m.Activation(job_id="probe", source_stage=0, micro_batch=_HEADER, values=(spec,), rng=False)
        payload = bytes(size)
        began = time.process_time()
        for _ in range(count):
            self._arrived.clear()
            await self._transport.send(own, message, [payload])
            await self._arrived.wait()
        return (time.process_time() - began) / count
