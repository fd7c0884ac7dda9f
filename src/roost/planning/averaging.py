"""How long an averaging round takes, and how often rounds can follow each other (docs/planning.md)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from roost.planning.network import Network
from roost.types import SegmentPlan

LEAST_LINE = 0.5
"""Fraction of a line that a round gets even where the pipeline could fill it: streams share a line fairly."""


def round_seconds(segments: Sequence[SegmentPlan], network: Network, piped: Mapping[str, float], compression: float) -> float:
    """Return the seconds of a round with all rings in parallel: that of the node which takes longest for its rings; 0 without rings.

    Each member of a ring of C sends 2 (C-1)/C of the segment's bytes to the next member, in 2 (C-1) steps that wait for the
    one before (arXiv 2401.01728, parallel multi-ring all-reduce). A node in several rings sends for all of them over one line,
    of which the pipeline uses `piped` bytes per second, by node id; the round gets what is left, at least half.
    """
    busy: dict[str, float] = {}
    slowest_ring = 0.0
    for segment in segments:
        members, count = segment.members, len(segment.members)
        if count < 2:
            continue
        sent = 2 * (count - 1) / count * segment.nbytes * compression
        hops = list(itertools.pairwise((*members, members[0])))
        latency = sum(network.latency_s(*hop) for hop in hops) / count
        link = min(network.bytes_per_s(*hop) for hop in hops)
        # A ring is as slow as its slowest hop, and pays a latency with each of its steps.
        slowest_ring = max(slowest_ring, sent / link + 2 * (count - 1) * latency)
        for member in members:
            line = min(float(network.up[network.places[member]]), float(network.down[network.places[member]]))
            left = max(LEAST_LINE * line, line - piped.get(member, 0.0))
            busy[member] = busy.get(member, 0.0) + sent / left
    return max([slowest_ring, *busy.values()])
