"""Five clusters of one node train a job, and one of them averages lies: the production code of all roles, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import roost
from inproc_pool import InprocPool, TrippingTransport, node
from roost import messages as m
from roost.transport.interface import Buffer
from roost.types import Peer

NAMES = ("a", "b", "c", "d", "e")
LIAR = "c"


def data(samples: int = 800) -> tuple[Tensor, Tensor]:
    """Return points, and which of four directions they are nearest to."""
    generator = torch.Generator().manual_seed(4)
    points, directions = torch.randn(samples, 16, generator=generator), torch.randn(16, 4, generator=generator)
    return points, (points @ directions).argmax(dim=1)


def job_of(tmp_path: Path, robust: str) -> roost.Job:
    torch.manual_seed(6)
    return roost.Job(
        model=nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)),
        loss=functional.cross_entropy,
        data=data(),
        optimizer="SGD",
        optimizer_args={"lr": 0.3},
        batch_size=8,
        epochs=4,
        averaging_interval=4,
        robust_averaging=robust,
        min_clusters=5,
        max_clusters=5,
        checkpoint_dir=str(tmp_path / "checkpoints"),
    )


def loss_after(tmp_path: Path, robust: str) -> float:
    """Return the loss of the model that a run ends with."""
    job = job_of(tmp_path, robust)
    run = roost.train(job, InprocPool([node(name) for name in NAMES], tmp_path)).wait(120)
    assert run.plan is not None
    assert [len(cluster.stages) for cluster in run.plan.clusters] == [1] * 5
    assert run.metrics().averaging_rounds > 4
    job.model.load_state_dict(run.state_dict())
    inputs, labels = job.data
    with torch.no_grad():
        return float(job.loss(job.model(inputs), labels)) if job.loss is not None else 0.0


def lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one node flip the sign of everything that it averages."""
    honest = TrippingTransport.send

    async def send(transport: TrippingTransport, peer: Peer, message: m.Message, buffers: Sequence[Buffer] = (), **options: Any) -> None:
        if transport.peer_id == LIAR and isinstance(message, m.RingChunk):
            buffers = [(-torch.frombuffer(bytearray(buffers[0]), dtype=torch.float32)).numpy().tobytes()]
        await honest(transport, peer, message, buffers, **options)

    monkeypatch.setattr(TrippingTransport, "send", send)


def test_one_bad_cluster_of_five_ruins_a_plain_job_and_not_a_guarded_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("honest", "plain", "clipped", "trimmed"):
        (tmp_path / name).mkdir()
    honest = loss_after(tmp_path / "honest", "none")
    lie(monkeypatch)
    assert loss_after(tmp_path / "plain", "none") > 2 * honest
    assert loss_after(tmp_path / "clipped", "clipped") < 1.1 * honest
    assert loss_after(tmp_path / "trimmed", "trimmed") < 1.1 * honest
