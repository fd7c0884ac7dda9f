"""Five clusters train one model, and one of them averages lies: what becomes of the loss."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ring_kit import Lie, Member, running
from torch import Tensor, nn
from torch.nn import functional

import roost
from inproc_pool import InprocPool, TrippingTransport, node
from roost import messages as m
from roost.averaging.segment_average import AveragingOptions
from roost.config import RobustMethod
from roost.transport.interface import Buffer
from roost.types import Peer, SegmentPlan

NAMES = ("a", "b", "c", "d", "e")
LIAR = "c"
INPUTS, CLASSES = 16, 4
ROUNDS, UPDATES, BATCH, RATE = 30, 4, 8, 0.25


def data(samples: int = 800) -> tuple[Tensor, Tensor]:
    """Return points, and which of four directions they are nearest to; two labels of five are made up, so that losses have a floor."""
    generator = torch.Generator().manual_seed(4)
    points, directions = torch.randn(samples, INPUTS, generator=generator), torch.randn(INPUTS, CLASSES, generator=generator)
    made_up = torch.rand(samples, generator=generator) < 0.4
    return points, torch.where(made_up, torch.randint(CLASSES, (samples,), generator=generator), (points @ directions).argmax(dim=1))


POINTS, LABELS = data()


def flipped(buffer: Buffer) -> bytes:
    return (-torch.frombuffer(bytearray(buffer), dtype=torch.float32)).numpy().tobytes()


def train(member: Member, generator: torch.Generator) -> None:
    """Take some updates of plain SGD."""
    for _ in range(UPDATES):
        picked = torch.randint(len(LABELS), (BATCH,), generator=generator)
        weights = member.tensors["w"].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(functional.cross_entropy(POINTS[picked] @ weights, LABELS[picked]), [weights])
        member.tensors["w"] = member.tensors["w"] - RATE * gradient
        member.samples += BATCH


def loss_with(robust: RobustMethod, lies: Mapping[str, Lie]) -> float:
    """Return the mean loss of the honest members at the end."""
    members = {name: Member(tensors={"w": torch.zeros(INPUTS, CLASSES)}, samples=0) for name in NAMES}
    generators = {name: torch.Generator().manual_seed(seed) for seed, name in enumerate(NAMES)}
    ring = SegmentPlan(index=0, tensors=("w",), nbytes=4 * INPUTS * CLASSES, members=NAMES)

    async def scenario() -> None:
        async with running(members, [ring], options=AveragingOptions(robust=robust), lies=lies), asyncio.timeout(60):
            for number in range(1, ROUNDS + 1):
                for name, member in members.items():
                    train(member, generators[name])
                await asyncio.gather(*(member.rings[0].average_exactly(number) for member in members.values()))

    asyncio.run(scenario())
    losses = [float(functional.cross_entropy(POINTS @ member.tensors["w"], LABELS)) for name, member in members.items() if name != LIAR]
    return sum(losses) / len(losses)


LIARS: dict[str, Lie] = {
    "flips the sign of its values": lambda message, buffer: (message, flipped(buffer) if message.step < len(NAMES) - 1 else buffer),
    "flips the sign of its values and means": lambda message, buffer: (message, flipped(buffer)),
}


@pytest.fixture(scope="module")
def honest() -> float:
    return loss_with(RobustMethod.NONE, {})


def test_one_liar_of_five_ruins_the_plain_mean_of_a_run(honest: float) -> None:
    ruined = loss_with(RobustMethod.NONE, {LIAR: LIARS["flips the sign of its values and means"]})
    assert not ruined < math.log(CLASSES), "worse than guessing"
    assert honest < 0.8 * math.log(CLASSES)


@pytest.mark.parametrize("robust", [RobustMethod.CLIPPED, RobustMethod.TRIMMED])
@pytest.mark.parametrize("lie", LIARS.values(), ids=LIARS)
def test_a_run_with_robust_averaging_ends_near_the_loss_that_it_has_without_the_liar(honest: float, robust: RobustMethod, lie: Lie) -> None:
    assert loss_with(robust, {LIAR: lie}) < 1.04 * honest


@pytest.mark.parametrize("robust", [RobustMethod.CLIPPED, RobustMethod.TRIMMED])
def test_without_a_liar_robust_averaging_costs_next_to_nothing(honest: float, robust: RobustMethod) -> None:
    assert loss_with(robust, {}) < 1.01 * honest


def test_a_job_with_robust_averaging_learns_though_one_cluster_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(6)
    job = roost.Job(
        model=nn.Linear(INPUTS, CLASSES),
        loss=functional.cross_entropy,
        data=(POINTS, LABELS),
        optimizer="SGD",
        optimizer_args={"lr": 0.2},
        batch_size=16,
        epochs=4,
        averaging_interval=8,
        robust_averaging="clipped",
        min_clusters=5,
        max_clusters=5,
        checkpoint_dir=str(tmp_path / "checkpoints"),
    )
    truthful = TrippingTransport.send

    async def send(transport: TrippingTransport, peer: Peer, message: m.Message, buffers: Sequence[Buffer] = (), **options: Any) -> None:
        if transport.peer_id == LIAR and isinstance(message, m.RingChunk):
            buffers = [flipped(buffers[0])]
        await truthful(transport, peer, message, buffers, **options)

    monkeypatch.setattr(TrippingTransport, "send", send)
    with torch.no_grad():
        untrained = float(functional.cross_entropy(job.model(POINTS), LABELS))
    run = roost.train(job, InprocPool([node(name) for name in NAMES], tmp_path)).wait(120)
    assert run.metrics().averaging_rounds >= 4
    job.model.load_state_dict(run.state_dict())
    with torch.no_grad():
        trained = float(functional.cross_entropy(job.model(POINTS), LABELS))
    assert trained < 0.9 * untrained
