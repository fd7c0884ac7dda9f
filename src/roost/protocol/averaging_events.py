"""What one member of an averaging ring is told, and what it answers (averaging_round.py and guarded_round.py decide)."""

from __future__ import annotations

from dataclasses import dataclass

from roost.config import TensorCodec

NO_BASE = -1
"""In place of a round's number: the values themselves are averaged."""


@dataclass(frozen=True, kw_only=True)
class RoundTerms:
    """What all members of a round do alike; a member that cannot leaves the round."""

    base: int = NO_BASE
    """The round whose mean the values are differences to; 0: the initial weights. NO_BASE: the values themselves are averaged."""
    codec: TensorCodec = TensorCodec.NONE
    """How chunks are encoded."""


PLAIN = RoundTerms()
"""The values themselves, as they are."""


@dataclass(frozen=True, kw_only=True)
class StartRequested:
    """The member should start a round: its own threshold is reached, or the coordinator orders one."""

    now: float
    order: int = 0
    """k for the k-th order of the coordinator (counted from 1), 0 for a background round."""


@dataclass(frozen=True, kw_only=True)
class OpenReceived:
    """A peer has opened this round."""

    round: int
    now: float
    terms: RoundTerms = PLAIN


@dataclass(frozen=True, kw_only=True)
class SnapshotTaken:
    """The snapshot that TakeSnapshot asked for exists: the chunks hold weight * values."""

    round: int
    weight: float
    """Samples this cluster has consumed since its last finished round; not negative."""
    now: float


@dataclass(frozen=True, kw_only=True)
class ChunkArrived:
    """The `source` of this step sent a piece of a chunk; the shell keeps its buffer under (round, step, piece) while `wants(round)`."""

    round: int
    step: int
    chunk: int
    weight: float
    """In reduce-scatter the samples behind the partial sum, in all-gather their total; in a guarded round the sender's samples."""
    now: float
    piece: int = 0
    terms: RoundTerms = PLAIN


@dataclass(frozen=True, kw_only=True)
class AverageApplied:
    """The weights now contain the average that ApplyAverage asked for."""

    round: int
    now: float


@dataclass(frozen=True, kw_only=True)
class DeadlinePassed:
    """The shell's timer for `deadline` has run out; ignored if the deadline has moved since."""

    now: float


@dataclass(frozen=True, kw_only=True)
class ChunkRefused:
    """What arrived in this round is not fit to be averaged: the shell has found values that are not finite."""

    round: int
    reason: str
    now: float


@dataclass(frozen=True, kw_only=True)
class SendOpen:
    """Tell `peer` that this round is open."""

    peer: str
    round: int
    terms: RoundTerms = PLAIN


@dataclass(frozen=True, kw_only=True)
class TakeSnapshot:
    """Between two updates, copy the segment, multiply it (or its difference to the base) by the weight, then report SnapshotTaken."""

    round: int
    terms: RoundTerms = PLAIN


@dataclass(frozen=True, kw_only=True)
class SendChunk:
    """Send a piece of the local chunk, as it is now, to `peer`."""

    peer: str
    round: int
    step: int
    chunk: int
    weight: float
    piece: int = 0
    terms: RoundTerms = PLAIN


@dataclass(frozen=True, kw_only=True)
class AddChunk:
    """Add the buffer that was received under (round, step, piece) to that piece of the local chunk."""

    round: int
    step: int
    chunk: int
    piece: int = 0


@dataclass(frozen=True, kw_only=True)
class StoreChunk:
    """Replace that piece of the local chunk by the buffer that was received under (round, step, piece): it is the mean."""

    round: int
    step: int
    chunk: int
    piece: int = 0


@dataclass(frozen=True, kw_only=True)
class ScaleChunk:
    """Divide a piece of the local chunk by the total weight: it becomes the mean."""

    chunk: int
    total_weight: float
    piece: int = 0


@dataclass(frozen=True, kw_only=True)
class CombineChunk:
    """Make the robust mean of a piece of the local chunk: of this member's values, and those received under (round, 0 .. C-2, piece)."""

    round: int
    chunk: int
    piece: int = 0


@dataclass(frozen=True, kw_only=True)
class ApplyAverage:
    """All chunks are means: between two updates do weights += mean - snapshot, then report AverageApplied."""

    round: int
    total_weight: float


@dataclass(frozen=True, kw_only=True)
class AbandonRound:
    """Drop the snapshot and every buffer of this round; the weights stay as they are."""

    round: int
    reason: str


RingEvent = StartRequested | OpenReceived | SnapshotTaken | ChunkArrived | ChunkRefused | AverageApplied | DeadlinePassed
RingInstruction = SendOpen | TakeSnapshot | SendChunk | AddChunk | StoreChunk | ScaleChunk | CombineChunk | ApplyAverage | AbandonRound
