"""One member's values in the rounds of one ring: what is sent, what becomes of what arrives, and what is kept between rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from roost.averaging.codecs import Bytes, decode, encode, root_mean_square
from roost.averaging.outer_step import OuterStep
from roost.averaging.ring_buffer import SegmentBuffer
from roost.config import RobustMethod, TensorCodec
from roost.errors import NonFiniteLossError, ProtocolError

ABSURD = 1000.0
"""A mean whose values are so many times as large as a member's own, and as 1, is no mean of clusters that train the same model."""


@dataclass(frozen=True, kw_only=True)
class AveragingOptions:
    """How the members of a ring average: the same for all of them."""

    codec: TensorCodec = TensorCodec.NONE
    """Of background rounds."""
    outer_learning_rate: float = 0.0
    """Of the outer optimizer; 0: the average itself is taken."""
    outer_momentum: float = 0.0
    """Of the outer optimizer."""
    parameters: frozenset[str] = frozenset()
    """The tensors that the outer optimizer steps; the others (running statistics) take the average."""
    robust: RobustMethod = RobustMethod.NONE
    """How rings of three or more guard themselves against a bad member."""
    most_samples: float = math.inf
    """Samples that are believed to be behind a chunk."""

    @property
    def differences(self) -> bool:
        """True if rounds average differences to the last mean: they are small, so they can be sent in few bits, or be clipped."""
        return self.codec is not TensorCodec.NONE or self.outer_learning_rate > 0 or self.robust is not RobustMethod.NONE


class SegmentAverage:
    """A segment's values in a round, cut into `parts` chunks of `pieces` each.

    Between rounds it keeps the last mean (the base) if differences to it are averaged, what int8 has rounded away, and the
    outer momentum. Its methods may run on other threads than the event loop's, at the same time only for different pieces.
    """

    def __init__(self, *, parts: int, pieces: int, options: AveragingOptions) -> None:
        self._parts = parts
        self._pieces = pieces
        self._options = options
        outer = options.outer_learning_rate > 0
        self._outer = OuterStep(learning_rate=options.outer_learning_rate, momentum=options.outer_momentum) if outer else None
        self._base: Tensor | None = None
        self._lost: Tensor | None = None  # what int8 has rounded away, in the units it was sent in
        self._memory: Tensor | None = None
        self._buffer: SegmentBuffer | None = None
        self._codec = TensorCodec.NONE
        self._from_base = False
        self._weight = 0.0
        self._filled: dict[int, float] = {}  # chunks that hold values by now, with the root mean square of this member's own
        self._encoded: dict[tuple[int, int], Bytes] = {}  # means of this round as they travel

    @property
    def running(self) -> bool:
        """True between `begin` and `end`."""
        return self._buffer is not None

    @property
    def dtype(self) -> str:
        """What this round sums in: 'float32' or 'float64'."""
        return self._running.dtype

    @property
    def _running(self) -> SegmentBuffer:
        assert self._buffer is not None, "a chunk is handled only after the snapshot"
        return self._buffer

    def set_base(self, tensors: Mapping[str, Tensor]) -> None:
        """Make `tensors`, equal on all members, what differences are taken to."""
        buffer = SegmentBuffer(tensors, self._parts)
        for chunk in range(self._parts):
            buffer.fill(chunk)
        self._base = buffer.flat

    def begin(self, snapshot: Mapping[str, Tensor], weight: float, *, from_base: bool, codec: TensorCodec, reuse: bool) -> None:
        """Start a round with this member's `snapshot`, which must not change before `end`; `weight` are the samples behind it.

        `from_base`: average differences to the base. `reuse`: nothing of the last round waits to be sent, so its memory may be
        written. Raises ProtocolError if there is no base or a tensor is not float.
        """
        buffer = SegmentBuffer(snapshot, self._parts, self._pieces, self._memory if reuse else None)
        if from_base and self._base is None:
            raise ProtocolError("a round averages differences, but this member has no last mean")
        if codec is TensorCodec.INT8 and self._lost is None:
            self._lost = torch.zeros_like(buffer.flat)
        self._memory, self._buffer = buffer.flat, buffer
        self._codec, self._from_base = codec, from_base
        self._weight = weight
        self._filled.clear()
        self._encoded.clear()

    def prepare(self, position: int) -> None:
        """Get ready what the member at this position sends first; the other chunks are copied when they are needed."""
        self.fill(position)

    def fill(self, chunk: int) -> None:
        """Copy this member's values of a chunk, times their weight, unless that has been done. Raises NonFiniteLossError."""
        if chunk in self._filled:
            return
        values = self._running.fill(chunk)
        own = root_mean_square(values)
        if not math.isfinite(own):
            raise NonFiniteLossError("weights of this node are not finite: they are not averaged")
        if self._from_base and self._base is not None:
            begin = values.storage_offset()
            values.sub_(self._base[begin : begin + values.numel()])
        values.mul_(self._weight)
        self._filled[chunk] = own

    def add(self, chunk: int, piece: int, buffer: Bytes) -> None:
        """Add a received partial sum. Raises MalformedMessageError, or NonFiniteLossError if it is this member's own fault."""
        self.fill(chunk)
        self._running.add(chunk, buffer, piece, self._codec)

    def store(self, chunk: int, piece: int, buffer: Bytes) -> None:
        """Take a received mean, which is passed on as it came. Raises MalformedMessageError."""
        self._running.store(chunk, buffer, piece, self._codec, largest=self._largest(chunk))
        if self._codec is not TensorCodec.NONE:
            self._encoded[chunk, piece] = buffer

    def scale(self, chunk: int, piece: int, total_weight: float) -> None:
        """Make a complete sum the mean; this member takes what the others will decode. Raises ProtocolError, MalformedMessageError."""
        self._running.scale(chunk, total_weight, piece, largest=self._largest(chunk))
        self._encode_mean(chunk, piece)

    def outgoing(self, chunk: int, piece: int) -> Bytes:
        """Return the bytes of a piece as it is now; without a codec they are the memory of the round itself."""
        kept = self._encoded.get((chunk, piece))
        if kept is not None:
            return kept
        values = self._running.piece(chunk, piece)
        return _bytes(values) if self._codec is TensorCodec.NONE else self._encode(values)[0]

    def norms(self, chunk: int, piece: int) -> tuple[float, ...]:
        """Return what travels with a piece besides its bytes: nothing, in a ring of sums."""
        return ()

    def finish(self) -> dict[str, Tensor]:
        """Return what the weights should become, of a round whose pieces are all means; the tensors are only lent.

        What waits to be sent does not change.
        """
        buffer = self._running
        if not self._options.differences:
            return buffer.unflatten()
        if self._base is None or not self._from_base:
            self._base = buffer.flat.clone() if self._base is None else self._base.copy_(buffer.flat)
            self._lost = None
            if self._outer is not None:
                self._outer.reset()
        elif self._outer is not None:
            stepped = [where for name, where in buffer.slices().items() if name in self._options.parameters]
            self._outer.apply(self._base, buffer.flat, stepped)
        else:
            self._base.add_(buffer.flat)
        return buffer.unflatten(self._base)

    def end(self, *, finished: bool) -> None:
        """Forget the round; of one that was given up, also what its rounding has lost."""
        self._buffer = None
        self._encoded.clear()
        if not finished:
            self._lost = None

    def _largest(self, chunk: int) -> float:
        """Return the largest root mean square that a mean of this chunk, or of differences to the base, is believed to have."""
        return ABSURD * max(1.0, self._filled.get(chunk, 0.0))

    def _encode_mean(self, chunk: int, piece: int) -> None:
        """Keep a mean as it travels, and take what the others will decode."""
        if self._codec is not TensorCodec.NONE:
            values = self._running.piece(chunk, piece)
            encoded, decoded = self._encode(values)
            values.copy_(decoded)
            self._encoded[chunk, piece] = encoded

    def _encode(self, values: Tensor) -> tuple[Bytes, Tensor]:
        """Return the bytes of `values` and what they decode to; int8 adds what was lost the last time and keeps what is lost now."""
        if self._codec is not TensorCodec.INT8:
            encoded = encode(self._codec, values)
            return _bytes(encoded), decode(self._codec, _bytes(encoded), values.numel(), values.dtype)
        lost = self._lost_of(values)
        wanted = values + lost
        encoded = encode(self._codec, wanted)
        decoded = decode(self._codec, _bytes(encoded), values.numel(), values.dtype)
        torch.sub(wanted, decoded, out=lost)
        return _bytes(encoded), decoded

    def _lost_of(self, values: Tensor) -> Tensor:
        """Return the part of what was lost that belongs to `values`, a part of the buffer."""
        assert self._lost is not None, "begin() makes it"
        begin = values.storage_offset()
        return self._lost[begin : begin + values.numel()]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
