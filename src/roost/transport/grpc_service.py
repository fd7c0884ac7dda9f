"""The listening side of gRPC: takes the streams and calls of peers whose certificate the authority has issued."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from roost.config import TransportConfig
from roost.errors import CredentialsError, MalformedMessageError, PeerUnreachableError, RoostError
from roost.messages import Message
from roost.transport.credentials import key_hash, parse_certificate, read_identity
from roost.transport.dispatch import answer, check_role, deliver, failed_from
from roost.transport.framing import MAX_FRAME_BYTES, Assembler, pack
from roost.transport.grpc_options import SERVICE, asked_frame_bytes, frame_bytes_for
from roost.transport.guard import Guard, PeerGuard
from roost.transport.intake import Intake
from roost.transport.interface import Buffer, Handler, Sender
from roost.transport.latency import DelayLine, Read
from roost.transport.meter import Meter

logger = logging.getLogger(__name__)

FAREWELL_S = 0.2
"""How long an endpoint that stops waits for its senders to let go of their streams."""

GONE = (grpc.aio.AioRpcError, grpc.aio.AbortError, grpc.aio.InternalError, grpc.aio.UsageError, asyncio.InvalidStateError)
"""What grpc raises when a stream or call has ended under the one who answers on it."""

Result = TypeVar("Result")
Admit = Callable[[Sender, str], None]
"""Gets a peer and the hex SHA-256 of the key that it proved to hold. Raises RoostError to refuse it."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who a connection's verified certificate says is at its other end."""

    sender: Sender
    key_hash: str
    """Hex SHA-256 of its public key."""


@functools.lru_cache(maxsize=16_384)
def _identify(certificate_pem: bytes) -> Identity:
    peer_id, role = read_identity(certificate_pem)
    return Identity(sender=Sender(peer_id=peer_id, role=role), key_hash=key_hash(parse_certificate(certificate_pem).public_key()))


class GrpcService:
    """Hands what peers send to a handler; runs each handler in a task of its own that outlives the peer's connection."""

    def __init__(self, own_id: str, handler: Handler, config: TransportConfig, meter: Meter, admit: Admit | None = None) -> None:
        """`admit` is asked for every message; it raises to refuse a peer."""
        self._own_id = own_id
        self._handler = handler
        self._config = config
        self._meter = meter
        self._admit_peer = admit
        self._guard = Guard(config)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._streams: set[Any] = set()
        self._stopping = False

    def rpc_handlers(self) -> grpc.GenericRpcHandler:
        """Return what a grpc server needs to route to this service; messages stay raw bytes."""
        methods = {
            "Send": grpc.stream_stream_rpc_method_handler(self._on_send),
            "Call": grpc.stream_stream_rpc_method_handler(self._on_call),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, give running handlers `grace_s` to finish, then cancel them; tell senders that this is the end."""
        self._stopping = True
        # A handler may be the one that stops the transport.
        running = {task for task in self._tasks if task is not asyncio.current_task()}
        if running:
            _, late = await asyncio.wait(running, timeout=grace_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        leaving = PeerUnreachableError(f"{self._own_id} has stopped")
        farewells = [asyncio.ensure_future(self._close_with(context, leaving)) for context in self._streams]
        if farewells:
            await asyncio.wait(farewells, timeout=FAREWELL_S)

    async def _on_send(self, _requests: Any, context: Any) -> None:
        identity: Identity | None = None
        try:
            identity = self._admit(context)
            with self._guard.of(identity.sender.peer_id).stream():
                await context.send_initial_metadata(asked_frame_bytes(self._config))
                self._streams.add(context)
                read = functools.partial(self._read, context)
                if self._config.latency_s == 0:
                    await self._read_stream(read, identity)
                    return
                line = DelayLine(read, self._config.latency_s)
                try:
                    await self._read_stream(line.read, identity)
                finally:
                    line.close()
        except RoostError as error:
            await self._close_with(context, error, identity)
        finally:
            self._streams.discard(context)

    async def _read_stream(self, read: Read, identity: Identity) -> None:
        sender, guard = identity.sender, self._guard.of(identity.sender.peer_id)
        intake = self._intake(read, sender, guard)
        with intake:
            while (message := await intake.next_message()) is not None:
                self._check(identity)
                broken = await self._run(deliver(self._handler, self._own_id, sender, *message))
                if broken is not None:
                    raise broken
                intake.dealt_with()
                if (delay := guard.message_delay(time.monotonic())) > 0:
                    # Whoever waits here does not read: the network makes the sender wait, and nobody else.
                    await asyncio.sleep(delay)

    async def _on_call(self, _requests: Any, context: Any) -> None:
        identity: Identity | None = None
        try:
            identity = self._admit(context)
            sender, guard = identity.sender, self._guard.of(identity.sender.peer_id)
            with guard.call(), self._intake(functools.partial(self._read, context), sender, guard) as intake:
                await asyncio.sleep(guard.call_delay(time.monotonic()))
                message = await intake.next_message(begun=True)
                if message is None:
                    raise MalformedMessageError(f"{sender.peer_id} ended a call without a message")
                await asyncio.sleep(self._config.latency_s)
                reply, buffers = await self._run(answer(self._handler, self._own_id, sender, *message))
                await self._write_reply(context, sender, reply, buffers)
        except RoostError as error:
            await self._close_with(context, error, identity)

    async def _write_reply(self, context: Any, sender: Sender, reply: Message, buffers: Sequence[Buffer]) -> None:
        frame_bytes = frame_bytes_for(context.invocation_metadata(), self._config.frame_bytes)
        for frame in pack(reply, buffers, self._config).frames(frame_bytes):
            await self._meter.sending(len(frame))
            try:
                async with asyncio.timeout(self._config.idle_s):
                    await context.write(frame)
            except TimeoutError:
                # It does not read: it would not read an error either.
                logger.warning("slow_reader node=%s peer=%s reply=%s", self._own_id, sender.peer_id, type(reply).__name__)
                return
        self._meter.message_sent()

    def _intake(self, read: Read, sender: Sender, guard: PeerGuard) -> Intake:
        assembler = Assembler(self._config, accept=functools.partial(check_role, sender))
        return Intake(read, assembler, sender=sender, guard=guard, config=self._config, meter=self._meter)

    def _admit(self, context: Any) -> Identity:
        if self._stopping:
            raise PeerUnreachableError(f"{self._own_id} is stopping")
        certificates = context.auth_context().get("x509_pem_cert", ())
        if len(certificates) != 1:
            raise CredentialsError("a connection has no certificate")
        identity = _identify(bytes(certificates[0]))
        self._check(identity)
        return identity

    def _check(self, identity: Identity) -> None:
        """Raise what the owner of this endpoint has against the peer, if anything; for every message."""
        if self._admit_peer is not None:
            self._admit_peer(identity.sender, identity.key_hash)

    async def _read(self, context: Any) -> Any:
        """Return the next frame, or EOF, when the downlink would have let it through."""
        frame = await context.read()
        if frame is not grpc.aio.EOF:
            await self._meter.receiving(len(frame))
        return frame

    async def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a handler so that it finishes even if the peer goes away: half-handled messages are worse than unasked answers."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _close_with(self, context: Any, error: RoostError, identity: Identity | None = None) -> None:
        """End a stream or call with a `Failed` as its last message: unlike a status, it survives a sender that still writes."""
        # Who has not shown a certificate has no account of its own: all of them share one.
        peer_id = identity.sender.peer_id if identity is not None else ""
        if self._guard.of(peer_id).may_log(time.monotonic()):
            logger.log(
                logging.INFO if self._stopping else logging.WARNING,
                "stream_closed node=%s peer=%s address=%s error=%s what=%r",
                self._own_id,
                peer_id or "-",
                context.peer(),
                error.code,
                error.message,
            )
        # Not held to the uplink: it is small, and the sender should stop now. A sender that is gone need not hear it.
        with contextlib.suppress(*GONE):
            for frame in pack(failed_from(error), (), self._config).frames(MAX_FRAME_BYTES):
                await context.write(frame)
