"""Small jobs on in-process pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import roost

FEATURES, CLASSES = 6, 3


def samples(count: int = 24, *, features: int = FEATURES, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, features, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def perceptron(*, width: int = 16, dropout: float = 0.2) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, CLASSES))


def accuracy(output: Tensor, label: Tensor) -> Tensor:
    return (output.argmax(1) == label).float().mean()


def job(tmp_path: Path, **changes: Any) -> roost.Job:
    """Return a job of a small perceptron on 24 random samples, 3 batches an epoch."""
    fields: dict[str, Any] = {
        "model": perceptron(),
        "loss": functional.cross_entropy,
        "data": samples(),
        "optimizer": "AdamW",
        "optimizer_args": {"lr": 1e-2},
        "batch_size": 8,
        "checkpoint_dir": str(tmp_path / "checkpoints"),
    }
    return roost.Job(**{**fields, **changes})
