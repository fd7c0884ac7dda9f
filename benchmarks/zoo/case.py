"""What a model of the zoo comes with, and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roost.capture.graph import Graph
from roost.capture.tracing import CallLayout, own_loss

VOCABULARY = 61
"""Tokens of the small language models."""

PADDING = -100
"""Label of a token that has none."""


@dataclass(frozen=True, kw_only=True)
class ZooCase:
    """A model with its loss and one batch."""

    model: nn.Module
    loss: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    labels: tuple[Tensor, ...] = ()
    layout: CallLayout | None = None
    dynamic: tuple[frozenset[int], ...] | None = None
    """For each data input its dimensions besides the first that vary."""

    @property
    def data(self) -> tuple[Tensor, ...]:
        """Inputs, then labels."""
        return (*self.inputs, *self.labels)

    def eager_loss(self, data: tuple[Tensor, ...]) -> Tensor:
        """Return the loss that the model itself computes; it gets copies of `data`, and its buffers may change."""
        copies = [item.clone() for item in data]
        layout = self.layout or CallLayout(positional=len(self.inputs))
        return self.loss(layout.call(self.model, copies), *layout.labels(copies))

    def narrowed(self, graph: Graph, samples: int) -> tuple[Tensor, ...]:
        """Return the first `samples` samples of the data, with half the length in each dimension that `graph` leaves free."""
        found = []
        for item, record in zip(self.data, graph.data, strict=True):
            part = item[:samples]
            for dimension, size in enumerate(record.shape):
                if size is None and dimension > 0:
                    part = part.narrow(dimension, 0, part.shape[dimension] // 2)
            found.append(part.contiguous())
        return tuple(found)


def keyword_case(model: nn.Module, data: dict[str, Tensor], *, varying: frozenset[int] = frozenset()) -> ZooCase:
    """Return the case of a model that is called as model(**data) and computes its own loss.

    `varying` are the dimensions besides the first that vary, of every input that has them.
    """
    return ZooCase(
        model=model,
        loss=own_loss,
        inputs=tuple(data.values()),
        layout=CallLayout(positional=0, keywords=tuple(data)),
        dynamic=tuple(frozenset(dimension for dimension in varying if dimension < item.dim()) for item in data.values()),
    )


def text(samples: int, length: int, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Return token ids of padded sentences with their mask: the last sample fills half the length, the one before three quarters."""
    ids = torch.randint(3, vocabulary, (samples, length))
    mask = torch.ones_like(ids)
    mask[-1, length // 2 :] = 0
    mask[-2, 3 * length // 4 :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def causal_text(samples: int, length: int, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Return `text` with each token as its own label, as causal language models take it; padding has none."""
    data = text(samples, length, vocabulary)
    return data | {"labels": data["input_ids"].masked_fill(data["attention_mask"] == 0, PADDING)}


def images(samples: int, side: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return noise with three channels, and classes."""
    return torch.randn(samples, 3, side, side), torch.randint(classes, (samples,))


def configuration(full: bool, small: dict[str, Any], large: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the size that is asked for."""
    return large if full else small
