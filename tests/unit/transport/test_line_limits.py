"""The owner's limits on a line: by an exact clock, and by the bytes that really cross a socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_kit import GrpcFleet, Recorder, chunk, stopping

from roost.config import TransportConfig
from roost.messages import Ping, TensorsReply
from roost.transport.grpc_options import FRAME_BYTES_KEY, LEAST_FRAME_BYTES, asked_frame_bytes, frame_bytes_for
from roost.transport.interface import Lane
from roost.transport.meter import Meter
from roost.transport.shaping import BURST_S, TokenBucket, frame_bytes, piece_bytes
from roost.types import Peer

LIMIT = 2_000_000
AROUND_FRAMES = 0.02
"""What TLS, HTTP/2 and keepalives add on this host, where no Ethernet frames are."""
AHEAD_OF_READING = 64 << 10
"""What HTTP/2 lets a peer send on each stream and connection before anything is read (RFC 9113, section 6.9.2)."""


class StepClock:
    """A loop's clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def passed(meter: Meter, sizes: list[tuple[int, float]], ask: Callable[[Meter, int], object], clock: StepClock) -> list[tuple[float, int]]:
    """Return when how many bytes had passed in all, for messages with pauses before them."""

    async def scene() -> list[tuple[float, int]]:
        found, total = [], 0
        for size, pause in sizes:
            clock.now += pause
            await ask(meter, size)  # type: ignore[misc]
            total += size
            found.append((clock.now, total))
        return found

    return asyncio.run(scene())


@pytest.mark.parametrize("way", ["sending", "receiving"])
@given(sizes=st.lists(st.tuples(st.integers(1, 200_000), st.floats(0, 0.3)), min_size=1, max_size=40))
@settings(max_examples=40, deadline=None)
def test_over_any_time_no_more_passes_than_the_limit_a_burst_and_a_frame(way: str, sizes: list[tuple[int, float]]) -> None:
    clock = StepClock()
    meter = Meter(LIMIT, LIMIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roost.transport.meter.asyncio.get_running_loop", lambda: clock)
        patch.setattr("roost.transport.meter.asyncio.sleep", clock.sleep)
        seen = passed(meter, sizes, lambda meter, size: getattr(meter, way)(size), clock)
    largest = max(size for size, _ in sizes)
    for (began, before), (ended, after) in itertools.combinations([(clock.now - 1e9, 0), *seen], 2):
        assert after - before <= LIMIT * (ended - began + BURST_S) + largest + 1
    traffic = meter.traffic
    assert (traffic.bytes_sent if way == "sending" else traffic.bytes_received) == sum(size for size, _ in sizes)


def test_frames_are_no_larger_than_what_a_slow_line_carries_in_a_few_milliseconds() -> None:
    config = TransportConfig()
    assert frame_bytes(config, 0) == config.frame_bytes
    assert frame_bytes(config, 12.5e6) == piece_bytes(12.5e6) == 62_500
    assert frame_bytes(config, 1e4) == 16 << 10
    assert frame_bytes(config, 1e12) == config.frame_bytes


def test_a_limited_peer_asks_for_frames_that_fit_and_others_for_nothing() -> None:
    assert asked_frame_bytes(TransportConfig(uplink_bytes_per_s=1e6)) == ()
    ((key, value),) = asked_frame_bytes(TransportConfig(downlink_bytes_per_s=12.5e6))
    assert frame_bytes_for([("other", "1"), (key, value)], 1 << 20) == 62_500
    assert frame_bytes_for([(key, value)], 20_000) == 20_000


@pytest.mark.parametrize("value", ["", "-5", "1e9", "\u0663", "9" * 40, b"5"])
def test_what_a_peer_asks_for_in_another_form_is_ignored(value: str | bytes) -> None:
    assert frame_bytes_for([(FRAME_BYTES_KEY, value)], 1 << 20) == 1 << 20


def test_nobody_can_ask_for_frames_so_small_that_sending_is_all_overhead() -> None:
    assert frame_bytes_for([(FRAME_BYTES_KEY, "0")], 1 << 20) == LEAST_FRAME_BYTES
    assert frame_bytes_for(None, 1 << 20) == 1 << 20


def test_without_a_limit_nothing_waits() -> None:
    assert not TokenBucket(0).limited
    assert not Meter(0).traffic.bytes_received


class Relay:
    """Carries one endpoint's TCP connections and notes when how many bytes came to it, and from it."""

    def __init__(self, target: Peer) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self.towards: list[tuple[float, int]] = []
        self.back: list[tuple[float, int]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> Peer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return Peer(peer_id=self._target.peer_id, address=f"127.0.0.1:{port}")

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target.address.split(":")
        other_reader, other_writer = await asyncio.open_connection(host, int(port))
        pumps = [self._pump(reader, other_writer, self.towards), self._pump(other_reader, writer, self.back)]
        self._tasks |= {asyncio.create_task(pump) for pump in pumps}

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: list[tuple[float, int]]) -> None:
        clock = asyncio.get_running_loop().time
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                seen.append((clock(), len(data)))
                writer.write(data)
                await writer.drain()
        writer.close()


def most_over(seen: list[tuple[float, int]], limit: float) -> float:
    """Return the most bytes that any window of at least half a second had above the limit."""
    times = [0.0, *(time for time, _ in seen)]
    sums = [0, *itertools.accumulate(size for _, size in seen)]
    pairs = itertools.combinations(range(1, len(times)), 2)
    return max(sums[j] - sums[i - 1] - limit * (times[j] - times[i]) for i, j in pairs if times[j] - times[i] >= 0.5)


LANES = (Lane.TRAINING, Lane.AVERAGING)


def test_a_limited_downlink_makes_its_peers_wait(tmp_path: Path) -> None:
    async def scene() -> tuple[list[tuple[float, int]], float]:
        fleet = GrpcFleet(tmp_path / "authority")
        async with stopping(fleet):
            limited = fleet.make("limited", config=TransportConfig(downlink_bytes_per_s=LIMIT))
            senders, seen = [fleet.make("one"), fleet.make("two")], Recorder()
            for member in (limited, *senders):
                await member.start(seen)
            relay = Relay(Peer(peer_id="limited", address=limited.address))
            peer = await relay.start()
            clock = asyncio.get_running_loop().time
            began = clock()
            # 200 KB from each of four streams, and calls between them.
            works = [
                sender.send(peer, chunk(step), [bytes(50_000)], lane=lane) for step in range(4) for sender in senders for lane in LANES
            ]
            await asyncio.gather(*works, *(sender.call(peer, Ping(), [bytes(300_000)]) for sender in senders))
            for _ in range(len(works) + len(senders)):
                await seen.next()
            took = clock() - began
            await relay.stop()
            return relay.towards, took

    seen, took = asyncio.run(scene())
    total = sum(size for _, size in seen)
    assert total > 1_400_000
    assert took >= 1_400_000 / LIMIT - BURST_S
    streams, connections = 6, 4
    ahead = streams * (AHEAD_OF_READING + piece_bytes(LIMIT)) + connections * AHEAD_OF_READING
    assert most_over(seen, LIMIT) <= AROUND_FRAMES * total + LIMIT * BURST_S + ahead


def test_a_limited_uplink_is_never_exceeded_by_sends_calls_and_replies_together(tmp_path: Path) -> None:
    async def scene() -> list[tuple[float, int]]:
        fleet = GrpcFleet(tmp_path / "authority")
        async with stopping(fleet):
            limited, other, seen = fleet.make("limited", config=TransportConfig(uplink_bytes_per_s=LIMIT)), fleet.make("other"), Recorder()
            await other.start(seen)
            await limited.start(Recorder(reply=(TensorsReply(tensors=()), (bytes(200_000),))))
            relays = [Relay(Peer(peer_id=each.peer_id, address=each.address)) for each in (other, limited)]
            to_other, to_limited = [await relay.start() for relay in relays]
            works = [limited.send(to_other, chunk(step), [bytes(300_000)], lane=lane) for step in range(2) for lane in LANES]
            await asyncio.gather(*works, limited.call(to_other, Ping(), [bytes(200_000)]), other.call(to_limited, Ping()))
            for relay in relays:
                await relay.stop()
            return sorted(relays[0].towards + relays[1].back)

    seen = asyncio.run(scene())
    total = sum(size for _, size in seen)
    assert total > 1_600_000
    assert most_over(seen, LIMIT) <= AROUND_FRAMES * total + LIMIT * BURST_S + 2 * piece_bytes(LIMIT)
