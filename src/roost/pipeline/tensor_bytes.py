"""Tensors as raw bytes: little-endian elements in the order that their TensorSpec names, row-major without one."""

from __future__ import annotations

import torch
from torch import Tensor

from roost.errors import MalformedMessageError
from roost.types import DTYPE_BYTES, TensorSpec

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
"""torch's dtype for every dtype name of the wire."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 16
"""Bytes; on memory aligned less, matrix kernels were seen to round differently, so such buffers are copied."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the wire's name of `dtype`; a dtype that may not cross the wire keeps torch's name, which TensorSpec refuses."""
    return _NAMES.get(dtype, str(dtype))


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Return the spec of `tensor`. Raises InvalidConfigError for a dtype that may not cross the wire."""
    return TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))


def ordered_spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Return the spec of `tensor` with the order that its dimensions have in memory, for a value that goes on being computed with.

    What follows can depend on that order: dropout draws its mask in the order of memory, and sums are rounded by it.
    """
    order: tuple[int, ...] = ()
    if not tensor.is_contiguous():
        # What torch itself makes of strides that are not dense, as of a slice or an expanded tensor.
        strides = torch.empty_like(tensor, device="meta").stride()
        # A dimension of one element can have its neighbour's stride: it comes after, as in the tensor that is made of this order.
        order = tuple(sorted(range(tensor.dim()), key=lambda dimension: (-strides[dimension], tensor.shape[dimension] == 1)))
    if order == tuple(range(len(order))):
        order = ()
    return TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), order=order)


def to_buffer(tensor: Tensor, order: tuple[int, ...] = ()) -> memoryview:
    """Return the bytes of `tensor` in that order of its dimensions, without a copy if they lie so in host memory.

    Until the bytes are sent the tensor must not change.
    """
    return bytes_of(flattened(tensor.detach().cpu(), order))


def flattened(tensor: Tensor, order: tuple[int, ...] = ()) -> Tensor:
    """Return the elements of `tensor`, (elements,), in that order of its dimensions, without a copy if they lie so in its memory."""
    return (tensor.permute(order) if order else tensor).contiguous().reshape(-1)


def bytes_of(flat: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, (elements,); they are its own memory."""
    return flat.view(torch.uint8).numpy().data


def from_buffer(spec: TensorSpec, buffer: memoryview | bytearray | bytes) -> Tensor:
    """Return the tensor that `spec` describes.

    A writable, aligned buffer is used as the tensor's memory, and must then not be used for anything else; another is
    copied. Raises MalformedMessageError if the length is wrong or a bool is neither 0 nor 1.
    """
    view = memoryview(buffer)
    if view.nbytes != spec.nbytes:
        raise MalformedMessageError(f"tensor {spec.name!r}: {view.nbytes} bytes, but {spec.dtype} {list(spec.shape)} has {spec.nbytes}")
    if view.nbytes == 0:
        return torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
    raw = torch.frombuffer(bytearray(view) if view.readonly else view.cast("B"), dtype=torch.uint8)
    if raw.data_ptr() % _ALIGNMENT:
        raw = raw.clone()
    if spec.dtype == "bool" and int(raw.max()) > 1:
        raise MalformedMessageError(f"tensor {spec.name!r}: a bool is neither 0 nor 1")
    return arranged(spec, raw.view(DTYPES[spec.dtype]))


def arranged(spec: TensorSpec, elements: Tensor) -> Tensor:
    """Return `elements`, (elements,), in the shape and the order of dimensions of `spec`; the opposite of `flattened`."""
    if not spec.order:
        return elements.view(spec.shape)
    places = [spec.order.index(dimension) for dimension in range(len(spec.order))]
    return elements.view([spec.shape[dimension] for dimension in spec.order]).permute(places)
