"""One member of one averaging ring (arXiv 2401.01728, parallel multi-ring all-reduce).

C members hold the same segment, flattened and cut into C chunks. A round has 2(C-1) steps. In the first C-1
(reduce-scatter) each member sends one chunk of partial sums to the next and adds the one it gets from the previous; then
each member owns the complete sum of one chunk and divides it by the total weight. In the last C-1 (all-gather) the means
travel once around the ring.

Rounds are numbered upward from 1. An ordered round (all clusters drained, so it is exact) has a number every member
knows in advance, `ordered_round(k)` for the k-th order, so nobody can mistake a background round for it. A member joins
a round when it hears of it: by its own request, an Open, or a chunk. Whatever a peer sends of later rounds is remembered.

A chunk travels in pieces: a member passes a piece on as soon as it has added its own, while the next one is on its way, so
that its line never waits (docs/averaging.md). Pieces of a step come in order, and so do steps.

A ring that compresses, or has an outer optimizer, averages differences to the mean of the last round it finished: the base.
Whoever opens a round states the base and the codec. A member with another base (it gave up a round that others finished)
leaves the round and opens the next one for the values themselves; that gives all members the same base again.

Deadlines count from the last progress of a round, so that all members give up at about the same time. Messages from one
peer must arrive in the order they were sent: then a chunk of a later round tells that the previous member has left this
round, and it is abandoned at once.
"""

from __future__ import annotations

import math
from enum import StrEnum

from roost.config import TensorCodec
from roost.errors import ProtocolError
from roost.protocol.averaging_events import (
    NO_BASE,
    PLAIN,
    AbandonRound,
    AddChunk,
    ApplyAverage,
    AverageApplied,
    ChunkArrived,
    ChunkRefused,
    DeadlinePassed,
    OpenReceived,
    RingEvent,
    RingInstruction,
    RoundTerms,
    ScaleChunk,
    SendChunk,
    SendOpen,
    SnapshotTaken,
    StartRequested,
    StoreChunk,
    TakeSnapshot,
)
from roost.protocol.machine import StateMachine

__all__ = [
    "NO_BASE",
    "ORDER_STRIDE",
    "PLAIN",
    "TRANSITIONS",
    "AbandonRound",
    "AddChunk",
    "ApplyAverage",
    "AverageApplied",
    "ChunkArrived",
    "ChunkRefused",
    "DeadlinePassed",
    "OpenReceived",
    "RingEvent",
    "RingInstruction",
    "RingMember",
    "RingState",
    "RoundTerms",
    "ScaleChunk",
    "SendChunk",
    "SendOpen",
    "SnapshotTaken",
    "StartRequested",
    "StoreChunk",
    "TakeSnapshot",
    "ordered_round",
]

ORDER_STRIDE = 1 << 20
"""Round numbers between two ordered rounds: more background rounds than fit between two synchronisation points."""


def ordered_round(order: int) -> int:
    """Return the number of the ordered round of the `order`-th synchronisation point (1, 2, ...)."""
    return order * ORDER_STRIDE


class RingState(StrEnum):
    """Where a member is in its round."""

    IDLE = "idle"
    SNAPSHOTTING = "snapshotting"
    REDUCING = "reducing"
    GATHERING = "gathering"
    APPLYING = "applying"


_S = RingState
_RESTART = (_S.IDLE, _S.SNAPSHOTTING)
"""Where a member is after a round has ended: idle, or in the next round it has heard of."""

TRANSITIONS: dict[RingState, dict[type[object], RingState | tuple[RingState, ...]]] = {
    _S.IDLE: {
        StartRequested: _RESTART,
        OpenReceived: _RESTART,
        ChunkArrived: _RESTART,
        SnapshotTaken: _S.IDLE,
        ChunkRefused: _S.IDLE,
        DeadlinePassed: _S.IDLE,
    },
    _S.SNAPSHOTTING: {
        StartRequested: _S.SNAPSHOTTING,
        OpenReceived: _S.SNAPSHOTTING,
        ChunkArrived: _RESTART,
        SnapshotTaken: (_S.IDLE, _S.SNAPSHOTTING, _S.REDUCING, _S.GATHERING),
        ChunkRefused: _RESTART,
        DeadlinePassed: _RESTART,
    },
    _S.REDUCING: {
        StartRequested: _S.REDUCING,
        OpenReceived: _S.REDUCING,
        ChunkArrived: (_S.IDLE, _S.SNAPSHOTTING, _S.REDUCING, _S.GATHERING),
        SnapshotTaken: _S.REDUCING,
        ChunkRefused: (_S.IDLE, _S.SNAPSHOTTING, _S.REDUCING),
        DeadlinePassed: (_S.IDLE, _S.SNAPSHOTTING, _S.REDUCING),
    },
    _S.GATHERING: {
        StartRequested: _S.GATHERING,
        OpenReceived: _S.GATHERING,
        ChunkArrived: (_S.IDLE, _S.SNAPSHOTTING, _S.GATHERING, _S.APPLYING),
        SnapshotTaken: _S.GATHERING,
        ChunkRefused: (_S.IDLE, _S.SNAPSHOTTING, _S.GATHERING),
        DeadlinePassed: (_S.IDLE, _S.SNAPSHOTTING, _S.GATHERING),
    },
    _S.APPLYING: {
        StartRequested: _S.APPLYING,
        OpenReceived: _S.APPLYING,
        ChunkArrived: _S.APPLYING,
        SnapshotTaken: _S.APPLYING,
        ChunkRefused: _RESTART,
        AverageApplied: _RESTART,
        DeadlinePassed: _S.APPLYING,
    },
}


class RingMember:
    """Takes one node through the rounds of one ring, one round at a time."""

    transitions = TRANSITIONS
    """The table of its state machine."""

    def __init__(
        self,
        segment: int,
        members: tuple[str, ...],
        me: str,
        deadline_s: float,
        *,
        pieces: int = 1,
        codec: TensorCodec = TensorCodec.NONE,
        differences: bool = False,
        agreed: bool = True,
    ) -> None:
        """`members` in ring order, `me` among them; a round is abandoned `deadline_s` after it was first heard of or last moved.

        `pieces`, the same for all members, is how many a chunk travels in. `codec` is that of background rounds; with
        `differences` (any codec but NONE needs it) differences to the last mean are averaged. `agreed`: all members begin with the
        same weights; otherwise the first round averages the values themselves.
        """
        self._name = f"ring of segment {segment} at {me}"
        self._members = members
        self._me = me
        self._deadline_s = deadline_s
        self._pieces = pieces
        self._codec = codec
        self._differences = differences
        self._agreed = agreed  # some mean, or the initial weights, are known to all members
        self._machine = StateMachine(self._name, RingState.IDLE, self.transitions)
        self._target = RingState.IDLE  # the state after the event that is being handled
        self._round = 0  # the current round, or the last one
        self._terms = PLAIN  # of the current round
        self._finished = 0
        self._moved_at = 0.0  # when the current round was first heard of, or last moved
        self._step = 0  # the step and the piece that are taken in next
        self._piece = 0
        self._weight = 0.0
        # round -> (step, piece) -> arrival; the current round and later ones
        self._chunks: dict[int, dict[tuple[int, int], ChunkArrived]] = {}
        self._heard: dict[int, tuple[float, RoundTerms]] = {}  # later rounds, when each was first heard of, and how it goes
        self._requested = False  # a background round shall follow
        self._plain_next = False  # the next round that is opened here shall give all members the same base
        self._ordered = 0  # the ordered round that shall follow; 0 means none
        self._exact = False  # the current round carries out an order

    @property
    def state(self) -> RingState:
        """Where the member is in its round."""
        return self._machine.state

    @property
    def round(self) -> int:
        """The current round, or the last one; 0 before the first."""
        return self._round

    @property
    def finished(self) -> int:
        """The last round whose average was applied; order k is carried out once this is at least `ordered_round(k)`."""
        return self._finished

    @property
    def idle(self) -> bool:
        """True if no round is running."""
        return self._machine.state is RingState.IDLE

    @property
    def deadline(self) -> float | None:
        """When to report DeadlinePassed; None if no round waits for others."""
        waiting = self._machine.state not in (RingState.IDLE, RingState.APPLYING)
        return self._moved_at + self._deadline_s if waiting else None

    def wants(self, number: int) -> bool:
        """Return True if chunks of round `number` are still of use: the shell drops the buffers of all others."""
        if number == self._round:
            return not self.idle
        return number > self._round and number not in self._superseded()

    def source(self, step: int) -> str:
        """Return the member that sends what arrives in `step`: in a ring always the previous one."""
        return self._neighbour(-1)

    def handle(self, event: RingEvent) -> list[RingInstruction]:
        """Take in `event` and return what to do, in order.

        Raises ProtocolError for a chunk or weight that cannot be; whatever belongs to an earlier round is ignored.
        """
        self._machine.allowed(event)
        self._target = self._machine.state
        if isinstance(event, StartRequested):
            out = self._request(event)
        elif isinstance(event, OpenReceived):
            out = self._hear(event.round, event.terms, event.now)
        elif isinstance(event, SnapshotTaken):
            out = self._snapshot(event)
        elif isinstance(event, ChunkArrived):
            out = self._chunk(event)
        elif isinstance(event, AverageApplied):
            out = self._applied(event)
        elif isinstance(event, ChunkRefused):
            out = self._refuse(event)
        else:
            out = self._expire(event)
        self._machine.move(event, self._target)
        return out

    # ------------------------------------------------------------ starting a round

    def _request(self, event: StartRequested) -> list[RingInstruction]:
        if event.order == 0:
            self._requested = True
        elif self._finished < ordered_round(event.order):
            # A running round with at least that number is the ordered one; one that was abandoned is tried again.
            running = self._target is not RingState.IDLE and self._round >= ordered_round(event.order)
            self._exact |= running
            self._ordered = 0 if running else max(ordered_round(event.order), self._round + 1)
        return self._next_round(event.now) if self._target is RingState.IDLE else []

    def _hear(self, number: int, terms: RoundTerms, now: float) -> list[RingInstruction]:
        if number <= self._round:
            return []
        self._heard.setdefault(number, (now, terms))
        for old in self._superseded():
            self._heard.pop(old, None)
            self._chunks.pop(old, None)
        return self._next_round(now) if self._target is RingState.IDLE else []

    def _superseded(self) -> set[int]:
        """Return the later rounds nobody will finish: a peer is ahead of them, and only ordered rounds may be skipped to."""
        newest: dict[int, int] = {}
        for number in self._heard:
            order = number // ORDER_STRIDE
            newest[order] = max(number, newest.get(order, 0))
        return {number for number in {*self._heard, *self._chunks} if self._round < number < newest.get(number // ORDER_STRIDE, 0)}

    def _next_round(self, now: float) -> list[RingInstruction]:
        """Begin the round that is due, if any; rounds whose deadline has passed are skipped."""
        while self._heard and now >= self._heard[min(self._heard)][0] + self._deadline_s:
            skipped = min(self._heard)
            self._round = max(self._round, skipped)
            self._forget(skipped)
        candidates = list(self._heard)
        # A peer at or beyond the ordered number is in it, or in its repetition: joining that carries out the order.
        if self._ordered and max(candidates, default=0) < self._ordered:
            candidates.append(max(self._ordered, self._round + 1))
        if not candidates and self._requested:
            candidates = [self._round + 1]
        return self._begin(min(candidates), now) if candidates else []

    def _begin(self, number: int, now: float) -> list[RingInstruction]:
        joined = number in self._heard
        ordered = 0 < self._ordered <= number
        self._moved_at, terms = self._heard.pop(number, (now, self._own_terms(exact=ordered)))
        self._round = number
        self._forget(number - 1)
        if terms.base not in (NO_BASE, self._finished) or (terms.base != NO_BASE and not self._agreed):
            # Its values would be differences to other weights than those the opener speaks of.
            self._forget(number)
            self._plain_next = self._requested = True
            return self._next_round(now)
        self._terms = terms
        self._requested = False
        self._plain_next = self._plain_next and terms.base != NO_BASE
        self._ordered = 0 if ordered else self._ordered
        self._exact = ordered or number % ORDER_STRIDE == 0
        self._step = self._piece = 0
        self._target = RingState.SNAPSHOTTING
        opens: list[RingInstruction] = [] if joined else [SendOpen(peer=peer, round=number, terms=terms) for peer in self._others]
        return [*opens, TakeSnapshot(round=number, terms=terms)]

    def _own_terms(self, *, exact: bool) -> RoundTerms:
        """Return how a round goes that is opened here."""
        if not self._differences or self._plain_next or not self._agreed:
            return PLAIN
        return RoundTerms(base=self._finished, codec=TensorCodec.NONE if exact else self._codec)

    def _forget(self, last: int) -> None:
        """Drop what is remembered of rounds up to `last`."""
        self._heard = {number: heard for number, heard in self._heard.items() if number > last}
        self._chunks = {number: chunks for number, chunks in self._chunks.items() if number > last}

    # ------------------------------------------------------------ ending a round

    def _abandon(self, reason: str, now: float) -> list[RingInstruction]:
        self._forget(self._round)
        self._target = RingState.IDLE
        gone: RingInstruction = AbandonRound(round=self._round, reason=reason)
        return [gone, *self._next_round(now)]

    def _applied(self, event: AverageApplied) -> list[RingInstruction]:
        if event.round != self._round:
            raise self._broken(f"the average of round {event.round} was applied during round {self._round}")
        self._finished = self._round
        self._agreed = True
        self._forget(self._round)
        self._target = RingState.IDLE
        return self._next_round(event.now)

    def _refuse(self, event: ChunkRefused) -> list[RingInstruction]:
        # Pieces are added after this member has decided: the last of them can be refused when the average is about to be applied.
        current = event.round == self._round and self._target is not RingState.IDLE
        return self._abandon(event.reason, event.now) if current else []

    def _expire(self, event: DeadlinePassed) -> list[RingInstruction]:
        deadline = self.deadline
        if deadline is None or event.now < deadline:
            return []
        reason = "no snapshot was taken" if self._target is RingState.SNAPSHOTTING else self._missing()
        return self._abandon(f"{reason} within {self._deadline_s:g} s", event.now)

    def _missing(self) -> str:
        """Return what the round waits for."""
        return f"nothing arrived from {self._neighbour(-1)} for step {self._step}"

    # ------------------------------------------------------------ the steps of a round

    def _snapshot(self, event: SnapshotTaken) -> list[RingInstruction]:
        if event.round != self._round or self._target is not RingState.SNAPSHOTTING:
            return []
        if not (math.isfinite(event.weight) and event.weight >= 0):
            raise self._broken(f"the weight of the snapshot of round {event.round} is {event.weight}")
        self._weight = event.weight
        self._target = RingState.REDUCING
        return [*self._first_sends(), *self._advance(event.now)]

    def _first_sends(self) -> list[RingInstruction]:
        """Return what is sent as soon as the snapshot is there."""
        return [self._send(0, self._position, piece, self._weight) for piece in range(self._pieces)]

    def _chunk(self, event: ChunkArrived) -> list[RingInstruction]:
        self._check_chunk(event)
        current = self._target is not RingState.IDLE and event.round == self._round
        if not current and event.round <= self._round:
            return []
        pieces = self._chunks.setdefault(event.round, {})
        if (event.step, event.piece) in pieces:
            raise self._broken(f"step {event.step} of round {event.round} arrived twice")
        first = pieces.get((event.step, 0), event)
        if first.weight != event.weight or first.terms != event.terms:
            raise self._broken(f"the pieces of step {event.step} of round {event.round} contradict each other")
        pieces[event.step, event.piece] = event
        if current:
            return self._take_in(event)
        out = self._hear(event.round, event.terms, event.now)
        if out or self._target in (RingState.IDLE, RingState.APPLYING):
            return out
        if self._owes(event.step):
            return self._abandon(f"{self.source(event.step)} has left it for round {event.round}", event.now)
        return []

    def _owes(self, step: int) -> bool:
        """Return True if the source of `step` has not sent all of the current round."""
        return len(self._chunks.get(self._round, {})) < self._steps * self._pieces

    def _take_in(self, event: ChunkArrived) -> list[RingInstruction]:
        """Go on with the current round."""
        if event.terms != self._terms and self._target is not RingState.APPLYING:
            self._plain_next = self._requested = True
            return self._abandon(f"{self.source(event.step)} averages {event.terms}, not {self._terms}", event.now)
        self._moved_at = max(self._moved_at, event.now)
        return self._use(event) if self._target is not RingState.SNAPSHOTTING else []

    def _use(self, event: ChunkArrived) -> list[RingInstruction]:
        """Go on after the snapshot with a piece that has just come."""
        return self._advance(event.now)

    def _advance(self, now: float) -> list[RingInstruction]:
        """Take in the pieces that have arrived, in their order."""
        out: list[RingInstruction] = []
        arrived = self._chunks.get(self._round, {})
        while self._target is not RingState.APPLYING and (event := arrived.get((self._step, self._piece))) is not None:
            reducing = self._step <= self._last_reduce
            kind = AddChunk if reducing else StoreChunk
            out.append(kind(round=self._round, step=self._step, chunk=event.chunk, piece=event.piece))
            total = event.weight + self._weight if reducing else event.weight
            if self._step == self._last_reduce:
                if total <= 0:
                    return [*out, *self._abandon("no member has consumed samples since the last round", now)]
                out.append(ScaleChunk(chunk=event.chunk, total_weight=total, piece=event.piece))
            if self._step + 1 < self._steps:
                out.append(self._send(self._step + 1, event.chunk, event.piece, total))
            self._count_piece()
            if self._step == self._steps:
                out.append(ApplyAverage(round=self._round, total_weight=total))
        return out

    def _count_piece(self) -> None:
        """Turn to the next piece, and to the next step after the last one."""
        self._piece += 1
        if self._piece < self._pieces:
            return
        self._piece = 0
        self._step += 1
        if self._step == self._steps:
            self._target = RingState.APPLYING
        elif self._step > self._last_reduce:
            self._target = RingState.GATHERING

    def _send(self, step: int, chunk: int, piece: int, weight: float, to: int = 1) -> SendChunk:
        """Return what sends a piece to the member `to` places on."""
        return SendChunk(peer=self._neighbour(to), round=self._round, step=step, chunk=chunk, weight=weight, piece=piece, terms=self._terms)

    def _check_chunk(self, event: ChunkArrived) -> None:
        if not 0 <= event.step < self._steps:
            raise self._broken(f"step {event.step} of round {event.round} is not one of 0..{self._steps - 1}")
        if not 0 <= event.piece < self._pieces:
            raise self._broken(f"piece {event.piece} of step {event.step} of round {event.round} is not one of 0..{self._pieces - 1}")
        expected = self._expected_chunk(event.round, event.step)
        if event.chunk != expected:
            raise self._broken(f"step {event.step} of round {event.round} brought chunk {event.chunk}, not {expected}")
        self._check_weight(event)

    def _check_weight(self, event: ChunkArrived) -> None:
        if not (math.isfinite(event.weight) and event.weight >= 0):
            raise self._broken(f"the weight of step {event.step} of round {event.round} is {event.weight}")

    def _expected_chunk(self, number: int, step: int) -> int:
        """Return the chunk that arrives in step s of any round: (p - s - 1) mod C when reducing, (p - (s - (C-1))) mod C when gathering."""
        count = len(self._members)
        return (self._position - step - 1) % count if step <= self._last_reduce else (self._position - (step - count + 1)) % count

    @property
    def _position(self) -> int:
        return self._members.index(self._me)

    @property
    def _others(self) -> tuple[str, ...]:
        return tuple(peer for peer in self._members if peer != self._me)

    @property
    def _last_reduce(self) -> int:
        return len(self._members) - 2

    @property
    def _steps(self) -> int:
        return 2 * (len(self._members) - 1)

    def _neighbour(self, offset: int) -> str:
        return self._members[(self._position + offset) % len(self._members)]

    def _broken(self, what: str) -> ProtocolError:
        history = "; ".join(self._machine.history)
        return ProtocolError(f"{self._name}: {what} ({history})", hint="Run the same version of roost everywhere, then report this.")
