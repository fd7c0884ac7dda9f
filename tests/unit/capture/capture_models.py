"""Small models and a pipeline in one thread, for the tests of capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roost.capture.export import Captured, capture
from roost.capture.rehearsal import Rehearsal

VOCABULARY, CONTEXT, WIDTH = 23, 12, 16


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Dropout(0.2),
            nn.Conv2d(4, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AvgPool2d(2),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.features(x), 1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 2, width // 2).transpose(1, 2) for part in self.qkv(self.ln1(x)).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        x = x + self.drop(self.project(y.transpose(1, 2).contiguous().view(batch, length, width)))
        return x + self.mlp(self.ln2(x))


class TinyGPT(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def language_loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.view(-1, VOCABULARY), labels.view(-1))


def accuracy(output: Tensor, labels: Tensor) -> Tensor:
    return (output.argmax(-1) == labels).float().mean()


@dataclass(frozen=True, kw_only=True)
class Example:
    """A model with its loss and a batch of 8."""

    model: nn.Module
    loss: nn.Module
    inputs: Tensor
    labels: Tensor

    def captured(self) -> Captured:
        return capture(self.model, self.loss, (self.inputs,), (self.labels,), metric=accuracy)


class LanguageLoss(nn.Module):
    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        return language_loss(output, labels)


EXAMPLES = ("perceptron", "convnet", "gpt", "tied_gpt")


def example(name: str) -> Example:
    torch.manual_seed(0)
    if name == "perceptron":
        return Example(model=Perceptron(), loss=nn.CrossEntropyLoss(), inputs=torch.randn(8, 6), labels=torch.randint(0, 4, (8,)))
    if name == "convnet":
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.5]))
        return Example(model=ConvNet(), loss=loss, inputs=torch.randn(8, 1, 10, 10), labels=torch.randint(0, 4, (8,)))
    ids = torch.randint(0, VOCABULARY, (8, CONTEXT + 1))
    return Example(
        model=TinyGPT(tied=name == "tied_gpt"), loss=LanguageLoss(), inputs=ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous()
    )


def training_tensors(captured: Captured) -> dict[str, Tensor]:
    trainable = {record.name for record in captured.graph.tensors if record.trainable}
    return {name: item.clone().requires_grad_(name in trainable) for name, item in captured.tensors.items()}


def train_step(captured: Captured, cuts: Sequence[int], data: Sequence[Tensor], tensors: dict[str, Tensor], seed: int) -> Tensor:
    """Run forward and backward through all stages, adding to the gradients of `tensors`; return the loss."""
    return rehearsal_of(captured, cuts, tensors).step(data, seed)


def evaluate(captured: Captured, cuts: Sequence[int], data: Sequence[Tensor], tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return loss and metric of an evaluation through all stages."""
    loss, metric = rehearsal_of(captured, cuts, tensors).evaluate(data)
    assert metric is not None
    return loss, metric


def rehearsal_of(captured: Captured, cuts: Sequence[int], tensors: dict[str, Tensor]) -> Rehearsal:
    """Return the stages on `tensors`, which change as training changes them."""
    rehearsal = Rehearsal(captured, cuts)
    rehearsal.tensors = tensors
    return rehearsal
