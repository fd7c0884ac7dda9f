"""Captures and measures the models of the planning benchmark: `python -m benchmarks.model_profiles [name ...]`.

Writes benchmarks/profiles/NAME.json. Weights are random and data is noise: costs do not depend on them. The models have the
published shapes, in float32, without dropout; differences are named in their docstrings. Seconds of an update are AdamW's; for
the largest model they are those of one of its layers (and its embedding and head), per byte. About ten minutes on one core and
19 GB of memory for the largest.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from benchmarks.models import next_token_loss
from benchmarks.planning_profiles import MODELS, save_profile
from roost.capture.export import capture
from roost.capture.profiling import profile
from roost.pipeline.probe import measure
from roost.types import ModelProfile

PROBE_S = 4.0
"""Seconds for the probe of this machine's speed."""


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, *, causal: bool) -> Tensor:
    """Return multi-head attention of (N, T, D) tensors, (N, T, D)."""
    samples, length, width = query.shape
    query, key, value = (part.view(samples, length, heads, -1).transpose(1, 2) for part in (query, key, value))
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    return attended.transpose(1, 2).reshape(samples, length, width)


class Bottleneck(nn.Module):
    """A residual block of ResNet-50: 1x1, 3x3 (with the stride), 1x1 convolutions: (N, C, H, W) -> (N, 4 width, H', W')."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        y = functional.relu(self.norm2(self.conv2(y)))
        return functional.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50 (arXiv 1512.03385), 25.6 million parameters: (N, 3, 224, 224) -> (N, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, channels = [], 64
        for depth, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
            for index in range(depth):
                blocks.append(Bottleneck(channels, width, 2 if index == 0 and width > 64 else 1))
                channels = 4 * width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


class TransformerLayer(nn.Module):
    """A layer of BERT (norms after) or GPT-2 (norms before, causal), width 768, 12 heads: (N, T, D) -> (N, T, D)."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        if self.causal:
            x = x + self._attention(self.norm1(x))
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(x + self._attention(x))
        return self.norm2(x + self._feed_forward(x))

    def _attention(self, x: Tensor) -> Tensor:
        return self.out(attend(self.query(x), self.key(x), self.value(x), self.heads, causal=self.causal))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class BertBase(nn.Module):
    """BERT-base with its masked-language head (arXiv 1810.04805), tokens of one segment: (N, T) int64 -> (N, T, 30522).

    The decoder has a weight of its own (133 million parameters): the published one is tied to the embedding, and a tied weight
    crosses every cut. GPT-2 is the example with a tied one.
    """

    def __init__(self, length: int, *, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 30522) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length, width))
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(TransformerLayer(width, heads, causal=False) for _ in range(layers))
        self.transform = nn.Linear(width, width)
        self.head_norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.tokens(tokens) + self.positions)
        for layer in self.layers:
            x = layer(x)
        return self.decoder(self.head_norm(functional.gelu(self.transform(x))))


class GPT2Small(nn.Module):
    """GPT-2 small, 124 million parameters, the head tied to the embedding as published: (N, T) int64 -> (N, T, 50257)."""

    def __init__(self, length: int, *, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length, width))
        self.layers = nn.ModuleList(TransformerLayer(width, heads, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.tokens.weight)


class LlamaLayer(nn.Module):
    """A layer with grouped-query attention, rotary positions and a gated feed-forward: (N, T, D) -> (N, T, D)."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, length: int, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.norm1 = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * (width // heads), bias=False)
        self.value = nn.Linear(width, groups * (width // heads), bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(length).float(), 10000.0 ** (-torch.arange(half).float() / half))
        self.register_buffer("cosine", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sine", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        y = self.norm1(x)
        query = self._rotate(self.query(y).view(samples, length, self.heads, -1).transpose(1, 2))
        key = self._rotate(self.key(y).view(samples, length, self.groups, -1).transpose(1, 2))
        value = self.value(y).view(samples, length, self.groups, -1).transpose(1, 2)
        key, value = (part.repeat_interleave(self.heads // self.groups, dim=1) for part in (key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, width))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    def _rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cosine + torch.cat([-second, first], dim=-1) * self.sine


class Llama1B(nn.Module):
    """A Llama-like model of 1.1 billion parameters: (N, T) int64 -> (N, T, 32000)."""

    def __init__(self, length: int, *, layers: int = 16, width: int = 2048, vocabulary: int = 32000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaLayer(length, width, heads=32, groups=8, hidden=8192) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to measure, with one micro-batch."""

    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    data: Callable[[], tuple[Tensor, Tensor]]
    """Returns inputs and labels."""
    repeats: int
    part: Callable[[], nn.Module] | None = None
    """A smaller model of the same layers, for one whose optimizer's state does not fit in memory beside all else."""


def _tokens(samples: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    return torch.randint(vocabulary, (samples, length)), torch.randint(vocabulary, (samples, length))


def _images(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, 224, 224), torch.randint(1000, (samples,))


SUBJECTS = {
    "resnet50": Subject(build=ResNet50, loss=functional.cross_entropy, data=lambda: _images(8), repeats=3),
    "bert-base": Subject(build=lambda: BertBase(128), loss=next_token_loss, data=lambda: _tokens(4, 128, 30522), repeats=3),
    "gpt2-small": Subject(build=lambda: GPT2Small(512), loss=next_token_loss, data=lambda: _tokens(2, 512, 50257), repeats=3),
    "llama-1b": Subject(
        build=lambda: Llama1B(512),
        loss=next_token_loss,
        data=lambda: _tokens(1, 512, 32000),
        repeats=1,
        part=lambda: Llama1B(512, layers=1),
    ),
}


def measure_model(name: str) -> dict[str, object]:
    """Capture and measure one of MODELS, write its file, and return a summary."""
    torch.manual_seed(0)
    subject = SUBJECTS[name]
    parameters = sum(parameter.numel() for parameter in subject.build().parameters())
    updates = None if subject.part is None else _seconds_per_byte(_measure(name, subject, subject.part, _adamw))
    result = _measure(name, subject, subject.build, _adamw if updates is None else None)
    if updates is not None:
        units = tuple(dataclasses.replace(unit, update_s=unit.trainable_bytes * updates) for unit in result.units)
        result = dataclasses.replace(result, units=units)
    path = save_profile(result)
    return {
        "model": name,
        "parameters": parameters,
        "units": len(result.units),
        "seconds_per_micro_batch": round(sum(unit.forward_s + unit.backward_s for unit in result.units), 3),
        "seconds_per_update": round(sum(unit.update_s for unit in result.units), 3),
        "gflop_per_s": round(result.reference_flop_per_s / 1e9, 1),
        "kilobytes": path.stat().st_size // 1000,
    }


def _measure(
    name: str, subject: Subject, build: Callable[[], nn.Module], make_optimizer: Callable[[list[nn.Parameter]], Optimizer] | None
) -> ModelProfile:
    inputs, labels = subject.data()
    captured = capture(build(), subject.loss, (inputs,), (labels,), name=name)
    # The largest model fits only once beside its gradients and the profiler's copy; what traced it has cycles.
    gc.collect()
    speed = measure(threads=1, budget_s=PROBE_S).flop_per_s
    data = (inputs,), (labels,)
    return profile(captured, *data, reference_flop_per_s=speed, make_optimizer=make_optimizer, repeats=subject.repeats)


def _adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _seconds_per_byte(measured: ModelProfile) -> float:
    return sum(unit.update_s for unit in measured.units) / sum(unit.trainable_bytes for unit in measured.units)


def main() -> None:
    """Measure the named models, all without a name, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*MODELS, []], help="models to measure; all without one")
    for name in parser.parse_args().names or MODELS:
        print(json.dumps(measure_model(name)), flush=True)


if __name__ == "__main__":
    main()
