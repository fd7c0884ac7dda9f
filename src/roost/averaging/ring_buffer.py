"""A segment's tensors as one flat buffer in chunks: what a ring all-reduce computes on.

Ravnest (arXiv 2401.01728), parallel multi-ring all-reduce; the chunked ring is that of Patarasuk and Yuan (2009). With C
members, member p in reduce-scatter step s sends chunk (p - s) mod C and adds what it receives to chunk (p - s - 1) mod C;
it then owns the sum in chunk (p + 1) mod C, scales it by the total weight and passes it round in the all-gather.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from roost.errors import MalformedMessageError, ProtocolError

_DTYPE_NAMES = {torch.float32: "float32", torch.float64: "float64"}


class SegmentBuffer:
    """The sum of weighted tensors of one averaging round, in `parts` nearly equal chunks; some may be empty.

    Sums are kept in float32, or in float64 if any tensor is float64. All members must flatten the same names in the same
    order. Chunks that were sent are only overwritten when their final values come round, which the ring orders after the
    next member's receipt, so views of them may be sent without a copy.
    """

    def __init__(self, snapshot: Mapping[str, Tensor], parts: int) -> None:
        """Copy `snapshot`, float tensors of any device, into host memory. Raises ProtocolError if a tensor is not float."""
        for name, tensor in snapshot.items():
            if not tensor.is_floating_point():
                raise ProtocolError(f"tensor {name!r} is {tensor.dtype}: only float tensors are averaged")
        double = any(tensor.dtype == torch.float64 for tensor in snapshot.values())
        self._shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in snapshot.items()}
        self._flat = torch.empty(sum(tensor.numel() for tensor in snapshot.values()), dtype=torch.float64 if double else torch.float32)
        self._parts = parts
        begin = 0
        for tensor in snapshot.values():
            self._flat[begin : begin + tensor.numel()].copy_(tensor.detach().reshape(-1))
            begin += tensor.numel()

    @property
    def dtype(self) -> str:
        """The dtype of the chunks: 'float32' or 'float64'."""
        return _DTYPE_NAMES[self._flat.dtype]

    @property
    def parts(self) -> int:
        """Number of chunks, some of which may be empty."""
        return self._parts

    def multiply(self, weight: float) -> None:
        """Multiply everything by this member's weight (the samples it consumed), once, before the first step."""
        self._flat.mul_(weight)

    def chunk(self, index: int) -> Tensor:
        """Return a (n,) view of chunk `index`; the first chunks have one element more if they cannot all be equal."""
        size, longer = divmod(self._flat.numel(), self._parts)
        begin = index * size + min(index, longer)
        return self._flat[begin : begin + size + (1 if index < longer else 0)]

    def add(self, index: int, buffer: memoryview | bytearray | bytes) -> None:
        """Add a received partial sum to chunk `index`. Raises MalformedMessageError if its length is wrong."""
        self.chunk(index).add_(self._received(index, buffer))

    def store(self, index: int, buffer: memoryview | bytearray | bytes) -> None:
        """Set chunk `index` to received final values. Raises MalformedMessageError if their length is wrong."""
        self.chunk(index).copy_(self._received(index, buffer))

    def scale(self, index: int, total_weight: float) -> None:
        """Divide chunk `index`, a complete sum, by the weight of all members. Raises ProtocolError if that is not positive."""
        if not (math.isfinite(total_weight) and total_weight > 0):
            raise ProtocolError(f"the weights of an averaging round add up to {total_weight}, not to a positive number")
        self.chunk(index).div_(total_weight)

    def unflatten(self) -> dict[str, Tensor]:
        """Return the tensors in their own shapes and dtypes, in host memory; those of the sum's dtype are views."""
        tensors: dict[str, Tensor] = {}
        begin = 0
        for name, (shape, dtype) in self._shapes.items():
            tensors[name] = self._flat[begin : begin + shape.numel()].view(shape).to(dtype)
            begin += shape.numel()
        return tensors

    def _received(self, index: int, buffer: memoryview | bytearray | bytes) -> Tensor:
        view = memoryview(buffer)
        wanted = self.chunk(index).numel() * self._flat.element_size()
        if view.nbytes != wanted:
            raise MalformedMessageError(f"chunk {index} of an averaging round has {view.nbytes} bytes, not {wanted}")
        if wanted == 0:
            return torch.empty(0, dtype=self._flat.dtype)
        return torch.frombuffer(bytearray(view) if view.readonly else view.cast("B"), dtype=torch.uint8).view(self._flat.dtype)
