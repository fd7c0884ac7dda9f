from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roost.errors import InvalidConfigError, MalformedMessageError
from roost.pipeline.tensor_bytes import DTYPES, from_buffer, ordered_spec_of, spec_of, to_buffer
from roost.types import TensorSpec


@given(dtype=st.sampled_from(sorted(DTYPES)), shape=st.lists(st.integers(0, 4), max_size=4), transpose=st.booleans())
def test_any_tensor_survives_the_way_through_bytes(dtype, shape, transpose):
    tensor = (torch.rand(shape) * 200 - 100).to(DTYPES[dtype])
    if transpose and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)
    buffer = to_buffer(tensor)
    spec = spec_of("x", tensor)
    assert buffer.nbytes == spec.nbytes == len(bytes(buffer))
    for received in (bytes(buffer), bytearray(buffer), memoryview(bytearray(buffer))):
        back = from_buffer(spec, received)
        assert back.dtype == tensor.dtype
        assert back.shape == tensor.shape
        assert torch.equal(back, tensor)


def test_a_contiguous_tensor_is_not_copied():
    tensor = torch.arange(6.0, requires_grad=True)
    buffer = to_buffer(tensor)
    with torch.no_grad():
        tensor[0] = 42.0
    assert from_buffer(spec_of("x", tensor), bytes(buffer))[0] == 42.0


def test_a_writable_buffer_becomes_the_tensors_memory():
    buffer = bytearray(16)
    tensor = from_buffer(TensorSpec(name="x", dtype="int32", shape=(4,)), buffer)
    tensor[0] = 1
    assert buffer[0] == 1


def test_a_buffer_that_is_not_aligned_is_copied():
    raw = bytearray(17)
    tensor = from_buffer(TensorSpec(name="x", dtype="float32", shape=(4,)), memoryview(raw)[1:])
    assert tensor.data_ptr() % 16 == 0
    tensor.fill_(1.0)
    assert raw == bytearray(17)


@pytest.mark.parametrize("length", [0, 11, 13])
def test_a_buffer_of_the_wrong_length_is_refused(length):
    with pytest.raises(MalformedMessageError, match=f"'x': {length} bytes, but float32 .3. has 12"):
        from_buffer(TensorSpec(name="x", dtype="float32", shape=(3,)), bytes(length))


def test_a_bool_that_is_neither_0_nor_1_is_refused():
    with pytest.raises(MalformedMessageError, match="neither 0 nor 1"):
        from_buffer(TensorSpec(name="x", dtype="bool", shape=(2,)), b"\x01\x02")


def test_a_dtype_that_may_not_cross_the_wire_is_refused():
    with pytest.raises(InvalidConfigError, match="complex64"):
        spec_of("x", torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4).transpose(1, 2),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6)[:, 1:4].t(),
        torch.randn(3, 1).expand(3, 4),
        torch.randn(0, 3).t(),
        torch.randn(2, 3),
        torch.randn(2, 2, 1).transpose(0, -1),
        torch.randn(3, 1, 1, 2).transpose(0, -1),
    ],
)
def test_a_value_arrives_with_the_order_its_dimensions_had_in_memory(tensor: torch.Tensor) -> None:
    spec = ordered_spec_of("7", tensor)
    back = from_buffer(spec, bytearray(to_buffer(tensor, spec.order)))
    assert torch.equal(back, tensor)
    assert back.numel() == 0 or back.stride() == torch.empty_like(tensor).stride()
    assert ordered_spec_of("7", back) == spec
