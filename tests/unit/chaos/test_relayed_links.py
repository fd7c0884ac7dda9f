"""Links that can be cut: relays on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable

from roost.chaos.links import LOOPBACK, LinkState, RelayedLinks

WITHIN_S = 10.0


@contextlib.asynccontextmanager
async def echoing() -> AsyncIterator[tuple[RelayedLinks, Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]]]:
    """Yield links with an endpoint "echo" that this process, "here", can dial."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(100):
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, LOOPBACK, 0)
    links = RelayedLinks(lambda: {os.getpid(): "here"})
    address = await links.listen("echo", server.sockets[0].getsockname()[1])
    port = int(address.rpartition(":")[2])
    try:
        yield links, lambda: asyncio.open_connection(LOOPBACK, port)
    finally:
        await links.close()
        server.close()


async def said(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, word: bytes) -> bytes:
    """Return what comes back; nothing if the connection is closed."""
    try:
        writer.write(word)
        return await asyncio.wait_for(reader.read(100), WITHIN_S)
    except ConnectionError:
        return b""


def test_an_open_link_passes_everything_on() -> None:
    async def play() -> None:
        async with echoing() as (_, dial):
            reader, writer = await dial()
            assert await said(reader, writer, b"hello") == b"hello"

    asyncio.run(play())


def test_a_cut_link_closes_what_is_open_refuses_what_is_new_and_works_again_afterwards() -> None:
    async def play() -> None:
        async with echoing() as (links, dial):
            before = await dial()
            assert await said(*before, b"one") == b"one"
            links.set_state("here", "echo", LinkState.CUT)
            assert await said(*before, b"two") == b""
            assert await said(*await dial(), b"three") == b""
            links.set_state("here", "echo", LinkState.OPEN)
            assert await said(*await dial(), b"four") == b"four"

    asyncio.run(play())


def test_a_silent_link_keeps_what_is_sent_until_it_is_open_again() -> None:
    async def play() -> None:
        async with echoing() as (links, dial):
            reader, writer = await dial()
            assert await said(reader, writer, b"one") == b"one"
            links.set_state("here", "echo", LinkState.SILENT)
            answer = asyncio.create_task(said(reader, writer, b"two"))
            later = asyncio.create_task(dial())
            # The other end does not hear of it however often the loop turns.
            for _ in range(100):
                await asyncio.sleep(0)
            assert not answer.done()
            links.set_state("here", "echo", LinkState.OPEN)
            assert await answer == b"two"
            assert await said(*await later, b"three") == b"three"

    asyncio.run(play())


def test_the_links_of_others_stay_open() -> None:
    async def play() -> None:
        async with echoing() as (links, dial):
            links.set_state("elsewhere", "echo", LinkState.CUT)
            assert await said(*await dial(), b"hello") == b"hello"

    asyncio.run(play())


def test_nobody_who_listens_is_no_connection() -> None:
    async def play() -> None:
        links = RelayedLinks(lambda: {})
        server = await asyncio.start_server(lambda reader, writer: None, LOOPBACK, 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        address = await links.listen("gone", port)
        reader, writer = await asyncio.open_connection(LOOPBACK, int(address.rpartition(":")[2]))
        assert await said(reader, writer, b"hello") == b""
        await links.close()

    asyncio.run(play())
