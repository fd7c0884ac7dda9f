"""Rings without a network: every member takes each step before any takes the next."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from roost.averaging.segment_average import AveragingOptions, SegmentAverage
from roost.config import TensorCodec
from roost.errors import MalformedMessageError, NonFiniteLossError, ProtocolError

PIECES = 3
SHAPES = {"w": (40, 30), "scalar": (), "empty": (0,), "running_mean": (17,)}


def tensors(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def moved(weights: dict[str, Tensor], seed: int, scale: float = 0.01) -> dict[str, Tensor]:
    return {name: weights[name] + change for name, change in tensors(seed, scale).items()}


def members(count: int, options: AveragingOptions) -> list[SegmentAverage]:
    return [SegmentAverage(parts=count, pieces=PIECES, options=options) for _ in range(count)]


def one_round(
    ring: list[SegmentAverage],
    snapshots: list[dict[str, Tensor]],
    weights: list[float],
    *,
    from_base: bool,
    codec: TensorCodec,
    reuse: bool = True,
) -> list[dict[str, Tensor]]:
    """Return what every member's weights should become."""
    count = len(ring)
    for member, snapshot, weight in zip(ring, snapshots, weights, strict=True):
        member.begin(snapshot, weight, from_base=from_base, codec=codec, reuse=reuse)
    for position, member in enumerate(ring):
        member.fill(position)
    total = sum(weights)
    for step in range(2 * (count - 1)):
        reducing = step < count - 1
        for piece in range(PIECES):
            chunks = [(p - step) % count if reducing else (p + 1 - (step - count + 1)) % count for p in range(count)]
            sent = [bytearray(member.outgoing(chunk, piece)) for member, chunk in zip(ring, chunks, strict=True)]
            for p, member in enumerate(ring):
                take = member.add if reducing else member.store
                take(chunks[p - 1], piece, sent[p - 1])
                if step == count - 2:
                    member.scale(chunks[p - 1], piece, total)
    results = [{name: tensor.clone() for name, tensor in member.finish().items()} for member in ring]
    for member in ring:
        member.end(finished=True)
    return results


def mean_of(snapshots: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    return {
        name: sum(w * s[name].double() for w, s in zip(weights, snapshots, strict=True)) / sum(weights)  # type: ignore[misc]
        for name in SHAPES
    }


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return float(sum((found[name].double() - wanted[name].double()).square().sum() for name in SHAPES)) ** 0.5


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize(("codec", "close"), [(TensorCodec.NONE, 1e-5), (TensorCodec.FP16, 1e-3), (TensorCodec.INT8, 0.03)])
def test_all_members_get_the_same_bits_close_to_the_mean(count: int, codec: TensorCodec, close: float) -> None:
    options = AveragingOptions(codec=codec, outer_learning_rate=0.0)
    ring, common = members(count, options), tensors(0)
    if options.differences:
        for member in ring:
            member.set_base(common)
    for turn in range(3):
        snapshots = [moved(common, 10 * turn + seed + 1) for seed in range(count)]
        weights = [float(10 + 7 * seed) for seed in range(count)]
        results = one_round(ring, snapshots, weights, from_base=options.differences, codec=codec)
        for other in results[1:]:
            assert all(torch.equal(other[name], results[0][name]) for name in SHAPES)
        wanted = mean_of(snapshots, weights)
        assert distance(results[0], wanted) < close * distance(wanted, common) + 1e-6
        common = results[0]


def test_what_int8_loses_in_one_round_it_makes_good_in_the_next() -> None:
    ring, common = members(2, AveragingOptions(codec=TensorCodec.INT8)), tensors(0)
    for member in ring:
        member.set_base(common)
    # Half of the values move by much less than a step of the quantisation, which the other half sets.
    small = {"w": torch.full((40, 30), 1e-4), "scalar": torch.tensor(0.0), "empty": torch.empty(0), "running_mean": torch.zeros(17)}
    small["w"][:, ::2] = 1.0
    wanted = dict(common)
    for _ in range(200):
        wanted = {name: wanted[name] + small[name] for name in SHAPES}
        snapshots = [{name: common[name] + small[name] for name in SHAPES}] * 2
        common = one_round(ring, snapshots, [1.0, 1.0], from_base=True, codec=TensorCodec.INT8)[0]
    # Without feedback the small moves would be rounded away every time: the error would be all of 200 * 1e-4.
    assert (common["w"] - wanted["w"]).abs().max() < 0.012


def test_memory_that_waits_to_be_sent_is_not_written_by_the_next_round() -> None:
    ring = members(2, AveragingOptions())
    first = [tensors(1), tensors(2)]
    one_round(ring, first, [1.0, 1.0], from_base=False, codec=TensorCodec.NONE)
    ring[0].begin(first[0], 1.0, from_base=False, codec=TensorCodec.NONE, reuse=True)
    ring[0].fill(0)
    waiting = memoryview(ring[0].outgoing(0, 0))
    before = bytes(waiting)
    ring[0].begin(tensors(3), 5.0, from_base=False, codec=TensorCodec.NONE, reuse=False)
    ring[0].fill(0)
    assert bytes(waiting) == before


def test_an_outer_optimizer_gives_all_members_the_same_step() -> None:
    options = AveragingOptions(outer_learning_rate=0.7, outer_momentum=0.9, parameters=frozenset({"w", "scalar"}))
    ring, common = members(3, options), tensors(0)
    for member in ring:
        member.set_base(common)
    parameter = torch.nn.Parameter(common["w"].clone())
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for turn in range(3):
        snapshots = [moved(common, 10 * turn + seed + 1, 0.1) for seed in range(3)]
        mean = mean_of(snapshots, [1.0, 2.0, 3.0])
        results = one_round(ring, snapshots, [1.0, 2.0, 3.0], from_base=True, codec=TensorCodec.NONE)
        parameter.grad = (common["w"].double() - mean["w"]).float()
        reference.step()
        torch.testing.assert_close(results[0]["w"], parameter.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(results[0]["running_mean"].double(), mean["running_mean"], rtol=1e-5, atol=1e-6)
        assert all(torch.equal(other[name], results[0][name]) for other in results[1:] for name in SHAPES)
        common = results[0]


def test_a_round_of_the_values_themselves_gives_members_with_other_bases_a_common_one() -> None:
    ring = members(2, AveragingOptions(codec=TensorCodec.INT8))
    ring[0].set_base(tensors(5))
    ring[1].set_base(tensors(6))
    common = one_round(ring, [tensors(1), tensors(2)], [1.0, 1.0], from_base=False, codec=TensorCodec.NONE)[0]
    snapshots = [moved(common, 3), moved(common, 4)]
    results = one_round(ring, snapshots, [1.0, 1.0], from_base=True, codec=TensorCodec.INT8)
    wanted = mean_of(snapshots, [1.0, 1.0])
    assert distance(results[0], wanted) < 0.03 * distance(wanted, common)
    assert all(torch.equal(results[0][name], results[1][name]) for name in SHAPES)


def test_weights_that_are_not_finite_are_not_averaged() -> None:
    member = SegmentAverage(parts=2, pieces=1, options=AveragingOptions())
    bad = tensors(1)
    bad["w"][3, 3] = float("nan")
    member.begin(bad, 1.0, from_base=False, codec=TensorCodec.NONE, reuse=False)
    with pytest.raises(NonFiniteLossError):
        member.fill(0)
    member.fill(1)


@pytest.mark.parametrize("reducing", [True, False])
def test_a_value_that_is_not_finite_is_refused(reducing: bool) -> None:
    member = SegmentAverage(parts=2, pieces=1, options=AveragingOptions())
    member.begin(tensors(1), 1.0, from_base=False, codec=TensorCodec.NONE, reuse=False)
    member.fill(0)
    poisoned = torch.zeros(len(member.outgoing(0, 0)) // 4)
    poisoned[5] = float("inf")
    with pytest.raises(MalformedMessageError, match="not finite"):
        (member.add if reducing else member.store)(0, 0, bytearray(poisoned.numpy().tobytes()))


def test_differences_need_a_base() -> None:
    member = SegmentAverage(parts=2, pieces=1, options=AveragingOptions(codec=TensorCodec.FP16))
    with pytest.raises(ProtocolError, match="no last mean"):
        member.begin(tensors(1), 1.0, from_base=True, codec=TensorCodec.FP16, reuse=False)
