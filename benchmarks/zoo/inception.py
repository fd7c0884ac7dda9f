"""Inception-V3 with its auxiliary classifier, written from arXiv 1512.00567."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.case import ZooCase, images

AUXILIARY_WEIGHT = 0.4
"""Weight of the auxiliary loss, as common trainings of this model have it."""

Pair = int | tuple[int, int]
Scale = Callable[[int], int]
"""From a width of the paper to the width here."""


class Conv(nn.Module):
    """Convolution, batch-norm and ReLU: (N, C, H, W) -> (N, width, H', W')."""

    def __init__(self, channels: int, width: int, kernel: Pair, stride: int = 1, padding: Pair = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, kernel, stride=stride, padding=padding, bias=False)
        self.norm = nn.BatchNorm2d(width, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.norm(self.conv(x)), inplace=True)


class Branches(nn.Module):
    """Branches side by side, their results joined by channel: (N, C, H, W) -> (N, sum of widths, H', W')."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def across(channels: int, width: int, kernel: int) -> Conv:
    """Return a convolution that is 1 down and `kernel` across."""
    return Conv(channels, width, (1, kernel), padding=(0, kernel // 2))


def along(channels: int, width: int, kernel: int) -> Conv:
    """Return a convolution that is `kernel` down and 1 across."""
    return Conv(channels, width, (kernel, 1), padding=(kernel // 2, 0))


def pooled(channels: int, width: int) -> nn.Module:
    """Return the branch that averages."""
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), Conv(channels, width, 1))


def fine_block(channels: int, projected: int, c: Scale) -> Branches:
    """Return a block of figure 5."""
    return Branches(
        Conv(channels, c(64), 1),
        nn.Sequential(Conv(channels, c(48), 1), Conv(c(48), c(64), 5, padding=2)),
        nn.Sequential(Conv(channels, c(64), 1), Conv(c(64), c(96), 3, padding=1), Conv(c(96), c(96), 3, padding=1)),
        pooled(channels, c(projected)),
    )


def middle_block(channels: int, width: int, c: Scale) -> Branches:
    """Return a block of figure 6 with n = 7."""
    out = c(192)
    return Branches(
        Conv(channels, out, 1),
        nn.Sequential(Conv(channels, width, 1), across(width, width, 7), along(width, out, 7)),
        nn.Sequential(
            Conv(channels, width, 1), along(width, width, 7), across(width, width, 7), along(width, width, 7), across(width, out, 7)
        ),
        pooled(channels, out),
    )


def coarse_block(channels: int, c: Scale) -> Branches:
    """Return a block of figure 7."""
    width = c(384)
    return Branches(
        Conv(channels, c(320), 1),
        nn.Sequential(Conv(channels, width, 1), Branches(across(width, width, 3), along(width, width, 3))),
        nn.Sequential(
            Conv(channels, c(448), 1), Conv(c(448), width, 3, padding=1), Branches(across(width, width, 3), along(width, width, 3))
        ),
        pooled(channels, c(192)),
    )


def fine_reduction(channels: int, c: Scale) -> Branches:
    """Return the block between the fine and the middle grid."""
    return Branches(
        Conv(channels, c(384), 3, stride=2),
        nn.Sequential(Conv(channels, c(64), 1), Conv(c(64), c(96), 3, padding=1), Conv(c(96), c(96), 3, stride=2)),
        nn.MaxPool2d(3, stride=2),
    )


def middle_reduction(channels: int, c: Scale) -> Branches:
    """Return the block between the middle and the coarse grid."""
    width = c(192)
    return Branches(
        nn.Sequential(Conv(channels, width, 1), Conv(width, c(320), 3, stride=2)),
        nn.Sequential(Conv(channels, width, 1), across(width, width, 7), along(width, width, 7), Conv(width, width, 3, stride=2)),
        nn.MaxPool2d(3, stride=2),
    )


class InceptionOutput(NamedTuple):
    """Logits of the main and of the auxiliary classifier, (N, classes) each."""

    main: Tensor
    auxiliary: Tensor


class InceptionV3(nn.Module):
    """Inception-V3 (table 1): (N, 3, 299, 299) -> two times (N, classes).

    `share` scales all widths; `auxiliary_kernel` is 5 for pictures of 299 pixels, less for smaller ones.
    """

    def __init__(self, classes: int, *, share: float = 1.0, auxiliary_kernel: int = 5) -> None:
        super().__init__()

        def c(width: int) -> int:
            return max(1, round(width * share))

        self.stem = nn.Sequential(
            Conv(3, c(32), 3, stride=2),
            Conv(c(32), c(32), 3),
            Conv(c(32), c(64), 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            Conv(c(64), c(80), 1),
            Conv(c(80), c(192), 3),
            nn.MaxPool2d(3, stride=2),
        )
        concatenated = [c(64) + c(64) + c(96) + c(width) for width in (32, 64, 64)]
        self.fine = nn.Sequential(
            *(fine_block(before, width, c) for before, width in zip([c(192), *concatenated], (32, 64, 64), strict=False))
        )
        fine, middle = concatenated[-1], 4 * c(192)
        reduced = c(384) + c(96) + fine
        self.fine_reduction = fine_reduction(fine, c)
        widths = (128, 160, 160, 192)
        self.middle = nn.Sequential(*(middle_block(middle if index else reduced, c(width), c) for index, width in enumerate(widths)))
        self.auxiliary = nn.Sequential(
            nn.AvgPool2d(5, stride=3),
            Conv(middle, c(128), 1),
            Conv(c(128), c(768), auxiliary_kernel),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(c(768), classes),
        )
        self.middle_reduction = middle_reduction(middle, c)
        coarse = c(320) + 4 * c(384) + c(192)
        self.coarse = nn.Sequential(coarse_block(c(320) + c(192) + middle, c), coarse_block(coarse, c))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(coarse, classes))

    def forward(self, x: Tensor) -> InceptionOutput:
        x = self.middle(self.fine_reduction(self.fine(self.stem(x))))
        return InceptionOutput(main=self.head(self.coarse(self.middle_reduction(x))), auxiliary=self.auxiliary(x))


def weighted_loss(output: InceptionOutput, labels: Tensor) -> Tensor:
    """Return the cross-entropy of the main logits and its share of the auxiliary ones."""
    return functional.cross_entropy(output.main, labels) + AUXILIARY_WEIGHT * functional.cross_entropy(output.auxiliary, labels)


def inception(*, full: bool) -> ZooCase:
    """Return Inception-V3 with a loss on both outputs; small: a sixteenth of the widths, pictures of 107 pixels."""
    model = InceptionV3(1000) if full else InceptionV3(10, share=1 / 16, auxiliary_kernel=1)
    x, y = images(3, 299, 1000) if full else images(4, 107, 10)
    return ZooCase(model=model, loss=weighted_loss, inputs=(x,), labels=(y,))
