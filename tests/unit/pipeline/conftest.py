"""Small hand-made programs that stage runners run in these tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from roost.config import JobConfig, NamedArguments
from roost.types import MicroBatch, TensorKind, TensorRecord

Body = Callable[[dict[int, Tensor], Mapping[str, Tensor], bool], dict[int, Tensor]]


@dataclass(kw_only=True)
class HandMadeProgram:
    """A program whose body is a Python function."""

    body: Body
    index: int = 0
    start: int = 0
    stop: int = 1
    tensors: tuple[TensorRecord, ...] = ()
    shared: tuple[TensorRecord, ...] = ()
    receives: dict[int, tuple[int, ...]] = field(default_factory=dict)
    sends: dict[int, tuple[int, ...]] = field(default_factory=dict)
    differentiable: frozenset[int] = frozenset()
    changed_tensors: frozenset[str] = frozenset()
    changed_values: frozenset[int] = frozenset()
    draws_random: bool = False
    is_last: bool = False
    loss_value: int | None = None
    metric_value: int | None = None

    def run(self, values: dict[int, Tensor], tensors: Mapping[str, Tensor], *, training: bool) -> dict[int, Tensor]:
        return self.body(values, tensors, training)


def records(tensors: Mapping[str, Tensor], *, frozen: tuple[str, ...] = (), buffers: tuple[str, ...] = ()) -> tuple[TensorRecord, ...]:
    return tuple(
        TensorRecord(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            kind=TensorKind.BUFFER if name in buffers else TensorKind.PARAMETER,
            trainable=name not in frozen and name not in buffers,
        )
        for name, tensor in tensors.items()
    )


def config(
    optimizer: str = "SGD", schedule: str | None = None, schedule_arguments: tuple = (), start_updates: int = 0, **arguments
) -> JobConfig:
    arguments = arguments or {"lr": 0.1}
    return JobConfig(
        job_id="job",
        optimizer=NamedArguments(name=optimizer, arguments=tuple(arguments.items())),
        schedule=None if schedule is None else NamedArguments(name=schedule, arguments=schedule_arguments),
        samples=1000,
        start_updates=start_updates,
    )


def micro_batch(
    number: int, *, batch: int | None = None, position: int = 0, count: int = 1, samples: int = 4, batch_samples: int | None = None
):
    return MicroBatch(
        number=number,
        batch=number if batch is None else batch,
        position=position,
        count=count,
        samples=samples,
        batch_samples=samples if batch_samples is None else batch_samples,
        training=True,
        seed=1000 + number,
        lease=0,
    )


@dataclass(frozen=True, kw_only=True)
class Builders:
    program: type[HandMadeProgram] = HandMadeProgram
    records: Callable = staticmethod(records)
    config: Callable = staticmethod(config)
    micro_batch: Callable = staticmethod(micro_batch)


@pytest.fixture
def make() -> Builders:
    return Builders(records=records, config=config, micro_batch=micro_batch)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
