"""One member's values in guarded rounds: those of all members meet at a chunk's owner, and receivers judge the means of others."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roost.averaging.codecs import Bytes, decode
from roost.averaging.robust import RobustMean, bounded_mean, clipped_mean, trimmed_mean
from roost.averaging.segment_average import AveragingOptions, SegmentAverage
from roost.config import ONE_SAMPLE, RobustMethod, TensorCodec, robust_quorum
from roost.errors import MalformedMessageError, ProtocolError

TRUSTED = 2.0
"""A mean is believed to be so many times as far from the last one as one at the second fastest member's pace, or as this member is."""
ROUNDING = 1e-5
"""And by so much of the size of the values themselves, which their mean is rounded by."""

VARIANCES = "running_var"
"""How the names of batch-norm's running variances end (torch.nn): a negative one makes every evaluation NaN."""
LEAST_VARIANCE = 0.1
"""What a round leaves of a running variance, at least."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemberValues:
    """What another member sent to the owner of a chunk: a piece of its values."""

    buffer: Bytes
    dtype: str
    """'float32' or 'float64', as the sender says."""
    weight: float
    """The samples behind the values, as the sender says."""
    share: float
    """The part of the data that its cluster is expected to consume, over the mean part, by the plan."""
    norms: tuple[float, ...]
    """How far its values of this piece of every chunk are from the last mean, by chunk, as the sender says; 0 if it knows none."""


class GuardedAverage(SegmentAverage):
    """A segment's values in a round whose chunks are combined by their owners.

    Values are not multiplied by their weight: the owner does that. Rounding errors of a codec are not kept.
    """

    def __init__(self, *, parts: int, pieces: int, options: AveragingOptions, share: float = 1.0) -> None:
        """`share` is what this member's cluster is expected to consume, over the mean."""
        super().__init__(parts=parts, pieces=pieces, options=options)
        self._share = share
        self._own_weight = 0.0
        self._norms: list[list[float]] = []  # of this member's own values, by piece and chunk
        self._believed: dict[int, list[float]] = {}  # norms of means, by piece, once the own one is combined, and chunk
        self._combined: set[tuple[int, int]] = set()
        self._usual: dict[int, list[float]] = {}  # how far a member of the mean share moves in a round, by piece and chunk

    def begin(self, snapshot: Mapping[str, Tensor], weight: float, *, from_base: bool, codec: TensorCodec, reuse: bool) -> None:
        """Start a round, as SegmentAverage does."""
        super().begin(snapshot, 1.0, from_base=from_base, codec=codec, reuse=reuse)
        self._own_weight = weight
        self._believed.clear()
        self._combined.clear()

    def prepare(self, position: int) -> None:
        """Copy all chunks, and measure how far they are from the last mean. Raises NonFiniteLossError."""
        for chunk in range(self._parts):
            self.fill(chunk)
        self._norms = [[self._distance(chunk, piece) for chunk in range(self._parts)] for piece in range(self._pieces)]

    def norms(self, chunk: int, piece: int) -> tuple[float, ...]:
        """Return this member's norms of a piece of every chunk, which travel with its values; nothing travels with a mean."""
        return () if (chunk, piece) in self._combined else tuple(self._norms[piece])

    def combine(self, chunk: int, piece: int, others: Sequence[MemberValues]) -> RobustMean:
        """Make a piece of this member's own chunk the robust mean of its values and the others'.

        Returns who was left out or is suspected, by position in `others`; the last position is this member itself. Values of the wrong
        length or dtype, or with a weight that cannot be, are left out. Raises MalformedMessageError if that leaves half or fewer.
        """
        own = self._running.piece(chunk, piece)
        self._believed[piece] = self._beliefs(piece, others)
        found = RobustMean(mean=own, refused=(), suspects=())
        if own.numel():
            try:
                found = self._robust_mean(chunk, piece, others)
            except ProtocolError as error:
                raise MalformedMessageError(f"chunk {chunk} of an averaging round: {error.message}") from error
            own.copy_(found.mean)
        self._combined.add((chunk, piece))
        self._encode_mean(chunk, piece)
        return found

    def store(self, chunk: int, piece: int, buffer: Bytes) -> None:
        """Take another owner's mean. Raises MalformedMessageError if it cannot be, or is farther from the last one than is believed."""
        super().store(chunk, piece, buffer)
        found, believed = self._distance(chunk, piece), self._believed[piece][chunk]
        if self._base is not None and not found <= believed:
            raise MalformedMessageError(
                f"the mean of chunk {chunk} of an averaging round is {found:g} from the last one, at most {believed:g} is believed"
            )

    def finish(self) -> dict[str, Tensor]:
        """Return what the weights should become, as SegmentAverage does; running variances stay positive, whatever an owner says."""
        buffer = self._running
        slices = [where for name, where in buffer.slices().items() if name.endswith(VARIANCES)]
        known = self._base if self._from_base else None
        floors = [torch.zeros(()) if known is None else LEAST_VARIANCE * known[where] for where in slices]
        super().finish()
        assert self._base is not None, "guarded rounds keep the last mean"
        for where, floor in zip(slices, floors, strict=True):
            torch.maximum(self._base[where], floor.to(self._base.dtype), out=self._base[where])
        return buffer.unflatten(self._base)

    def _robust_mean(self, chunk: int, piece: int, others: Sequence[MemberValues]) -> RobustMean:
        own = self._running.piece(chunk, piece)
        values = [*(self._usable(other, own) for other in others), own]
        weights = [*(other.weight for other in others), self._own_weight]
        shares = [*(other.share for other in others), self._share]
        enough = sum(weight >= ONE_SAMPLE for weight in weights) >= robust_quorum(self._parts)
        if self._from_base and not enough and piece in self._usual:
            # At a synchronisation point. Nobody moves the others by more than a member usually does in a round.
            return bounded_mean(values, weights, [self._usual[piece][chunk] * share for share in shares])
        combined = trimmed_mean if self._options.robust is RobustMethod.TRIMMED else clipped_mean
        # Of the weights themselves, and not of how far they have moved, nobody's are larger since it trains faster.
        return combined(values, weights, shares if self._from_base else None)

    def _usable(self, other: MemberValues, own: Tensor) -> Tensor:
        """Return another member's values, (n,) in the dtype of `own`; NaN, which is left out, in place of what cannot be used."""
        if other.dtype == self.dtype and 0 <= other.weight <= self._options.most_samples:
            with contextlib.suppress(MalformedMessageError):
                return decode(self._codec, other.buffer, own.numel(), own.dtype).to(own.dtype)
        return torch.full_like(own, math.nan)

    def _beliefs(self, piece: int, others: Sequence[MemberValues]) -> list[float]:
        """Return, by chunk, how far a mean of this piece is believed to be from the last one, by all members' norms.

        A robust mean of movements per share is hardly larger than those of the second fastest member, whatever one member claims. One
        that missed rounds knows an older mean than the others, and has moved as far from it as they have.
        """
        own = self._norms[piece]
        usable = [other for other in others if len(other.norms) == self._parts and all(norm >= 0 for norm in other.norms)]
        alone = not self._learn(piece, usable) and piece in self._usual
        shares = [self._share, *(other.share for other in others)]
        pace, fastest = sum(share * share for share in shares) / sum(shares), max(shares)
        believed = []
        for chunk in range(self._parts):
            rates = sorted([own[chunk] / self._share, *(other.norms[chunk] / other.share for other in usable)])
            bounded = fastest * self._usual[piece][chunk] if alone else 0.0
            slack = 0.0 if self._from_base else ROUNDING * self._size(chunk, piece)
            believed.append(TRUSTED * max(own[chunk], pace * rates[-2:][0], bounded) + slack)
        return believed

    def _learn(self, piece: int, others: Sequence[MemberValues]) -> bool:
        """Keep how far members usually move, and return True, if enough of them have."""
        busy = [(other.norms, other.share) for other in others if other.weight >= ONE_SAMPLE]
        busy += [(tuple(self._norms[piece]), self._share)] if self._own_weight >= ONE_SAMPLE else []
        if len(busy) < robust_quorum(self._parts):
            return False
        if self._base is not None:
            self._usual[piece] = [statistics.median_low(norms[chunk] / share for norms, share in busy) for chunk in range(self._parts)]
        return True

    def _distance(self, chunk: int, piece: int) -> float:
        """Return how far what is in the buffer is from the last mean; 0 if there is none."""
        if self._base is None:
            return 0.0
        values = self._running.piece(chunk, piece)
        if not self._from_base:
            begin = values.storage_offset()
            values = values - self._base[begin : begin + values.numel()]
        return float(torch.linalg.vector_norm(values))

    def _size(self, chunk: int, piece: int) -> float:
        return float(torch.linalg.vector_norm(self._running.piece(chunk, piece)))
