"""Real graphs and a real checkpoint that the fuzzer starts from."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.hostile_files import sample_checkpoint
from benchmarks.hostile_graphs import as_bytes, sample_graph
from torch import Tensor, nn

from roost.capture.export import capture
from roost.capture.graph_format import to_bytes
from roost.checkpoint.manifest import MANIFEST_FILE, MODEL_FILE


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.2)),
            *(nn.Conv2d(4, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.GELU(), nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(2)),
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return self.head(F.pad(y, (1, 1, 1, 1), mode="replicate")[..., 1:-1, 1:-1].flatten(1))


class _Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.project = nn.Linear(8, 24)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11)
        self.register_buffer("mask", torch.ones(6, 6).tril().bool())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = self.project(self.norm(x)).view(*ids.shape, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)).masked_fill(~self.mask, float("-inf")).softmax(-1)
        mixed = torch.einsum("bhij,bhjd->bihd", scores, v).reshape(x.shape)
        fused = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return self.head(self.recurrent(x + F.dropout(mixed + fused, 0.1, self.training))[0])


def _text_loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


@cache
def graphs() -> tuple[bytes, ...]:
    """Return the graphs of a few small models."""
    torch.manual_seed(0)
    ids = torch.randint(11, (4, 6))
    images = capture(_Images(), nn.CrossEntropyLoss(), (torch.randn(4, 1, 8, 8),), (torch.randint(4, (4,)),))
    text = capture(_Text(), _text_loss, (ids,), (ids,), metric=lambda output, labels: (output.argmax(-1) == labels).float().mean())
    return as_bytes(sample_graph()), to_bytes(images.graph), to_bytes(text.graph)


def parsed(data: bytes) -> dict[str, Any]:
    """Return the JSON of a graph."""
    found: dict[str, Any] = json.loads(data)
    return found


@cache
def checkpoint_files() -> tuple[bytes, bytes]:
    """Return the manifest and the model file of a small checkpoint."""
    with TemporaryDirectory() as directory:
        path = sample_checkpoint(Path(directory))
        return (path / MANIFEST_FILE).read_bytes(), (path / MODEL_FILE).read_bytes()
