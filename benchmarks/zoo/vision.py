"""Models of images, written from their papers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.case import ZooCase, images


class DropoutNet(nn.Module):
    """Convolutions, batch-norm and both kinds of dropout: (N, 3, S, S) -> (N, classes)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Dropout2d(0.1),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.1, inplace=True),
            nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * width, 4 * width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4 * width, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def dropout_net(*, full: bool) -> ZooCase:
    """Return a small CNN with dropout and batch-norm."""
    width, side, samples = (64, 32, 32) if full else (8, 12, 8)
    x, y = images(samples, side, 10)
    return ZooCase(model=DropoutNet(width, 10), loss=nn.CrossEntropyLoss(label_smoothing=0.1), inputs=(x,), labels=(y,))


class _Doubled(nn.Module):
    """Two convolutions with batch-norm and ReLU: (N, C, H, W) -> (N, width, H, W)."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """U-Net (arXiv 1505.04597) with padded convolutions: (N, 3, S, S) -> (N, classes, S, S); S divides by 2 ** levels.

    The first half of the levels goes up with transposed convolutions, the other with bilinear interpolation.
    """

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(_Doubled(channels, wide) for channels, wide in zip([3, *widths], widths, strict=False))
        self.raised = nn.ModuleList()
        self.up = nn.ModuleList()
        for level in reversed(range(levels)):
            below, here = widths[level + 1], widths[level]
            interpolated = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), nn.Conv2d(below, here, 1))
            self.raised.append(nn.ConvTranspose2d(below, here, 2, stride=2) if level < (levels + 1) // 2 else interpolated)
            self.up.append(_Doubled(2 * here, here))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else functional.max_pool2d(x, 2))
            skips.append(x)
        x = self.dropout(skips.pop())
        for raised, block in zip(self.raised, self.up, strict=True):
            x = block(torch.cat([skips.pop(), raised(x)], dim=1))
        return self.head(x)


def unet(*, full: bool) -> ZooCase:
    """Return a U-Net for the class of every pixel."""
    width, levels, side, samples = (64, 4, 128, 2) if full else (4, 3, 16, 4)
    return ZooCase(
        model=UNet(width, levels, 5),
        loss=nn.CrossEntropyLoss(),
        inputs=(torch.randn(samples, 3, side, side),),
        labels=(torch.randint(5, (samples, side, side)),),
    )
