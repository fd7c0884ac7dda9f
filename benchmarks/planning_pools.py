"""Random pools for the planning benchmark: realistic mixes of PCs and home links, the same for the same seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from roost.config import JobConfig, NamedArguments, PlanningConfig
from roost.types import LinkProfile, ModelProfile, NodeProfile

RATES_MBIT = (10.0, 50.0, 100.0, 300.0, 1000.0)
MEMORIES_GB = (4, 6, 8, 12, 16, 24, 32)
TYPICAL_GB = 11.0
"""Geometric mean of MEMORIES_GB, about."""
SPEED_SPREAD = math.sqrt(20)
"""Nodes are at most so many times faster, or slower, than the reference machine."""
LEAST_NODES_OF_CLUSTER, MOST_NODES_OF_CLUSTER = 0.8, 6.0
"""Nodes of typical memory that together hold the model once."""
EQUAL_NODES = 0.2
"""Fraction of nodes that are copies of an earlier one."""
LINKS_PER_NODE = 10
"""Measured links from every node of a pool too large to measure all."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What one planning problem is."""

    seed: int
    profile: ModelProfile
    nodes: tuple[NodeProfile, ...]
    links: tuple[LinkProfile, ...]
    config: JobConfig
    options: PlanningConfig


@dataclass(frozen=True, kw_only=True)
class _Home:
    """Where a node is and how it is connected."""

    site: int
    up: float
    down: float
    """bytes/s."""


def make_scenario(profile: ModelProfile, nodes: int, seed: int) -> Scenario:
    """Return a pool of `nodes` for `profile`, with all links up to 100 nodes and LINKS_PER_NODE each beyond."""
    rng = random.Random(f"{profile.name} {nodes} {seed}")
    config = _job(profile, rng)
    # Memory is scaled to the model: so many typical nodes hold it. A small pool should hold it too, most of the time.
    wanted = rng.uniform(LEAST_NODES_OF_CLUSTER, min(MOST_NODES_OF_CLUSTER, LEAST_NODES_OF_CLUSTER * nodes))
    scale = _needed_bytes(profile, config) / (wanted * TYPICAL_GB * 1e9)
    measured = rng.random() < 0.8
    profiles: list[NodeProfile] = []
    homes: list[_Home] = []
    sites = rng.randint(1, max(1, min(12, nodes // 2)))
    for index in range(nodes):
        copied = rng.randrange(index) if index and rng.random() < EQUAL_NODES else None
        profiles.append(_node(f"node-{index}", profile, scale, measured, rng, None if copied is None else profiles[copied]))
        down, up = sorted((rng.choice(RATES_MBIT), rng.choice(RATES_MBIT)), reverse=True)
        new = _Home(site=rng.randrange(sites), up=up * 125_000, down=down * 125_000)
        homes.append(new if copied is None else homes[copied])
    options = PlanningConfig(headroom=rng.choice((1.0, 1.25, 1.25, 1.25, 1.5)))
    links = tuple(_links(homes, sites, rng))
    return Scenario(seed=seed, profile=profile, nodes=tuple(profiles), links=links, config=config, options=options)


def _job(profile: ModelProfile, rng: random.Random) -> JobConfig:
    optimizer = (
        NamedArguments(name="AdamW", arguments=(("lr", 1e-4),))
        if rng.random() < 0.8
        else NamedArguments(name="SGD", arguments=(("lr", 0.1),))
    )
    return JobConfig(
        job_id="benchmark",
        optimizer=optimizer,
        batch_size=profile.micro_batch_size * rng.choice((1, 2, 4, 8, 16)),
        micro_batch_size=profile.micro_batch_size,
        averaging_interval=rng.choice((4, 16, 64)),
        max_in_flight=rng.choice((0, 0, 0, 0, 3)),
        samples=1_000_000,
    )


def _needed_bytes(profile: ModelProfile, config: JobConfig) -> float:
    """Return about what a cluster needs for one replica: parameters, gradients, optimizer, averaging and three activations."""
    copies = 4 if config.optimizer.name == "SGD" else 6
    return sum(copies * unit.tensor_bytes + 3 * unit.saved_bytes for unit in profile.units)


def _node(name: str, profile: ModelProfile, scale: float, measured: bool, rng: random.Random, twin: NodeProfile | None) -> NodeProfile:
    speed = profile.reference_flop_per_s * SPEED_SPREAD ** rng.uniform(-1, 1) if twin is None else twin.flop_per_s
    memory = int(rng.choice(MEMORIES_GB) * 1e9 * scale) if twin is None else twin.memory_bytes
    bus, message, wire = rng.uniform(4e9, 4e10), rng.uniform(5e-5, 5e-4), rng.uniform(2e-10, 2e-9)
    if twin is not None:
        bus, message, wire = twin.memory_bytes_per_s, twin.message_s, twin.wire_s_per_byte
    return NodeProfile(
        node_id=name,
        address="192.0.2.1:7702",
        memory_bytes=memory,
        flop_per_s=speed,
        matmul_flop_per_s=speed,
        convolution_flop_per_s=speed,
        device="cpu",
        threads=1,
        memory_bytes_per_s=bus if measured else 0.0,
        message_s=message if measured else 0.0,
        wire_s_per_byte=wire if measured else 0.0,
        reliability=rng.uniform(0.9, 1.0) if twin is None else twin.reliability,
    )


def _links(homes: list[_Home], sites: int, rng: random.Random) -> Iterator[LinkProfile]:
    places = [(rng.random(), rng.random()) for _ in range(sites)]
    switch = [rng.choice((100.0, 1000.0, 1000.0)) * 125_000 for _ in range(sites)]
    everybody = range(len(homes))
    for a in everybody:
        others = everybody if len(homes) <= 100 else _some(a, len(homes), rng)
        for b in others:
            if a == b:
                continue
            one, two = homes[a], homes[b]
            if one.site == two.site:
                rate, latency = switch[one.site], 2e-4 * rng.uniform(1, 3)
            else:
                (x1, y1), (x2, y2) = places[one.site], places[two.site]
                latency = 2e-3 + 0.027 * math.hypot(x1 - x2, y1 - y2)
                rate = min(one.up, two.down)
            yield LinkProfile(source=f"node-{a}", target=f"node-{b}", latency_s=latency, bytes_per_s=rate * rng.uniform(0.8, 1.0))


def _some(a: int, count: int, rng: random.Random) -> list[int]:
    return sorted({rng.randrange(count) for _ in range(LINKS_PER_NODE)} - {a})
