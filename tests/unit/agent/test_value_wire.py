from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roost.agent.value_wire import PackedValues, ValueWire, WireValue
from roost.config import BYTES_PER_ENCODED_BYTE, TensorCodec
from roost.errors import MalformedMessageError, NonFiniteLossError
from roost.pipeline.host_buffers import host_buffers
from roost.pipeline.tensor_bytes import ordered_spec_of

CODED = [TensorCodec.FP16, TensorCodec.INT8]
HIDDEN, LABEL = 7, 8


def wire(codec: TensorCodec) -> ValueWire:
    return ValueWire(codec, frozenset({HIDDEN}), host_buffers("cpu"))


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sent(codec: TensorCodec, values: dict[int, Tensor], *, training: bool = True) -> tuple[PackedValues, dict[int, Tensor]]:
    """Return what is put on the wire, and what the receiver makes of it."""
    packed = wire(codec).pack(values, training=training)
    buffers = [bytearray(buffer) for buffer in packed.buffers]
    arrived = wire(codec).arrived(packed.specs, packed.codecs, buffers, [HIDDEN, LABEL], training=training)
    waiting: dict[int, Tensor | WireValue] = {**arrived}
    return packed, wire(codec).unpack(waiting)


@pytest.mark.parametrize("codec", CODED)
@given(shape=st.lists(st.integers(0, 9), min_size=0, max_size=4), transpose=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_value_keeps_its_shape_and_order_in_memory_and_comes_back_close(
    codec: TensorCodec, shape: list[int], transpose: bool, seed: int
) -> None:
    value = normal(*shape, seed=seed)
    if transpose and value.dim() > 1:
        value = value.transpose(0, -1)
    _, found = sent(codec, {HIDDEN: value})
    assert found[HIDDEN].shape == value.shape
    assert found[HIDDEN].dtype == value.dtype
    if value.numel():
        assert ordered_spec_of("value", found[HIDDEN]) == ordered_spec_of("value", value)
        worst = {TensorCodec.FP16: 2**-11, TensorCodec.INT8: 0.51 / 127}[codec] * float(value.abs().max())
        assert float((found[HIDDEN] - value).abs().max()) <= worst


@pytest.mark.parametrize("codec", list(TensorCodec))
def test_the_planner_counts_the_bytes_that_are_sent(codec: TensorCodec) -> None:
    value = normal(64, 1024)
    packed, _ = sent(codec, {HIDDEN: value})
    assert packed.nbytes / value.nbytes == pytest.approx(BYTES_PER_ENCODED_BYTE[codec], abs=0.001)


@pytest.mark.parametrize("codec", list(TensorCodec))
@pytest.mark.parametrize("label", [torch.arange(6), torch.tensor([True, False] * 3), normal(6)], ids=["int", "bool", "float"])
def test_what_carries_no_gradient_is_exact(codec: TensorCodec, label: Tensor) -> None:
    packed, found = sent(codec, {HIDDEN: normal(40, 40), LABEL: label})
    assert torch.equal(found[LABEL], label)
    assert packed.codecs == (() if codec is TensorCodec.NONE else (codec, TensorCodec.NONE))


@pytest.mark.parametrize("codec", list(TensorCodec))
def test_values_of_evaluations_are_exact(codec: TensorCodec) -> None:
    value = normal(40, 40)
    packed, found = sent(codec, {HIDDEN: value}, training=False)
    assert packed.codecs == ()
    assert torch.equal(found[HIDDEN], value)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), 2.0**126])
def test_a_value_with_what_cannot_be_encoded_travels_as_it_is(bad: float) -> None:
    value = normal(40, 40)
    value[3, 3] = bad
    packed, found = sent(TensorCodec.INT8, {HIDDEN: value})
    assert packed.codecs == ()
    assert torch.equal(found[HIDDEN], value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floating_dtypes_come_back_as_themselves(dtype: torch.dtype) -> None:
    value = normal(40, 40).to(dtype)
    packed, found = sent(TensorCodec.INT8, {HIDDEN: value})
    assert packed.codecs == (TensorCodec.INT8,)
    assert found[HIDDEN].dtype == dtype
    assert float((found[HIDDEN] - value).abs().max()) <= 0.01 * float(value.abs().max())


def test_half_precision_gains_nothing_from_fp16_and_travels_as_it_is() -> None:
    packed, _ = sent(TensorCodec.FP16, {HIDDEN: normal(40, 40).half()})
    assert packed.codecs == ()


def test_a_small_value_that_would_grow_travels_as_it_is() -> None:
    packed, found = sent(TensorCodec.INT8, {HIDDEN: torch.tensor(3.25)})
    assert packed.codecs == ()
    assert found[HIDDEN] == 3.25


def announced(codec: TensorCodec = TensorCodec.INT8, **changes: Any) -> dict[int, WireValue]:
    """Return what a receiver takes from a message about one coded value and its label, with some of it changed."""
    packed = wire(codec).pack({HIDDEN: normal(40, 40), LABEL: torch.arange(4)}, training=True)
    fields: dict[str, Any] = {
        "specs": packed.specs,
        "chosen": packed.codecs,
        "buffers": packed.buffers,
        "expected": [HIDDEN, LABEL],
        "sender": "liar",
    }
    return wire(changes.pop("receiver", codec)).arrived(**{**fields, "training": True, "sender": "liar", **changes})


def test_what_was_announced_is_taken() -> None:
    assert set(announced()) == {HIDDEN, LABEL}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"receiver": TensorCodec.FP16}, "codec int8"),
        ({"receiver": TensorCodec.NONE}, "codec int8"),
        ({"training": False}, "codec int8"),
        ({"chosen": (TensorCodec.INT8, TensorCodec.INT8)}, "value '8' came from liar with codec int8"),
        ({"chosen": (TensorCodec.INT8,)}, "liar announced 2 tensors with 1 codecs"),
        ({"chosen": ()}, "1628 bytes, not 6400"),
        ({"chosen": (TensorCodec.NONE, TensorCodec.NONE)}, "bytes, not"),
        ({"buffers": [b"", b""]}, "0 bytes, not 1628"),
        ({"buffers": [b""]}, "and sent 1"),
        ({"expected": [HIDDEN]}, "'8' from liar is not one that crosses here"),
    ],
)
def test_a_peer_that_announces_what_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedMessageError, match=reason):
        announced(**changes)


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 3e38])
def test_a_scale_that_makes_numbers_that_are_not_finite_is_refused(codec: TensorCodec, scale: float) -> None:
    packed = wire(codec).pack({HIDDEN: normal(40, 40)}, training=True)
    buffer = bytearray(packed.buffers[0])
    buffer[:4] = torch.tensor([scale]).view(torch.uint8).numpy().tobytes()
    value = WireValue(spec=packed.specs[0], codec=codec, buffer=buffer, sender="liar")
    with pytest.raises(MalformedMessageError, match="from liar encodes numbers that are not finite"):
        wire(codec).unpack({HIDDEN: value})


def test_a_value_with_a_nan_that_carries_a_gradient_is_refused_and_its_sender_named() -> None:
    plain = wire(TensorCodec.NONE)
    values = normal(40, 40)
    values[3, 7] = float("nan")
    for training in (True, False):
        packed = plain.pack({HIDDEN: values, LABEL: torch.full((4,), float("nan"))}, training=training)
        found = plain.arrived(packed.specs, packed.codecs, packed.buffers, [HIDDEN, LABEL], training=training, sender="liar")
        if training:
            with pytest.raises(NonFiniteLossError, match="liar sent value '[0-9]+' with a NaN"):
                plain.unpack(found)
        else:
            assert bool(plain.unpack(found)[HIDDEN].isnan().any())


def test_infinities_that_are_meant_may_cross() -> None:
    plain = wire(TensorCodec.NONE)
    scores = normal(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, float("-inf"))
    packed = plain.pack({HIDDEN: scores}, training=True)
    found = plain.unpack(plain.arrived(packed.specs, packed.codecs, packed.buffers, [HIDDEN], training=True))
    assert torch.equal(found[HIDDEN], scores)
