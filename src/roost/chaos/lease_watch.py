"""A requester's transport that notes which leases nodes fetch: what the account of a chaos run is made of."""

from __future__ import annotations

from collections.abc import Sequence

from roost import messages as m
from roost.transport.interface import Buffer, Handler, Lane, ReceivedBuffer, Reply, Sender, StreamWatcher, Traffic, Transport
from roost.types import Lease, Peer


class NotingHandler:
    """Passes everything on to the requester."""

    def __init__(self, handler: Handler, served: dict[int, Lease]) -> None:
        self._handler = handler
        self._served = served

    async def on_message(self, sender: Sender, message: m.Message, buffers: list[ReceivedBuffer]) -> None:
        """Pass it on."""
        await self._handler.on_message(sender, message, buffers)

    async def on_call(self, sender: Sender, message: m.Message, buffers: list[ReceivedBuffer]) -> tuple[m.Message, Sequence[Buffer]]:
        """Pass it on, and note a training lease once its samples are there. Raises what the requester raises."""
        answer = await self._handler.on_call(sender, message, buffers)
        if isinstance(message, m.FetchSamples) and message.lease.training:
            self._served[message.lease.lease_id] = message.lease
        return answer


class LeaseWatch:
    """Implements `Transport` with another one."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.served: dict[int, Lease] = {}
        """Training leases whose samples were fetched, by id; one that is fetched again, as its answer was lost, counts once."""

    @property
    def peer_id(self) -> str:
        return self._transport.peer_id

    @property
    def address(self) -> str:
        return self._transport.address

    @property
    def traffic(self) -> Traffic:
        return self._transport.traffic

    def watch_streams(self, watcher: StreamWatcher) -> None:
        self._transport.watch_streams(watcher)

    async def start(self, handler: Handler) -> None:
        """Begin to listen, with a note taken of what arrives."""
        await self._transport.start(NotingHandler(handler, self.served))

    async def stop(self) -> None:
        await self._transport.stop()

    async def send(
        self,
        peer: Peer,
        message: m.Message,
        buffers: Sequence[Buffer] = (),
        *,
        lane: Lane = Lane.TRAINING,
        deadline_s: float | None = None,
    ) -> None:
        await self._transport.send(peer, message, buffers, lane=lane, deadline_s=deadline_s)

    async def call(
        self,
        peer: Peer,
        message: m.Message,
        buffers: Sequence[Buffer] = (),
        *,
        lane: Lane = Lane.TRAINING,
        deadline_s: float | None = None,
    ) -> Reply:
        return await self._transport.call(peer, message, buffers, lane=lane, deadline_s=deadline_s)

    async def forget(self, peer_id: str) -> None:
        await self._transport.forget(peer_id)
