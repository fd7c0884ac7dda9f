"""What every transport does, whatever carries the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from roost.errors import RoostError
from roost.messages import Message
from roost.types import Peer, Role

Buffer = bytes | bytearray | memoryview
"""What may be sent beside a message: anything contiguous."""
ReceivedBuffer = bytearray | memoryview
"""What arrives beside a message: always writable and owned by the receiver, so `torch.frombuffer` needs no copy."""


class Lane(StrEnum):
    """Separate ordered streams to the same peer, so that large averaging chunks do not hold up activations."""

    TRAINING = "training"
    AVERAGING = "averaging"
    """Gives way to the other one; checkpoints that are uploaded beside training take it, too."""


@dataclass(frozen=True, kw_only=True)
class Sender:
    """Who sent a message, as its verified certificate says; nothing in a message can change it."""

    peer_id: str
    role: Role


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer to a call; never a `Failed`, which is raised instead."""

    message: Message
    buffers: list[ReceivedBuffer]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What an endpoint has carried since it was made, replies included; counts only grow."""

    bytes_sent: int
    bytes_received: int
    messages_sent: int
    messages_received: int


class Handler(Protocol):
    """Receives what peers send.

    The role of the sender has been checked against the message's `senders`. A handler that has begun is not cancelled
    when the peer goes away or stops waiting, only when the transport stops.
    """

    async def on_message(self, sender: Sender, message: Message, buffers: list[ReceivedBuffer]) -> None:
        """Take a one-way message. Messages of one sender and lane come one after the other; time spent here slows that sender.

        A RoostError raised here is logged and drops the message. Any other exception is logged with its traceback and
        closes the stream, so that the sender's next send raises.
        """

    async def on_call(self, sender: Sender, message: Message, buffers: list[ReceivedBuffer]) -> tuple[Message, Sequence[Buffer]]:
        """Return the reply to a call; its buffers must not change until they are sent. Calls run concurrently.

        A RoostError raised here is raised again at the caller, as its own class.
        """


StreamWatcher = Callable[[str, Lane, RoostError], None]
"""Is told the peer, the lane, and why a stream to it broke."""


class Transport(Protocol):
    """An endpoint: sends messages to peers, and gives what it receives to its handler."""

    @property
    def peer_id(self) -> str:
        """Who this endpoint is."""

    @property
    def address(self) -> str:
        """Where peers reach it; known after `start`."""

    @property
    def traffic(self) -> Traffic:
        """What it has carried so far."""

    def watch_streams(self, watcher: StreamWatcher) -> None:
        """Tell `watcher` when a stream that was sent on breaks while nobody sends on it: what was taken last may be lost.

        Without it a sender that has nothing more to send would never know. Who is sending when it breaks is told by the error that
        is raised there, and the watcher is not told as well. Nor is it when this endpoint forgets the peer or stops.
        """

    async def start(self, handler: Handler) -> None:
        """Begin to listen and to hand what arrives to `handler`."""

    async def stop(self) -> None:
        """Deliver what was taken, as far as peers accept it promptly; close everything. May be called twice."""

    async def send(
        self,
        peer: Peer,
        message: Message,
        buffers: Sequence[Buffer] = (),
        *,
        lane: Lane = Lane.TRAINING,
        deadline_s: float | None = None,
    ) -> None:
        """Send a one-way message; returns when the network took it, which is not yet when the peer handled it.

        Messages of one peer and lane arrive in the order of the calls. When a stream breaks, the send that notices raises
        once, and the next one connects again: what was taken before may be lost.

        Raises PeerUnreachableError, DeadlineError, MessageTooLargeError, or what the peer closed the stream with
        (ForbiddenError, MalformedMessageError, MessageTooLargeError, ProtocolError).
        """

    async def call(
        self,
        peer: Peer,
        message: Message,
        buffers: Sequence[Buffer] = (),
        *,
        lane: Lane = Lane.TRAINING,
        deadline_s: float | None = None,
    ) -> Reply:
        """Send a message and return its reply; a `Failed` reply is raised as its own error.

        On the averaging lane the message gives way to what else is sent; its reply does not.

        Raises PeerUnreachableError, DeadlineError, MessageTooLargeError, and whatever RoostError the peer reports.
        """

    async def forget(self, peer_id: str) -> None:
        """Close the streams to a peer; a later send connects again."""
