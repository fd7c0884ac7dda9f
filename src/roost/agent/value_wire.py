"""Values and gradients between the stages of a cluster as bytes: encoded with the job's codec, moved to and from the device.

Only what carries a gradient is encoded, and only in training: labels, masks and whole numbers travel as they are, and so do the
values of evaluations, whose loss is that of the model that is saved. The coding is that of averaging (averaging/codecs.py), without
error feedback: what rounding takes from one micro-batch has no place in the next, which has other samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roost.averaging import codecs
from roost.config import TensorCodec
from roost.errors import MalformedMessageError, NonFiniteLossError
from roost.pipeline.host_buffers import HostBuffers
from roost.pipeline.tensor_bytes import DTYPES, arranged, bytes_of, flattened, from_buffer, ordered_spec_of
from roost.transport.interface import Buffer
from roost.types import TensorSpec

FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})
LARGEST = 2.0**126
"""A tensor with a larger value (or infinity, as in masked scores) travels as it is: rounding up must not overflow."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WireValue:
    """A value that has arrived, checked but not yet decoded."""

    spec: TensorSpec
    codec: TensorCodec
    buffer: Buffer
    sender: str = "a peer"
    """The node it came from."""
    must_be_number: bool = False
    """True if it carries a gradient in training: there a NaN ends all training that it reaches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedValues:
    """Values ready to be sent to one stage."""

    specs: tuple[TensorSpec, ...]
    codecs: tuple[TensorCodec, ...]
    """Empty if no value is encoded."""
    buffers: list[Buffer]
    wait: Callable[[], None] | None
    """Returns once the buffers are filled; None: they are."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(memoryview(buffer).nbytes for buffer in self.buffers)


class ValueWire:
    """Packs what a stage sends and unpacks what it receives; `pack` and `unpack` are for the thread that computes."""

    def __init__(self, codec: TensorCodec, differentiable: frozenset[int], host: HostBuffers) -> None:
        """`differentiable` are the numbers of the values that carry a gradient."""
        self._codec = codec
        self._differentiable = differentiable
        self._host = host

    def pack(self, values: Mapping[int, Tensor], *, training: bool) -> PackedValues:
        """Return `values`, by number, ready to be sent; until they have been, those that are not encoded must not change."""
        specs = tuple(ordered_spec_of(str(number), tensor) for number, tensor in values.items())
        flat = [flattened(tensor.detach(), spec.order) for spec, tensor in zip(specs, values.values(), strict=True)]
        chosen = tuple(self._choose(spec, elements, training) for spec, elements in zip(specs, flat, strict=True))
        flat = [_encoded(codec, elements) for codec, elements in zip(chosen, flat, strict=True)]
        host = self._host.to_host(flat)
        encoded = any(codec is not TensorCodec.NONE for codec in chosen)
        buffers: list[Buffer] = [bytes_of(elements) for elements in host.tensors]
        return PackedValues(specs=specs, codecs=chosen if encoded else (), buffers=buffers, wait=host.wait)

    def _choose(self, spec: TensorSpec, elements: Tensor, training: bool) -> TensorCodec:
        if not training or not self._may_be_encoded(spec) or _wire_bytes(self._codec, spec) >= spec.nbytes:
            return TensorCodec.NONE
        return self._codec if _all_within(elements, LARGEST) else TensorCodec.NONE

    def _may_be_encoded(self, spec: TensorSpec) -> bool:
        encodes = self._codec is not TensorCodec.NONE and spec.dtype in FLOATING
        return encodes and int(spec.name) in self._differentiable

    def arrived(
        self,
        specs: Sequence[TensorSpec],
        chosen: Sequence[TensorCodec],
        buffers: Sequence[Buffer],
        expected: Sequence[int],
        *,
        training: bool,
        sender: str = "a peer",
    ) -> dict[int, WireValue]:
        """Return the values that came in a message from the node `sender`, by number.

        Raises MalformedMessageError, naming the sender, for other values than the `expected`, a codec they may not have, or wrong sizes.
        """
        known = {str(value): value for value in expected}
        all_codecs = chosen or (TensorCodec.NONE,) * len(specs)
        if not len(specs) == len(buffers) == len(all_codecs):
            raise MalformedMessageError(f"{sender} announced {len(specs)} tensors with {len(chosen)} codecs and sent {len(buffers)}")
        values = {}
        for spec, codec, buffer in zip(specs, all_codecs, buffers, strict=True):
            if spec.name not in known:
                raise MalformedMessageError(f"value {spec.name[:80]!r} from {sender} is not one that crosses here")
            if codec is not TensorCodec.NONE and not (training and codec is self._codec and self._may_be_encoded(spec)):
                raise MalformedMessageError(f"value {spec.name!r} came from {sender} with codec {codec}, which it cannot have here")
            if (found := memoryview(buffer).nbytes) != (wanted := _wire_bytes(codec, spec)):
                raise MalformedMessageError(f"value {spec.name!r} came from {sender} with {found} bytes, not {wanted}")
            number = known[spec.name]
            carries = training and spec.dtype in FLOATING and number in self._differentiable
            values[number] = WireValue(spec=spec, codec=codec, buffer=buffer, sender=sender, must_be_number=carries)
        return values

    def unpack(self, values: Mapping[int, Tensor | WireValue]) -> dict[int, Tensor]:
        """Return the values by number, on the device.

        Raises MalformedMessageError for one that encodes what is not finite, NonFiniteLossError for one that carries a gradient and has a
        NaN; both name the sender.
        """
        return {
            number: self._host.to_device(_decoded(value) if isinstance(value, WireValue) else value) for number, value in values.items()
        }


def _wire_bytes(codec: TensorCodec, spec: TensorSpec) -> int:
    if codec is TensorCodec.NONE:
        return spec.nbytes
    element_bytes = DTYPES[spec.dtype].itemsize
    return codecs.encoded_bytes(codec, spec.nbytes // element_bytes, element_bytes)


def _encoded(codec: TensorCodec, elements: Tensor) -> Tensor:
    return elements if codec is TensorCodec.NONE else codecs.encode(codec, elements)


def _decoded(value: WireValue) -> Tensor:
    if value.codec is TensorCodec.NONE:
        tensor = from_buffer(value.spec, value.buffer)
        # One pass: a NaN never leaves a sum. Infinities may be meant, as in masked scores, but not both of them.
        if value.must_be_number and math.isnan(float(tensor.sum())):
            raise NonFiniteLossError(f"{value.sender} sent value {value.spec.name!r} with a NaN")
        return tensor
    dtype = DTYPES[value.spec.dtype]
    elements = codecs.decode(value.codec, value.buffer, value.spec.nbytes // dtype.itemsize, torch.float32)
    if not _all_within(elements, float("inf")):
        raise MalformedMessageError(f"value {value.spec.name!r} from {value.sender} encodes numbers that are not finite")
    return arranged(value.spec, elements.to(dtype))


def _all_within(elements: Tensor, bound: float) -> bool:
    """Return whether all elements, (elements,), lie strictly between -bound and bound; False for NaN, True without elements."""
    if elements.numel() == 0:
        return True
    low, high = (float(end) for end in elements.aminmax())
    return -bound < low and high < bound
