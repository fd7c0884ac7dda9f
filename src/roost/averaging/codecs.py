"""How values of a segment become bytes on the wire, and back: block-wise, so that one large value spoils only its block.

Block-wise 8-bit quantisation follows Dettmers et al. (arXiv 2110.02861), here with linear steps; what is lost is kept by the
caller and added the next time (error feedback: Seide et al. 2014; Karimireddy et al., arXiv 1901.09847).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from roost.config import TensorCodec
from roost.errors import MalformedMessageError

INT8_BLOCK = 256
"""Values that share a scale: 4 bytes beside 256."""
FP16_BLOCK = 4096
"""Values that share a power of two: 4 bytes beside 8192."""
_INT8_STEPS = 127
_FP16_EXPONENT = 15
"""The largest value of a block lies in (2**14, 2**15]: within half precision, whose largest is 65504, with the most room below."""
_LEAST_EXPONENT = -100
"""Blocks smaller than 2**-100 are sent as if they were that large: the inverse of their scale must stay finite."""

Bytes = memoryview | bytearray | bytes
_Scales = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From the largest magnitude of each block, (blocks,), to what its elements are multiplied by when read, and when written."""


def encoded_bytes(codec: TensorCodec, count: int, element_bytes: int) -> int:
    """Return the bytes that `count` values take; `element_bytes` is the size of a value that is not encoded."""
    if codec is TensorCodec.INT8:
        return 4 * _blocks(count, INT8_BLOCK) + count
    if codec is TensorCodec.FP16:
        return 4 * _blocks(count, FP16_BLOCK) + 2 * count
    return count * element_bytes


def encode(codec: TensorCodec, values: Tensor) -> Tensor:
    """Return `values`, (n,) float, as (encoded_bytes,) uint8: the blocks' float32 scales, then the elements.

    INT8 and FP16 need finite values. NONE gives a view.
    """
    if codec is TensorCodec.NONE:
        return values.view(torch.uint8)
    if codec is TensorCodec.INT8:
        return _encode_blocks(values.float(), INT8_BLOCK, _int8_scales, torch.int8)
    return _encode_blocks(values.float(), FP16_BLOCK, _fp16_scales, torch.float16)


def decode(codec: TensorCodec, buffer: Bytes, count: int, dtype: torch.dtype) -> Tensor:
    """Return the `count` values in `buffer`, (count,), in `dtype` if they are not encoded and in float32 if they are.

    They are not looked at: `all_finite` does that. Raises MalformedMessageError if the length is wrong.
    """
    view = memoryview(buffer)
    wanted = encoded_bytes(codec, count, dtype.itemsize)
    if view.nbytes != wanted:
        raise MalformedMessageError(f"a buffer of codec {codec} has {view.nbytes} bytes, not {wanted}")
    if count == 0:
        return torch.empty(0, dtype=dtype)
    raw = torch.frombuffer(bytearray(view) if view.readonly else view.cast("B"), dtype=torch.uint8)
    if codec is TensorCodec.NONE:
        values = raw.view(dtype)
    elif codec is TensorCodec.INT8:
        values = _decode_blocks(raw, count, INT8_BLOCK, torch.int8)
    else:
        values = _decode_blocks(raw, count, FP16_BLOCK, torch.float16)
    return values


def all_finite(values: Tensor) -> bool:
    """Return whether the values, (n,), are finite and small enough that their sum is.

    One pass without temporaries: NaN and infinities never leave a sum.
    """
    return math.isfinite(float(values.sum()))


def root_mean_square(values: Tensor) -> float:
    """Return the root of the mean square of the values, (n,); NaN or infinity if one is not finite, or too large to be squared.

    One pass without temporaries.
    """
    count = values.numel()
    return float(torch.linalg.vector_norm(values)) / math.sqrt(count) if count else 0.0


def _blocks(count: int, block: int) -> int:
    return -(-count // block)


def _encode_blocks(values: Tensor, block: int, scales_of: _Scales, dtype: torch.dtype) -> Tensor:
    count, blocks = values.numel(), _blocks(values.numel(), block)
    padded = values
    if blocks * block != count:
        padded = values.new_zeros(blocks * block)
        padded[:count] = values
    rows = padded.view(blocks, block)
    scales, inverse = scales_of(rows.abs().amax(dim=1))
    scaled = rows * inverse[:, None]
    elements = scaled.round_().clamp_(-_INT8_STEPS, _INT8_STEPS).to(dtype) if dtype is torch.int8 else scaled.to(dtype)
    encoded = torch.empty(4 * blocks + count * dtype.itemsize, dtype=torch.uint8, device=values.device)
    encoded[: 4 * blocks] = scales.view(torch.uint8)
    encoded[4 * blocks :] = elements.reshape(-1)[:count].view(torch.uint8)
    return encoded


def _decode_blocks(raw: Tensor, count: int, block: int, dtype: torch.dtype) -> Tensor:
    blocks = _blocks(count, block)
    # A copy, since the memory of a received buffer is not always aligned.
    scales = raw[: 4 * blocks].clone().view(torch.float32)
    elements = raw[4 * blocks :].clone().view(dtype)
    values = torch.empty(blocks * block, dtype=torch.float32)
    values[:count] = elements
    values[count:] = 0
    # One multiplication, so that every machine gets the same bits.
    values.view(blocks, block).mul_(scales[:, None])
    return values[:count]


def _int8_scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    scales = largest / _INT8_STEPS
    # A scale too small to be inverted belongs to a block of (nearly) zeros.
    return scales, torch.where(scales > 2.0**_LEAST_EXPONENT, 1 / scales, 0.0)


def _fp16_scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    _, exponents = torch.frexp(largest)
    powers = exponents.clamp(min=_LEAST_EXPONENT) - _FP16_EXPONENT
    one = torch.ones_like(largest)
    return torch.ldexp(one, powers), torch.ldexp(one, -powers)
