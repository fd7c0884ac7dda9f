"""Messages and their buffers as frames, and back. Pure.

A message is one run of bytes: the length of its JSON and the number of its buffers (4 bytes each, big-endian), the JSON, the
sizes of the buffers (8 bytes each), and the buffers. The run is cut into frames; every message begins a frame of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from roost.codec import decode, encode
from roost.config import TransportConfig
from roost.errors import MalformedMessageError, MessageTooLargeError
from roost.messages import Message
from roost.transport.interface import Buffer, ReceivedBuffer

PREFIX = struct.Struct("!II")
"""Bytes of the JSON; number of buffers."""
SIZE = struct.Struct("!Q")
"""Bytes of one buffer."""
MAX_BUFFERS = 1 << 16
MAX_FRAME_BYTES = 3 << 20
"""The largest frame any peer may be configured to send (TransportConfig.frame_bytes has the same bound)."""
FIRST_ALLOCATION = 1 << 20
"""Bytes allocated for a buffer on the strength of its declared size alone."""


@dataclass(frozen=True, kw_only=True)
class PackedMessage:
    """A message that is ready to be cut into frames."""

    kind: str
    head: bytes
    views: tuple[memoryview, ...]
    nbytes: int
    """Bytes on the wire, head included."""

    def frames(self, frame_bytes: int) -> Iterator[bytes]:
        """Yield the frames, each of at most `frame_bytes`; each is copied from the buffers only when it is asked for."""
        pieces: list[Buffer] = []
        room = frame_bytes
        for view in (memoryview(self.head), *self.views):
            taken = 0
            while taken < len(view):
                piece = view[taken : taken + room]
                pieces.append(piece)
                taken += len(piece)
                room -= len(piece)
                if room == 0:
                    yield b"".join(pieces)
                    pieces, room = [], frame_bytes
        if pieces:
            yield b"".join(pieces)


def pack(message: Message, buffers: Sequence[Buffer], limits: TransportConfig) -> PackedMessage:
    """Return `message` with its buffers, ready to be sent; the buffers are not copied.

    Raises MessageTooLargeError over the sender's own limits, MalformedMessageError for a number JSON cannot carry.
    """
    kind = type(message).__name__
    try:
        text = encode(message)
    except ValueError as error:
        raise MalformedMessageError(f"{kind} cannot be sent: {error}", hint="A number in it is not finite.") from error
    if len(buffers) > MAX_BUFFERS:
        raise MessageTooLargeError(f"{kind} has {len(buffers)} buffers, at most {MAX_BUFFERS} fit")
    if len(text) > limits.max_header_bytes:
        raise MessageTooLargeError(f"{kind} has a header of {len(text)} bytes, at most {limits.max_header_bytes} are allowed")
    views = tuple(_flat(buffer) for buffer in buffers)
    data = sum(len(view) for view in views)
    if data > limits.max_message_bytes:
        raise MessageTooLargeError(f"{kind} carries {data} bytes, at most {limits.max_message_bytes} are allowed")
    head = PREFIX.pack(len(text), len(views)) + text + struct.pack(f"!{len(views)}Q", *(len(view) for view in views))
    return PackedMessage(kind=kind, head=head, views=views, nbytes=len(head) + data)


def _flat(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def accept_all(message: Message) -> None:
    """Refuse nothing."""


class Assembler:
    """Puts frames back together, one message after the other. After it has raised, it must not be used again."""

    def __init__(self, limits: TransportConfig, accept: Callable[[Message], None] = accept_all) -> None:
        """`accept` sees a message as soon as its header is complete, and raises to refuse it before its data is taken."""
        self._limits = limits
        self._accept = accept
        self._head = bytearray()
        self._head_bytes = PREFIX.size
        self._message: Message | None = None
        self._sizes: tuple[int, ...] = ()
        self._buffers: list[ReceivedBuffer] = []
        self._growing = bytearray()
        self._filled = 0

    @property
    def idle(self) -> bool:
        """True between two messages."""
        return self._message is None and not self._head

    def feed(self, frame: bytes) -> tuple[Message, list[ReceivedBuffer]] | None:
        """Take one frame; return the message that it completes, or None.

        Raises MalformedMessageError, MessageTooLargeError, or what `accept` raises. No limit is checked later than the
        allocation that it guards, and at most about three times the bytes really received are ever allocated.
        """
        if not frame:
            raise MalformedMessageError("an empty frame")
        if len(frame) > MAX_FRAME_BYTES:
            raise MessageTooLargeError(f"a frame of {len(frame)} bytes, at most {MAX_FRAME_BYTES} are allowed")
        view = memoryview(frame)
        if self._message is None:
            view = self._feed_head(view)
            if self._message is None:
                return None
        self._feed_data(view)
        if len(self._buffers) < len(self._sizes):
            return None
        complete = (self._message, self._buffers)
        self._head, self._head_bytes = bytearray(), PREFIX.size
        self._message, self._sizes, self._buffers = None, (), []
        return complete

    def _feed_head(self, view: memoryview) -> memoryview:
        if len(self._head) < PREFIX.size:
            view = self._take_head(view)
            if len(self._head) < PREFIX.size:
                return view
            text, count = PREFIX.unpack(self._head)
            if text > self._limits.max_header_bytes:
                raise MessageTooLargeError(f"a header of {text} bytes, at most {self._limits.max_header_bytes} are allowed")
            if count > MAX_BUFFERS:
                raise MessageTooLargeError(f"a message with {count} buffers, at most {MAX_BUFFERS} are allowed")
            self._head_bytes = PREFIX.size + text + SIZE.size * count
        view = self._take_head(view)
        if len(self._head) == self._head_bytes:
            self._parse_head()
        return view

    def _take_head(self, view: memoryview) -> memoryview:
        wanted = self._head_bytes - len(self._head)
        self._head += view[:wanted]
        return view[wanted:]

    def _parse_head(self) -> None:
        text, count = PREFIX.unpack_from(self._head)
        sizes: tuple[int, ...] = struct.unpack_from(f"!{count}Q", self._head, PREFIX.size + text)
        total = sum(sizes)
        if total > self._limits.max_message_bytes:
            raise MessageTooLargeError(f"a message of {total} bytes, at most {self._limits.max_message_bytes} are allowed")
        message = decode(bytes(self._head[PREFIX.size : PREFIX.size + text]))
        if total > message.max_buffer_bytes:
            what = f"{type(message).__name__} came with {total} bytes beside it, at most {message.max_buffer_bytes} are allowed"
            raise MessageTooLargeError(what)
        self._accept(message)
        self._message, self._sizes = message, sizes
        self._skip_empty()

    def _skip_empty(self) -> None:
        while len(self._buffers) < len(self._sizes) and self._sizes[len(self._buffers)] == 0:
            self._buffers.append(bytearray())

    def _feed_data(self, view: memoryview) -> None:
        while view:
            if len(self._buffers) == len(self._sizes):
                raise MalformedMessageError(f"{len(view)} bytes follow the end of a message")
            size = self._sizes[len(self._buffers)]
            piece = view[: size - self._filled]
            self._append(piece, size)
            view = view[len(piece) :]
            if self._filled == size:
                self._buffers.append(self._growing)
                self._growing, self._filled = bytearray(), 0
                self._skip_empty()

    def _append(self, piece: memoryview, size: int) -> None:
        needed = self._filled + len(piece)
        if needed > len(self._growing):
            # Doubling keeps the copies below the bytes received; a declared size is only believed up to the first allocation.
            larger = bytearray(min(size, max(needed, 2 * len(self._growing), FIRST_ALLOCATION)))
            memoryview(larger)[: self._filled] = memoryview(self._growing)[: self._filled]
            self._growing = larger
        # Through a view, since assigning to a slice of the bytearray itself would copy the piece first.
        memoryview(self._growing)[self._filled : needed] = piece
        self._filled = needed
