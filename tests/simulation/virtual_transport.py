"""Endpoints in virtual time: what `roost.transport.grpc_transport` does, over a `VirtualNetwork`. Messages really are encoded."""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from virtual_loop import VirtualMachine
from virtual_network import Passage, VirtualNetwork

from roost.config import TransportConfig
from roost.errors import DeadlineError, PeerUnreachableError, RoostError
from roost.messages import Failed, Message
from roost.transport.dispatch import answer, check_role, deliver, error_from
from roost.transport.framing import Assembler, PackedMessage, pack
from roost.transport.interface import Buffer, Handler, Lane, Reply, Sender, StreamWatcher, Traffic
from roost.transport.meter import Meter
from roost.types import Peer, Role

Data = list[bytes]
"""The frames of one message."""
STOP_GRACE_S = 1.0
"""How long an endpoint that stops waits for what was sent and for what it handles."""


class VirtualStream(Passage):
    """The messages of one peer to another on one lane, in order."""

    def __init__(self, source: VirtualTransport, target: VirtualTransport, network: VirtualNetwork) -> None:
        super().__init__(source, target, network.patience())
        self._network = network
        self._under_way = 0
        self._last_due = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.arrived: deque[Data] = deque()
        self._more: asyncio.Future[None] | None = None
        self.on_break += [self._note_loss, self._wake_all]

    @property
    def empty(self) -> bool:
        """True if everything has been taken."""
        return self._under_way == 0

    async def admit(self) -> None:
        """Return when the network takes another message. Raises what the stream broke with."""
        while self.error is None and self._under_way >= self._network.window:
            await self._wait()
        if self.error is not None:
            raise self.error

    async def drained(self) -> None:
        """Return when everything was taken, or the stream is broken."""
        while self.error is None and self._under_way:
            await self._wait()

    async def _wait(self) -> None:
        future = self._network.loop.create_future()
        self._waiting.append(future)
        await future

    def put(self, data: Data) -> None:
        """Send a message on its way."""
        self._under_way += 1
        size = sum(len(frame) for frame in data)
        names = self.source.peer_id, self.target.peer_id
        self._last_due = self._network.carry(self, *names, size, functools.partial(self._arrive, data), self._last_due)

    def _arrive(self, data: Data) -> None:
        self.arrived.append(data)
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def next(self) -> Data | None:
        """Return the next message that has arrived, None once the stream is broken."""
        while not self.arrived and self.error is None:
            self._more = self._network.loop.create_future()
            await self._more
        return self.arrived.popleft() if self.error is None else None

    def taken(self) -> None:
        """The receiver is done with a message: room for another."""
        self._under_way -= 1
        self._wake_all()

    def _note_loss(self) -> None:
        if self._under_way:
            self._network.note("lost", self.source.peer_id, self.target.peer_id, self._under_way)
        assert self.error is not None
        source = self.source
        # Not from within whatever has cut it, and on the sender's own machine.
        self._network.loop.call_soon(source.stream_broke, self, self.error, context=source.machine.context)

    def _wake_all(self) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
        if self.error is not None and self._more is not None and not self._more.done():
            self._more.set_result(None)


class VirtualTransport:
    """An endpoint on a `VirtualNetwork`, on one machine. Implements `Transport`."""

    def __init__(self, peer_id: str, role: Role, machine: VirtualMachine, network: VirtualNetwork, *, address: str = "") -> None:
        self.identity = Sender(peer_id=peer_id, role=role)
        self.machine = machine
        self.known_as = address or f"virtual:{peer_id}"
        self._network = network
        self._config = TransportConfig()
        self._meter = Meter(0.0)
        self._handler: Handler | None = None
        self._streams: dict[tuple[str, Lane], VirtualStream] = {}
        self._locks: dict[tuple[str, Lane], asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self._watcher: StreamWatcher = lambda peer_id, lane, error: None

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def address(self) -> str:
        return self.known_as if self._handler is not None else ""

    @property
    def traffic(self) -> Traffic:
        return self._meter.traffic

    def watch_streams(self, watcher: StreamWatcher) -> None:
        self._watcher = watcher

    def stream_broke(self, stream: VirtualStream, error: RoostError) -> None:
        """Tell the watcher, unless the stream was closed here or somebody is sending on it, who hears it from that."""
        for key, known in list(self._streams.items()):
            if known is stream and not self._locks[key].locked() and not self._stopping and self._handler is not None:
                del self._streams[key]
                self._watcher(*key, error)

    async def start(self, handler: Handler) -> None:
        self._network.join(self, self.known_as)
        self._handler = handler
        self._stopping = False

    async def stop(self) -> None:
        self._stopping = True
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                for stream in list(self._streams.values()):
                    await stream.drained()
        except TimeoutError:
            self._network.note("stop", self.peer_id, "not everything was taken")
        running = {task for task in self._tasks if task is not asyncio.current_task()}
        if running:
            await asyncio.wait(running, timeout=STOP_GRACE_S)
        self._network.leave(self, "has stopped")
        self._handler = None
        self._streams.clear()
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    # ------------------------------------------------------------ sending

    async def send(
        self,
        peer: Peer,
        message: Message,
        buffers: Sequence[Buffer] = (),
        *,
        lane: Lane = Lane.TRAINING,
        deadline_s: float | None = None,
    ) -> None:
        packed = pack(message, buffers, self._config)
        limit = self._config.send_s if deadline_s is None else deadline_s
        try:
            async with asyncio.timeout(limit):
                await self._send(peer, packed, lane)
        except TimeoutError as error:
            raise self._late(peer, packed, limit) from error

    async def _send(self, peer: Peer, packed: PackedMessage, lane: Lane) -> None:
        key = (peer.peer_id, lane)
        async with self._locks.setdefault(key, asyncio.Lock()):
            stream = self._streams.get(key)
            try:
                if stream is None:
                    stream = self._streams[key] = self._connect(peer)
                await stream.admit()
                data = await self._transmit(packed, lane)
                if stream.error is not None:
                    raise stream.error
            except BaseException:
                # A message that was cut short leaves the stream unusable, as the send that notices a broken one does.
                if stream is not None:
                    stream.cut(PeerUnreachableError(f"{self.peer_id} ended its stream to {peer.peer_id}"))
                self._streams.pop(key, None)
                raise
            self._network.note("send", self.peer_id, peer.peer_id, lane.value, packed.kind, _checksum(data))
            stream.put(data)
            self._meter.message_sent()

    def _connect(self, peer: Peer) -> VirtualStream:
        self._require_running(peer)
        stream = VirtualStream(self, self._network.reach(self, peer), self._network)
        self._network.open(stream)
        stream.target.accept(stream)
        return stream

    async def call(
        self,
        peer: Peer,
        message: Message,
        buffers: Sequence[Buffer] = (),
        *,
        lane: Lane = Lane.TRAINING,
        deadline_s: float | None = None,
    ) -> Reply:
        packed = pack(message, buffers, self._config)
        limit = self._config.call_s if deadline_s is None else deadline_s
        try:
            async with asyncio.timeout(limit):
                reply = await self._call(peer, packed, lane)
        except TimeoutError as error:
            raise self._late(peer, packed, limit) from error
        if isinstance(reply.message, Failed):
            raise error_from(reply.message)
        return reply

    async def _call(self, peer: Peer, packed: PackedMessage, lane: Lane) -> Reply:
        self._require_running(peer)
        network = self._network
        target = network.reach(self, peer)
        passage = Passage(self, target, network.patience())
        network.open(passage)
        answered: asyncio.Future[Data] = network.loop.create_future()

        def broke() -> None:
            if passage.error is not None and not answered.done():
                answered.set_exception(passage.error)

        passage.on_break.append(broke)
        try:
            data = await self._transmit(packed, lane)
            network.note("call", self.peer_id, peer.peer_id, packed.kind, _checksum(data))
            self._meter.message_sent()
            size = sum(len(frame) for frame in data)
            serve = functools.partial(target.serve, self.identity, data, passage, answered)
            if passage.error is not None:
                raise passage.error
            network.carry(passage, self.peer_id, peer.peer_id, size, serve, 0.0)
            frames = await answered
        finally:
            passage.cut(PeerUnreachableError(f"{self.peer_id} has ended its call"))
            if answered.done() and not answered.cancelled():
                answered.exception()
        message, received = await self._assemble(Assembler(self._config), frames)
        network.note("reply", self.peer_id, peer.peer_id, type(message).__name__, _checksum(frames))
        return Reply(message=message, buffers=received)

    async def forget(self, peer_id: str) -> None:
        for key in [key for key in self._streams if key[0] == peer_id]:
            self._streams.pop(key).cut(PeerUnreachableError(f"{self.peer_id} closed its stream to {peer_id}"))

    async def _transmit(self, packed: PackedMessage, lane: Lane) -> Data:
        frames = []
        with self._meter.message(lane):
            for frame in packed.frames(self._config.frame_bytes):
                async with self._meter.frame(len(frame), lane):
                    frames.append(frame)
        return frames

    async def _assemble(self, assembler: Assembler, frames: Data) -> tuple[Message, list[Any]]:
        complete = None
        for frame in frames:
            await self._meter.receiving(len(frame))
            complete = assembler.feed(frame)
        assert complete is not None, "the last frame completes a message"
        self._meter.message_received()
        return complete

    # ------------------------------------------------------------ receiving

    def accept(self, stream: VirtualStream) -> None:
        """Begin to take the messages of a stream, one after the other."""
        self._network.loop.run_on(self.machine, self._take_all(stream))

    async def _take_all(self, stream: VirtualStream) -> None:
        sender = stream.source.identity
        assembler = Assembler(self._config, accept=functools.partial(check_role, sender))
        while (frames := await stream.next()) is not None:
            try:
                message, buffers = await self._assemble(assembler, frames)
            except RoostError as error:
                stream.cut(error)
                return
            self._network.note("take", self.peer_id, sender.peer_id, type(message).__name__, _checksum(frames))
            # A handler that has begun goes on when its stream breaks.
            broken = await deliver(self._running_handler(), self.peer_id, sender, message, buffers)
            self._network.after_message(self.peer_id, message)
            if broken is not None:
                stream.cut(broken)
                return
            stream.taken()

    def serve(self, sender: Sender, data: Data, passage: Passage, answered: asyncio.Future[Data]) -> None:
        """Answer a call that has arrived."""
        if not self.machine.dead and self._handler is not None:
            self._spawn(self._answer(sender, data, passage, answered))

    async def _answer(self, sender: Sender, data: Data, passage: Passage, answered: asyncio.Future[Data]) -> None:
        assembler = Assembler(self._config, accept=functools.partial(check_role, sender))
        try:
            message, buffers = await self._assemble(assembler, data)
        except RoostError as error:
            passage.cut(error)
            return
        self._network.note("take", self.peer_id, sender.peer_id, type(message).__name__, _checksum(data))
        reply, given = await answer(self._running_handler(), self.peer_id, sender, message, buffers)
        self._network.after_message(self.peer_id, message)
        frames = await self._transmit(pack(reply, given, self._config), Lane.TRAINING)
        self._meter.message_sent()

        def arrive() -> None:
            if not answered.done():
                answered.set_result(frames)

        self._network.carry(passage, self.peer_id, sender.peer_id, sum(len(frame) for frame in frames), arrive, 0.0)

    def _spawn(self, work: Any) -> None:
        task = self._network.loop.run_on(self.machine, work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _running_handler(self) -> Handler:
        if self._handler is None:
            raise PeerUnreachableError(f"{self.peer_id} is stopping")
        return self._handler

    def _require_running(self, peer: Peer) -> None:
        if self._handler is None or self._stopping:
            raise PeerUnreachableError(f"{self.peer_id} has stopped and cannot reach {peer.peer_id}")

    def _late(self, peer: Peer, packed: PackedMessage, limit: float) -> DeadlineError:
        return DeadlineError(f"{peer.peer_id} at {peer.address} did not take or answer {packed.kind} of {self.peer_id} in {limit:g} s")


def _checksum(frames: Data) -> int:
    checksum = 0
    for frame in frames:
        checksum = zlib.crc32(frame, checksum)
    return checksum
