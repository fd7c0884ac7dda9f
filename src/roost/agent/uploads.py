"""Uploads the state of a segment to the requester in messages of bounded size."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from roost import messages as m
from roost.pipeline.tensor_bytes import spec_of, to_buffer
from roost.transport.interface import Buffer, Lane, Transport
from roost.types import Peer

UPLOAD_BYTES = 16 << 20
"""The most tensor bytes in one message: neither side holds more at once beside the state itself."""
UPLOAD_TENSORS = 4096
"""The most tensors in one message: their specs are its header."""
UPLOAD_DEADLINE_S = 600.0
"""Of one message, as long as its receiver waits for it (TransportConfig.message_s): slow lines take long. A requester that is away is
noticed by the connection to it."""


async def upload_state(
    transport: Transport,
    requester: Peer,
    *,
    job_id: str,
    checkpoint: str,
    segment: int,
    tensors: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    attempt: int = 0,
    most_bytes: int = UPLOAD_BYTES,
    deadline_s: float = UPLOAD_DEADLINE_S,
    line_share: float = 1.0,
    lane: Lane = Lane.TRAINING,
    sent: Callable[[], None] = lambda: None,
) -> None:
    """Send model tensors by name, and optimizer state as 'PARAMETER/KEY', of one segment to attempt `attempt` of a checkpoint.

    Each message has at most `most_bytes` of tensors and `deadline_s` seconds; a tensor that is larger goes in pieces. The tensors must not
    change meanwhile. Messages are on the line for about `line_share` of the time; `sent` is called after each. Upload the segments of a
    node one after the other. Raises whatever RoostError the transport or the requester reports.
    """
    parts = _parts(tensors, optimizer, most_bytes)
    for number, part in enumerate(parts):
        message = m.UploadState(
            job_id=job_id,
            checkpoint=checkpoint,
            segment=segment,
            tensors=tuple(spec_of(name, tensor) for name, tensor in part.tensors.items()),
            optimizer=tuple(spec_of(name, tensor) for name, tensor in part.optimizer.items()),
            attempt=attempt,
            part=number,
            pieces=part.pieces,
        )
        began = time.monotonic()
        await transport.call(requester, message, part.buffers, lane=lane, deadline_s=deadline_s)
        sent()
        if line_share < 1:
            await asyncio.sleep((time.monotonic() - began) * (1 / line_share - 1))


class _Part:
    """What one message carries."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.optimizer: dict[str, Tensor] = {}
        self.pieces: tuple[m.TensorPiece, ...] = ()
        self.piece_buffers: list[Buffer] = []
        self.nbytes = 0

    @property
    def buffers(self) -> list[Buffer]:
        whole = [to_buffer(tensor) for tensor in (*self.tensors.values(), *self.optimizer.values())]
        return [*whole, *self.piece_buffers]

    def has_room(self, nbytes: int, most_bytes: int) -> bool:
        return self.nbytes + nbytes <= most_bytes and len(self.tensors) + len(self.optimizer) < UPLOAD_TENSORS


def _parts(tensors: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], most_bytes: int) -> Iterator[_Part]:
    """Yield the parts of a segment, one at least: the requester hears of a segment that holds nothing, too."""
    part = _Part()
    sent = False
    everything = [(False, *item) for item in tensors.items()] + [(True, *item) for item in optimizer.items()]
    for is_state, name, tensor in everything:
        if tensor.nbytes > most_bytes:
            yield from _pieces(name, tensor, is_state, most_bytes)
            sent = True
            continue
        if not part.has_room(tensor.nbytes, most_bytes):
            yield part
            part, sent = _Part(), True
        (part.optimizer if is_state else part.tensors)[name] = tensor
        part.nbytes += tensor.nbytes
    if part.tensors or part.optimizer or not sent:
        yield part


def _pieces(name: str, tensor: Tensor, is_state: bool, most_bytes: int) -> Iterator[_Part]:
    spec, whole = spec_of(name, tensor), to_buffer(tensor)
    for start in range(0, whole.nbytes, most_bytes):
        part = _Part()
        part.pieces = (m.TensorPiece(spec=spec, optimizer=is_state, start=start),)
        part.piece_buffers = [whole[start : start + most_bytes]]
        yield part
