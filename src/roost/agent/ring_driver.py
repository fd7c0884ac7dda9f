"""One ring of this node: carries out what protocol/averaging_round.py decides, in the background of training."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from torch import Tensor

from roost import messages as m
from roost.averaging.ring_buffer import SegmentBuffer
from roost.errors import DeadlineError, MalformedMessageError, ProtocolError, TransportError
from roost.pipeline.tensor_bytes import to_buffer
from roost.protocol import averaging_round as rounds
from roost.transport.interface import Buffer, Lane, Transport
from roost.types import Peer, SegmentPlan

logger = logging.getLogger(__name__)

ROUND_DEADLINE_S = 60.0
WEIGHT_FLOOR = 1e-6
"""Weight of a member that has consumed nothing since its last snapshot: a round in which nobody has stays defined."""

MAX_WAITING_ROUNDS = 4
"""Rounds whose chunks may wait here: honest members are at most one ahead."""
MAX_ELEMENT_BYTES = 8
"""Sums are float64 at most; a segment's elements have at least one byte."""

Snapshot = Callable[[], Awaitable[tuple[dict[str, Tensor], int]]]
Apply = Callable[[dict[str, Tensor], dict[str, Tensor]], Awaitable[None]]


class RingDriver:
    """Runs the rounds of one ring; events are handled one after the other by `run`."""

    def __init__(
        self,
        *,
        job_id: str,
        segment: SegmentPlan,
        node_id: str,
        peers: dict[str, Peer],
        transport: Transport,
        snapshot: Snapshot,
        apply: Apply,
    ) -> None:
        self._job_id = job_id
        self._segment = segment
        self._node_id = node_id
        self._peers = peers
        self._transport = transport
        self._snapshot = snapshot
        self._apply = apply
        self._position = segment.members.index(node_id)
        self._previous = segment.members[self._position - 1]
        self._member = rounds.RingMember(segment.index, segment.members, node_id, ROUND_DEADLINE_S)
        self._events: asyncio.Queue[rounds.RingEvent] = asyncio.Queue()
        self._arrived: dict[tuple[int, int], Buffer] = {}
        self._buffer: SegmentBuffer | None = None
        self._taken: dict[str, Tensor] = {}
        self._samples_before = 0
        self._samples_at_snapshot = 0
        self._orders = 0
        self.moved = asyncio.Condition()
        self.rounds_done = 0

    # ------------------------------------------------------------ called from the event loop

    def start_round(self) -> None:
        """Ask for a background round; nothing happens if one is under way."""
        self._events.put_nowait(rounds.StartRequested(now=time.monotonic()))

    def opened(self, sender: str, message: m.OpenRound) -> None:
        """A member has opened a round. Raises MalformedMessageError if the sender is not in the ring."""
        if sender not in self._segment.members:
            raise MalformedMessageError(f"{sender} is not in the ring of segment {self._segment.index}")
        self._check_round(sender, message.round)
        self._events.put_nowait(rounds.OpenReceived(round=message.round, now=time.monotonic()))

    def chunk_arrived(self, sender: str, message: m.RingChunk, buffer: Buffer) -> None:
        """A chunk came from the previous member. Raises MalformedMessageError for any other sender."""
        if sender != self._previous:
            raise MalformedMessageError(f"{sender} is not the previous member of the ring of segment {self._segment.index}")
        self._check_round(sender, message.round)
        if not self._member.wants(message.round):
            return
        if len(self._arrived) >= MAX_WAITING_ROUNDS * 2 * len(self._segment.members):
            raise MalformedMessageError(f"{sender} sends chunks of more rounds of segment {self._segment.index} than may wait")
        if len(buffer) > MAX_ELEMENT_BYTES * self._segment.nbytes:
            raise MalformedMessageError(f"{sender} sent a chunk of {len(buffer)} bytes, larger than segment {self._segment.index}")
        if (message.round, message.step) in self._arrived:
            raise MalformedMessageError(f"{sender} sent step {message.step} of round {message.round} twice")
        self._arrived[message.round, message.step] = buffer
        self._events.put_nowait(
            rounds.ChunkArrived(round=message.round, step=message.step, chunk=message.chunk, weight=message.weight, now=time.monotonic())
        )

    def _check_round(self, sender: str, number: int) -> None:
        """Raise MalformedMessageError for a round beyond the next ordered one: nobody can be there yet."""
        if not 0 < number < rounds.ordered_round(self._orders + 2):
            raise MalformedMessageError(f"{sender} speaks of round {number} of segment {self._segment.index}, which cannot be yet")

    async def average_exactly(self, order: int) -> None:
        """Take part in the round of this order, and wait until its result is applied. Raises DeadlineError."""
        self._orders = max(self._orders, order)
        self._events.put_nowait(rounds.StartRequested(now=time.monotonic(), order=order))
        target = rounds.ordered_round(order)
        try:
            async with asyncio.timeout(2 * ROUND_DEADLINE_S), self.moved:
                await self.moved.wait_for(lambda: self._member.finished >= target)
        except TimeoutError:
            raise DeadlineError(f"the averaging round of segment {self._segment.index} did not finish on {self._node_id}") from None

    # ------------------------------------------------------------ the task

    async def run(self) -> None:
        """Handle events until cancelled; a peer that cannot be reached ends the round, not the training.

        Raises ProtocolError or MalformedMessageError for a chunk that cannot be: the average would be wrong.
        """
        while True:
            event = await self._next_event()
            for instruction in self._handle(event):
                await self._perform(instruction)
            async with self.moved:
                self.moved.notify_all()

    def _handle(self, event: rounds.RingEvent) -> list[rounds.RingInstruction]:
        if not isinstance(event, rounds.ChunkArrived):
            return self._member.handle(event)
        try:
            return self._member.handle(event)
        except ProtocolError as error:
            # The round ends by its deadline without that chunk; one peer's mistake does not end the job.
            logger.warning("chunk_refused job=%s node=%s sender=%s error=%s", self._job_id, self._node_id, self._previous, error.message)
            self._arrived.pop((event.round, event.step), None)
            return []

    async def _next_event(self) -> rounds.RingEvent:
        deadline = self._member.deadline
        if deadline is None:
            return await self._events.get()
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await self._events.get()
        except TimeoutError:
            return rounds.DeadlinePassed(now=time.monotonic())

    async def _perform(self, instruction: rounds.RingInstruction) -> None:
        match instruction:
            case rounds.SendOpen(peer=peer, round=number):
                await self._send(peer, m.OpenRound(job_id=self._job_id, segment=self._segment.index, round=number))
            case rounds.TakeSnapshot(round=number):
                await self._take_snapshot(number)
            case rounds.SendChunk():
                await self._send_chunk(instruction)
            case rounds.AddChunk(round=number, step=step, chunk=chunk):
                await asyncio.to_thread(self._filled.add, chunk, self._arrived.pop((number, step)))
            case rounds.StoreChunk(round=number, step=step, chunk=chunk):
                await asyncio.to_thread(self._filled.store, chunk, self._arrived.pop((number, step)))
            case rounds.ScaleChunk(chunk=chunk, total_weight=weight):
                await asyncio.to_thread(self._filled.scale, chunk, weight)
            case rounds.ApplyAverage(round=number):
                await self._apply_average(number)
            case rounds.AbandonRound(round=number, reason=reason):
                logger.warning("round_abandoned job=%s segment=%d round=%d reason=%s", self._job_id, self._segment.index, number, reason)
                self._drop_buffers()

    @property
    def _filled(self) -> SegmentBuffer:
        assert self._buffer is not None, "a chunk is handled only after the snapshot"
        return self._buffer

    async def _take_snapshot(self, number: int) -> None:
        self._taken, samples = await self._snapshot()
        weight = max(float(samples - self._samples_before), WEIGHT_FLOOR)
        self._samples_at_snapshot = samples
        self._buffer = SegmentBuffer(self._taken, parts=len(self._segment.members))
        await asyncio.to_thread(self._buffer.multiply, weight)
        self._events.put_nowait(rounds.SnapshotTaken(round=number, weight=weight, now=time.monotonic()))

    async def _send_chunk(self, instruction: rounds.SendChunk) -> None:
        tensor = self._filled.chunk(instruction.chunk)
        message = m.RingChunk(
            job_id=self._job_id,
            segment=self._segment.index,
            round=instruction.round,
            step=instruction.step,
            chunk=instruction.chunk,
            weight=instruction.weight,
            dtype=str(tensor.dtype).removeprefix("torch."),
        )
        await self._send(instruction.peer, message, [to_buffer(tensor)])

    async def _send(self, peer: str, message: m.Message, buffers: Sequence[Buffer] = ()) -> None:
        try:
            await self._transport.send(self._peers[peer], message, buffers, lane=Lane.AVERAGING)
        except TransportError as error:
            # The round then ends by its deadline, here and at the others; training goes on.
            logger.warning("round_hampered job=%s segment=%d error=%s", self._job_id, self._segment.index, error.message)

    async def _apply_average(self, number: int) -> None:
        average = await asyncio.to_thread(self._filled.unflatten)
        await self._apply(average, self._taken)
        self._samples_before = self._samples_at_snapshot
        self.rounds_done += 1
        logger.info("round_applied job=%s node=%s segment=%d round=%d", self._job_id, self._node_id, self._segment.index, number)
        self._drop_buffers()
        self._events.put_nowait(rounds.AverageApplied(round=number, now=time.monotonic()))

    def _drop_buffers(self) -> None:
        self._buffer, self._taken = None, {}
        self._arrived = {key: buffer for key, buffer in self._arrived.items() if self._member.wants(key[0])}
