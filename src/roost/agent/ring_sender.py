"""Sends what one ring has to send, in order, while the ring goes on with what arrives."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roost import messages as m
from roost.averaging.segment_average import SegmentAverage
from roost.config import TensorCodec
from roost.errors import TransportError
from roost.protocol.averaging_events import SendChunk, SendOpen
from roost.transport.interface import Buffer, Lane, Transport
from roost.types import Peer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReadChunk:
    """A piece with its bytes."""

    instruction: SendChunk
    dtype: str
    buffer: Buffer
    norms: tuple[float, ...]


class RingSender:
    """A queue of pieces to the next member (in guarded rounds to all), and of openings to all.

    One piece at a time waits for the transport, so that rings with the same next member take turns on its stream.
    """

    def __init__(
        self,
        *,
        job_id: str,
        segment: int,
        peers: Mapping[str, Peer],
        transport: Transport,
        average: SegmentAverage,
        generation: int = 0,
    ) -> None:
        """`generation` is that of the plan whose ring this is."""
        self._job_id = job_id
        self._segment = segment
        self._generation = generation
        self._peers = peers
        self._transport = transport
        self._average = average
        self._waiting: deque[SendChunk | ReadChunk | list[SendOpen]] = deque()
        self._more = asyncio.Event()
        self._reading = asyncio.Lock()
        self._sending = False

    @property
    def idle(self) -> bool:
        """True if nothing waits to be sent and nothing is being sent."""
        return not self._waiting and not self._sending

    def put(self, instruction: SendChunk) -> None:
        """Queue a piece; its bytes are read when its turn comes."""
        self._waiting.append(instruction)
        self._more.set()

    def open(self, instructions: Sequence[SendOpen]) -> None:
        """Queue the news of a round; all members are told at the same time."""
        self._waiting.append(list(instructions))
        self._more.set()

    async def clear(self) -> None:
        """Drop the pieces that wait; when this returns, nothing reads the round's values any more."""
        self._waiting = deque(item for item in self._waiting if isinstance(item, list))
        async with self._reading:
            pass

    async def detach(self) -> None:
        """Take the bytes of the pieces that wait, which are means: when this returns, the round itself is not needed any more."""
        async with self._reading:
            self._waiting = deque(self._read(item) if isinstance(item, SendChunk) else item for item in self._waiting)

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            while not self._waiting:
                self._more.clear()
                await self._more.wait()
            item = self._waiting.popleft()
            self._sending = True
            try:
                await (self._send_opens(item) if isinstance(item, list) else self._send_chunk(item))
            except TransportError as error:
                # The round then ends by its deadline, here and at the others; training goes on.
                logger.warning("round_hampered job=%s segment=%d error=%s", self._job_id, self._segment, error.message)
                await self.clear()
            finally:
                self._sending = False

    async def _send_opens(self, instructions: list[SendOpen]) -> None:
        results = await asyncio.gather(*(self._send_open(instruction) for instruction in instructions), return_exceptions=True)
        for failed in (result for result in results if isinstance(result, BaseException)):
            raise failed

    async def _send_open(self, instruction: SendOpen) -> None:
        terms = instruction.terms
        message = m.OpenRound(
            job_id=self._job_id,
            segment=self._segment,
            generation=self._generation,
            round=instruction.round,
            base=terms.base,
            codec=terms.codec,
        )
        await self._transport.send(self._peers[instruction.peer], message, lane=Lane.AVERAGING)

    async def _send_chunk(self, item: SendChunk | ReadChunk) -> None:
        async with self._reading:
            read = await self._encoded(item) if isinstance(item, SendChunk) else item
        instruction = read.instruction
        message = m.RingChunk(
            job_id=self._job_id,
            segment=self._segment,
            generation=self._generation,
            round=instruction.round,
            step=instruction.step,
            chunk=instruction.chunk,
            weight=instruction.weight,
            dtype=read.dtype,
            piece=instruction.piece,
            base=instruction.terms.base,
            codec=instruction.terms.codec,
            norms=read.norms,
        )
        await self._transport.send(self._peers[instruction.peer], message, [read.buffer], lane=Lane.AVERAGING)

    async def _encoded(self, instruction: SendChunk) -> ReadChunk:
        if instruction.terms.codec is TensorCodec.NONE:
            return self._read(instruction)
        return await asyncio.to_thread(self._read, instruction)

    def _read(self, instruction: SendChunk) -> ReadChunk:
        chunk, piece = instruction.chunk, instruction.piece
        buffer, norms = self._average.outgoing(chunk, piece), self._average.norms(chunk, piece)
        return ReadChunk(instruction=instruction, dtype=self._average.dtype, buffer=buffer, norms=norms)
