"""A sender that has nothing more to send is told when its stream breaks. The same for every transport."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from transport_kit import WAIT_S, GrpcFleet, InprocFleet, Recorder, chunk, peer_of, stopping

from roost.errors import PeerUnreachableError, ProtocolError, RoostError
from roost.messages import Ping
from roost.transport.interface import Lane
from roost.types import Peer


class Relay:
    """Carries connections to an endpoint until they are cut."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = host, int(port)
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen; return the address."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Reset the connections that are open; new ones are carried."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, back_writer]
        await asyncio.gather(self._copy(reader, back_writer), self._copy(back_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()


class InprocWorld:
    """Two endpoints, the second of which can be lost without a word and come back."""

    def __init__(self) -> None:
        self.fleet = InprocFleet()
        self.one, self.two, self.seen = self.fleet.make("one"), self.fleet.make("two"), Recorder()

    async def open(self) -> Peer:
        await self.one.start(Recorder())
        await self.two.start(self.seen)
        return peer_of(self.two)

    def lose(self) -> None:
        self.fleet.network.kill("two")

    async def come_back(self) -> Peer:
        self.two, self.seen = self.fleet.make("two"), Recorder()
        await self.two.start(self.seen)
        return peer_of(self.two)

    async def close(self) -> None:
        self.seen.gate.set()


class GrpcWorld:
    """The same over sockets."""

    def __init__(self, directory: Path) -> None:
        self.fleet = GrpcFleet(directory)
        self.one, self.two, self.seen = self.fleet.make("one"), self.fleet.make("two"), Recorder()
        self._relay: Relay | None = None
        self._address = ""

    async def open(self) -> Peer:
        await self.one.start(Recorder())
        await self.two.start(self.seen)
        self._relay = Relay(self.two.address)
        self._address = await self._relay.start()
        return Peer(peer_id="two", address=self._address)

    def lose(self) -> None:
        assert self._relay is not None
        self._relay.cut()

    async def come_back(self) -> Peer:
        self.seen.gate.set()
        self.seen.arrived = asyncio.Queue()
        return Peer(peer_id="two", address=self._address)

    async def close(self) -> None:
        self.seen.gate.set()
        if self._relay is not None:
            self._relay.stop()


World = InprocWorld | GrpcWorld


@pytest.fixture(params=["inproc", "grpc"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return GrpcWorld(tmp_path / "authority") if request.param == "grpc" else InprocWorld()


class Ear:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[str, Lane, RoostError]] = asyncio.Queue()

    def __call__(self, peer_id: str, lane: Lane, error: RoostError) -> None:
        self.told.put_nowait((peer_id, lane, error))

    async def next(self) -> tuple[str, Lane, RoostError]:
        async with asyncio.timeout(WAIT_S):
            return await self.told.get()


@contextlib.asynccontextmanager
async def watched(world: World) -> AsyncIterator[tuple[Peer, Ear]]:
    """Open the world, with an ear at the first endpoint, which has sent the second one a message that has arrived."""
    async with stopping(world.fleet):
        try:
            ear, peer = Ear(), await world.open()
            world.one.watch_streams(ear)
            await world.one.send(peer, chunk(0))
            assert (await world.seen.next())[1] == chunk(0)
            yield peer, ear
        finally:
            await world.close()


async def lost_once_more(world: World, peer: Peer, ear: Ear) -> None:
    """Check that the next send connects again, and that the loss of that stream is the only thing the ear has not been asked for."""
    await world.one.send(peer, chunk(9))
    while (await world.seen.next())[1] != chunk(9):
        pass
    world.lose()
    peer_id, lane, error = await ear.next()
    assert (peer_id, lane) == ("two", Lane.TRAINING)
    assert isinstance(error, PeerUnreachableError)
    assert ear.told.empty()


def test_the_sender_is_told_of_every_lane_when_its_peer_is_lost_and_the_next_send_connects_again(world: World) -> None:
    async def main() -> None:
        async with watched(world) as (peer, ear):
            await world.one.send(peer, chunk(1), lane=Lane.AVERAGING)
            assert (await world.seen.next())[1] == chunk(1)
            world.lose()
            told = [await ear.next() for _ in Lane]
            assert {(peer_id, lane) for peer_id, lane, _ in told} == {("two", lane) for lane in Lane}
            assert all(isinstance(error, PeerUnreachableError) for _, _, error in told)
            await lost_once_more(world, await world.come_back(), ear)

    asyncio.run(main())


def test_the_sender_is_told_when_its_peer_stops(world: World) -> None:
    async def main() -> None:
        async with watched(world) as (_, ear):
            await world.two.stop()
            peer_id, lane, error = await ear.next()
            assert (peer_id, lane) == ("two", Lane.TRAINING)
            assert isinstance(error, PeerUnreachableError)
            assert "two has stopped" in error.message
            assert ear.told.empty()

    asyncio.run(main())


def test_the_sender_is_told_why_its_peer_closed_the_stream(world: World) -> None:
    async def main() -> None:
        async with watched(world) as (peer, ear):
            world.seen.error = ZeroDivisionError("oops")
            world.seen.gate.clear()
            await world.one.send(peer, chunk(1))
            world.seen.gate.set()
            _, _, error = await ear.next()
            assert isinstance(error, ProtocolError)
            assert "oops" in error.message
            world.seen.error = None
            await world.one.send(peer, chunk(2))
            while (await world.seen.next())[1] != chunk(2):
                pass
            assert ear.told.empty()

    asyncio.run(main())


def test_the_sender_is_not_told_of_a_peer_that_it_forgets(world: World) -> None:
    async def main() -> None:
        async with watched(world) as (peer, ear):
            await world.one.forget("two")
            await lost_once_more(world, peer, ear)

    asyncio.run(main())


def test_an_endpoint_that_stops_is_not_told(world: World) -> None:
    async def main() -> None:
        async with watched(world) as (_, ear):
            await world.one.stop()
            await world.two.stop()
            assert ear.told.empty()

    asyncio.run(main())


def test_a_send_that_is_under_way_raises_and_the_watcher_is_not_told_as_well(world: World) -> None:
    async def main() -> None:
        async with watched(world) as (peer, ear):
            world.seen.gate.clear()
            world.seen.entered.clear()

            async def go_on_sending() -> None:
                while True:
                    await world.one.send(peer, chunk(1), [bytes(16 << 20)])

            sending = asyncio.create_task(go_on_sending())
            await asyncio.wait_for(world.seen.entered.wait(), WAIT_S)
            world.lose()
            with pytest.raises(PeerUnreachableError):
                await asyncio.wait_for(sending, WAIT_S)
            await lost_once_more(world, await world.come_back(), ear)

    asyncio.run(main())


def test_a_call_that_finds_the_connection_broken_does_not_hide_it_from_the_watcher(world: World) -> None:
    async def main() -> None:
        async with watched(world) as (peer, ear):
            world.seen.gate.clear()
            world.seen.entered.clear()
            calling = asyncio.create_task(world.one.call(peer, Ping()))
            await asyncio.wait_for(world.seen.entered.wait(), WAIT_S)
            world.lose()
            with pytest.raises(PeerUnreachableError):
                await calling
            peer_id, lane, _ = await ear.next()
            assert (peer_id, lane) == ("two", Lane.TRAINING)
            await lost_once_more(world, await world.come_back(), ear)

    asyncio.run(main())
