"""The functions that run a graph's operations, where torch's or Python's own could end or stall the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roost.capture.ops import SCALAR_OPS, resolve
from roost.errors import GraphFormatError

_LARGEST = 2**63
"""A number of a graph fits in 64 bits, as sizes of tensors do."""


def callable_of(op: str) -> Callable[..., Any]:
    """Return the function that runs an allowed operation. Raises GraphFormatError for any other name."""
    if op in SCALAR_OPS:
        return _bounded(op, SCALAR_OPS[op])
    function = resolve(op)
    return _whole_division(function) if op in ("aten.div.Tensor_mode", "aten.div.Scalar_mode") else function


def _bounded(op: str, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return `function` so that it refuses what does not fit: squared again and again, an integer of Python fills the memory."""

    def call(left: Any, right: Any) -> Any:
        try:
            result = function(left, right)
        except ArithmeticError as error:
            raise GraphFormatError(f"{op} of {left} and {right}: {error}") from error
        if isinstance(result, int) and not -_LARGEST <= result < _LARGEST:
            raise GraphFormatError(f"{op} of {left} and {right} does not fit in 64 bits")
        return result

    return call


def _whole_division(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` so that dividing the smallest integer by -1 wraps, as elsewhere in torch; the processor would trap."""

    def call(left: Any, right: Any, *, rounding_mode: str | None = None) -> Any:
        dtype = torch.result_type(left, right)
        if rounding_mode != "trunc" or dtype.is_floating_point:
            return function(left, right, rounding_mode=rounding_mode)
        left = left.to(dtype)
        if not isinstance(right, Tensor):
            return left.neg() if right == -1 else function(left, right, rounding_mode=rounding_mode)
        right = right.to(dtype)
        if dtype is torch.uint8 or dtype is torch.bool:
            return function(left, right, rounding_mode=rounding_mode)
        negative = right == -1
        return torch.where(negative, left.neg(), function(left, torch.where(negative, 1, right), rounding_mode=rounding_mode))

    return call
