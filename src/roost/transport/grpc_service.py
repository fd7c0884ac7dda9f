"""The listening side of gRPC: takes the streams and calls of peers whose certificate the authority has issued."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

from roost.config import TransportConfig
from roost.errors import CredentialsError, MalformedMessageError, PeerUnreachableError, RoostError
from roost.messages import Message
from roost.transport.credentials import read_identity
from roost.transport.dispatch import answer, check_role, deliver, failed_from
from roost.transport.framing import MAX_FRAME_BYTES, Assembler, pack
from roost.transport.grpc_options import SERVICE, asked_frame_bytes, frame_bytes_for
from roost.transport.interface import Handler, ReceivedBuffer, Sender
from roost.transport.latency import DelayLine, Read
from roost.transport.meter import Meter

logger = logging.getLogger(__name__)

FAREWELL_S = 0.2
"""How long an endpoint that stops waits for its senders to let go of their streams."""

Result = TypeVar("Result")
_sender_of_certificate = functools.lru_cache(maxsize=1024)(read_identity)


class GrpcService:
    """Hands what peers send to a handler; runs each handler in a task of its own that outlives the peer's connection."""

    def __init__(self, own_id: str, handler: Handler, config: TransportConfig, meter: Meter) -> None:
        self._own_id = own_id
        self._handler = handler
        self._config = config
        self._meter = meter
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
        try:
            sender = self._admit(context)
            await context.send_initial_metadata(asked_frame_bytes(self._config))
            self._streams.add(context)
            read = functools.partial(self._read, context)
            if self._config.latency_s == 0:
                await self._read_stream(read, sender)
                return
            line = DelayLine(read, self._config.latency_s)
            try:
                await self._read_stream(line.read, sender)
            finally:
                line.close()
        except RoostError as error:
            await self._close_with(context, error)
        finally:
            self._streams.discard(context)

    async def _read_stream(self, read: Read, sender: Sender) -> None:
        assembler = Assembler(self._config, accept=functools.partial(check_role, sender))
        while (frame := await read()) is not grpc.aio.EOF:
            message = self._take(assembler, frame)
            if message is not None:
                broken = await self._run(deliver(self._handler, self._own_id, sender, *message))
                if broken is not None:
                    raise broken
        if not assembler.idle:
            raise MalformedMessageError(f"{sender.peer_id} ended a stream in the middle of a message")

    async def _on_call(self, _requests: Any, context: Any) -> None:
        try:
            sender = self._admit(context)
            assembler = Assembler(self._config, accept=functools.partial(check_role, sender))
            message: tuple[Message, list[ReceivedBuffer]] | None = None
            while message is None:
                frame = await self._read(context)
                if frame is grpc.aio.EOF:
                    raise MalformedMessageError(f"{sender.peer_id} ended a call in the middle of its message")
                message = self._take(assembler, frame)
            await asyncio.sleep(self._config.latency_s)
            reply, buffers = await self._run(answer(self._handler, self._own_id, sender, *message))
            frame_bytes = frame_bytes_for(context.invocation_metadata(), self._config.frame_bytes)
            for frame in pack(reply, buffers, self._config).frames(frame_bytes):
                await self._meter.sending(len(frame))
                await context.write(frame)
            self._meter.message_sent()
        except RoostError as error:
            await self._close_with(context, error)

    def _admit(self, context: Any) -> Sender:
        if self._stopping:
            raise PeerUnreachableError(f"{self._own_id} is stopping")
        certificates = context.auth_context().get("x509_pem_cert", ())
        if len(certificates) != 1:
            raise CredentialsError("a connection has no certificate")
        peer_id, role = _sender_of_certificate(bytes(certificates[0]))
        return Sender(peer_id=peer_id, role=role)

    async def _read(self, context: Any) -> Any:
        """Return the next frame, or EOF, when the downlink would have let it through."""
        frame = await context.read()
        if frame is not grpc.aio.EOF:
            await self._meter.receiving(len(frame))
        return frame

    def _take(self, assembler: Assembler, frame: bytes) -> tuple[Message, list[ReceivedBuffer]] | None:
        message = assembler.feed(frame)
        if message is not None:
            self._meter.message_received()
        return message

    async def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a handler so that it finishes even if the peer goes away: half-handled messages are worse than unasked answers."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _close_with(self, context: Any, error: RoostError) -> None:
        """End a stream or call with a `Failed` as its last message: unlike a status, it survives a sender that still writes."""
        logger.log(
            logging.INFO if self._stopping else logging.WARNING,
            "stream_closed node=%s peer=%s error=%s what=%r",
            self._own_id,
            context.peer(),
            error.code,
            error.message,
        )
        # Not held to the uplink: it is small, and the sender should stop now. A sender that is gone need not hear it.
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.AbortError, asyncio.InvalidStateError, grpc.aio.UsageError):
            for frame in pack(failed_from(error), (), self._config).frames(MAX_FRAME_BYTES):
                await context.write(frame)
