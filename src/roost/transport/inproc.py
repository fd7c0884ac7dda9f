"""An in-process twin of the network: same order, limits, checks, errors and backpressure, without sockets.

Messages really are encoded and cut into frames, so that what works here works on the wire. Tests break links and kill peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from roost.config import TransportConfig
from roost.errors import DeadlineError, InvalidConfigError, PeerUnreachableError, RoostError
from roost.messages import Failed, Message
from roost.transport.dispatch import answer, check_role, deliver, error_from
from roost.transport.framing import Assembler, PackedMessage, pack
from roost.transport.interface import Buffer, Handler, Lane, Reply, Sender, StreamWatcher, Traffic
from roost.transport.meter import Meter
from roost.types import Peer, Role

logger = logging.getLogger(__name__)

PIPE_MESSAGES = 2
"""Messages a pipe holds before its sender has to wait."""
STOP_GRACE_S = 1.0
"""How long `stop` waits for peers to take what was sent, and for running handlers to finish."""

Frames = list[bytes]
Result = TypeVar("Result")


class InprocNetwork:
    """Where in-process transports find each other, and where tests break things."""

    def __init__(self) -> None:
        self._members: dict[str, InprocTransport] = {}
        self._cut: set[frozenset[str]] = set()
        self._lifelines: set[Lifeline] = set()

    def break_link(self, first: str, second: str) -> None:
        """Cut the link between two peers: what is under way fails, and so does all that is tried until `heal_link`."""
        pair = frozenset((first, second))
        self._cut.add(pair)
        self._fail(lambda lifeline: lifeline.pair == pair, f"the link between {first} and {second} is broken")

    def heal_link(self, first: str, second: str) -> None:
        """Undo `break_link`."""
        self._cut.discard(frozenset((first, second)))

    def kill(self, peer_id: str) -> None:
        """End a peer the way SIGKILL would: its handlers stop where they are, its peers' streams break."""
        member = self._members.pop(peer_id, None)
        self._fail(lambda lifeline: peer_id in lifeline.pair, f"{peer_id} was killed")
        if member is not None:
            member.die()

    def join(self, member: InprocTransport) -> None:
        """Make `member` reachable. Raises InvalidConfigError if its peer id is taken."""
        if member.peer_id in self._members:
            raise InvalidConfigError(f"{member.peer_id} is already on this network")
        self._members[member.peer_id] = member

    def leave(self, member: InprocTransport) -> None:
        """Make `member` unreachable and break its streams."""
        if self._members.get(member.peer_id) is member:
            del self._members[member.peer_id]
        self._fail(lambda lifeline: member.peer_id in lifeline.pair, f"{member.peer_id} has stopped")

    def reach(self, source: str, peer: Peer) -> tuple[InprocTransport, Lifeline]:
        """Return the peer and a lifeline that ends when the way to it does. Raises PeerUnreachableError."""
        pair = frozenset((source, peer.peer_id))
        target = self._members.get(peer.peer_id)
        if target is None or target.address != peer.address or pair in self._cut:
            raise PeerUnreachableError(f"{peer.peer_id} at {peer.address} cannot be reached from {source}")
        lifeline = Lifeline(pair)
        self._lifelines.add(lifeline)
        return target, lifeline

    def release(self, lifeline: Lifeline) -> None:
        """Forget a lifeline that is not needed any more."""
        self._lifelines.discard(lifeline)

    def _fail(self, hit: Any, why: str) -> None:
        for lifeline in [lifeline for lifeline in self._lifelines if hit(lifeline)]:
            self._lifelines.discard(lifeline)
            lifeline.cut(PeerUnreachableError(why))


class Lifeline:
    """Tells whoever waits on a peer that the way to it is gone."""

    def __init__(self, pair: frozenset[str]) -> None:
        self.pair = pair
        self.error: RoostError | None = None
        self.on_cut: Callable[[RoostError], None] = lambda error: None
        self._gone = asyncio.Event()

    def cut(self, error: RoostError) -> None:
        """End it; the first reason counts."""
        if self.error is None:
            self.error = error
            self._gone.set()
            self.on_cut(error)

    async def race(self, work: Awaitable[Result]) -> Result:
        """Return the result of `work`; raise the reason as soon as the lifeline ends before it."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if self.error is not None and not (task.done() and not task.cancelled()):
                raise self.error
            return task.result()
        finally:
            gone.cancel()
            task.cancel()


class Pipe:
    """The stream from one peer to another on one lane."""

    def __init__(self, target: InprocTransport, lifeline: Lifeline) -> None:
        self.target = target
        self.lifeline = lifeline
        self.queue: asyncio.Queue[Frames] = asyncio.Queue(PIPE_MESSAGES)
        self.lock = asyncio.Lock()
        self.senders = 0
        self.worker: asyncio.Task[None] | None = None


class InprocTransport:
    """An endpoint on an `InprocNetwork`. Implements `Transport`."""

    def __init__(self, peer_id: str, role: Role, network: InprocNetwork, *, config: TransportConfig | None = None) -> None:
        self._identity = Sender(peer_id=peer_id, role=role)
        self._network = network
        self._config = config or TransportConfig()
        self._meter = Meter(self._config.uplink_bytes_per_s, self._config.downlink_bytes_per_s)
        self._handler: Handler | None = None
        self._pipes: dict[tuple[str, Lane], Pipe] = {}
        self._workers: set[asyncio.Task[Any]] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self._watcher: StreamWatcher = lambda peer_id, lane, error: None

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def address(self) -> str:
        return f"inproc:{self.peer_id}" if self._handler is not None else ""

    @property
    def traffic(self) -> Traffic:
        return self._meter.traffic

    def watch_streams(self, watcher: StreamWatcher) -> None:
        self._watcher = watcher

    async def start(self, handler: Handler) -> None:
        """Become reachable. Raises InvalidConfigError if the peer id is taken."""
        self._network.join(self)
        self._handler = handler
        self._stopping = False

    async def stop(self) -> None:
        self._stopping = True
        flushing = [pipe.lifeline.race(pipe.queue.join()) for pipe in self._pipes.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await asyncio.gather(*flushing, return_exceptions=True)
        running = {task for task in self._running if task is not asyncio.current_task()}
        if running:
            await asyncio.wait(running, timeout=STOP_GRACE_S)
        self._network.leave(self)
        tasks = (self._workers | self._running) - {asyncio.current_task()}
        self.die()
        if tasks:
            await asyncio.wait(tasks)

    def die(self) -> None:
        """Cancel everything at once and stay silent; `InprocNetwork.kill` ends here."""
        self._handler = None
        self._pipes.clear()
        for task in self._workers | self._running:
            if task is not asyncio.current_task():
                task.cancel()

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

    async def forget(self, peer_id: str) -> None:
        for key in [key for key in self._pipes if key[0] == peer_id]:
            self._pipes.pop(key).lifeline.cut(PeerUnreachableError(f"{self.peer_id} closed its stream to {peer_id}"))

    def serve(self, sender: Sender, frames: Frames) -> asyncio.Task[Frames]:
        """Answer a call; returns the task of it, which goes on when the caller stops waiting."""
        return self._spawn(self._answer(sender, frames), self._running)

    def accept(self, sender: Sender, pipe: Pipe) -> asyncio.Task[None]:
        """Begin to take the messages of a pipe, one after the other."""
        return self._spawn(self._take(sender, pipe), self._workers)

    async def _send(self, peer: Peer, packed: PackedMessage, lane: Lane) -> None:
        pipe = self._pipe(peer, lane)
        pipe.senders += 1
        try:
            async with pipe.lock:
                if pipe.lifeline.error is not None:
                    raise self._drop(peer, lane, pipe, pipe.lifeline.error)
                frames = await self._transmit(packed, lane)
                try:
                    await pipe.lifeline.race(pipe.queue.put(frames))
                except RoostError as error:
                    raise self._drop(peer, lane, pipe, error) from error
                if pipe.lifeline.error is not None:
                    raise self._drop(peer, lane, pipe, pipe.lifeline.error)
                self._meter.message_sent()
        finally:
            pipe.senders -= 1
            # It may have broken under one that gave up waiting for its turn.
            if pipe.lifeline.error is not None:
                self._pipe_broke((peer.peer_id, lane), pipe, pipe.lifeline.error)

    def _pipe(self, peer: Peer, lane: Lane) -> Pipe:
        self._require_running(peer)
        key = (peer.peer_id, lane)
        pipe = self._pipes.get(key)
        if pipe is None:
            target, lifeline = self._network.reach(self.peer_id, peer)
            pipe = self._pipes[key] = Pipe(target, lifeline)
            pipe.lifeline.on_cut = functools.partial(self._pipe_broke, key, pipe)
            pipe.worker = target.accept(self._identity, pipe)
        return pipe

    def _pipe_broke(self, key: tuple[str, Lane], pipe: Pipe, error: RoostError) -> None:
        """Whoever is sending, or about to, hears it from that; if nobody is, the watcher is told and the next send connects again."""
        if self._pipes.get(key) is pipe and pipe.senders == 0:
            del self._pipes[key]
            # Not from within whatever has cut it.
            asyncio.get_running_loop().call_soon(self._tell, key, error)

    def _tell(self, key: tuple[str, Lane], error: RoostError) -> None:
        if self._handler is not None and not self._stopping:
            self._watcher(*key, error)

    def _drop(self, peer: Peer, lane: Lane, pipe: Pipe, error: RoostError) -> RoostError:
        if self._pipes.get((peer.peer_id, lane)) is pipe:
            del self._pipes[(peer.peer_id, lane)]
        return error

    async def _call(self, peer: Peer, packed: PackedMessage, lane: Lane) -> Reply:
        self._require_running(peer)
        target, lifeline = self._network.reach(self.peer_id, peer)
        try:
            frames = await lifeline.race(self._transmit(packed, lane))
            self._meter.message_sent()
            served = target.serve(self._identity, frames)
            answered = await lifeline.race(asyncio.shield(served))
        finally:
            self._network.release(lifeline)
        assembler = Assembler(self._config)
        for frame in answered:
            await self._meter.receiving(len(frame))
            complete = assembler.feed(frame)
        assert complete is not None
        self._meter.message_received()
        return Reply(message=complete[0], buffers=complete[1])

    async def _transmit(self, packed: PackedMessage, lane: Lane = Lane.TRAINING) -> Frames:
        frames = []
        with self._meter.message(lane):
            for frame in packed.frames(self._config.frame_bytes):
                async with self._meter.frame(len(frame), lane):
                    frames.append(frame)
        return frames

    async def _take(self, sender: Sender, pipe: Pipe) -> None:
        assembler = Assembler(self._config, accept=functools.partial(check_role, sender))
        try:
            while pipe.lifeline.error is None:
                frames = await pipe.lifeline.race(pipe.queue.get())
                await self._take_message(sender, assembler, frames)
                pipe.queue.task_done()
        except RoostError as error:
            logger.warning("stream_refused node=%s peer=%s error=%s what=%r", self.peer_id, sender.peer_id, error.code, error.message)
            pipe.lifeline.cut(error)
        finally:
            self._network.release(pipe.lifeline)

    async def _take_message(self, sender: Sender, assembler: Assembler, frames: Frames) -> None:
        for frame in frames:
            await self._meter.receiving(len(frame))
            message = assembler.feed(frame)
            if message is not None:
                self._meter.message_received()
                work = deliver(self._require_handler(), self.peer_id, sender, *message)
                broken = await asyncio.shield(self._spawn(work, self._running))
                if broken is not None:
                    raise broken

    async def _answer(self, sender: Sender, frames: Frames) -> Frames:
        assembler = Assembler(self._config, accept=functools.partial(check_role, sender))
        for frame in frames:
            await self._meter.receiving(len(frame))
            message = assembler.feed(frame)
        assert message is not None
        self._meter.message_received()
        reply, buffers = await answer(self._require_handler(), self.peer_id, sender, *message)
        answered = await self._transmit(pack(reply, buffers, self._config))
        self._meter.message_sent()
        return answered

    def _spawn(self, work: Coroutine[Any, Any, Result], group: set[asyncio.Task[Any]]) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(work)
        group.add(task)

        def finished(done: asyncio.Task[Any]) -> None:
            group.discard(done)
            # A caller that has gone away does not fetch the error it would have got.
            if not done.cancelled():
                done.exception()

        task.add_done_callback(finished)
        return task

    def _require_handler(self) -> Handler:
        if self._handler is None or self._stopping:
            raise PeerUnreachableError(f"{self.peer_id} is stopping")
        return self._handler

    def _require_running(self, peer: Peer) -> None:
        if self._handler is None or self._stopping:
            raise PeerUnreachableError(f"{self.peer_id} has stopped and cannot reach {peer.peer_id}")

    def _late(self, peer: Peer, packed: PackedMessage, limit: float) -> DeadlineError:
        return DeadlineError(f"{peer.peer_id} at {peer.address} did not take or answer {packed.kind} of {self.peer_id} in {limit:g} s")
