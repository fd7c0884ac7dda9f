"""Links of known rate are measured as such, on clocks that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from roost import messages as m
from roost.agent import links
from roost.agent.links import PROBE_DEADLINE_S, measure_links
from roost.errors import PeerUnreachableError
from roost.transport.interface import Buffer, Reply, Traffic
from roost.types import LinkProfile, Peer

PAYLOAD_BYTES = 8 << 20


@dataclass
class KnownLink:
    """A transport whose calls take what a link of this rate takes: an idle line lets a burst through at once."""

    bytes_per_s: float
    latency_s: float = 0.001
    burst_s: float = 0.01
    reachable: bool = True
    now: float = 0.0
    payloads: list[int] = field(default_factory=list)

    peer_id = "a"
    address = "a:1"
    traffic = Traffic(bytes_sent=0, bytes_received=0, messages_sent=0, messages_received=0)

    def perf_counter(self) -> float:
        return self.now

    async def call(self, peer: Peer, message: m.Message, buffers: Sequence[Buffer] = (), *, deadline_s: float | None = None) -> Reply:
        assert isinstance(message, m.Ping) and deadline_s == PROBE_DEADLINE_S
        if not self.reachable:
            raise PeerUnreachableError("gone")
        size = sum(len(memoryview(buffer)) for buffer in buffers)
        self.payloads.append(size)
        self.now += 2 * self.latency_s + max(0.0, size / self.bytes_per_s - self.burst_s)
        return Reply(message=m.Done(), buffers=[])


async def measured(link: KnownLink, monkeypatch: pytest.MonkeyPatch) -> tuple[LinkProfile, ...]:
    monkeypatch.setattr(links, "time", link)
    return await measure_links(link, "a", (Peer(peer_id="b", address="b:1"),), PAYLOAD_BYTES)  # type: ignore[arg-type]


@pytest.mark.parametrize("mbit", [1, 5, 20, 100, 1000])
def test_the_rate_is_that_of_the_link_whatever_its_burst(mbit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = asyncio.run(measured(KnownLink(mbit * 125_000), monkeypatch))
    assert found.bytes_per_s == pytest.approx(mbit * 125_000, rel=0.03)
    assert found.latency_s == pytest.approx(0.001)


def test_a_slow_link_is_sent_little(monkeypatch: pytest.MonkeyPatch) -> None:
    link = KnownLink(125_000)
    asyncio.run(measured(link, monkeypatch))
    assert link.now < 2.0
    assert max(link.payloads) <= 64 << 10


def test_no_payload_is_larger_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    link = KnownLink(1e10)
    (found,) = asyncio.run(measured(link, monkeypatch))
    assert max(link.payloads) == PAYLOAD_BYTES
    assert found.bytes_per_s > 0


def test_a_peer_that_cannot_be_reached_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(measured(KnownLink(1e6, reachable=False), monkeypatch)) == ()
