"""One ring of this node: carries out what protocol/averaging_round.py decides, in the background of training.

With an option against bad members, and three members or more, protocol/guarded_round.py decides.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from roost import messages as m
from roost.agent.doubts import Doubts
from roost.agent.ring_sender import RingSender
from roost.averaging.guarded_average import GuardedAverage, MemberValues
from roost.averaging.segment_average import AveragingOptions, SegmentAverage
from roost.config import RobustMethod, TensorCodec
from roost.errors import DeadlineError, JobRefusedError, MalformedMessageError, ProtocolError, RoostError
from roost.protocol import averaging_round as rounds
from roost.protocol.averaging_events import CombineChunk
from roost.protocol.guarded_round import GuardedMember
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
LEAST_GUARDED = 3
"""Members: of two values there is no telling which is bad."""

Snapshot = Callable[[], Awaitable[tuple[dict[str, Tensor], int]]]
Apply = Callable[[dict[str, Tensor], dict[str, Tensor]], Awaitable[None]]
Calculation = rounds.AddChunk | rounds.StoreChunk | rounds.ScaleChunk | CombineChunk


@dataclass(frozen=True, kw_only=True)
class RingTimes:
    """What the last finished round took."""

    began_at: float = 0.0
    """When it began, on the clock `time.monotonic`."""
    reduce_s: float = 0.0
    """Seconds from the copy of the weights until all means were there: the ring itself."""
    round_s: float = 0.0
    """Seconds from its beginning until the average was applied."""


def pieces_of(segment: SegmentPlan) -> int:
    """Return in how many pieces the chunks of a segment travel: the same for all members of its ring."""
    return max(1, math.ceil(segment.nbytes / len(segment.members) / PIECE_BYTES))


def _relative(members: Sequence[str], shares: Mapping[str, float] | None) -> dict[str, float]:
    """Return the members' shares over their mean; 1 for all if there are none."""
    given = [(shares or {}).get(member, 0.0) for member in members]
    if not all(share > 0 for share in given):
        return dict.fromkeys(members, 1.0)
    return {member: share * len(given) / sum(given) for member, share in zip(members, given, strict=True)}


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
        shares: Mapping[str, float] | None = None,
        generation: int = 0,
        orders: int = 0,
        samples_before: int = 0,
        suspect: Callable[[str], None] = lambda peer_id: None,
    ) -> None:
        """`snapshot` returns copies and the samples behind them; `apply` must not keep the average it is given.

        `shares` are the parts of the data that the members are expected to consume, by node id; without them all are alike.
        `generation` is that of the plan; in all but the first the members begin with different weights. `orders` are the
        synchronisation points so far, `samples_before` the samples behind the last round that this node has finished. `suspect` is told
        of a member that keeps a round waiting.
        """
        self._job_id = job_id
        self._segment = segment
        self._node_id = node_id
        self._snapshot = snapshot
        self._apply = apply
        asked = options or AveragingOptions()
        guarded = asked.robust is not RobustMethod.NONE and len(segment.members) >= LEAST_GUARDED
        self._unguarded = asked.robust if not guarded else RobustMethod.NONE
        self._options = asked if guarded else replace(asked, robust=RobustMethod.NONE)
        self._previous = segment.members[segment.members.index(node_id) - 1]
        self._pieces = pieces_of(segment)
        self._member = (GuardedMember if guarded else rounds.RingMember)(
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
        self._shares = _relative(segment.members, shares)
        parts, share = len(segment.members), self._shares[node_id]
        self._guarded = GuardedAverage(parts=parts, pieces=self._pieces, options=self._options, share=share) if guarded else None
        self._average = self._guarded or SegmentAverage(parts=parts, pieces=self._pieces, options=self._options)
        self._sender = RingSender(
            job_id=job_id, segment=segment.index, generation=generation, peers=peers, transport=transport, average=self._average
        )
        self._events: asyncio.Queue[rounds.RingEvent] = asyncio.Queue()
        self._doubts = Doubts(suspect)
        self._arrived: dict[tuple[int, int, int], MemberValues] = {}
        self._named: set[str] = set()  # members that have been named in this round
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
        """A piece of a chunk came from the source of its step. Raises MalformedMessageError for any other sender, or if it cannot be."""
        index = self._segment.index
        if sender != self._member.source(message.step):
            whose = "the previous member" if self._guarded is None else f"the member of step {message.step}"
            raise MalformedMessageError(f"{sender} is not {whose} of the ring of segment {index}")
        terms = self._terms(sender, message.round, message.base, message.codec)
        if not self._member.wants(message.round):
            return
        self._check_claims(sender, message)
        if len(buffer) > MAX_ELEMENT_BYTES * (self._segment.nbytes // (len(self._segment.members) * self._pieces) + 2):
            raise MalformedMessageError(f"{sender} sent a chunk of {len(buffer)} bytes, larger than segment {index} has")
        if message.dtype not in SUM_DTYPES:
            raise MalformedMessageError(f"{sender} sent a chunk of dtype {message.dtype!r}, not one of {sorted(SUM_DTYPES)}")
        key = (message.round, message.step, message.piece)
        if key in self._arrived:
            raise MalformedMessageError(f"{sender} sent step {message.step} of round {message.round} twice")
        self._arrived[key] = MemberValues(
            buffer=buffer, dtype=message.dtype, weight=message.weight, share=self._shares[sender], norms=message.norms
        )
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

    def _check_claims(self, sender: str, message: m.RingChunk) -> None:
        """Raise MalformedMessageError for more chunks than may wait, or more samples than the job has."""
        count, index = len(self._segment.members), self._segment.index
        sources = 1 if self._guarded is None else count - 1
        waiting = sum(self._member.source(step) == sender for _, step, _ in self._arrived) if sources > 1 else len(self._arrived)
        if waiting >= MAX_WAITING_ROUNDS * 2 * count * self._pieces // sources:
            raise MalformedMessageError(f"{sender} sends chunks of more rounds of segment {index} than may wait")
        # The owner leaves values with such a claim out; nothing else could be done about a sum or a mean.
        values = self._guarded is not None and message.step < count - 1
        if not values and message.weight > self._options.most_samples:
            raise MalformedMessageError(
                f"{sender} claims {message.weight:g} samples in segment {index}, at most {self._options.most_samples:g} are believed"
            )

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
        if self._unguarded is not RobustMethod.NONE:
            logger.warning(
                "averaging_unguarded job=%s segment=%d members=%d method=%s: of so few the plain mean is taken",
                self._job_id,
                self._segment.index,
                len(self._segment.members),
                self._unguarded.value,
            )
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
            self._log_refused(error, self._member.source(event.step))
            self._arrived.pop((event.round, event.step, event.piece), None)
            return []

    def _log_refused(self, error: RoostError, sender: str) -> None:
        logger.warning("chunk_refused job=%s node=%s sender=%s error=%s", self._job_id, self._node_id, sender, error.message)

    async def _next_events(self) -> list[rounds.RingEvent]:
        """Return what has happened, waiting for something to happen; what came together is handled together."""
        deadline = self._member.deadline
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        # Every member of a round waits for the one before it, or for one that waits: who is away is named by the one after it.
        awaited = "" if deadline is None else self._previous
        try:
            events = [await self._doubts.next_of(self._events, awaited, within_s=wait_s)]
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
            if isinstance(instruction, Calculation):
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
        taken = [[self._arrived.pop(key) for key in self._needed(item)] for item in calculations]
        if self._segment.nbytes <= INLINE_BYTES:
            refused = self._calculate_now(calculations, taken)
        else:
            refused = await asyncio.to_thread(self._calculate_now, calculations, taken)
        if refused is not None:
            await self._perform_all(self._member.handle(refused))
            return False
        for send in sends:
            self._sender.put(send)
        return True

    def _needed(self, item: Calculation) -> list[tuple[int, int, int]]:
        """Return what must have arrived for a calculation: its round, step and piece."""
        if isinstance(item, rounds.ScaleChunk):
            return []
        steps = range(len(self._segment.members) - 1) if isinstance(item, CombineChunk) else (item.step,)
        return [(item.round, step, item.piece) for step in steps]

    def _calculate_now(self, calculations: Sequence[Calculation], taken: Sequence[Sequence[MemberValues]]) -> rounds.ChunkRefused | None:
        """Return what ends the round, if a piece cannot be averaged."""
        culprit, number = self._previous, 0
        try:
            for item, pieces in zip(calculations, taken, strict=True):
                if isinstance(item, CombineChunk):
                    culprit, number = "most members", item.round
                    self._combine(item, pieces)
                elif isinstance(item, rounds.ScaleChunk):
                    self._average.scale(item.chunk, item.piece, item.total_weight)
                else:
                    culprit, number = self._member.source(item.step), item.round
                    self._take(item, pieces[0])
        except MalformedMessageError as error:
            self._log_refused(error, culprit)
            reason = f"{culprit} sent what cannot be averaged: {error.message}"
            return rounds.ChunkRefused(round=number, reason=reason, now=time.monotonic())
        return None

    def _take(self, item: rounds.AddChunk | rounds.StoreChunk, piece: MemberValues) -> None:
        if piece.dtype != self._average.dtype:
            raise MalformedMessageError(
                f"a chunk has dtype {piece.dtype}, but segment {self._segment.index} is summed in {self._average.dtype}"
            )
        take = self._average.add if isinstance(item, rounds.AddChunk) else self._average.store
        take(item.chunk, item.piece, piece.buffer)

    def _combine(self, item: CombineChunk, pieces: Sequence[MemberValues]) -> None:
        """Make a robust mean, and name, once in a round, who does not fit in."""
        assert self._guarded is not None, "only guarded rounds combine"
        found = self._guarded.combine(item.chunk, item.piece, pieces)
        names = [*(self._member.source(step) for step in range(len(pieces))), self._node_id]
        for positions, why in ((found.refused, "left out"), (found.suspects, "far from the others")):
            for member in {names[position] for position in positions} - self._named:
                self._named.add(member)
                logger.warning(
                    "member_suspected job=%s node=%s segment=%d round=%d member=%s reason=%r",
                    self._job_id,
                    self._node_id,
                    self._segment.index,
                    item.round,
                    member,
                    why,
                )

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
        self._named.clear()
        await asyncio.to_thread(self._average.prepare, self._segment.members.index(self._node_id))
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
