"""What a hostile peer can do to an endpoint's port while two honest peers keep exchanging messages. Over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from transport_kit import WAIT_S, GrpcFleet, Recorder, chunk, peer_of

from roost.config import TransportConfig
from roost.errors import DeadlineError
from roost.messages import Done, Ping
from roost.transport.framing import pack
from roost.transport.grpc_link import open_channel
from roost.transport.grpc_options import CALL_METHOD, SEND_METHOD
from roost.transport.grpc_transport import GrpcTransport
from roost.types import Peer

EXCHANGES = 20
LIMITS = TransportConfig(peer_calls=8, peer_streams=4, peer_calls_per_s=200, max_message_bytes=4 << 20, max_header_bytes=1 << 16)
"""Its deadlines are long: on a machine that is busy, no honest peer runs into one."""
IMPATIENT = replace(LIMITS, idle_s=1.0)
SHORT_HANDSHAKES = replace(LIMITS, connect_s=2.0)

SMALL_WINDOW = TransportConfig(downlink_bytes_per_s=float(1 << 20))
"""A connection that takes 64 KiB ahead of what is read. Others take as much as the line seems to carry: whole replies, if it is fast."""


class Listener(logging.Handler):
    """Sets an event when a line with a certain text is logged."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self._loop = asyncio.get_running_loop()
        self.heard = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self._loop.call_soon_threadsafe(self.heard.set)


@contextlib.contextmanager
def listening_for(text: str) -> Iterator[asyncio.Event]:
    listener = Listener(text)
    logging.getLogger("roost").addHandler(listener)
    try:
        yield listener.heard
    finally:
        logging.getLogger("roost").removeHandler(listener)


class Scene:
    """A victim that answers, an honest peer connected to it, and a hostile one with a certificate of its own."""

    def __init__(self, directory: Path, config: TransportConfig) -> None:
        self.fleet = GrpcFleet(directory)
        self.recorder = Recorder()
        self.victim = self.fleet.make("victim", config=config)
        self.honest = self.fleet.make("honest")
        self.evil = self.fleet.make("evil")
        self.channels: list[grpc.aio.Channel] = []

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.victim.address.rpartition(":")
        return host, int(port)

    def channel(self, config: TransportConfig | None = None) -> Any:
        """Return a new connection of the hostile peer, to do with what it likes."""
        channel = open_channel(peer_of(self.victim), self.evil._credentials, config or TransportConfig())
        self.channels.append(channel)
        return channel

    async def exchange(self, count: int = EXCHANGES) -> None:
        """Let the honest pair call and send each other, in both directions."""
        for step in range(count):
            await self.honest.call(peer_of(self.victim), Ping())
            await self.honest.send(peer_of(self.victim), chunk(step))
            await self.victim.call(peer_of(self.honest), Ping())
            await self.victim.send(peer_of(self.honest), chunk(step))


@contextlib.asynccontextmanager
async def scene(directory: Path, config: TransportConfig = LIMITS) -> AsyncIterator[Scene]:
    made = Scene(directory, config)
    await made.victim.start(made.recorder)
    await made.honest.start(Recorder())
    await made.evil.start(Recorder())
    await made.exchange(1)
    try:
        async with asyncio.timeout(WAIT_S):
            yield made
    finally:
        await asyncio.gather(*(channel.close() for channel in made.channels))
        await made.fleet.stop()


def message_frames(transport: GrpcTransport, nbytes: int) -> list[bytes]:
    return list(pack(chunk(0), [bytes(nbytes)], TransportConfig()).frames(64 << 10))


def test_a_flood_of_connections_without_a_certificate_does_not_stop_those_that_are_open(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    async def attack(address: tuple[str, int], how: int) -> None:
        with contextlib.suppress(OSError):
            if how % 2:
                await asyncio.open_connection(*address, ssl=context)
            else:
                await asyncio.open_connection(*address)
            await asyncio.sleep(3600)

    async def main() -> None:
        async with scene(tmp_path) as made:
            attackers = [asyncio.create_task(attack(made.address, number)) for number in range(200)]
            await made.exchange()
            for attacker in attackers:
                attacker.cancel()
            await asyncio.gather(*attackers, return_exceptions=True)
            # And once it is over, a peer that was not connected gets through.
            await made.evil.call(peer_of(made.victim), Ping())

    asyncio.run(main())


def test_connections_that_show_no_certificate_are_closed_at_the_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, SHORT_HANDSHAKES) as made:
            silent = [await asyncio.open_connection(*made.address) for _ in range(50)]
            await made.exchange()
            # What is read is the end of the connection, since the server never speaks first.
            assert await asyncio.gather(*(reader.read() for reader, _ in silent)) == [b""] * len(silent)
            for _, writer in silent:
                writer.close()

    asyncio.run(main())


def test_a_flood_of_calls_waits_its_turn_and_honest_calls_are_answered(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as made:
            made.recorder.gate.clear()
            made.recorder.most_running = made.recorder.running = 0

            async def attack() -> None:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    rpc = made.channel().stream_stream(CALL_METHOD)()
                    await rpc.write(next(iter(pack(Ping(), (), TransportConfig()).frames(1 << 20))))
                    await rpc.read()

            with listening_for("evil has 8 calls open here, which is the limit") as refused:
                attackers = [asyncio.create_task(attack()) for _ in range(20)]
                await refused.wait()
                assert made.recorder.most_running <= LIMITS.peer_calls
                made.recorder.gate.set()
                await made.exchange()
                await asyncio.gather(*attackers)

    asyncio.run(main())


def test_a_peer_over_its_rate_has_to_wait_and_loses_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as made:
            await asyncio.gather(
                *(made.evil.call(peer_of(made.victim), Ping()) for _ in range(3 * LIMITS.peer_calls)), return_exceptions=True
            )
            for _ in range(int(2.5 * LIMITS.peer_calls_per_s)):
                await made.evil.call(peer_of(made.victim), Ping())
            await made.exchange()

    asyncio.run(main())


@pytest.mark.parametrize("method", [SEND_METHOD, CALL_METHOD])
@pytest.mark.parametrize("part", ["nothing", "half a header", "half the data"])
def test_a_message_that_is_begun_and_not_finished_is_cut_off_and_its_sender_named(tmp_path: Path, method: str, part: str) -> None:
    async def main() -> None:
        async with scene(tmp_path, IMPATIENT) as made:
            frames = message_frames(made.evil, 1 << 20)
            first = {"nothing": b"", "half a header": frames[0][:20], "half the data": frames[0]}[part]
            if part == "nothing" and method == SEND_METHOD:
                pytest.skip("a stream without a message in it may stay open")
            with listening_for("evil did not finish a message that it had begun") as cut:
                rpc = made.channel().stream_stream(method)()
                if first:
                    await rpc.write(first)
                else:
                    await rpc.wait_for_connection()
                await made.exchange()
                await cut.wait()
                await rpc.read()
            await made.exchange(1)

    asyncio.run(main())


def test_one_peer_cannot_fill_the_memory_with_messages_that_it_does_not_finish(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as made:
            frames = message_frames(made.evil, LIMITS.max_message_bytes)
            with listening_for("bytes under way to here") as refused:
                rpcs = [made.channel().stream_stream(CALL_METHOD)() for _ in range(LIMITS.peer_calls)]

                async def fill(rpc: Any) -> None:
                    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                        for frame in frames[:-1]:
                            await rpc.write(frame)

                await asyncio.gather(*(fill(rpc) for rpc in rpcs))
                await refused.wait()
            await made.exchange()

    asyncio.run(main())


def test_a_peer_may_have_so_many_streams_and_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as made:
            with listening_for("evil has 4 streams open here, which is the limit") as refused:
                rpcs = [made.channel().stream_stream(SEND_METHOD)() for _ in range(LIMITS.peer_streams + 1)]
                await refused.wait()
                await made.exchange()
                for rpc in rpcs:
                    rpc.cancel()

    asyncio.run(main())


def test_a_peer_that_does_not_read_its_replies_is_cut_off_and_stalls_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, IMPATIENT) as made:
            made.recorder.reply = (Ping(), [bytes(LIMITS.max_message_bytes)])
            with listening_for("slow_reader node=victim peer=evil") as cut:
                channel = made.channel(SMALL_WINDOW)
                rpcs = [channel.stream_stream(CALL_METHOD)() for _ in range(4)]
                for rpc in rpcs:
                    await rpc.write(next(iter(pack(Ping(), (), TransportConfig()).frames(1 << 20))))
                await made.victim.call(peer_of(made.honest), Ping())
                await cut.wait()
            made.recorder.reply = (Done(), ())
            await made.exchange()
            # Its calls are over: there is room for as many as before.
            assert (await made.evil.call(peer_of(made.victim), Ping())).message == Done()

    asyncio.run(main())


def test_a_sender_to_a_peer_that_does_not_read_gives_up_at_its_deadline_and_serves_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as made:
            deaf = made.fleet.make("deaf")
            stuck = Recorder()
            stuck.gate.clear()
            await deaf.start(stuck)

            async def shout() -> None:
                for step in range(100):
                    await made.victim.send(Peer(peer_id="deaf", address=deaf.address), chunk(step), [bytes(1 << 20)], deadline_s=1.0)

            shouting = asyncio.create_task(shout())
            await made.exchange()
            with pytest.raises(DeadlineError, match="did not take or answer"):
                await shouting
            stuck.gate.set()

    asyncio.run(main())
