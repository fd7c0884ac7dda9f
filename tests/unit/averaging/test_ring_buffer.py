from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roost.averaging.ring_buffer import SegmentBuffer
from roost.errors import MalformedMessageError, ProtocolError


def filled(tensors: dict[str, torch.Tensor], parts: int, weight: float = 1.0) -> SegmentBuffer:
    """Return a buffer with all chunks copied, times their weight."""
    buffer = SegmentBuffer(tensors, parts)
    for index in range(parts):
        buffer.fill(index).mul_(weight)
    return buffer


def chunk_bytes(buffer: SegmentBuffer, index: int) -> bytes:
    return buffer.chunk(index).numpy().tobytes()


def all_reduce(buffers: list[SegmentBuffer], weights: list[float]) -> None:
    """A ring without a network: every member takes each step before any takes the next."""
    count = len(buffers)
    sums = list(weights)
    for step in range(count - 1):
        sent = [(chunk_bytes(buffer, (p - step) % count), sums[p]) for p, buffer in enumerate(buffers)]
        for p, buffer in enumerate(buffers):
            data, weight = sent[p - 1]
            buffer.add((p - step - 1) % count, data)
            sums[p] = weights[p] + weight
    for p, buffer in enumerate(buffers):
        buffer.scale((p + 1) % count, sums[p])
    for step in range(count - 1):
        gathered = [chunk_bytes(buffer, (p + 1 - step) % count) for p, buffer in enumerate(buffers)]
        for p, buffer in enumerate(buffers):
            buffer.store((p - step) % count, gathered[p - 1])


def snapshot(seed: int, dtype: torch.dtype = torch.float32, scale: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (5 * scale, 3), "scalar": (), "empty": (0, 2), "b": (7,)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("members", [1, 2, 3, 4, 5])
def test_the_ring_computes_the_weighted_mean_and_all_members_agree_bit_for_bit(members):
    snapshots = [snapshot(seed) for seed in range(members)]
    weights = [float(10 + 37 * seed) for seed in range(members)]
    buffers = [filled(tensors, members, weight) for tensors, weight in zip(snapshots, weights, strict=True)]
    all_reduce(buffers, weights)
    results = [buffer.unflatten() for buffer in buffers]
    for name in snapshots[0]:
        mean = sum(w * s[name].double() for w, s in zip(weights, snapshots, strict=True)) / sum(weights)
        assert results[0][name].shape == snapshots[0][name].shape
        assert torch.allclose(results[0][name].double(), mean, atol=1e-6), name
        for other in results[1:]:
            assert torch.equal(other[name], results[0][name])


@given(elements=st.integers(0, 6), members=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_segments_smaller_than_the_ring_have_empty_chunks(elements, members):
    buffers = [filled({"w": torch.full((elements,), float(p))}, members) for p in range(members)]
    sizes = [buffers[0].chunk(index).numel() for index in range(members)]
    assert sum(sizes) == elements
    assert max(sizes) - min(sizes) <= 1
    all_reduce(buffers, [1.0] * members)
    for buffer in buffers:
        assert torch.allclose(buffer.unflatten()["w"], torch.full((elements,), (members - 1) / 2))


def test_half_precision_is_summed_in_single_and_returned_in_half():
    snapshots = [snapshot(seed, torch.bfloat16) for seed in range(3)]
    buffers = [filled(tensors, 3) for tensors in snapshots]
    assert buffers[0].dtype == "float32"
    all_reduce(buffers, [1.0, 1.0, 1.0])
    exact = sum(tensors["w"].float() for tensors in snapshots) / 3
    assert buffers[0].unflatten()["w"].dtype == torch.bfloat16
    assert torch.equal(buffers[0].unflatten()["w"], exact.bfloat16())


def test_one_double_tensor_makes_the_sum_double():
    buffer = filled({"a": torch.ones(2), "b": torch.full((2,), 1 + 1e-12, dtype=torch.float64)}, 2)
    assert buffer.dtype == "float64"
    result = buffer.unflatten()
    assert result["a"].dtype == torch.float32
    assert result["b"][0] == 1 + 1e-12


def test_the_snapshot_is_left_as_it_was():
    tensors = {"w": torch.ones(4)}
    filled(tensors, 2, 3.0)
    assert torch.equal(tensors["w"], torch.ones(4))


def test_a_chunk_of_the_wrong_length_is_refused():
    buffer = filled({"w": torch.ones(4)}, 2)
    with pytest.raises(MalformedMessageError, match="chunk 1 .* has 4 bytes, not 8"):
        buffer.add(1, bytes(4))
    with pytest.raises(MalformedMessageError, match="chunk 0 .* has 12 bytes, not 8"):
        buffer.store(0, bytearray(12))


@pytest.mark.parametrize("total", [0.0, -1.0, float("nan"), float("inf")])
def test_a_total_weight_that_is_not_positive_is_refused(total):
    with pytest.raises(ProtocolError, match="add up to"):
        SegmentBuffer({"w": torch.ones(4)}, 2).scale(0, total)


def test_integer_tensors_are_refused_by_name():
    with pytest.raises(ProtocolError, match="num_batches_tracked"):
        SegmentBuffer({"num_batches_tracked": torch.tensor(3)}, 2)
