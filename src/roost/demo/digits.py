"""Handwritten digits (scikit-learn's, 8 x 8 pixels) and a small convolutional network for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from roost.errors import InvalidDataError

VALIDATION_SAMPLES = 360


class DigitsCNN(nn.Module):
    """Three convolutions with batch-norm, then two linear layers with dropout: (N, 1, 8, 8) -> (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Dropout(0.25),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the fraction of samples whose largest logit is the label."""
    return (logits.argmax(dim=1) == labels).float().mean()


def load_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (images, labels) for training and for validation: float32 (N, 1, 8, 8) in 0..1, and int64 (N,).

    Raises InvalidDataError if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise InvalidDataError("the digits come with scikit-learn, which is not installed", hint="pip install 'roost[demo]'") from error
    digits = load()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    training = len(labels) - VALIDATION_SAMPLES
    return (images[:training], labels[:training]), (images[training:], labels[training:])
