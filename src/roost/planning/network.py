"""What the network between nodes carries: measured links, and estimates for pairs that were not measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roost.planning.cost import Floats
from roost.types import LinkProfile

DEFAULT_BYTES_PER_S = 12.5e6
"""Assumed for links when none was measured: 100 Mbit/s."""
DEFAULT_LATENCY_S = 1e-3
"""Assumed for links when none was measured."""


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
        rate, latency, up, down = self.rate[chosen][:, chosen], self.latency[chosen][:, chosen], self.up[chosen], self.down[chosen]
        return Network(
            places={names[place]: index for index, place in enumerate(places)},
            rate=rate,
            latency=latency,
            up=up,
            down=down,
            uniform=_uniform(rate, latency, up, down),
        )


def make_network(
    node_ids: Sequence[str], links: Iterable[LinkProfile], declared: Mapping[str, tuple[float, float]] | None = None
) -> Network:
    """Return the network of `node_ids`; links with an end that is not among them are ignored, of two for one pair the later counts.

    `declared` are lines that are known, up and down, by node id; 0 means unknown.
    """
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
    known_lines = [(declared or {}).get(name, (0.0, 0.0)) for name in node_ids]
    up, down = (_lines(seen, [line[way] for line in known_lines]) for way, seen in enumerate((sent, received)))
    delay = _typical(delays)
    rate = np.minimum(up[:, None], down[None, :])
    latency = (delay[:, None] + delay[None, :]) / 2
    if known:
        ends = np.asarray(list(known), dtype=np.intp)
        rate[ends[:, 0], ends[:, 1]] = [link.bytes_per_s for link in known.values()]
        latency[ends[:, 0], ends[:, 1]] = [link.latency_s for link in known.values()]
    np.fill_diagonal(rate, np.inf)
    np.fill_diagonal(latency, 0.0)
    return Network(places=places, rate=rate, latency=latency, up=up, down=down, uniform=_uniform(rate, latency, up, down))


def _lines(seen: Sequence[Sequence[float]], declared: Sequence[float]) -> Floats:
    """Return per node its declared line, or else the most that any of its links was seen to carry, or else the median of the others."""
    best = [line or max(rates, default=0.0) for rates, line in zip(seen, declared, strict=True)]
    known = [line for line in best if line]
    unknown = statistics.median(known) if known else DEFAULT_BYTES_PER_S
    return np.asarray([line or unknown for line in best], dtype=np.float64)


def _typical(seen: Sequence[Sequence[float]]) -> Floats:
    every = [statistics.median(delays) for delays in seen if delays]
    unknown = statistics.median(every) if every else DEFAULT_LATENCY_S
    return np.asarray([statistics.median(delays) if delays else unknown for delays in seen], dtype=np.float64)


def _uniform(rate: Floats, latency: Floats, up: Floats, down: Floats) -> bool:
    if rate.shape[0] < 2:
        return True
    if np.ptp(up) or np.ptp(down):
        return False
    others = ~np.eye(rate.shape[0], dtype=bool)
    return bool(np.ptp(rate[others]) == 0 and np.ptp(latency[others]) == 0)
