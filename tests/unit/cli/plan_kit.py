"""A made-up model, pools and plans for the tests of `roost plan`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from roost.config import JobConfig, NamedArguments
from roost.planning.advice import Advice, advise
from roost.planning.planner import make_plan
from roost.requester.model_file import ModelFile
from roost.types import LinkProfile, ModelProfile, NodeProfile, Plan, TensorKind, TensorRecord, UnitProfile

MB = 10**6


def unit(index: int, *, label: str = "", crossing: int = 10_000) -> UnitProfile:
    weight = TensorRecord(name=f"layers.{index}.weight", dtype="float32", shape=(MB // 4,), kind=TensorKind.PARAMETER, trainable=True)
    return UnitProfile(
        start=index,
        stop=index + 1,
        label=label or f"layers.{index}",
        forward_s=0.001,
        backward_s=0.002,
        forward_flop=1e6,
        tensors=(weight,),
        saved_bytes=1000,
        crossing_bytes=crossing,
    )


def model(units: int = 6, *, name: str = "made-up", labels: Sequence[str] = ()) -> ModelProfile:
    """Return a model of equal units with a parameter of one megabyte each."""
    made = tuple(unit(index, label=labels[index] if labels else "") for index in range(units))
    return ModelProfile(name=name, micro_batch_size=4, reference_flop_per_s=1e9, units=made, input_bytes=1000)


def config(**fields: int) -> JobConfig:
    settings = {"batch_size": 4, "micro_batch_size": 4, "samples": 100, **fields}
    return JobConfig(job_id="job", optimizer=NamedArguments(name="SGD"), **settings)


def node(name: str, *, memory: int = 100 * MB, speed: float = 1.0, emulated: bool = True) -> NodeProfile:
    return NodeProfile(
        node_id=name,
        address="",
        memory_bytes=memory,
        flop_per_s=speed * 1e9,
        matmul_flop_per_s=speed * 1e9,
        convolution_flop_per_s=speed * 1e9,
        device="cpu",
        threads=1,
        emulated=emulated,
    )


def links(nodes: Sequence[NodeProfile], *, rate: float = 1e7) -> list[LinkProfile]:
    pairs = [(a.node_id, b.node_id) for a in nodes for b in nodes if a is not b]
    return [LinkProfile(source=a, target=b, latency_s=1e-3, bytes_per_s=rate) for a, b in pairs]


def plan_for(profile: ModelProfile, nodes: Sequence[NodeProfile], job: JobConfig | None = None) -> Plan:
    """Return the plan for a pool."""
    return make_plan(profile, nodes, links(nodes), job or config(), random.Random(0))


def planned(profile: ModelProfile, nodes: Sequence[NodeProfile], job: JobConfig | None = None) -> tuple[Plan, Advice]:
    """Return the plan and the advice for a pool."""
    plan = plan_for(profile, nodes, job)
    return plan, advise(profile, nodes, links(nodes), job or config(), plan, random.Random(0))


def saved_model(directory: Path, units: int = 6) -> Path:
    """Write the made-up model as --save-profile would, and return the file."""
    path = directory / "model.json"
    ModelFile(config=config(), profile=model(units)).save(path)
    return path


def pool_file(directory: Path, text: str) -> Path:
    path = directory / "pool.yaml"
    path.write_text(text)
    return path
