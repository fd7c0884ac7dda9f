"""Guarded rounds without a network: every member sends all its values before any owner combines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from roost.averaging.guarded_average import GuardedAverage, MemberValues
from roost.averaging.segment_average import AveragingOptions
from roost.config import RobustMethod, TensorCodec
from roost.errors import MalformedMessageError

COUNT, PIECES = 3, 2
NAMES = {"w": (40, 30), "b": (7,)}


def tensors(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in NAMES.items()}


def moved(weights: dict[str, Tensor], seed: int, scale: float = 0.01) -> dict[str, Tensor]:
    return {name: weights[name] + change for name, change in tensors(seed, scale).items()}


def members(options: AveragingOptions, *, base: dict[str, Tensor] | None) -> list[GuardedAverage]:
    ring = [GuardedAverage(parts=COUNT, pieces=PIECES, options=options) for _ in range(COUNT)]
    for member in ring if base is not None else []:
        assert base is not None
        member.set_base(base)
    return ring


EVEN = (10.0,) * COUNT


def begin(
    ring: list[GuardedAverage],
    snapshots: list[dict[str, Tensor]],
    *,
    from_base: bool,
    codec: TensorCodec = TensorCodec.NONE,
    weights: Sequence[float] = EVEN,
) -> None:
    for position, (member, snapshot, weight) in enumerate(zip(ring, snapshots, weights, strict=True)):
        member.begin(snapshot, weight, from_base=from_base, codec=codec, reuse=True)
        member.prepare(position)


def sent(member: GuardedAverage, chunk: int, piece: int, weight: float = 10.0) -> MemberValues:
    buffer = bytearray(member.outgoing(chunk, piece))
    return MemberValues(buffer=buffer, dtype=member.dtype, weight=weight, share=1.0, norms=member.norms(chunk, piece))


def exchange(ring: list[GuardedAverage], weights: Sequence[float] = EVEN) -> list[dict[str, Tensor]]:
    """Let every member own the chunk of its position; return what every member's weights should become."""
    for piece in range(PIECES):
        values = [[sent(member, chunk, piece, weight) for member, weight in zip(ring, weights, strict=True)] for chunk in range(COUNT)]
        for owner, member in enumerate(ring):
            member.combine(owner, piece, [value for other, value in enumerate(values[owner]) if other != owner])
        for owner, member in enumerate(ring):
            for other in ring:
                if other is not member:
                    assert member.norms(owner, piece) == ()
                    other.store(owner, piece, bytearray(member.outgoing(owner, piece)))
    results = [{name: tensor.clone() for name, tensor in member.finish().items()} for member in ring]
    for member in ring:
        member.end(finished=True)
    return results


@pytest.mark.parametrize("robust", [RobustMethod.CLIPPED, RobustMethod.TRIMMED])
@pytest.mark.parametrize("codec", [TensorCodec.NONE, TensorCodec.FP16])
def test_all_members_get_the_same_bits_round_after_round(robust: RobustMethod, codec: TensorCodec) -> None:
    common = tensors(0)
    ring = members(AveragingOptions(robust=robust, codec=codec), base=common)
    for turn in range(3):
        snapshots = [moved(common, 10 * turn + seed) for seed in range(1, COUNT + 1)]
        begin(ring, snapshots, from_base=True, codec=codec)
        results = exchange(ring)
        assert all(torch.equal(other[name], results[0][name]) for other in results for name in NAMES)
        farthest = max((snapshot["w"] - common["w"]).norm() for snapshot in snapshots)
        assert 0 < (results[0]["w"] - common["w"]).norm() <= farthest
        common = results[0]


@pytest.mark.parametrize("robust", [RobustMethod.CLIPPED, RobustMethod.TRIMMED])
def test_a_round_of_the_values_themselves_needs_no_common_base(robust: RobustMethod) -> None:
    ring = members(AveragingOptions(robust=robust), base=None)
    ring[0].set_base(tensors(0))
    snapshots = [moved(tensors(0), seed) for seed in range(1, COUNT + 1)]
    begin(ring, snapshots, from_base=False)
    results = exchange(ring)
    assert all(torch.equal(other[name], results[0][name]) for other in results for name in NAMES)
    begin(ring, [moved(results[0], seed) for seed in range(4, 7)], from_base=True)
    exchange(ring)


def test_members_that_have_not_moved_agree_on_what_they_have() -> None:
    common = tensors(0)
    for from_base in (True, False):
        ring = members(AveragingOptions(robust=RobustMethod.TRIMMED), base=common)
        begin(ring, [common] * COUNT, from_base=from_base)
        torch.testing.assert_close(exchange(ring)[1], common)


def test_a_false_claim_of_norms_does_not_widen_what_is_believed_of_a_mean() -> None:
    common = tensors(0)
    ring = members(AveragingOptions(robust=RobustMethod.CLIPPED), base=common)
    begin(ring, [moved(common, seed) for seed in range(1, COUNT + 1)], from_base=True)
    honest, liar = sent(ring[1], 0, 0), sent(ring[2], 0, 0)
    boast = MemberValues(buffer=liar.buffer, dtype=liar.dtype, weight=10.0, share=1.0, norms=(1e30,) * COUNT)
    ring[0].combine(0, 0, [honest, boast])
    far = torch.full((len(ring[2].outgoing(2, 0)) // 4,), 1.0)
    with pytest.raises(MalformedMessageError, match="the mean of chunk 2 of an averaging round is .* is believed"):
        ring[0].store(2, 0, bytearray(far.numpy().tobytes()))


@pytest.mark.parametrize("norms", [(), (1.0,), (-1.0, -1.0, -1.0)])
def test_norms_that_cannot_be_are_not_counted(norms: tuple[float, ...]) -> None:
    common = tensors(0)
    ring = members(AveragingOptions(robust=RobustMethod.CLIPPED), base=common)
    begin(ring, [moved(common, seed) for seed in range(1, COUNT + 1)], from_base=True)
    others = [sent(member, 0, 0) for member in ring[1:]]
    ring[0].combine(0, 0, [MemberValues(buffer=other.buffer, dtype=other.dtype, weight=10.0, share=1.0, norms=norms) for other in others])
    ring[0].store(1, 0, bytearray(ring[1].outgoing(1, 0)))


def test_values_of_most_members_that_cannot_be_used_end_the_round() -> None:
    ring = members(AveragingOptions(robust=RobustMethod.CLIPPED), base=tensors(0))
    begin(ring, [tensors(0)] * COUNT, from_base=True)
    empty = MemberValues(buffer=b"", dtype="float32", weight=1.0, share=1.0, norms=())
    with pytest.raises(MalformedMessageError, match="2 of 3 members average values that are not finite"):
        ring[0].combine(0, 0, [empty, empty])


@pytest.mark.parametrize("from_base", [True, False])
def test_running_variances_stay_positive_whatever_an_owner_says(from_base: bool) -> None:
    common = {"bn.running_var": torch.full((90,), 0.5), "bn.running_mean": torch.zeros(90)}
    ring = members(AveragingOptions(robust=RobustMethod.CLIPPED), base=common)
    begin(ring, [{name: tensor + 1.0 for name, tensor in common.items()}] * COUNT, from_base=from_base)
    for chunk in range(COUNT):
        for piece in range(PIECES):
            values = [sent(member, chunk, piece) for member in ring[1:]]
            ring[0].combine(chunk, piece, values)
            low = torch.full((len(ring[0].outgoing(chunk, piece)) // 4,), -1.0)
            ring[0].store(chunk, piece, bytearray(low.numpy().tobytes()))
    found = ring[0].finish()
    torch.testing.assert_close(found["bn.running_var"], torch.full((90,), 0.05 if from_base else 0.0))
    torch.testing.assert_close(found["bn.running_mean"], torch.full((90,), -1.0))


def test_one_that_has_worked_alone_before_a_synchronisation_moves_all_by_no_more_than_is_usual() -> None:
    common = tensors(0)
    ring = members(AveragingOptions(robust=RobustMethod.CLIPPED), base=common)
    begin(ring, [moved(common, seed) for seed in range(1, COUNT + 1)], from_base=True)
    usual = float(sum((moved(common, 2)[name] - common[name]).square().sum() for name in NAMES)) ** 0.5
    common = exchange(ring)[0]
    far = moved(common, 9, 0.1)
    begin(ring, [far, common, common], from_base=True, weights=[10.0, 1e-6, 1e-6])
    found = exchange(ring, weights=[10.0, 1e-6, 1e-6])[2]
    distance = float(sum((found[name] - common[name]).square().sum() for name in NAMES)) ** 0.5
    assert 0.8 * usual < distance < 1.2 * usual
    assert torch.cosine_similarity(found["w"].flatten() - common["w"].flatten(), far["w"].flatten() - common["w"].flatten(), dim=0) > 0.95
