"""The promises of `Transport`, kept by every transport."""

from __future__ import annotations

import asyncio
import logging

import pytest
from transport_kit import WAIT_S, Fleet, Recorder, chunk, peer_of, stopping

from roost.config import TransportConfig
from roost.errors import (
    DeadlineError,
    ForbiddenError,
    JobRefusedError,
    MalformedMessageError,
    MessageTooLargeError,
    PeerUnreachableError,
    ProtocolError,
    RoostError,
)
from roost.messages import ContinueJob, Done, Ping, RingChunk, StatusRequest, TensorsReply
from roost.transport.interface import Lane, Sender
from roost.types import Peer, Role


def test_a_message_arrives_with_its_sender_and_writable_buffers(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two, seen = fleet.make("one"), fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(seen)
            big = bytes(range(256)) * 8192
            await one.send(peer_of(two), chunk(7), [b"", memoryview(big), bytearray(b"abc")])
            sender, message, buffers = await seen.next()
            assert sender == Sender(peer_id="one", role=Role.NODE)
            assert message == chunk(7)
            assert [bytes(buffer) for buffer in buffers] == [b"", big, b"abc"]
            assert all(not memoryview(buffer).readonly for buffer in buffers)

    asyncio.run(scene())


def test_messages_of_one_lane_arrive_in_order_and_one_at_a_time(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two, seen = fleet.make("one"), fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(seen)
            peer = peer_of(two)
            await asyncio.gather(*(one.send(peer, chunk(step), [bytes(step * 9000)]) for step in range(40)))
            steps = []
            for _ in range(40):
                _, message, buffers = await seen.next()
                assert isinstance(message, RingChunk)
                assert len(buffers[0]) == message.step * 9000
                steps.append(message.step)
            assert steps == list(range(40))
            assert seen.most_running == 1

    asyncio.run(scene())


def test_a_lane_that_is_held_up_does_not_hold_up_the_other(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two, seen = fleet.make("one"), fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(seen)
            peer = peer_of(two)
            held = seen.gate
            held.clear()
            await one.send(peer, chunk(0), lane=Lane.AVERAGING)
            await asyncio.wait_for(seen.entered.wait(), WAIT_S)
            seen.gate = asyncio.Event()
            seen.gate.set()
            await one.send(peer, chunk(1), lane=Lane.TRAINING)
            assert (await seen.next())[1] == chunk(1)
            held.set()
            assert (await seen.next())[1] == chunk(0)

    asyncio.run(scene())


def test_a_receiver_that_is_slow_holds_its_sender_back(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two, seen = fleet.make("one"), fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(seen)
            seen.gate.clear()
            peer, data = peer_of(two), bytes(8 << 20)
            with pytest.raises(DeadlineError, match="two"):
                for step in range(50):
                    await one.send(peer, chunk(step), [data], deadline_s=0.5)
            seen.gate.set()

    asyncio.run(scene())


def test_calls_run_concurrently_and_return_their_replies(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two, seen = fleet.make("one"), fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(seen)
            peer = peer_of(two)
            payloads = [bytes([step]) * (step * 200_000) for step in range(8)]
            replies = await asyncio.gather(*(one.call(peer, Ping(), [payload]) for payload in payloads))
            assert [bytes(reply.buffers[0]) for reply in replies] == payloads
            assert all(reply.message == TensorsReply(tensors=()) for reply in replies[1:])
            traffic = one.traffic
            assert traffic.messages_sent == traffic.messages_received == 8
            assert traffic.bytes_sent > sum(len(payload) for payload in payloads)

    asyncio.run(scene())


def test_an_error_of_roost_in_a_call_is_raised_at_the_caller_as_its_own_class(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two = fleet.make("one"), fleet.make("two")
            await one.start(Recorder())
            await two.start(Recorder(error=JobRefusedError("busy with job-1", hint="wait")))
            with pytest.raises(JobRefusedError, match="busy with job-1") as caught:
                await one.call(peer_of(two), Ping())
            assert caught.value.hint == "wait"

    asyncio.run(scene())


def test_a_handler_that_breaks_in_a_call_is_logged_and_reported(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two = fleet.make("one"), fleet.make("two")
            await one.start(Recorder())
            await two.start(Recorder(error=ZeroDivisionError("oops")))
            with pytest.raises(ProtocolError, match="two failed while it handled Ping: ZeroDivisionError: oops"):
                await one.call(peer_of(two), Ping())

    asyncio.run(scene())
    assert any(record.exc_info is not None and "handler_broke" in record.message for record in caplog.records)


async def _send_until_refused(one: object, peer: Peer, lane: Lane = Lane.TRAINING) -> RoostError:
    """Send until the stream's end is noticed: that takes as long as the news travels."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await one.send(peer, chunk(1), lane=lane)  # type: ignore[attr-defined]
            except RoostError as error:
                return error


def test_a_handler_that_breaks_on_a_message_closes_the_stream(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two, seen = fleet.make("one"), fleet.make("two"), Recorder(error=ZeroDivisionError("oops"))
            await one.start(Recorder())
            await two.start(seen)
            assert isinstance(await _send_until_refused(one, peer_of(two)), ProtocolError)
            seen.error = None
            seen.arrived = asyncio.Queue()
            await one.send(peer_of(two), chunk(2))
            assert (await seen.next())[1] == chunk(2)

    asyncio.run(scene())
    assert any(record.exc_info is not None and "handler_broke" in record.message for record in caplog.records)


def test_a_message_that_its_handler_refuses_is_dropped_and_the_next_one_arrives(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two, seen = fleet.make("one"), fleet.make("two"), Recorder(error=ForbiddenError("not your part"))
            await one.start(Recorder())
            await two.start(seen)
            await one.send(peer_of(two), chunk(0))
            await one.send(peer_of(two), chunk(1))
            assert [(await seen.next())[1] for _ in range(2)] == [chunk(0), chunk(1)]

    with caplog.at_level(logging.WARNING):
        asyncio.run(scene())
    assert sum("message_dropped" in record.message for record in caplog.records) == 2


def test_a_call_that_the_senders_role_may_not_make_is_refused(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            node, requester, seen = fleet.make("node"), fleet.make("requester", Role.REQUESTER), Recorder()
            await node.start(seen)
            await requester.start(Recorder())
            with pytest.raises(ForbiddenError, match="requester is a requester and sent ContinueJob"):
                await requester.call(peer_of(node), ContinueJob(job_id="job"))
            await requester.call(peer_of(node), StatusRequest())
            assert seen.arrived.qsize() == 1

    asyncio.run(scene())


def test_a_message_that_the_senders_role_may_not_send_closes_its_stream_only(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            node, requester, other, seen = fleet.make("node"), fleet.make("requester", Role.REQUESTER), fleet.make("other"), Recorder()
            await node.start(seen)
            await requester.start(Recorder())
            await other.start(Recorder())
            await other.send(peer_of(node), chunk(1))
            assert isinstance(await _send_until_refused(requester, peer_of(node)), ForbiddenError)
            await other.send(peer_of(node), chunk(2))
            assert [(await seen.next())[1] for _ in range(2)] == [chunk(1), chunk(2)]

    asyncio.run(scene())


def test_a_message_over_the_receivers_limit_is_refused_and_others_still_arrive(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, seen = fleet.make("one"), Recorder()
            two = fleet.make("two", config=TransportConfig(max_message_bytes=100_000))
            await one.start(Recorder())
            await two.start(seen)
            for _ in range(3):
                with pytest.raises(MessageTooLargeError):
                    await one.call(peer_of(two), Ping(), [bytes(30 << 20)])
            await one.call(peer_of(two), Ping(), [bytes(1000)])

    asyncio.run(scene())


def test_a_message_over_the_senders_own_limit_is_not_sent(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two = fleet.make("one", config=TransportConfig(max_message_bytes=1000)), fleet.make("two")
            await one.start(Recorder())
            await two.start(Recorder())
            with pytest.raises(MessageTooLargeError):
                await one.send(peer_of(two), chunk(0), [bytes(1001)])
            assert one.traffic.bytes_sent == 0

    asyncio.run(scene())


def test_a_number_that_is_not_finite_is_refused_at_the_sender(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one = fleet.make("one")
            await one.start(Recorder())
            bad = RingChunk(job_id="job", segment=0, round=0, step=0, chunk=0, weight=float("nan"), dtype="float32")
            with pytest.raises(MalformedMessageError):
                await one.send(Peer(peer_id="two", address="inproc:two"), bad)

    asyncio.run(scene())


def test_a_call_without_an_answer_raises_at_its_deadline_and_its_handler_goes_on(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two, seen = fleet.make("one"), fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(seen)
            seen.gate.clear()
            with pytest.raises(DeadlineError, match="Ping"):
                await one.call(peer_of(two), Ping(), deadline_s=0.2)
            seen.gate.set()
            await seen.next()
            assert seen.finished == 1
            await one.call(peer_of(two), Ping())

    asyncio.run(scene())


def test_a_peer_that_does_not_run_is_unreachable_at_once_and_reached_once_it_does(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two, seen = fleet.make("one"), fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(seen)
            peer = peer_of(two)
            await one.send(peer, chunk(0))
            await seen.next()
            await two.stop()
            started = asyncio.get_running_loop().time()
            assert isinstance(await _send_until_refused(one, peer), PeerUnreachableError)
            with pytest.raises(PeerUnreachableError, match="two"):
                await one.call(peer, Ping())
            assert asyncio.get_running_loop().time() - started < 1
            again = fleet.make("two")
            await again.start(seen)
            seen.arrived = asyncio.Queue()
            await one.send(peer_of(again), chunk(2))
            assert (await seen.next())[1] == chunk(2)

    asyncio.run(scene())


def test_a_call_in_progress_fails_when_its_peer_stops(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two, seen = fleet.make("one"), fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(seen)
            seen.gate.clear()
            call = asyncio.create_task(one.call(peer_of(two), Ping()))
            await asyncio.wait_for(seen.entered.wait(), WAIT_S)
            await two.stop()
            with pytest.raises(PeerUnreachableError):
                await call

    asyncio.run(scene())


def test_what_was_taken_is_delivered_before_the_sender_stops(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two, seen = fleet.make("one"), fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(seen)
            for step in range(3):
                await one.send(peer_of(two), chunk(step), [bytes(1 << 20)])
            await one.stop()
            assert [(await seen.next())[1] for _ in range(3)] == [chunk(0), chunk(1), chunk(2)]
            with pytest.raises(PeerUnreachableError):
                await one.send(peer_of(two), chunk(3))

    asyncio.run(scene())


def test_a_forgotten_peer_is_reached_again(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two, seen = fleet.make("one"), fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(seen)
            for step in range(3):
                await one.send(peer_of(two), chunk(step))
                assert (await seen.next())[1] == chunk(step)
                await one.forget("two")

    asyncio.run(scene())


def test_a_cancelled_send_leaves_the_peer_reachable(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            one, two, seen = fleet.make("one"), fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(seen)
            seen.gate.clear()
            sends = [asyncio.create_task(one.send(peer_of(two), chunk(step), [bytes(16 << 20)])) for step in range(6)]
            await asyncio.wait_for(seen.entered.wait(), WAIT_S)
            for send in sends:
                send.cancel()
            await asyncio.wait(sends)
            seen.gate.set()
            await one.call(peer_of(two), Ping())
            await one.send(peer_of(two), chunk(99))
            async with asyncio.timeout(WAIT_S):
                while (await seen.next())[1] != chunk(99):
                    pass

    asyncio.run(scene())


def test_an_emulated_uplink_is_shared_by_sends_calls_and_replies(fleet: Fleet) -> None:
    async def scene() -> None:
        async with stopping(fleet):
            slow = TransportConfig(uplink_bytes_per_s=2e6, frame_bytes=32 << 10)
            one, two, seen = fleet.make("one", config=slow), fleet.make("two"), Recorder(reply=(Done(), ()))
            await two.start(seen)
            await one.start(Recorder(reply=(TensorsReply(tensors=()), (bytes(200_000),))))
            clock = asyncio.get_running_loop().time
            started = clock()
            await asyncio.gather(
                one.send(peer_of(two), chunk(0), [bytes(200_000)]),
                one.send(peer_of(two), chunk(1), [bytes(200_000)], lane=Lane.AVERAGING),
                one.call(peer_of(two), Ping(), [bytes(200_000)]),
                two.call(peer_of(one), Ping()),
            )
            assert 0.38 < clock() - started < 1.5

    asyncio.run(scene())
