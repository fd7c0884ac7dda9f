from __future__ import annotations

import asyncio

import pytest
import torch

from roost import messages as m
from roost.agent.ring_sender import RingSender
from roost.averaging.segment_average import AveragingOptions, SegmentAverage
from roost.config import TensorCodec
from roost.errors import PeerUnreachableError
from roost.protocol.averaging_events import SendChunk, SendOpen
from roost.transport.interface import Buffer, Lane
from roost.types import Peer

PEERS = {name: Peer(peer_id=name, address=name) for name in ("b", "c")}


class SlowTransport:
    """Takes one message at a time, as a stream does, and only when it is told to."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, m.Message, bytes]] = []
        self.error: PeerUnreachableError | None = None
        self.turns = asyncio.Semaphore(0)
        self.ended: asyncio.Queue[bool] = asyncio.Queue()
        self._stream = asyncio.Lock()

    async def send(self, peer: Peer, message: m.Message, buffers: tuple[Buffer, ...] = (), *, lane: Lane) -> None:
        assert lane is Lane.AVERAGING
        async with self._stream:
            await self.turns.acquire()
            # As long as this one is being sent, the others get to wait for the stream.
            await asyncio.sleep(0)
            self.ended.put_nowait(self.error is None)
            if self.error is not None:
                raise self.error
            self.taken.append((peer.peer_id, message, bytes(buffers[0]) if buffers else b""))


def average_of(value: float, pieces: int) -> SegmentAverage:
    average = SegmentAverage(parts=2, pieces=pieces, options=AveragingOptions())
    average.begin({"w": torch.full((2 * pieces,), value)}, 1.0, from_base=False, codec=TensorCodec.NONE, reuse=False)
    average.fill(0)
    average.fill(1)
    return average


def sender_of(segment: int, transport: SlowTransport, average: SegmentAverage) -> RingSender:
    return RingSender(job_id="job", segment=segment, peers=PEERS, transport=transport, average=average)  # type: ignore[arg-type]


def piece(number: int) -> SendChunk:
    return SendChunk(peer="b", round=1, step=0, chunk=0, weight=1.0, piece=number)


async def let_go(transport: SlowTransport, count: int) -> None:
    """Let `count` more messages be taken, or fail, and wait until they have."""
    for _ in range(count):
        transport.turns.release()
    async with asyncio.timeout(10):
        for _ in range(count):
            await transport.ended.get()


def test_rings_with_the_same_next_member_take_turns() -> None:
    async def scenario() -> list[int]:
        transport = SlowTransport()
        senders = [sender_of(segment, transport, average_of(float(segment), 3)) for segment in (0, 1)]
        tasks = [asyncio.create_task(sender.run()) for sender in senders]
        for sender in senders:
            for number in range(3):
                sender.put(piece(number))
        await let_go(transport, 6)
        for task in tasks:
            task.cancel()
        return [message.segment for _, message, _ in transport.taken if isinstance(message, m.RingChunk)]

    assert asyncio.run(scenario()) == [0, 1, 0, 1, 0, 1]


def test_means_that_still_wait_are_sent_as_they_were_when_the_round_ended() -> None:
    async def scenario() -> list[bytes]:
        transport = SlowTransport()
        average = average_of(7.0, 2)
        sender = sender_of(0, transport, average)
        task = asyncio.create_task(sender.run())
        sender.put(piece(0))
        sender.put(piece(1))
        await sender.detach()
        average.end(finished=True)
        assert not sender.idle
        average.begin({"w": torch.zeros(4)}, 1.0, from_base=False, codec=TensorCodec.NONE, reuse=sender.idle)
        average.fill(0)
        await let_go(transport, 2)
        task.cancel()
        return [data for _, _, data in transport.taken]

    seven = torch.tensor([7.0]).numpy().tobytes()
    assert asyncio.run(scenario()) == [seven, seven]


def test_all_members_hear_of_a_round_though_one_cannot_be_reached_and_its_pieces_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> list[tuple[str, type[m.Message]]]:
        transport = SlowTransport()
        sender = sender_of(0, transport, average_of(1.0, 2))
        task = asyncio.create_task(sender.run())
        sender.open([SendOpen(peer="b", round=1), SendOpen(peer="c", round=1)])
        await let_go(transport, 2)
        transport.error = PeerUnreachableError("b cannot be reached")
        sender.put(piece(0))
        sender.put(piece(1))
        await let_go(transport, 1)
        transport.error = None
        sender.open([SendOpen(peer="c", round=2)])
        await let_go(transport, 1)
        task.cancel()
        return [(peer, type(message)) for peer, message, _ in transport.taken]

    assert asyncio.run(scenario()) == [("b", m.OpenRound), ("c", m.OpenRound), ("c", m.OpenRound)]
    assert "round_hampered" in caplog.text


def test_pieces_of_a_round_that_was_given_up_are_not_sent() -> None:
    async def scenario() -> int:
        transport = SlowTransport()
        sender = sender_of(0, transport, average_of(1.0, 3))
        for number in range(3):
            sender.put(piece(number))
        await sender.clear()
        assert sender.idle
        return len(transport.taken)

    assert asyncio.run(scenario()) == 0
