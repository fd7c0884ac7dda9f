"""The precision in which a stage computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.amp.autocast_mode import is_autocast_available

_TRIED = 16
"""Rows and columns of the matrices that are multiplied to see whether a device can."""


def can_compute(precision: str, device: torch.device) -> bool:
    """Return whether forwards can compute in `precision` on `device`: torch says so, and a product of matrices comes out in it."""
    if precision == "float32":
        return True
    if not is_autocast_available(device.type):
        return False
    matrix = torch.ones((_TRIED, _TRIED), device=device)
    try:
        with computing(precision, device):
            product = matrix @ matrix
        return product.dtype is torch.bfloat16 and float(product[0, 0]) == _TRIED
    except RuntimeError:
        # What torch raises for a dtype that the device's kernels do not have.
        return False


def computing(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which forwards compute in `precision`, one of roost.config.PRECISIONS.

    "bf16" is torch.autocast: matrix products, convolutions and attention in bfloat16, what needs the range or the digits (losses,
    norms, sums) in float32; parameters, their gradients and the optimizer stay in float32 (mixed precision, arXiv 1710.03740; bfloat16
    needs no scaling of the loss, arXiv 1905.12322). Backwards run outside: they compute in what their forward chose.
    """
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
