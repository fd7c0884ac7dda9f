"""Measures the way to other nodes: round trip and bandwidth over the same transport that training uses."""

from __future__ import annotations

import logging
import statistics
import time

from roost import messages as m
from roost.errors import TransportError
from roost.transport.interface import Transport
from roost.types import LinkProfile, Peer

logger = logging.getLogger(__name__)

PINGS = 5
PROBE_DEADLINE_S = 20.0


async def measure_links(transport: Transport, node_id: str, targets: tuple[Peer, ...], payload_bytes: int) -> tuple[LinkProfile, ...]:
    """Return one LinkProfile per target that answered: half the median round trip, and bytes per second of one payload.

    A target that cannot be reached is left out and logged.
    """
    links = []
    for target in targets:
        try:
            links.append(await _measure(transport, node_id, target, payload_bytes))
        except TransportError as error:
            logger.warning("link_unmeasured node=%s target=%s error=%s", node_id, target.peer_id, error.message)
    return tuple(links)


async def _measure(transport: Transport, node_id: str, target: Peer, payload_bytes: int) -> LinkProfile:
    await transport.call(target, m.Ping(), deadline_s=PROBE_DEADLINE_S)
    round_trips = []
    for _ in range(PINGS):
        started = time.perf_counter()
        await transport.call(target, m.Ping(), deadline_s=PROBE_DEADLINE_S)
        round_trips.append(time.perf_counter() - started)
    round_trip = statistics.median(round_trips)
    started = time.perf_counter()
    await transport.call(target, m.Ping(), [bytes(payload_bytes)], deadline_s=PROBE_DEADLINE_S)
    seconds = max(time.perf_counter() - started - round_trip, 1e-6)
    return LinkProfile(source=node_id, target=target.peer_id, latency_s=round_trip / 2, bytes_per_s=payload_bytes / seconds)
