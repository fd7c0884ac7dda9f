"""What becomes of a call that is cancelled in the moment in which it breaks; grpc is played, for it happens in few of many runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from roost.config import TransportConfig
from roost.errors import PeerUnreachableError
from roost.messages import Ping
from roost.transport.framing import pack
from roost.transport.grpc_link import Link
from roost.transport.interface import Lane
from roost.transport.meter import Meter
from roost.types import Peer

CONFIG = TransportConfig()


def gone() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "Socket closed")


class BreakingCall:
    """A call, or a stream, that ends with grpc's own error when it is cancelled, as one does that breaks at the same time."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    async def _wait(self) -> None:
        self.reached.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise gone() from None

    async def initial_metadata(self) -> Any:
        await self._wait()

    async def write(self, frame: bytes) -> None:
        """Take everything."""

    async def done_writing(self) -> None:
        """Nothing more comes."""

    async def read(self) -> bytes:
        await self._wait()
        return b""

    def cancel(self) -> None:
        """It has ended."""

    def done(self) -> bool:
        return False


class PlayedChannel:
    """A channel whose every call is the same one."""

    def __init__(self, call: BreakingCall) -> None:
        self._call = call

    def stream_stream(self, method: str) -> Callable[..., BreakingCall]:
        return lambda **_: self._call

    async def close(self) -> None:
        """Nothing to close."""


def link_over(call: BreakingCall) -> Link:
    channel: Any = PlayedChannel(call)
    peer = Peer(peer_id="barn", address="127.0.0.1:1")
    return Link("attic", peer, Lane.TRAINING, channel, CONFIG, Meter(0.0, 0.0), on_break=lambda *_: None)


@pytest.mark.parametrize("way", ["call", "send"])
def test_what_is_cancelled_ends_as_cancelled_though_the_connection_breaks_just_then(way: str) -> None:
    async def main() -> None:
        call = BreakingCall()
        link = link_over(call)
        task = asyncio.create_task(getattr(link, way)(pack(Ping(), (), CONFIG)))
        await call.reached.wait()
        # Let whoever waits for it be reached, too.
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())


def test_one_who_asks_again_and_again_while_a_peer_is_away_can_be_cancelled() -> None:
    async def main() -> None:
        call = BreakingCall()

        async def insist() -> None:
            while True:
                try:
                    await link_over(call).call(pack(Ping(), (), CONFIG))
                except PeerUnreachableError:
                    await asyncio.sleep(0)

        task = asyncio.create_task(insist())
        await call.reached.wait()
        await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=10.0)
        assert done

    asyncio.run(main())
