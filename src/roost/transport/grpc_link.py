"""The dialling side of gRPC: one connection to one peer for one lane, its long-lived send stream, and calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn

import grpc
import grpc.aio

from roost.config import TransportConfig
from roost.errors import MalformedMessageError, PeerUnreachableError, RoostError
from roost.messages import Failed, Message
from roost.transport.credentials import Credentials, dns_name
from roost.transport.dispatch import error_from
from roost.transport.framing import Assembler, PackedMessage
from roost.transport.grpc_options import CALL_METHOD, SEND_METHOD, asked_frame_bytes, channel_options, frame_bytes_for
from roost.transport.interface import Lane, ReceivedBuffer, Reply
from roost.transport.meter import Meter
from roost.types import Peer

RPC_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""What grpc raises when a call has ended under the one who writes to it or reads from it."""

logger = logging.getLogger(__name__)

REASON_S = 1.0
"""How long a send that failed waits to hear from the peer why."""
FLUSH_S = 1.0
"""How long a link that is closed waits for its peer to take what was sent."""


def open_channel(peer: Peer, credentials: Credentials, config: TransportConfig) -> grpc.aio.Channel:
    """Return a channel that only ever talks to the holder of the certificate for `peer.peer_id`; it connects when it is used."""
    tls = grpc.ssl_channel_credentials(
        root_certificates=credentials.authority_pem,
        private_key=credentials.key_pem,
        certificate_chain=credentials.certificate_pem,
    )
    options = [*channel_options(config), ("grpc.ssl_target_name_override", dns_name(peer.peer_id))]
    return grpc.aio.secure_channel(f"dns:///{peer.address}", tls, options=options)


class Link:
    """A connection to a peer for one lane. Once it has broken it stays broken, and its owner makes a new one."""

    def __init__(
        self,
        own_id: str,
        peer: Peer,
        lane: Lane,
        channel: grpc.aio.Channel,
        config: TransportConfig,
        meter: Meter,
        *,
        on_break: Callable[[Link, Lane, RoostError], None],
    ) -> None:
        """`on_break` is told when the stream breaks while nobody sends on it: what the peer was sent last may be lost."""
        self.peer = peer
        self._on_break = on_break
        self._own_id = own_id
        self._lane = lane
        self._channel = channel
        self._config = config
        self._meter = meter
        self._lock = asyncio.Lock()
        self._senders = 0
        self._stream: SendStream | None = None
        self._frame_bytes = config.frame_bytes
        self.broken: RoostError | None = None
        """Why the connection cannot be used any more."""

    async def send(self, packed: PackedMessage) -> None:
        """Write one message to the stream, after those that were sent before. Raises what `Transport.send` does."""
        self._senders += 1
        try:
            with _cancellation_kept():
                async with self._lock:
                    await self._send(packed)
        finally:
            self._senders -= 1
            # It may have ended under one that gave up waiting for its turn.
            if self._stream is not None and self._stream.heard:
                self._stream_ended(self._stream)

    async def call(self, packed: PackedMessage) -> Reply:
        """Make one call and return its reply. Raises what `Transport.call` does."""
        with _cancellation_kept():
            return await self._call(packed)

    async def _call(self, packed: PackedMessage) -> Reply:
        if self.broken is not None:
            raise self.broken
        rpc = self._channel.stream_stream(CALL_METHOD)(metadata=asked_frame_bytes(self._config))
        # It reads from the start, since a peer may refuse a message before all of it has been written.
        reading = asyncio.get_running_loop().create_task(self._read_reply(rpc))
        try:
            # If the peer has ended the call, what it replied says why.
            with contextlib.suppress(*RPC_ERRORS):
                with self._meter.message(self._lane):
                    for frame in packed.frames(self._frame_bytes):
                        async with self._meter.frame(len(frame), self._lane):
                            await rpc.write(frame)
                await rpc.done_writing()
                self._meter.message_sent()
            reply = await reading
        except RPC_ERRORS as error:
            raise self._unreachable(_describe(error)) from error
        except asyncio.CancelledError as error:
            self._raise_if_cut(error)
        finally:
            reading.cancel()
            rpc.cancel()
        if isinstance(reply.message, Failed):
            raise error_from(reply.message)
        return reply

    def close(self) -> Coroutine[Any, Any, None]:
        """Let nobody use it from now on; return what ends the stream, waits shortly until the peer has taken everything, and disconnects.

        If a call had found the connection broken, `on_break` is told of a stream of which the peer has not taken everything.
        """
        broken, stream = self.broken, self._stream
        self._stream = None
        if broken is None:
            self.broken = PeerUnreachableError(f"{self._own_id} closed its connection to {self.peer.peer_id}")
        return self._end(stream, broken if self._senders == 0 else None)

    async def _end(self, stream: SendStream | None, broken: RoostError | None) -> None:
        if stream is not None:
            taken = False
            with contextlib.suppress(*RPC_ERRORS):
                taken = await stream.finish(FLUSH_S)
            if broken is not None and not taken:
                self._on_break(self, self._lane, broken)
        await self._channel.close()

    async def _send(self, packed: PackedMessage) -> None:
        if self.broken is not None:
            raise self.broken
        opening = self._stream is None
        stream = self._stream = self._stream or SendStream(self._channel, on_end=self._stream_ended)
        whole = False
        try:
            if opening:
                # The peer answers at once when it has accepted us: so a refusal shows here and not after some messages.
                self._frame_bytes = frame_bytes_for(await stream.rpc.initial_metadata(), self._config.frame_bytes)
                logger.info("stream_opened node=%s peer=%s lane=%s", self._own_id, self.peer.peer_id, self._lane)
            if stream.ended:
                raise asyncio.InvalidStateError("the stream has ended")
            with self._meter.message(self._lane):
                for frame in packed.frames(self._frame_bytes):
                    async with self._meter.frame(len(frame), self._lane):
                        await stream.rpc.write(frame)
            if stream.ended:
                raise asyncio.InvalidStateError("the stream has ended")
            whole = True
        except RPC_ERRORS as error:
            await stream.listen(REASON_S)
            raise self._reason(stream) from error
        except asyncio.CancelledError as error:
            self._raise_if_cut(error)
        finally:
            # A message that was cut short leaves the stream unusable: the peer sees it end.
            if not whole:
                stream.cancel()
                self._stream = None
        self._meter.message_sent()

    def _stream_ended(self, stream: SendStream) -> None:
        """The peer or the network has ended a stream; whoever is sending on it, or about to, hears it from that."""
        if stream is not self._stream or self._senders > 0:
            return
        self._stream = None
        reason = self._reason(stream)
        stream.cancel()
        self._on_break(self, self._lane, reason)

    def _reason(self, stream: SendStream) -> RoostError:
        """Return why the peer, or the network, ended the stream."""
        try:
            frame = stream.last_words()
            complete = Assembler(self._config).feed(frame) if frame else None
        except RPC_ERRORS as error:
            return self._unreachable(_describe(error))
        except RoostError as error:
            return error
        if complete is None or not isinstance(complete[0], Failed):
            return self._unreachable("the stream has ended")
        reported = error_from(complete[0])
        if isinstance(reported, PeerUnreachableError):
            self.broken = reported
        return reported

    async def _read_reply(self, rpc: Any) -> Reply:
        assembler = Assembler(self._config)
        complete: tuple[Message, list[ReceivedBuffer]] | None = None
        while complete is None:
            frame = await rpc.read()
            if frame is grpc.aio.EOF:
                raise asyncio.InvalidStateError("the call ended without a reply")
            await self._meter.receiving(len(frame))
            complete = assembler.feed(frame)
        self._meter.message_received()
        await asyncio.sleep(self._config.latency_s)
        # The call ends cleanly if its end is read, and the reply counts however it ends.
        with contextlib.suppress(*RPC_ERRORS):
            if await rpc.read() is not grpc.aio.EOF:
                raise MalformedMessageError(f"{self.peer.peer_id} sent more than one reply to a call")
        return Reply(message=complete[0], buffers=complete[1])

    def _raise_if_cut(self, error: asyncio.CancelledError) -> NoReturn:
        """Raise `error` again if this task was cancelled; grpc raises it, too, when only the connection was closed."""
        task = asyncio.current_task()
        if task is not None and task.cancelling() > 0:
            raise error
        raise self._unreachable("the connection was closed") from error

    def _unreachable(self, why: str) -> PeerUnreachableError:
        self.broken = PeerUnreachableError(f"{self.peer.peer_id} at {self.peer.address} cannot be reached from {self._own_id}: {why}")
        return self.broken


class SendStream:
    """A long-lived stream of one-way messages. The peer says nothing on it until it ends it, and then at most a `Failed`."""

    def __init__(self, channel: grpc.aio.Channel, *, on_end: Callable[[SendStream], None]) -> None:
        self.rpc: Any = channel.stream_stream(SEND_METHOD)()
        # It reads from the start: once a write has failed, grpc no longer gives what the peer had said before.
        self._words = asyncio.get_running_loop().create_task(self._listen())
        self._words.add_done_callback(lambda task: None if task.cancelled() else on_end(self))

    @property
    def ended(self) -> bool:
        """True once the peer or the network has ended it."""
        return self._words.done() or bool(self.rpc.done())

    @property
    def heard(self) -> bool:
        """True once what the peer ended it with, or how the connection broke, is known."""
        return self._words.done() and not self._words.cancelled()

    async def listen(self, wait_s: float) -> None:
        """Wait up to `wait_s` for what the peer ends it with."""
        await asyncio.wait({self._words}, timeout=wait_s)

    def last_words(self) -> bytes:
        """Return the frame the peer ended the stream with, or nothing. Raises what grpc does if the connection broke."""
        if not self.heard:
            return b""
        words = self._words.result()
        if isinstance(words, bytes):
            return words
        raise words

    async def finish(self, wait_s: float) -> bool:
        """Tell the peer that nothing more comes, wait up to `wait_s` until it has taken everything, and return whether it has."""
        taken = False
        if not self.ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.rpc.done_writing()
                    await self.listen(wait_s)
                    # A peer that has read to the end of it ends it without a word.
                    taken = self.heard and self._words.result() == b""
        self.cancel()
        return taken

    def cancel(self) -> None:
        """End it at once."""
        self._words.cancel()
        self.rpc.cancel()

    async def _listen(self) -> bytes | Exception:
        try:
            frame = await self.rpc.read()
        except RPC_ERRORS as error:
            return error
        if frame is grpc.aio.EOF:
            return b""
        with contextlib.suppress(*RPC_ERRORS):
            await self.rpc.done_writing()
        return bytes(frame)


@contextlib.contextmanager
def _cancellation_kept() -> Iterator[None]:
    """Raise CancelledError if the task is cancelled meanwhile, whatever else comes of it.

    A call that breaks while it is cancelled can end with grpc's error: who asks again after that would never end.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.details()} ({error.code().name})"
    return str(error)
