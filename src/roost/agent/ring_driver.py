"""One ring of this node: carries out what protocol/averaging_round.py decides, in the background of training."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from roost import messages as m
from roost.agent.ring_sender import RingSender
from roost.averaging.segment_average import AveragingOptions, SegmentAverage
from roost.config import TensorCodec
from roost.errors import DeadlineError, JobRefusedError, MalformedMessageError, ProtocolError, RoostError
from roost.protocol import averaging_round as rounds
from roost.transport.interface import Buffer, Transport
from roost.types import Peer, SegmentPlan

logger = logging.getLogger(__name__)

ROUND_DEADLINE_S = 60.0
WEIGHT_FLOOR = 1e-6
"""Weight of a member that has consumed nothing since its last snapshot: a round in which nobody has stays defined."""

PIECE_BYTES = 512 << 10
"""Bytes of a segment that travel together. A member passes a piece on as soon as it has added its own part to it; smaller ones
cost more messages and gain nothing once a chunk is a few pieces (docs/averaging.md)."""
MAX_WAITING_ROUNDS = 4
"""Rounds whose chunks may wait here: honest members are at most one ahead."""
MAX_ELEMENT_BYTES = 8
"""Sums are float64 at most; a segment's elements have at least one byte."""
INLINE_BYTES = 64 << 10
"""Chunks of segments up to this size are added at once: handing them to a thread would take longer."""
SUM_DTYPES = frozenset({"float32", "float64"})

Snapshot = Callable[[], Awaitable[tuple[dict[str, Tensor], int]]]
Apply = Callable[[dict[str, Tensor], dict[str, Tensor]], Awaitable[None]]
Calculation = rounds.AddChunk | rounds.StoreChunk | rounds.ScaleChunk


@dataclass(frozen=True, kw_only=True)
class RingTimes:
    """What the last finished round took."""

    began_at: float = 0.0
    """When it began, on the clock `time.monotonic`."""
    reduce_s: float = 0.0
    """Seconds from the copy of the weights until all means were there: the ring itself."""
    round_s: float = 0.0
    """Seconds from its beginning until the average was applied."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece that has arrived and waits for its turn."""

    buffer: Buffer
    dtype: str


def pieces_of(segment: SegmentPlan) -> int:
    """Return in how many pieces the chunks of a segment travel: the same for all members of its ring."""
    return max(1, math.ceil(segment.nbytes / len(segment.members) / PIECE_BYTES))


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
        options: AveragingOptions | None = None,
        generation: int = 0,
        orders: int = 0,
        samples_before: int = 0,
    ) -> None:
        """`snapshot` returns copies and the samples behind them; `apply` must not keep the average it is given.

        `generation` is that of the plan; in all but the first the members begin with different weights. `orders` are the
        synchronisation points so far, `samples_before` the samples behind the last round that this node has finished.
        """
        self._job_id = job_id
        self._segment = segment
        self._node_id = node_id
        self._snapshot = snapshot
        self._apply = apply
        self._options = options or AveragingOptions()
        self._previous = segment.members[segment.members.index(node_id) - 1]
        self._pieces = pieces_of(segment)
        self._member = rounds.RingMember(
            segment.index,
            segment.members,
            node_id,
            ROUND_DEADLINE_S,
            pieces=self._pieces,
            codec=self._options.codec,
            differences=self._options.differences,
            agreed=generation == 0,
        )
        self._agreed = generation == 0
        self._average = SegmentAverage(parts=len(segment.members), pieces=self._pieces, options=self._options)
        self._sender = RingSender(
            job_id=job_id, segment=segment.index, generation=generation, peers=peers, transport=transport, average=self._average
        )
        self._events: asyncio.Queue[rounds.RingEvent] = asyncio.Queue()
        self._arrived: dict[tuple[int, int, int], Piece] = {}
        self._taken: dict[str, Tensor] = {}
        self._samples_before = samples_before
        self._samples_at_snapshot = samples_before
        self._orders = orders
        self._closed = False
        self._begun_at = 0.0
        self._copied_at = 0.0
        self.ready = asyncio.Event()
        """Set once training may change the weights: the initial ones are what the first round's differences are taken to."""
        self.moved = asyncio.Condition()
        self.rounds_done = 0
        self.times = RingTimes()

    @property
    def unfinished(self) -> bool:
        """True if the last round that began has not been finished."""
        return self._member.round > self._member.finished

    @property
    def samples_before(self) -> int:
        """Samples behind the last round that was finished."""
        return self._samples_before

    @property
    def idle(self) -> bool:
        """True if no round is running, as far as events have been handled."""
        return self._member.idle and self._events.empty()

    # ------------------------------------------------------------ called from the event loop

    def start_round(self) -> None:
        """Ask for a background round; nothing happens if one is under way."""
        self._events.put_nowait(rounds.StartRequested(now=time.monotonic()))

    def opened(self, sender: str, message: m.OpenRound) -> None:
        """A member has opened a round. Raises MalformedMessageError if the sender is not in the ring."""
        if sender not in self._segment.members:
            raise MalformedMessageError(f"{sender} is not in the ring of segment {self._segment.index}")
        terms = self._terms(sender, message.round, message.base, message.codec)
        self._events.put_nowait(rounds.OpenReceived(round=message.round, now=time.monotonic(), terms=terms))

    def chunk_arrived(self, sender: str, message: m.RingChunk, buffer: Buffer) -> None:
        """A piece of a chunk came from the previous member. Raises MalformedMessageError for any other sender, or if it cannot be."""
        index = self._segment.index
        if sender != self._previous:
            raise MalformedMessageError(f"{sender} is not the previous member of the ring of segment {index}")
        terms = self._terms(sender, message.round, message.base, message.codec)
        if not self._member.wants(message.round):
            return
        if len(self._arrived) >= MAX_WAITING_ROUNDS * 2 * len(self._segment.members) * self._pieces:
            raise MalformedMessageError(f"{sender} sends chunks of more rounds of segment {index} than may wait")
        if len(buffer) > MAX_ELEMENT_BYTES * (self._segment.nbytes // (len(self._segment.members) * self._pieces) + 2):
            raise MalformedMessageError(f"{sender} sent a chunk of {len(buffer)} bytes, larger than segment {index} has")
        if message.dtype not in SUM_DTYPES:
            raise MalformedMessageError(f"{sender} sent a chunk of dtype {message.dtype!r}, not one of {sorted(SUM_DTYPES)}")
        key = (message.round, message.step, message.piece)
        if key in self._arrived:
            raise MalformedMessageError(f"{sender} sent step {message.step} of round {message.round} twice")
        self._arrived[key] = Piece(buffer=buffer, dtype=message.dtype)
        event = rounds.ChunkArrived(
            round=message.round,
            step=message.step,
            chunk=message.chunk,
            weight=message.weight,
            now=time.monotonic(),
            piece=message.piece,
            terms=terms,
        )
        self._events.put_nowait(event)

    def peer_lost(self, peer_id: str) -> None:
        """What was sent to `peer_id` may be lost: give up a round that waits for others."""
        if peer_id in self._segment.members and self._member.deadline is not None:
            reason = f"the stream to {peer_id} broke"
            self._events.put_nowait(rounds.ChunkRefused(round=self._member.round, reason=reason, now=time.monotonic()))

    def _terms(self, sender: str, number: int, base: int, codec: TensorCodec) -> rounds.RoundTerms:
        """Return how a round goes that `sender` speaks of.

        Raises MalformedMessageError for a round beyond the next ordered one, where nobody can be yet, or terms this job has not.
        """
        if not 0 < number < rounds.ordered_round(self._orders + 2):
            raise MalformedMessageError(f"{sender} speaks of round {number} of segment {self._segment.index}, which cannot be yet")
        known = codec in (TensorCodec.NONE, self._options.codec) and (base != rounds.NO_BASE or codec is TensorCodec.NONE)
        if not known or not rounds.NO_BASE <= base < number or (base != rounds.NO_BASE and not self._options.differences):
            raise MalformedMessageError(
                f"{sender} averages segment {self._segment.index} with codec {codec} from round {base}, unlike this job"
            )
        return rounds.RoundTerms(base=base, codec=codec)

    async def average_exactly(self, order: int) -> None:
        """Take part in the round of this order, and wait until its result is applied.

        Raises DeadlineError if nothing moves, JobRefusedError if the ring is closed before.
        """
        self._orders = max(self._orders, order)
        self._events.put_nowait(rounds.StartRequested(now=time.monotonic(), order=order))
        target = rounds.ordered_round(order)
        while self._member.finished < target:
            if self._closed:
                raise JobRefusedError(f"the ring of segment {self._segment.index} was closed", hint="Another plan has other rings.")
            try:
                async with asyncio.timeout(2 * ROUND_DEADLINE_S), self.moved:
                    await self.moved.wait()
            except TimeoutError:
                what = f"the averaging round of segment {self._segment.index} did not finish on {self._node_id}"
                raise DeadlineError(what) from None

    async def close(self) -> None:
        """The task has ended and does not come back: whoever waits for a round is told so."""
        self._closed = True
        async with self.moved:
            self.moved.notify_all()

    # ------------------------------------------------------------ the task

    async def run(self) -> None:
        """Handle events until cancelled; a peer that cannot be reached, or sends nonsense, ends the round, not the training.

        Raises NonFiniteLossError if the weights to be averaged are not finite.
        """
        try:
            if self._options.differences and self._agreed:
                initial, _ = await self._snapshot()
                await asyncio.to_thread(self._average.set_base, initial)
        finally:
            self.ready.set()
        sending = asyncio.create_task(self._sender.run(), name=f"ring-sender-{self._job_id}")
        try:
            while True:
                instructions = [instruction for event in await self._next_events() for instruction in self._handle(event)]
                await self._perform_all(instructions)
                async with self.moved:
                    self.moved.notify_all()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def _handle(self, event: rounds.RingEvent) -> list[rounds.RingInstruction]:
        if not isinstance(event, rounds.ChunkArrived):
            return self._member.handle(event)
        try:
            return self._member.handle(event)
        except ProtocolError as error:
            # The round ends by its deadline without that chunk; one peer's mistake does not end the job.
            self._log_refused(error)
            self._arrived.pop((event.round, event.step, event.piece), None)
            return []

    def _log_refused(self, error: RoostError) -> None:
        logger.warning("chunk_refused job=%s node=%s sender=%s error=%s", self._job_id, self._node_id, self._previous, error.message)

    async def _next_events(self) -> list[rounds.RingEvent]:
        """Return what has happened, waiting for something to happen; what came together is handled together."""
        deadline = self._member.deadline
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            async with asyncio.timeout(wait_s):
                events = [await self._events.get()]
        except TimeoutError:
            return [rounds.DeadlinePassed(now=time.monotonic())]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    async def _perform_all(self, instructions: Sequence[rounds.RingInstruction]) -> None:
        """Carry out instructions in order: neighbouring calculations in one go, off the event loop, and what they are sent for after it."""
        calculations: list[Calculation] = []
        sends: list[rounds.SendChunk] = []
        for position, instruction in enumerate(instructions):
            if isinstance(instruction, rounds.AddChunk | rounds.StoreChunk | rounds.ScaleChunk):
                calculations.append(instruction)
                continue
            if isinstance(instruction, rounds.SendChunk):
                sends.append(instruction)
                continue
            if not await self._calculate(calculations, sends):
                # What was decided on the strength of a piece that is refused is void; later rounds are not.
                later = [other for other in instructions[position:] if not isinstance(other, rounds.ApplyAverage)]
                await self._perform_all(later)
                return
            calculations, sends = [], []
            await self._perform(instruction)
        await self._calculate(calculations, sends)

    async def _calculate(self, calculations: Sequence[Calculation], sends: Sequence[rounds.SendChunk]) -> bool:
        """Return True if all went well; if a piece is refused, the round is given up."""
        try:
            pieces = [
                None if isinstance(item, rounds.ScaleChunk) else self._arrived.pop((item.round, item.step, item.piece))
                for item in calculations
            ]
            if self._segment.nbytes <= INLINE_BYTES:
                self._calculate_now(calculations, pieces)
            else:
                await asyncio.to_thread(self._calculate_now, calculations, pieces)
        except MalformedMessageError as error:
            self._log_refused(error)
            reason = f"{self._previous} sent what cannot be averaged: {error.message}"
            number = max(item.round for item in calculations if not isinstance(item, rounds.ScaleChunk))
            refused = rounds.ChunkRefused(round=number, reason=reason, now=time.monotonic())
            await self._perform_all(self._member.handle(refused))
            return False
        for send in sends:
            self._sender.put(send)
        return True

    def _calculate_now(self, calculations: Sequence[Calculation], pieces: Sequence[Piece | None]) -> None:
        for item, piece in zip(calculations, pieces, strict=True):
            if isinstance(item, rounds.ScaleChunk):
                self._average.scale(item.chunk, item.piece, item.total_weight)
                continue
            assert piece is not None, "only scaling has no piece"
            if piece.dtype != self._average.dtype:
                raise MalformedMessageError(
                    f"a chunk has dtype {piece.dtype}, but segment {self._segment.index} is summed in {self._average.dtype}"
                )
            take = self._average.add if isinstance(item, rounds.AddChunk) else self._average.store
            take(item.chunk, item.piece, piece.buffer)

    async def _perform(self, instruction: rounds.RingInstruction) -> None:
        match instruction:
            case rounds.SendOpen():
                self._sender.open([instruction])
            case rounds.TakeSnapshot():
                await self._take_snapshot(instruction)
            case rounds.ApplyAverage(round=number):
                await self._apply_average(number)
            case rounds.AbandonRound(round=number, reason=reason):
                logger.warning("round_abandoned job=%s segment=%d round=%d reason=%s", self._job_id, self._segment.index, number, reason)
                await self._sender.clear()
                self._end(finished=False)

    async def _take_snapshot(self, instruction: rounds.TakeSnapshot) -> None:
        self._begun_at = time.monotonic()
        self._taken, samples = await self._snapshot()
        self._copied_at = time.monotonic()
        weight = max(float(samples - self._samples_before), WEIGHT_FLOOR)
        self._samples_at_snapshot = samples
        from_base, codec = instruction.terms.base != rounds.NO_BASE, instruction.terms.codec
        reuse = self._sender.idle
        self._average.begin(self._taken, weight, from_base=from_base, codec=codec, reuse=reuse)
        # The chunk that is sent first; the others are copied when they are needed.
        await asyncio.to_thread(self._average.fill, self._segment.members.index(self._node_id))
        self._events.put_nowait(rounds.SnapshotTaken(round=instruction.round, weight=weight, now=time.monotonic()))

    async def _apply_average(self, number: int) -> None:
        reduce_s = time.monotonic() - self._copied_at
        average = await asyncio.to_thread(self._average.finish)
        await self._sender.detach()
        await self._apply(average, self._taken)
        now = time.monotonic()
        self.times = RingTimes(began_at=self._begun_at, reduce_s=reduce_s, round_s=now - self._begun_at)
        self._samples_before = self._samples_at_snapshot
        self.rounds_done += 1
        logger.info("round_applied job=%s node=%s segment=%d round=%d", self._job_id, self._node_id, self._segment.index, number)
        self._end(finished=True)
        self._events.put_nowait(rounds.AverageApplied(round=number, now=now))

    def _end(self, *, finished: bool) -> None:
        self._average.end(finished=finished)
        self._taken = {}
        self._arrived = {key: piece for key, piece in self._arrived.items() if self._member.wants(key[0])}
