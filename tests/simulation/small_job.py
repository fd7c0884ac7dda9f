"""A job small enough to be trained some hundred times: captured once, with costs that are the same on every machine."""

from __future__ import annotations

import functools
import math
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import roost
from roost.api import prepare
from roost.errors import PlanningError
from roost.planning.planner import make_plan
from roost.requester.data import SampleSource
from roost.requester.run import JobPackage
from roost.types import ModelProfile, NodeProfile

FEATURES, CLASSES, WIDTH, LAYERS = 5, 3, 8, 4
MICRO_BATCH = 2
MOST_SAMPLES = 40
SPEED = 1e10
PLENTY = 10**9
AVERAGED = 1.5
"""Memory of a node that averages over that of one that does not."""


def _data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, FEATURES, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def _model() -> nn.Sequential:
    torch.manual_seed(7)
    widths = [FEATURES, *[WIDTH] * (LAYERS - 1), CLASSES]
    layers: list[nn.Module] = []
    for index in range(LAYERS):
        layers += [nn.Linear(widths[index], widths[index + 1]), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@functools.cache
def captured_job() -> JobPackage:
    """Return the captured job."""
    job = roost.Job(
        model=_model(),
        loss=functional.cross_entropy,
        data=_data(MOST_SAMPLES, 1),
        validation=_data(6, 2),
        optimizer="SGD",
        optimizer_args={"lr": 0.05, "momentum": 0.5},
        batch_size=MICRO_BATCH,
        checkpoint_dir=tempfile.gettempdir(),
    )
    package = prepare(job, saves=False)
    return replace(package, profile=_even_costs(package.profile), config=replace(package.config, job_id="job"))


def _even_costs(profile: ModelProfile) -> ModelProfile:
    """Return the profile with costs that follow from its sizes, not from how long this machine took."""
    units = tuple(
        replace(unit, forward_s=0.002 + 1e-6 * unit.tensor_bytes, backward_s=0.004 + 2e-6 * unit.tensor_bytes, update_s=0.001)
        for unit in profile.units
    )
    return replace(profile, reference_flop_per_s=SPEED, units=units, stage_s=0.001, stage_update_s=0.001)


def job_package(directory: Path, samples: int, validation_samples: int, **fields: Any) -> JobPackage:
    """Return the job with its first `samples` samples and other settings, its checkpoints under `directory`."""
    package = captured_job()
    config = replace(package.config, samples=samples, validation_samples=validation_samples, **fields)
    inputs, labels = _data(MOST_SAMPLES, 1)
    return replace(
        package,
        config=config,
        training=SampleSource((inputs[:samples], labels[:samples]), what="the training data"),
        validation=package.validation if validation_samples else None,
        directory=directory,
    )


def node_profile(name: str, *, memory: int = PLENTY, speed: float = SPEED) -> NodeProfile:
    """Return what a node says of itself; nothing is measured."""
    return NodeProfile(
        node_id=name,
        address="",
        memory_bytes=memory,
        flop_per_s=speed,
        matmul_flop_per_s=speed,
        convolution_flop_per_s=speed,
        bf16_flop_per_s=speed,
        device="cpu",
        threads=1,
        emulated=True,
    )


def memory_for(batch_size: int, count: int) -> int:
    """Return the memory of nodes of which about so many are needed to hold the model, in a job whose clusters average."""
    return int(AVERAGED * _least_memory(batch_size, count))


@functools.cache
def _least_memory(batch_size: int, count: int) -> int:
    """Return the memory with which the model just fits on so many equal nodes, where nothing is averaged."""
    config = replace(captured_job().config, batch_size=batch_size, min_clusters=1, max_clusters=1)
    low, high = 1, PLENTY
    while high > 1.1 * low:
        middle = math.isqrt(low * high) + 1
        nodes = [node_profile(str(index), memory=middle) for index in range(count)]
        try:
            make_plan(captured_job().profile, nodes, [], config, random.Random(0))
        except PlanningError:
            low = middle
        else:
            high = middle
    return high
