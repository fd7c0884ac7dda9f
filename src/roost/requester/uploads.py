"""Takes the parts of checkpoints that nodes upload: whole tensors, and pieces of those that are too large for one message."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from roost import messages as m
from roost.checkpoint.writer import CheckpointWriter
from roost.errors import CheckpointError, ForbiddenError, MalformedMessageError
from roost.pipeline.tensor_bytes import from_buffer
from roost.requester.access import Access
from roost.transport.interface import Buffer
from roost.types import TensorSpec
from roost.weights.source import TensorSource

STATE_BYTES_PER_ELEMENT = 8
"""The most that one tensor of optimizer state takes per element of its parameter: no optimizer keeps more than float64 of its shape."""
SMALL_STATE_BYTES = 4096
"""What it may take in any case, such as a step count of a scalar."""


@dataclass(kw_only=True, slots=True)
class _Unfinished:
    """A tensor of which the first pieces have come."""

    checkpoint: str
    attempt: int
    spec: TensorSpec
    optimizer: bool
    data: bytearray
    """As long as the whole tensor; memory that nothing was written to is not taken yet."""
    received: int = 0


class UploadReceiver:
    """Checks what nodes upload against the model, joins pieces, and gives the tensors to the writer. Used by one thread at a time."""

    def __init__(self, weights: TensorSource, writer: CheckpointWriter) -> None:
        self._weights = weights
        self._known = frozenset(weights.names)
        self._writer = writer
        self._unfinished: dict[tuple[str, int], _Unfinished] = {}
        """By node and segment: a node sends the tensors of a segment one after the other."""

    def take(self, node_id: str, message: m.UploadState, buffers: Sequence[Buffer], access: Access) -> None:
        """Take one message of `node_id`.

        Raises ForbiddenError for tensors that are not of its stage, MalformedMessageError for sizes that cannot be, or pieces out of
        order, each naming the node; CheckpointError if the part cannot be written.
        """
        _check_access(node_id, message, access)
        announced = len(message.tensors) + len(message.optimizer) + len(message.pieces)
        if announced != len(buffers):
            raise MalformedMessageError(f"node {node_id} announced {announced} tensors and sent {len(buffers)}")
        if message.attempt < 0 or message.part < 0:
            raise MalformedMessageError(f"node {node_id} uploads part {message.part} of attempt {message.attempt}")
        rest = iter(buffers)
        tensors = {spec.name: self._whole(node_id, spec, next(rest), optimizer=False) for spec in message.tensors}
        optimizer = {spec.name: self._whole(node_id, spec, next(rest), optimizer=True) for spec in message.optimizer}
        for piece, tensor in self._joined(node_id, message, rest):
            (optimizer if piece.optimizer else tensors)[piece.spec.name] = tensor
        self._writer.add(message.checkpoint, message.segment, tensors, optimizer, attempt=message.attempt, part=message.part)

    def check_finished(self, checkpoint: str, attempt: int) -> None:
        """Raise CheckpointError if of some tensor of the checkpoint not all pieces have come; forget what is left of other attempts."""
        self._unfinished = {key: one for key, one in self._unfinished.items() if (one.checkpoint, one.attempt) == (checkpoint, attempt)}
        for (node_id, _), one in self._unfinished.items():
            raise CheckpointError(
                f"checkpoint {checkpoint!r}: node {node_id} sent {one.received} of the {one.spec.nbytes} bytes of tensor {one.spec.name!r}",
                hint="Read the log of that node, and use the checkpoint before it.",
            )

    def _whole(self, node_id: str, spec: TensorSpec, buffer: Buffer, *, optimizer: bool) -> Tensor:
        self._check(node_id, spec, optimizer=optimizer)
        return from_buffer(spec, buffer)

    def _joined(self, node_id: str, message: m.UploadState, buffers: Iterator[Buffer]) -> Iterator[tuple[m.TensorPiece, Tensor]]:
        """Yield the tensors that the pieces of a message complete."""
        key = (node_id, message.segment)
        for piece in message.pieces:
            buffer = memoryview(next(buffers)).cast("B")
            if piece.start == 0:
                self._check(node_id, piece.spec, optimizer=piece.optimizer)
                self._unfinished[key] = _Unfinished(
                    checkpoint=message.checkpoint,
                    attempt=message.attempt,
                    spec=piece.spec,
                    optimizer=piece.optimizer,
                    data=bytearray(piece.spec.nbytes),
                )
            one = self._unfinished.get(key)
            expected = None if one is None else (one.checkpoint, one.attempt, one.spec, one.optimizer, one.received)
            if one is None or expected != (message.checkpoint, message.attempt, piece.spec, piece.optimizer, piece.start):
                raise MalformedMessageError(
                    f"node {node_id} sent a piece of tensor {piece.spec.name[:80]!r} from byte {piece.start}, out of order"
                )
            stop = one.received + buffer.nbytes
            if buffer.nbytes == 0 or stop > piece.spec.nbytes:
                raise MalformedMessageError(f"node {node_id} sent a piece of {buffer.nbytes} bytes of tensor {piece.spec.name[:80]!r}")
            one.data[one.received : stop] = buffer
            one.received = stop
            if stop == piece.spec.nbytes:
                del self._unfinished[key]
                yield piece, from_buffer(piece.spec, one.data)

    def _check(self, node_id: str, spec: TensorSpec, *, optimizer: bool) -> None:
        """Raise MalformedMessageError unless the model has such a tensor, or can have such optimizer state."""
        name = spec.name.rpartition("/")[0] if optimizer else spec.name
        if name not in self._known or spec.order:
            raise MalformedMessageError(f"node {node_id} uploads {spec.name[:80]!r}, which the model does not have")
        own = self._weights.spec(name)
        if not optimizer and (spec.dtype, spec.shape) != (own.dtype, own.shape):
            raise MalformedMessageError(
                f"node {node_id} uploads {spec.name!r} as {spec.dtype} {list(spec.shape)}, the model says {own.dtype} {list(own.shape)}"
            )
        most = max(SMALL_STATE_BYTES, STATE_BYTES_PER_ELEMENT * math.prod(own.shape))
        if optimizer and spec.nbytes > most:
            raise MalformedMessageError(f"node {node_id} uploads {spec.nbytes} bytes of state {spec.name!r}, at most {most} can be right")


def _check_access(node_id: str, message: m.UploadState, access: Access) -> None:
    """Raise ForbiddenError, naming the node, if it uploads what is not its own."""
    if message.segment not in access.segments:
        raise ForbiddenError(f"node {node_id} uploads to segment {message.segment}, which is not its own")
    names = [spec.name for spec in message.tensors] + [spec.name.rpartition("/")[0] for spec in message.optimizer]
    names += [piece.spec.name.rpartition("/")[0] if piece.optimizer else piece.spec.name for piece in message.pieces]
    foreign = next((name for name in names if name not in access.uploads), None)
    if foreign is not None:
        raise ForbiddenError(f"node {node_id} uploads tensor {foreign[:80]!r}, which its stage does not own")
