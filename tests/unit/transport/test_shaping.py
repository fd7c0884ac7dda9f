from __future__ import annotations

import asyncio

import pytest

from roost.transport.interface import Lane
from roost.transport.meter import Meter
from roost.transport.shaping import BURST_S, PACKET_BYTES, PIECE_S, TokenBucket


def test_without_a_rate_nothing_waits() -> None:
    assert TokenBucket(0).reserve(10**12, now=5.0) == 0.0


def test_a_reservation_waits_for_all_that_were_made_before() -> None:
    bucket = TokenBucket(1000)
    first, second = bucket.reserve(500, now=10.0), bucket.reserve(500, now=10.0)
    assert first == pytest.approx(0.5 - BURST_S)
    assert second == pytest.approx(1.0 - BURST_S)


def test_idle_time_saves_up_no_more_than_a_burst() -> None:
    bucket = TokenBucket(1000)
    bucket.reserve(500, now=10.0)
    assert bucket.reserve(500, now=100.0) == pytest.approx(0.5 - BURST_S)


def test_the_rate_holds_over_many_small_reservations() -> None:
    bucket, now = TokenBucket(1_000_000), 0.0
    for _ in range(1000):
        now += bucket.reserve(1000, now)
    assert now == pytest.approx(1.0 - BURST_S)


def test_a_meter_counts_both_directions() -> None:
    async def scene() -> Meter:
        meter = Meter(0)
        await meter.sending(10)
        meter.message_sent()
        await meter.receiving(20)
        await meter.receiving(5)
        meter.message_received()
        return meter

    traffic = asyncio.run(scene()).traffic
    assert (traffic.bytes_sent, traffic.messages_sent, traffic.bytes_received, traffic.messages_received) == (10, 1, 25, 1)


def test_pieces_add_up_and_take_a_few_milliseconds_each() -> None:
    pieces = list(TokenBucket(100_000_000).pieces(2_000_001))
    assert sum(pieces) == 2_000_001
    assert max(pieces) == 100_000_000 * PIECE_S
    assert list(TokenBucket(1000).pieces(2 * PACKET_BYTES + 1)) == [PACKET_BYTES, PACKET_BYTES, 1]


def test_a_large_message_does_not_hold_up_small_ones_until_all_of_it_has_left() -> None:
    async def scene() -> tuple[float, float]:
        meter = Meter(10_000_000)
        clock = asyncio.get_running_loop().time
        begun = clock()
        large = asyncio.create_task(meter.sending(4_000_000))
        await asyncio.sleep(0)
        await meter.sending(1000)
        small_s = clock() - begun
        await large
        return small_s, clock() - begun

    small_s, large_s = asyncio.run(scene())
    assert small_s < large_s / 2
    assert large_s > 0.4 - 2 * BURST_S


async def send(meter: Meter, nbytes: int, lane: Lane) -> float:
    """Send one message of one frame; return when it had left."""
    with meter.message(lane):
        async with meter.frame(nbytes, lane):
            pass
    return asyncio.get_running_loop().time()


def test_averaging_gives_way_to_a_message_of_the_pipeline() -> None:
    async def scene() -> tuple[float, float]:
        meter = Meter(10_000_000)
        begun = asyncio.get_running_loop().time()
        averaging = asyncio.create_task(send(meter, 1_000_000, Lane.AVERAGING))
        await asyncio.sleep(0)
        training = asyncio.create_task(send(meter, 500_000, Lane.TRAINING))
        return await training - begun, await averaging - begun

    training_s, averaging_s = asyncio.run(scene())
    # Had they taken turns from the beginning, the smaller one would have taken as long as twice its bytes.
    assert training_s < averaging_s
    assert averaging_s > 0.15 - 2 * BURST_S


def test_a_pipeline_that_fills_the_line_leaves_averaging_a_part_of_it() -> None:
    async def scene() -> float:
        meter = Meter(20_000_000)
        begun = asyncio.get_running_loop().time()
        filling = [asyncio.create_task(send(meter, 4_000_000, Lane.TRAINING)) for _ in range(2)]
        await asyncio.sleep(0)
        left = await send(meter, 400_000, Lane.AVERAGING) - begun
        for task in filling:
            await task
        return left / (asyncio.get_running_loop().time() - begun)

    assert asyncio.run(scene()) < 0.5


def test_waiting_messages_of_the_pipeline_are_counted_until_the_last_has_left() -> None:
    async def scene() -> list[bool]:
        meter = Meter(0)
        seen = []
        with meter.message(Lane.TRAINING):
            with meter.message(Lane.TRAINING):
                seen.append(meter.pipeline_sends)
            seen.append(meter.pipeline_sends)
            with meter.message(Lane.AVERAGING):
                seen.append(meter.pipeline_sends)
        seen.append(meter.pipeline_sends)
        return seen

    assert asyncio.run(scene()) == [True, True, True, False]
