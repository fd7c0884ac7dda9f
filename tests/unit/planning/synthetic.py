"""Made-up models and pools for the planner's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from roost.config import JobConfig, NamedArguments
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
    )


def model(units: Sequence[UnitProfile], *, micro_batch_size: int = 8, input_bytes: int = 10 * KB) -> ModelProfile:
    return ModelProfile(
        name="made-up", micro_batch_size=micro_batch_size, reference_flop_per_s=REFERENCE, units=tuple(units), input_bytes=input_bytes
    )


def even_model(units: int, **fields: int) -> ModelProfile:
    return model([unit(index, **fields) for index in range(units)])


def node(name: str, *, memory: int = 100 * MB, speed: float = 1.0) -> NodeProfile:
    return NodeProfile(
        node_id=name,
        address="",
        memory_bytes=memory,
        flop_per_s=speed * REFERENCE,
        matmul_flop_per_s=speed * REFERENCE,
        convolution_flop_per_s=speed * REFERENCE,
        device="cpu",
        threads=1,
    )


def link(source: str, target: str, *, latency: float = 1e-4, rate: float = 125e6) -> LinkProfile:
    return LinkProfile(source=source, target=target, latency_s=latency, bytes_per_s=rate)


def all_links(nodes: Sequence[NodeProfile], *, rate: float = 125e6, latency: float = 1e-4) -> list[LinkProfile]:
    return [link(a.node_id, b.node_id, rate=rate, latency=latency) for a in nodes for b in nodes if a is not b]


def job(*, optimizer: str = "SGD", arguments: tuple[tuple[str, float], ...] = (("lr", 0.1),), **fields: int) -> JobConfig:
    settings = {"batch_size": 8, "micro_batch_size": 8, "samples": 1000, **fields}
    return JobConfig(job_id="job", optimizer=NamedArguments(name=optimizer, arguments=arguments), **settings)


def random_pool(rng: random.Random, size: int, *, least: int, most: int, spread: float) -> list[NodeProfile]:
    return [node(f"n{index:03d}", memory=rng.randint(least, most), speed=spread ** rng.random()) for index in range(size)]
