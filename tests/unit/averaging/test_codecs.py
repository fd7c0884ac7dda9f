from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roost.averaging.codecs import all_finite, decode, encode, encoded_bytes
from roost.config import BYTES_PER_ENCODED_BYTE, TensorCodec
from roost.errors import MalformedMessageError

CODECS = list(TensorCodec)


def there_and_back(codec: TensorCodec, values: torch.Tensor) -> torch.Tensor:
    return decode(codec, bytearray(encode(codec, values).numpy().tobytes()), values.numel(), values.dtype)


@pytest.mark.parametrize("codec", CODECS)
@given(count=st.integers(0, 5000))
@settings(max_examples=30, deadline=None)
def test_the_length_is_what_was_said_and_what_comes_back_is_close(codec: TensorCodec, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    encoded = encode(codec, values)
    assert encoded.dtype == torch.uint8
    assert encoded.numel() == encoded_bytes(codec, count, 4)
    worst = {TensorCodec.NONE: 0.0, TensorCodec.FP16: 2**-11, TensorCodec.INT8: 0.5 / 127}[codec]
    largest = float(values.abs().max()) if count else 0.0
    assert torch.all((there_and_back(codec, values) - values).abs() <= worst * largest * 1.01)


@pytest.mark.parametrize("codec", CODECS)
def test_the_planner_counts_the_bytes_that_are_sent(codec: TensorCodec) -> None:
    count = 1 << 20
    assert encoded_bytes(codec, count, 4) / (4 * count) == pytest.approx(BYTES_PER_ENCODED_BYTE[codec], abs=0.001)


@pytest.mark.parametrize("codec", [TensorCodec.FP16, TensorCodec.INT8])
@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1.0, 1e6, 1e30])
def test_values_far_from_one_keep_their_precision(codec: TensorCodec, scale: float) -> None:
    values = scale * torch.randn(3000, generator=torch.Generator().manual_seed(1))
    error = (there_and_back(codec, values) - values).double().norm() / values.double().norm()
    assert error < (0.0005 if codec is TensorCodec.FP16 else 0.02)


@pytest.mark.parametrize("codec", [TensorCodec.FP16, TensorCodec.INT8])
@pytest.mark.parametrize("values", [[0.0] * 10, [3e38, -3e38, 1.0], [1e-45], [-1e-45, 0.0], [65505.0, 1e5]])
def test_zeros_and_the_ends_of_the_range_stay_finite(codec: TensorCodec, values: list[float]) -> None:
    back = there_and_back(codec, torch.tensor(values))
    assert torch.isfinite(back).all()
    assert back.abs().max() <= 1.01 * max(abs(value) for value in values) + 1e-30


def test_one_large_value_spoils_only_its_block() -> None:
    values = torch.ones(512)
    values[0] = 1e6
    back = there_and_back(TensorCodec.INT8, values)
    assert torch.equal(back[256:], torch.ones(256))
    assert back[1] == 0


def test_double_precision_travels_as_it_is_or_encoded_in_single() -> None:
    values = torch.tensor([1 + 1e-12, 2.0], dtype=torch.float64)
    assert torch.equal(there_and_back(TensorCodec.NONE, values), values)
    assert there_and_back(TensorCodec.FP16, values).dtype == torch.float32


@pytest.mark.parametrize("codec", CODECS)
def test_a_buffer_of_another_length_is_refused(codec: TensorCodec) -> None:
    with pytest.raises(MalformedMessageError, match="bytes, not"):
        decode(codec, bytearray(7), 300, torch.float32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_single_bad_value_is_found(bad: float) -> None:
    values = torch.zeros(1000)
    assert all_finite(values)
    values[777] = bad
    assert not all_finite(values)
    values[3] = -bad
    assert not all_finite(values)


def test_a_scale_that_is_no_number_makes_values_that_are_none() -> None:
    encoded = encode(TensorCodec.INT8, torch.ones(10))
    encoded[:4] = torch.tensor([float("nan")]).view(torch.uint8)
    assert not all_finite(decode(TensorCodec.INT8, bytearray(encoded.numpy().tobytes()), 10, torch.float32))
