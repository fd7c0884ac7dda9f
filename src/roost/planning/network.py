"""What the network between nodes carries: measured links, and estimates for pairs that were not measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from roost.planning.cost import Floats
from roost.types import LinkProfile

DEFAULT_BYTES_PER_S = 12.5e6
"""Assumed for links when none was measured: 100 Mbit/s."""
DEFAULT_LATENCY_S = 1e-3
"""Assumed for links when none was measured."""
DENSE_NODES = 4096
"""Largest pool for which every pair is kept; it takes 270 MB."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """Every link of a pool by the places of its ends in the pool's order; arrays have dtype float64.

    A pair that was not measured is estimated from the lines of its ends: the slower of what the source was seen to send to
    anybody and what the target was seen to receive from anybody; its latency is the mean of what both have to their peers.
    """

    places: dict[str, int]
    """Place of every node id."""
    rate: Floats
    """Bytes per second, shape (nodes, nodes), [source, target]; infinite on the diagonal."""
    latency: Floats
    """Seconds one way, shape (nodes, nodes); 0 on the diagonal."""
    up: Floats
    """Bytes per second that a node can send in all, shape (nodes,)."""
    down: Floats
    """Bytes per second that a node can receive in all, shape (nodes,)."""
    uniform: bool
    """True if all links are alike, so that only a node's own properties tell it from another."""

    def bytes_per_s(self, source: str, target: str) -> float:
        return float(self.rate[self.places[source], self.places[target]])

    def latency_s(self, source: str, target: str) -> float:
        return float(self.latency[self.places[source], self.places[target]])

    def part(self, places: Sequence[int]) -> Network:
        """Return the network of some of the nodes, in that order."""
        chosen = np.asarray(places, dtype=np.intp)
        names = {place: name for name, place in self.places.items()}
        return Network(
            places={names[place]: index for index, place in enumerate(places)},
            rate=self.rate[chosen][:, chosen],
            latency=self.latency[chosen][:, chosen],
            up=self.up[chosen],
            down=self.down[chosen],
            uniform=self.uniform,
        )


def make_network(node_ids: Sequence[str], links: Iterable[LinkProfile]) -> Network:
    """Return the network of `node_ids`; links with an end that is not among them are ignored, of two for one pair the later counts."""
    places = {name: place for place, name in enumerate(node_ids)}
    known = {
        (places[link.source], places[link.target]): link
        for link in links
        if link.source in places and link.target in places and link.source != link.target
    }
    count = len(node_ids)
    sent: list[list[float]] = [[] for _ in range(count)]
    received: list[list[float]] = [[] for _ in range(count)]
    delays: list[list[float]] = [[] for _ in range(count)]
    for (source, target), link in known.items():
        sent[source].append(link.bytes_per_s)
        received[target].append(link.bytes_per_s)
        delays[source].append(link.latency_s)
        delays[target].append(link.latency_s)
    up, down = _lines(sent), _lines(received)
    delay = _typical(delays)
    rate = np.minimum(up[:, None], down[None, :])
    latency = (delay[:, None] + delay[None, :]) / 2
    if known:
        ends = np.asarray(list(known), dtype=np.intp)
        rate[ends[:, 0], ends[:, 1]] = [link.bytes_per_s for link in known.values()]
        latency[ends[:, 0], ends[:, 1]] = [link.latency_s for link in known.values()]
    np.fill_diagonal(rate, np.inf)
    np.fill_diagonal(latency, 0.0)
    return Network(places=places, rate=rate, latency=latency, up=up, down=down, uniform=_uniform(rate, latency))


def _lines(seen: Sequence[Sequence[float]]) -> Floats:
    """Return per node the most that any of its links was seen to carry; for a node without links the median of the others."""
    best = [max(rates) for rates in seen if rates]
    unknown = statistics.median(best) if best else DEFAULT_BYTES_PER_S
    return np.asarray([max(rates) if rates else unknown for rates in seen], dtype=np.float64)


def _typical(seen: Sequence[Sequence[float]]) -> Floats:
    every = [statistics.median(delays) for delays in seen if delays]
    unknown = statistics.median(every) if every else DEFAULT_LATENCY_S
    return np.asarray([statistics.median(delays) if delays else unknown for delays in seen], dtype=np.float64)


def _uniform(rate: Floats, latency: Floats) -> bool:
    if rate.shape[0] < 2:
        return True
    others = ~np.eye(rate.shape[0], dtype=bool)
    return bool(np.ptp(rate[others]) == 0 and np.ptp(latency[others]) == 0)
