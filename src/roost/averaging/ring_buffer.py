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

from roost.averaging.codecs import Bytes, all_finite, decode, root_mean_square
from roost.config import TensorCodec
from roost.errors import MalformedMessageError, ProtocolError

_DTYPE_NAMES = {torch.float32: "float32", torch.float64: "float64"}


class SegmentBuffer:
    """The sum of weighted tensors of one averaging round, in `parts` nearly equal chunks of `pieces` each; some may be empty.

    A chunk is empty memory until `fill` copies it: so the first can be sent while the others are still being copied. Sums are
    kept in float32, or in float64 if any tensor is float64. All members must flatten the same names in the same order. Chunks that
    were sent are only overwritten when their final values come round, which the ring orders after the next member's receipt, so
    views of them may be sent without a copy.
    """

    def __init__(self, snapshot: Mapping[str, Tensor], parts: int, pieces: int = 1, memory: Tensor | None = None) -> None:
        """Make room for `snapshot`, float tensors of any device, on the host; in `memory`, (n,), if that is what is needed.

        Raises ProtocolError if a tensor is not float.
        """
        for name, tensor in snapshot.items():
            if not tensor.is_floating_point():
                raise ProtocolError(f"tensor {name!r} is {tensor.dtype}: only float tensors are averaged")
        double = any(tensor.dtype == torch.float64 for tensor in snapshot.values())
        self._shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in snapshot.items()}
        size, dtype = sum(tensor.numel() for tensor in snapshot.values()), torch.float64 if double else torch.float32
        fits = memory is not None and memory.shape == (size,) and memory.dtype == dtype
        self._flat = memory if memory is not None and fits else torch.empty(size, dtype=dtype)
        self._parts = parts
        self._pieces = pieces
        self._snapshot = snapshot

    def fill(self, index: int) -> Tensor:
        """Copy chunk `index` of the snapshot and return the chunk, (n,)."""
        chunk = self.chunk(index)
        start = chunk.storage_offset() - self._flat.storage_offset()
        for name, where in self.slices().items():
            begin, end = max(where.start, start), min(where.stop, start + chunk.numel())
            if begin < end:
                part = self._snapshot[name].detach().reshape(-1)[begin - where.start : end - where.start]
                self._flat[begin:end].copy_(part)
        return chunk

    @property
    def dtype(self) -> str:
        """The dtype of the chunks: 'float32' or 'float64'."""
        return _DTYPE_NAMES[self._flat.dtype]

    @property
    def flat(self) -> Tensor:
        """All elements, (n,)."""
        return self._flat

    @property
    def parts(self) -> int:
        """Number of chunks, some of which may be empty."""
        return self._parts

    def chunk(self, index: int) -> Tensor:
        """Return a (n,) view of chunk `index`; the first chunks have one element more if they cannot all be equal."""
        return _part(self._flat, self._parts, index)

    def piece(self, index: int, piece: int) -> Tensor:
        """Return a (n,) view of piece `piece` of chunk `index`; the first pieces have one element more if they cannot all be equal."""
        return _part(self.chunk(index), self._pieces, piece)

    def add(self, index: int, buffer: Bytes, piece: int = 0, codec: TensorCodec = TensorCodec.NONE) -> None:
        """Add a received partial sum to a piece of chunk `index`.

        Raises MalformedMessageError if its length is wrong or the sum is not finite any more.
        """
        summed = self.piece(index, piece).add_(self._received(index, buffer, piece, codec))
        if not all_finite(summed):
            raise MalformedMessageError(f"chunk {index} of an averaging round has a value that is not finite")

    def store(self, index: int, buffer: Bytes, piece: int = 0, codec: TensorCodec = TensorCodec.NONE, *, largest: float = math.inf) -> None:
        """Set a piece of chunk `index` to received final values.

        Raises MalformedMessageError if their length is wrong, one of them is not finite, or their root mean square is over `largest`.
        """
        values = self._received(index, buffer, piece, codec)
        _check_size(values, largest, index)
        self.piece(index, piece).copy_(values)

    def scale(self, index: int, total_weight: float, piece: int = 0, *, largest: float = math.inf) -> None:
        """Divide a piece of chunk `index`, a complete sum, by the weight of all members.

        Raises ProtocolError if that is not positive, MalformedMessageError if the root mean square of the result is over `largest`.
        """
        if not (math.isfinite(total_weight) and total_weight > 0):
            raise ProtocolError(f"the weights of an averaging round add up to {total_weight}, not to a positive number")
        _check_size(self.piece(index, piece).div_(total_weight), largest, index)

    def slices(self) -> dict[str, slice]:
        """Return where each tensor lies in a flat one."""
        found: dict[str, slice] = {}
        begin = 0
        for name, (shape, _) in self._shapes.items():
            found[name] = slice(begin, begin + shape.numel())
            begin += shape.numel()
        return found

    def unflatten(self, flat: Tensor | None = None) -> dict[str, Tensor]:
        """Return the tensors in `flat`, (n,), or in this buffer: in their own shapes and dtypes, on the host; some are views."""
        source = self._flat if flat is None else flat
        return {name: source[where].view(self._shapes[name][0]).to(self._shapes[name][1]) for name, where in self.slices().items()}

    def _received(self, index: int, buffer: Bytes, piece: int, codec: TensorCodec) -> Tensor:
        try:
            return decode(codec, buffer, self.piece(index, piece).numel(), self._flat.dtype)
        except MalformedMessageError as error:
            raise MalformedMessageError(f"chunk {index} of an averaging round: {error.message}", hint=error.hint) from error


def _part(flat: Tensor, parts: int, index: int) -> Tensor:
    """Return part `index` of `parts` nearly equal ones, the first of which have one element more if they cannot all be equal."""
    size, longer = divmod(flat.numel(), parts)
    begin = index * size + min(index, longer)
    return flat[begin : begin + size + (1 if index < longer else 0)]


def _check_size(values: Tensor, largest: float, index: int) -> None:
    """Raise MalformedMessageError if a value is not finite, or their root mean square is over `largest`."""
    size = root_mean_square(values)
    if not math.isfinite(size):
        raise MalformedMessageError(f"chunk {index} of an averaging round has a value that is not finite")
    if size > largest:
        raise MalformedMessageError(f"chunk {index} of an averaging round has values of size {size:g}, at most {largest:g} are believed")
