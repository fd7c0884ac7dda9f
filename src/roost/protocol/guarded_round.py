"""One member of one averaging ring that guards itself against a bad one: all values of a chunk meet at its owner.

A ring of partial sums hides who added what. In a guarded round every one of the C chunks has an owner; each member sends the owner
its own values of the chunk, the owner makes a robust mean of all members' (averaging/robust.py), and sends that to every other
member. Each sends and receives 2 (C-1)/C of the segment, as in a ring, in two hops instead of 2(C-1).

Chunks change their owners with every round, one position on: an owner that lies about its mean has every value once in C rounds.
What arrives is numbered as a ring's steps are: step s of 0 .. C-2 brings the values of the member at position p - s - 1 for the chunk
owned here, step C-1+s the mean of that member's chunk. So each step has one `source`, and in each every member sends to another one.

Where most members have consumed nothing since the last round there is no telling whether the work of the others is usual: such a
round is given up, and its work counts in the next one. At a synchronisation point, which cannot wait, it counts as far as the shell
believes it.

Numbers, orders, terms, bases, deadlines and giving up are those of RingMember (averaging_round.py). A piece of a mean is taken in
once the same piece of the own chunk is complete: with the values come the norms by which the shell judges means.
"""

from __future__ import annotations

from roost.config import ONE_SAMPLE, robust_quorum
from roost.protocol.averaging_events import (
    ApplyAverage,
    ChunkArrived,
    CombineChunk,
    RingInstruction,
    SnapshotTaken,
    StoreChunk,
)
from roost.protocol.averaging_round import ORDER_STRIDE, TRANSITIONS, RingMember, RingState

_S = RingState
_ANY = (_S.IDLE, _S.SNAPSHOTTING, _S.REDUCING, _S.GATHERING, _S.APPLYING)

GUARDED_TRANSITIONS = TRANSITIONS | {
    _S.SNAPSHOTTING: TRANSITIONS[_S.SNAPSHOTTING] | {SnapshotTaken: _ANY},
    _S.REDUCING: TRANSITIONS[_S.REDUCING] | {ChunkArrived: _ANY},
}
"""Those of a ring, but for one thing: no chunk waits for another, so the last to come, or the snapshot, may complete a round at once."""


class GuardedMember(RingMember):
    """Takes one node through the guarded rounds of one ring, one round at a time.

    "Reducing" is making the mean of the own chunk, "gathering" waiting for those of the others.
    """

    transitions = GUARDED_TRANSITIONS

    def source(self, step: int) -> str:
        """Return the member that sends what arrives in `step`."""
        return self._neighbour(-self._place(step) - 1)

    def _place(self, step: int) -> int:
        """Return s of step s or C-1+s."""
        return step % (len(self._members) - 1)

    def _expected_chunk(self, number: int, step: int) -> int:
        """Return the chunk that arrives in `step` of round `number`: the own one, then those of the sources."""
        owner = self._position if step <= self._last_reduce else self._position - self._place(step) - 1
        return self._chunk_of(owner, number)

    def _chunk_of(self, owner: int, number: int) -> int:
        """Return the chunk that the member at position `owner` owns in round `number`: another one in the next, ordered or not."""
        return (owner + number % ORDER_STRIDE + number // ORDER_STRIDE) % len(self._members)

    def _check_weight(self, event: ChunkArrived) -> None:
        """A claim of samples that cannot be is for the owner to leave out, with the values it came with."""

    def _first_sends(self) -> list[RingInstruction]:
        """Return the values for all owners, piece by piece, so that they can make means of the first while others are on their way."""
        count = len(self._members)
        return [
            self._send(step, self._chunk_of(self._position + step + 1, self._round), piece, self._weight, to=step + 1)
            for piece in range(self._pieces)
            for step in range(count - 1)
        ]

    def _use(self, event: ChunkArrived) -> list[RingInstruction]:
        late = event.step > self._last_reduce and event.piece < self._piece
        return [*([self._store(event)] if late else []), *self._advance(event.now)]

    def _advance(self, now: float) -> list[RingInstruction]:
        """Make the means of the pieces that are complete, in their order, and take in those that waited for them."""
        out: list[RingInstruction] = []
        arrived = self._chunks.get(self._round, {})
        values, means = range(self._last_reduce + 1), range(self._last_reduce + 1, self._steps)
        while self._piece < self._pieces and all((step, self._piece) in arrived for step in values):
            if (reason := self._pointless([self._weight, *(arrived[step, self._piece].weight for step in values)])) is not None:
                return [*out, *self._abandon(reason, now)]
            out += self._combine()
            out += [self._store(arrived[step, self._piece]) for step in means if (step, self._piece) in arrived]
            self._piece += 1
        if self._piece == self._pieces and self._target is not RingState.APPLYING:
            complete = len(arrived) == self._steps * self._pieces
            self._target = RingState.APPLYING if complete else RingState.GATHERING
            if complete:
                out.append(ApplyAverage(round=self._round, total_weight=self._total(arrived)))
        return out

    def _pointless(self, weights: list[float]) -> str | None:
        """Return why the round is given up by all members, who know the same weights; None if it goes on."""
        if sum(max(weight, 0.0) for weight in weights) <= 0:
            return "no member has consumed samples since the last round"
        busy, needed = sum(weight >= ONE_SAMPLE for weight in weights), robust_quorum(len(weights))
        if busy < needed and not self._exact:
            return f"{busy} of {len(weights)} members have consumed samples since the last round, {needed} must have"
        return None

    def _combine(self) -> list[RingInstruction]:
        own = self._chunk_of(self._position, self._round)
        means = [self._send(self._last_reduce + step, own, self._piece, self._weight, to=step) for step in range(1, len(self._members))]
        return [CombineChunk(round=self._round, chunk=own, piece=self._piece), *means]

    def _store(self, event: ChunkArrived) -> StoreChunk:
        return StoreChunk(round=event.round, step=event.step, chunk=event.chunk, piece=event.piece)

    def _total(self, arrived: dict[tuple[int, int], ChunkArrived]) -> float:
        """Return the samples that the members claim with the first piece of their values."""
        return self._weight + sum(arrived[step, 0].weight for step in range(self._last_reduce + 1))

    def _owes(self, step: int) -> bool:
        arrived = self._chunks.get(self._round, {})
        places = (self._place(step), self._last_reduce + 1 + self._place(step))
        return any((place, piece) not in arrived for place in places for piece in range(self._pieces))

    def _missing(self) -> str:
        silent = [self.source(step) for step in range(self._last_reduce + 1) if self._owes(step)]
        return f"not all has arrived from {', '.join(silent)}"
