"""Made-up models and pools for the planner's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from roost.config import JobConfig, NamedArguments, PlanningConfig
from roost.planning.cost import unit_costs
from roost.planning.groups import GroupSearch
from roost.planning.memory import MemoryModel, optimizer_copies
from roost.planning.network import make_network
from roost.planning.stages import StageCutter
from roost.planning.tables import TableMaker
from roost.types import LinkProfile, ModelProfile, NodeProfile, TensorKind, TensorRecord, UnitProfile

KB = 1000
MB = 1000 * KB
REFERENCE = 1e9


def parameter(name: str, size: int, *, dtype: str = "float32") -> TensorRecord:
    return TensorRecord(name=name, dtype=dtype, shape=(size // 4,), kind=TensorKind.PARAMETER, trainable=True)


def unit(
    index: int,
    *,
    seconds: float = 0.003,
    parameters: int = MB,
    saved: int = 100 * KB,
    crossing: int = 10 * KB,
    update: float = 0.0,
    extra: Sequence[TensorRecord] = (),
) -> UnitProfile:
    return UnitProfile(
        start=2 * index,
        stop=2 * index + 2,
        label=f"layers.{index}",
        forward_s=seconds / 3,
        backward_s=seconds * 2 / 3,
        forward_flop=seconds * REFERENCE,
        tensors=(parameter(f"layers.{index}.weight", parameters), *extra) if parameters else tuple(extra),
        saved_bytes=saved,
        crossing_bytes=crossing,
        update_s=update,
    )


def model(units: Sequence[UnitProfile], *, micro_batch_size: int = 8, input_bytes: int = 10 * KB, stage: float = 0.0) -> ModelProfile:
    return ModelProfile(
        name="made-up",
        micro_batch_size=micro_batch_size,
        reference_flop_per_s=REFERENCE,
        units=tuple(units),
        input_bytes=input_bytes,
        stage_s=stage,
    )


def even_model(units: int, **fields: int) -> ModelProfile:
    return model([unit(index, **fields) for index in range(units)])


def node(name: str, *, memory: int = 100 * MB, speed: float = 1.0, **costs: float) -> NodeProfile:
    return NodeProfile(
        node_id=name,
        address="",
        memory_bytes=memory,
        flop_per_s=speed * REFERENCE,
        matmul_flop_per_s=speed * REFERENCE,
        convolution_flop_per_s=speed * REFERENCE,
        device="cpu",
        threads=1,
        **costs,
    )


def link(source: str, target: str, *, latency: float = 1e-4, rate: float = 125e6) -> LinkProfile:
    return LinkProfile(source=source, target=target, latency_s=latency, bytes_per_s=rate)


def all_links(nodes: Sequence[NodeProfile], *, rate: float = 125e6, latency: float = 1e-4) -> list[LinkProfile]:
    return [link(a.node_id, b.node_id, rate=rate, latency=latency) for a in nodes for b in nodes if a is not b]


def job(*, optimizer: str = "SGD", arguments: tuple[tuple[str, float], ...] = (("lr", 0.1),), **fields: int) -> JobConfig:
    settings = {"batch_size": 8, "micro_batch_size": 8, "samples": 1000, **fields}
    return JobConfig(job_id="job", optimizer=NamedArguments(name=optimizer, arguments=arguments), **settings)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A model, a pool and a job, and the planner's parts for them."""

    profile: ModelProfile
    nodes: tuple[NodeProfile, ...]
    links: tuple[LinkProfile, ...]
    config: JobConfig
    options: PlanningConfig

    @property
    def names(self) -> list[str]:
        return [member.node_id for member in self.nodes]

    def maker(self) -> TableMaker:
        costs = unit_costs(self.profile, self.config)
        return TableMaker(
            costs=costs,
            memory=MemoryModel(costs=costs, optimizer_copies=optimizer_copies(self.config.optimizer)),
            network=make_network(self.names, self.links),
            config=self.config,
            options=self.options,
        )

    def cutter(self) -> StageCutter:
        return StageCutter(nodes=self.nodes, maker=self.maker())

    def groups(self) -> GroupSearch:
        """Return a search that knows nothing yet."""
        return GroupSearch(cutter=self.cutter())


def scene(
    profile: ModelProfile,
    nodes: Sequence[NodeProfile],
    links: Sequence[LinkProfile] | None = None,
    *,
    config: JobConfig | None = None,
    options: PlanningConfig | None = None,
) -> Scene:
    """Return a scene with fast links between all nodes, unless `links` says otherwise."""
    return Scene(
        profile=profile,
        nodes=tuple(nodes),
        links=tuple(all_links(nodes) if links is None else links),
        config=config or job(),
        options=options or PlanningConfig(),
    )


def random_scene(rng: random.Random, *, nodes: int, units: int, links: str = "mixed") -> Scene:
    """Return a scene in which anything may bind: computation, lines, links, waiting, memory, staleness.

    `links`: 'mixed' for unequal ones, all measured; 'equal' for links that are all alike.
    """
    profile = model(
        [
            unit(
                index,
                seconds=rng.choice([0.001, 0.003, 0.01]),
                parameters=rng.choice([0, 4 * KB, MB, 2 * MB]),
                saved=rng.choice([0, 100 * KB, 500 * KB]),
                crossing=rng.choice([0, KB, 20 * KB, 200 * KB]),
                update=rng.choice([0.0, 0.0005]),
            )
            for index in range(units)
        ],
        input_bytes=rng.choice([0, 10 * KB]),
        stage=rng.choice([0.0, 0.0003]),
    )
    measured = rng.random() < 0.5
    costs = {"memory_bytes_per_s": 2e9, "message_s": 2e-4, "wire_s_per_byte": 2e-9} if measured else {}
    pool = [
        node(
            f"n{index}",
            memory=int(MB * units * rng.choice([0.8, 2.0, 4.0, 10.0])),
            speed=rng.choice([0.3, 1.0, 2.5]),
            reliability=rng.choice([1.0, 1.0, 0.9]),
            **costs,
        )
        for index in range(nodes)
    ]
    rates, latencies = [2e6, 10e6, 125e6], [1e-4, 2e-3, 2e-2]
    one = rng.choice(rates), rng.choice(latencies)
    pairs = [(a.node_id, b.node_id) for a in pool for b in pool if a is not b]
    found = []
    for source, target in pairs:
        rate, latency = one if links == "equal" else (rng.choice(rates), rng.choice(latencies))
        found.append(link(source, target, rate=rate, latency=latency))
    micro_batches = rng.choice([1, 1, 3])
    return scene(
        profile,
        pool,
        found,
        config=job(
            optimizer=rng.choice(["SGD", "AdamW"]),
            batch_size=8 * micro_batches,
            max_in_flight=rng.choice([0, 0, 2]),
            averaging_interval=rng.choice([1, 16]),
        ),
        options=PlanningConfig(staleness_cost=rng.choice([0.005, 0.05]), headroom=rng.choice([1.0, 1.25, 2.0]), slowest_cluster=0.0),
    )


def random_pool(rng: random.Random, size: int, *, least: int, most: int, spread: float) -> list[NodeProfile]:
    return [node(f"n{index:03d}", memory=rng.randint(least, most), speed=spread ** rng.random()) for index in range(size)]
