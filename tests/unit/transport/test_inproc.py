from __future__ import annotations

import asyncio

import pytest
from transport_kit import WAIT_S, InprocFleet, Recorder, chunk, peer_of, stopping

from roost.errors import InvalidConfigError, PeerUnreachableError
from roost.messages import Ping
from roost.types import Peer


def test_a_broken_link_fails_until_it_is_healed_and_other_links_work() -> None:
    async def scene() -> None:
        fleet = InprocFleet()
        async with stopping(fleet):
            one, two, three, seen = fleet.make("one"), fleet.make("two"), fleet.make("three"), Recorder()
            for member in (one, two, three):
                await member.start(seen)
            await one.send(peer_of(two), chunk(0))
            await seen.next()
            fleet.network.break_link("one", "two")
            for _ in range(2):
                with pytest.raises(PeerUnreachableError):
                    await one.send(peer_of(two), chunk(1))
                with pytest.raises(PeerUnreachableError):
                    await two.call(peer_of(one), Ping())
            await one.call(peer_of(three), Ping())
            fleet.network.heal_link("two", "one")
            await one.send(peer_of(two), chunk(2))
            assert [(await seen.next())[1] for _ in range(2)] == [Ping(), chunk(2)]

    asyncio.run(scene())


def test_a_killed_peer_breaks_calls_in_progress_and_sends_that_wait() -> None:
    async def scene() -> None:
        fleet = InprocFleet()
        async with stopping(fleet):
            one, two, seen = fleet.make("one"), fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(seen)
            seen.gate.clear()
            call = asyncio.create_task(one.call(peer_of(two), Ping()))
            sends = [asyncio.create_task(one.send(peer_of(two), chunk(step))) for step in range(6)]
            await asyncio.wait_for(seen.entered.wait(), WAIT_S)
            await sends[1]
            fleet.network.kill("two")
            with pytest.raises(PeerUnreachableError, match="two was killed"):
                await call
            results = await asyncio.gather(*sends, return_exceptions=True)
            assert any(isinstance(result, PeerUnreachableError) for result in results)
            assert seen.finished == 0

    asyncio.run(scene())


def test_a_peer_that_is_killed_and_made_again_is_reached_at_once() -> None:
    async def scene() -> None:
        fleet = InprocFleet()
        async with stopping(fleet):
            one, two, seen = fleet.make("one"), fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(Recorder())
            await one.send(peer_of(two), chunk(0))
            fleet.network.kill("two")
            again = fleet.make("two")
            await again.start(seen)
            await one.send(peer_of(again), chunk(1))
            assert (await seen.next())[1] == chunk(1)

    asyncio.run(scene())


def test_two_peers_cannot_have_the_same_name() -> None:
    async def scene() -> None:
        fleet = InprocFleet()
        async with stopping(fleet):
            await fleet.make("one").start(Recorder())
            with pytest.raises(InvalidConfigError, match="one"):
                await fleet.make("one").start(Recorder())

    asyncio.run(scene())


def test_a_wrong_address_is_unreachable() -> None:
    async def scene() -> None:
        fleet = InprocFleet()
        async with stopping(fleet):
            one, two = fleet.make("one"), fleet.make("two")
            await one.start(Recorder())
            await two.start(Recorder())
            with pytest.raises(PeerUnreachableError):
                await one.call(Peer(peer_id="two", address="inproc:three"), Ping())

    asyncio.run(scene())
