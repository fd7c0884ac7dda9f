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
FIRST_BYTES = 32 << 10
"""Sent first; larger payloads follow until one takes about LINK_S."""
MOST_GROWTH = 16
LINK_S = 0.2
"""Seconds that the large payload should take: long against timers, short for whoever waits for the plan."""
PAYLOADS = 3
SMALL_PART = 4
"""The large payload is so many times the small one."""
PROBE_DEADLINE_S = 20.0
MIN_TRANSFER_S = 1e-6
MOST_GAINED = 2.0
"""On a fast link chance may bring the two times close together: the rate is at most so many times that of the large one alone."""


async def measure_links(transport: Transport, node_id: str, targets: tuple[Peer, ...], payload_bytes: int) -> tuple[LinkProfile, ...]:
    """Return one LinkProfile per target that answered: half the median round trip, and bytes per second of payloads.

    Payloads have at most `payload_bytes`. A target that cannot be reached is left out and logged.
    """
    links = []
    for target in targets:
        try:
            links.append(await _measure(transport, node_id, target, payload_bytes))
        except TransportError as error:
            logger.warning("link_unmeasured node=%s target=%s error=%s", node_id, target.peer_id, error.message)
    return tuple(links)


async def _measure(transport: Transport, node_id: str, target: Peer, payload_bytes: int) -> LinkProfile:
    async def seconds(size: int) -> float:
        started = time.perf_counter()
        await transport.call(target, m.Ping(), [bytes(size)] if size else (), deadline_s=PROBE_DEADLINE_S)
        return time.perf_counter() - started

    await seconds(0)
    round_trip = statistics.median([await seconds(0) for _ in range(PINGS)])
    large = min(FIRST_BYTES, payload_bytes)
    while (transfer := await seconds(large) - round_trip) < LINK_S / 2 and large < payload_bytes:
        large = int(min(payload_bytes, large * min(MOST_GROWTH, max(2.0, LINK_S / max(transfer, MIN_TRANSFER_S)))))
    small = large // SMALL_PART
    # The fastest count: whatever disturbs a transfer makes it longer. The difference of two sizes leaves out what every
    # transfer takes, and the burst that an idle line lets through.
    quickest = {size: min([await seconds(size) for _ in range(PAYLOADS)]) for size in (small, large)}
    rate = (large - small) / max(quickest[large] - quickest[small], MIN_TRANSFER_S)
    rate = min(rate, MOST_GAINED * large / max(quickest[large] - round_trip, MIN_TRANSFER_S))
    return LinkProfile(source=node_id, target=target.peer_id, latency_s=round_trip / 2, bytes_per_s=rate)
