"""A character GPT in equal stages for `benchmarks.convergence`, several seeds side by side in one set of tensors.

Every tensor has a first dimension of replicas, one per seed. Replicas never meet: the loss is the sum of theirs, and the optimizers
work element by element (rotation: matrix by matrix), so one run of R replicas is R runs of one, at a fraction of the overhead.
"""

from __future__ import annotations

import math
import pydoc_data.topics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from roost.types import TensorKind, TensorRecord

TOKENS, TARGETS, LOSS, LOSSES = 0, 1, 2, 3
HIDDEN = 10
"""Number of the value that stage 0 sends; stage i sends HIDDEN + i."""
HELD_OUT = 0.1
"""Last part of the text, for validation."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shape of the model; as many blocks as stages."""

    stages: int = 8
    width: int = 32
    heads: int = 2
    context: int = 32
    micro_batch: int = 4
    """Sequences per micro-batch and replica."""


@cache
def text() -> tuple[Tensor, Tensor, int]:
    """Return training and validation text as character codes, and the number of characters: Python's own help topics."""
    whole = "".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    characters = sorted(set(whole))
    codes = torch.tensor([characters.index(character) for character in whole])
    split = int(len(codes) * (1 - HELD_OUT))
    return codes[:split], codes[split:], len(characters)


def windows(codes: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, (*starts.shape, context), of the windows of `codes` at `starts`."""
    places = starts.unsqueeze(-1) + torch.arange(context + 1)
    found = codes[places]
    return found[..., :-1].contiguous(), found[..., 1:].contiguous()


class GptStage:
    """One block of the GPT as a program for StageRunner; the first stage also embeds, the last also predicts."""

    shared: tuple[TensorRecord, ...] = ()
    draws_random = False
    metric_value: int | None = None

    def __init__(self, index: int, sizes: Sizes) -> None:
        self.index, self.start, self.stop = index, index, index + 1
        self.is_last = index == sizes.stages - 1
        self.receives = {index - 1: (HIDDEN + index - 1, TARGETS)} if index else {-1: (TOKENS, TARGETS)}
        self.sends: dict[int, tuple[int, ...]] = {} if self.is_last else {index + 1: (HIDDEN + index, TARGETS)}
        self.differentiable = frozenset({HIDDEN + index - 1, HIDDEN + index, LOSS})
        self.loss_value = LOSS if self.is_last else None
        self.tensors: tuple[TensorRecord, ...] = ()
        self._sizes = sizes

    def initial(self, seeds: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the stage's tensors, (replicas, ...), drawn from each replica's seed; sets the records of the program."""
        drawn = [self._draw(torch.Generator().manual_seed(1000 * seed + self.index)) for seed in seeds]
        tensors = {name: torch.stack([one[name] for one in drawn]) for name in drawn[0]}
        self.tensors = tuple(
            TensorRecord(name=name, dtype="float32", shape=tuple(tensor.shape), kind=TensorKind.PARAMETER, trainable=True)
            for name, tensor in tensors.items()
        )
        return tensors

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        sizes, vocabulary = self._sizes, text()[2]
        width = sizes.width

        def normal(rows: int, columns: int, deviation: float) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * deviation

        slim = 1 / math.sqrt(2 * sizes.stages)
        tensors = {
            "norm1": torch.ones(1, width),
            "qkv": normal(width, 3 * width, width**-0.5),
            "out": normal(width, width, slim * width**-0.5),
            "norm2": torch.ones(1, width),
            "up": normal(width, 4 * width, width**-0.5),
            "down": normal(4 * width, width, slim * (4 * width) ** -0.5),
        }
        if self.index == 0:
            tensors |= {"embedding": normal(vocabulary, width, 0.1), "position": normal(sizes.context, width, 0.1)}
        if self.is_last:
            tensors |= {"norm": torch.ones(1, width), "head": normal(width, vocabulary, width**-0.5)}
        return tensors

    def run(self, values: dict[int, Tensor], tensors: Mapping[str, Tensor], *, training: bool) -> dict[int, Tensor]:
        """Return the hidden state, (replicas, sequences, context, width), and the targets; on the last stage the loss."""
        targets = values[TARGETS]
        hidden = self._embedded(values[TOKENS], tensors) if self.index == 0 else values[HIDDEN + self.index - 1]
        hidden = self._block(hidden, tensors)
        if not self.is_last:
            return {HIDDEN + self.index: hidden, TARGETS: targets}
        replicas, width = hidden.shape[0], hidden.shape[-1]
        logits = _normed(hidden.reshape(replicas, -1, width), tensors["norm"]) @ tensors["head"]
        each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses = each.view(replicas, -1).mean(1)
        return {LOSS: losses.sum(), LOSSES: losses}

    def _embedded(self, tokens: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        replicas, vocabulary = tensors["embedding"].shape[:2]
        own = tokens + (torch.arange(replicas) * vocabulary).view(-1, 1, 1)
        return functional.embedding(own, tensors["embedding"].flatten(0, 1)) + tensors["position"].unsqueeze(1)

    def _block(self, hidden: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        replicas, sequences, context, width = hidden.shape
        heads = self._sizes.heads
        flat = hidden.reshape(replicas, -1, width)
        qkv = (_normed(flat, tensors["norm1"]) @ tensors["qkv"]).view(replicas * sequences, context, 3, heads, width // heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        flat = flat + mixed.transpose(1, 2).reshape(replicas, -1, width) @ tensors["out"]
        inner = functional.relu(_normed(flat, tensors["norm2"]) @ tensors["up"])
        return (flat + inner @ tensors["down"]).view(replicas, sequences, context, width)


def _normed(flat: Tensor, scale: Tensor) -> Tensor:
    return functional.layer_norm(flat, flat.shape[-1:]) * scale
