"""Five members average, one of them lies: what becomes of the others, with and without a guard."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from ring_kit import Lie, Member, running
from torch import Tensor

from roost import messages as m
from roost.agent import ring_driver
from roost.averaging.segment_average import AveragingOptions
from roost.config import RobustMethod, TensorCodec
from roost.errors import MalformedMessageError
from roost.types import SegmentPlan

SIZE = 70_001
MEMBERS = ("a", "b", "c", "d", "e")
RING = SegmentPlan(index=0, tensors=("w",), nbytes=4 * SIZE, members=MEMBERS)
LIAR = "c"
VALUE_STEPS = len(MEMBERS) - 1
METHODS = [RobustMethod.CLIPPED, RobustMethod.TRIMMED]
MOST_SAMPLES = 1000.0


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chunks travel in several pieces."""
    monkeypatch.setattr(ring_driver, "PIECE_BYTES", 1 << 15)


def options(robust: RobustMethod, codec: TensorCodec = TensorCodec.NONE) -> AveragingOptions:
    return AveragingOptions(robust=robust, codec=codec, most_samples=MOST_SAMPLES)


def pool() -> dict[str, Member]:
    """Return members with the same weights that will move by a common direction and noise of their own."""
    generator = torch.Generator().manual_seed(11)
    weights, common = torch.randn(SIZE, generator=generator), 0.01 * torch.randn(SIZE, generator=generator)
    return {
        name: Member(tensors={"w": weights.clone()}, samples=0, moves=common + 0.005 * torch.randn(SIZE, generator=generator))
        for name in MEMBERS
    }


def move(members: dict[str, Member]) -> tuple[Tensor, Tensor]:
    """Let every member train a little; return the mean of the honest ones, and how far it is from where they were."""
    before = members["a"].tensors["w"].double()
    for index, member in enumerate(members.values()):
        member.tensors["w"] = member.tensors["w"] + member.moves
        member.samples += 10 + index
    honest = [(10 + index, member.tensors["w"].double()) for index, (name, member) in enumerate(members.items()) if name != LIAR]
    mean = torch.stack([weight * tensor for weight, tensor in honest]).sum(dim=0) / sum(weight for weight, _ in honest)
    return mean, (mean - before).norm()


async def one_round(members: dict[str, Member]) -> None:
    wanted = members["a"].rings[0].rounds_done + 1
    members["b"].rings[0].start_round()
    for member in members.values():
        ring = member.rings[0]
        async with ring.moved:
            await ring.moved.wait_for(lambda ring=ring: ring.rounds_done >= wanted)  # type: ignore[misc]


def of_values(change: Lie) -> Lie:
    """Return a liar that changes its own values only, and makes its means as it should."""
    return lambda message, buffer: change(message, buffer) if message.step < VALUE_STEPS else (message, buffer)


def scaled(factor: float) -> Lie:
    return lambda message, buffer: (message, (factor * torch.frombuffer(bytearray(buffer), dtype=torch.float32)).numpy().tobytes())


def filled(value: float) -> Lie:
    return lambda message, buffer: (message, torch.full((len(buffer) // 4,), value).numpy().tobytes())


def claiming(weight: float) -> Lie:
    flip = scaled(-1.0)

    def lie(message: m.RingChunk, buffer: bytes) -> tuple[m.RingChunk, bytes]:
        return dataclasses.replace(message, weight=weight), flip(message, buffer)[1]

    return lie


LIES: dict[str, Lie] = {
    "signs flipped and ten times as large": scaled(-10.0),
    "not a number": filled(float("nan")),
    "huge": filled(1e30),
    "too few bytes": lambda message, buffer: (message, buffer[:8]),
    "another dtype": lambda message, buffer: (dataclasses.replace(message, dtype="float64"), buffer),
    "more samples than the job has": claiming(1e12),
    "fewer samples than none": claiming(-5.0),
    "all the samples of the job": claiming(MOST_SAMPLES),
}
UNSEEN = {"all the samples of the job"}
"""Values that are no farther from the others than theirs are from each other are not noticed; what they do is bounded."""


@pytest.mark.parametrize("robust", METHODS)
@pytest.mark.parametrize("name", LIES)
def test_one_liar_of_five_does_not_ruin_a_guarded_round_and_is_named(
    name: str, robust: RobustMethod, caplog: pytest.LogCaptureFixture
) -> None:
    members = pool()

    async def scenario() -> None:
        async with running(members, [RING], options=options(robust), lies={LIAR: of_values(LIES[name])}), asyncio.timeout(60):
            mean, moved = move(members)
            await one_round(members)
            assert (members["a"].tensors["w"].double() - mean).norm() < 0.7 * moved
            assert all(torch.equal(member.tensors["w"], members["a"].tensors["w"]) for member in members.values())

    asyncio.run(scenario())
    named = {word for line in caplog.text.splitlines() if "member_suspected" in line for word in line.split() if "member=" in word}
    assert named == (set() if name in UNSEEN else {f"member={LIAR}"})


def test_the_same_liar_ruins_a_ring_of_sums() -> None:
    members = pool()

    async def scenario() -> None:
        async with running(members, [RING], lies={LIAR: scaled(-10.0)}), asyncio.timeout(60):
            mean, moved = move(members)
            await one_round(members)
            assert (members["a"].tensors["w"].double() - mean).norm() > 100 * moved

    asyncio.run(scenario())


@pytest.mark.parametrize("robust", METHODS)
@pytest.mark.parametrize("codec", [TensorCodec.NONE, TensorCodec.FP16])
def test_honest_members_get_the_same_bits_close_to_the_mean(
    robust: RobustMethod, codec: TensorCodec, caplog: pytest.LogCaptureFixture
) -> None:
    members = pool()

    async def scenario() -> None:
        async with running(members, [RING], options=options(robust, codec)), asyncio.timeout(60):
            for _ in range(2):
                mean, moved = move(members)
                await one_round(members)
                assert (members["a"].tensors["w"].double() - mean).norm() < 0.25 * moved
                assert all(torch.equal(member.tensors["w"], members["a"].tensors["w"]) for member in members.values())
            mean, moved = move(members)
            await asyncio.gather(*(member.rings[0].average_exactly(1) for member in members.values()))
            assert (members["a"].tensors["w"].double() - mean).norm() < 0.25 * moved

    asyncio.run(scenario())
    assert "member_suspected" not in caplog.text
    assert "round_abandoned" not in caplog.text


def of_means(change: Lie) -> Lie:
    return lambda message, buffer: (message, buffer) if message.step < VALUE_STEPS else change(message, buffer)


@pytest.mark.parametrize("robust", METHODS)
def test_a_mean_that_is_farther_than_members_have_moved_is_refused_and_its_owner_named(
    robust: RobustMethod, caplog: pytest.LogCaptureFixture
) -> None:
    members = pool()

    async def scenario() -> None:
        async with running(members, [RING], options=options(robust), lies={LIAR: of_means(scaled(-10.0))}), asyncio.timeout(60):
            move(members)
            weights = members["a"].tensors["w"].clone()
            ring = members["a"].rings[0]
            members["b"].rings[0].start_round()
            async with ring.moved:
                await ring.moved.wait_for(lambda: "node=a sender=c" in caplog.text)
            assert ring.rounds_done == 0
            assert torch.equal(members["a"].tensors["w"], weights)

    asyncio.run(scenario())
    assert any("node=a" in line and "sender=c" in line and "is believed" in line for line in caplog.text.splitlines())


def test_an_owner_that_lies_within_what_is_believed_moves_each_value_once_in_five_rounds() -> None:
    members = pool()

    async def scenario() -> None:
        lies = {LIAR: of_means(scaled(-1.0))}
        async with running(members, [RING], options=options(RobustMethod.CLIPPED), lies=lies), asyncio.timeout(60):
            before, direction = members["a"].tensors["w"].clone(), torch.stack([member.moves for member in members.values()]).mean(dim=0)
            for _ in MEMBERS:
                for index, member in enumerate(members.values()):
                    member.tensors["w"] = member.tensors["w"] + member.moves
                    member.samples += 10 + index
                await one_round(members)
            moved = members["a"].tensors["w"] - before
            for chunk in torch.tensor_split(torch.stack([moved, direction]), 5, dim=1):
                # Forward in four rounds of five, and back in one, in which what honest members have is overwritten.
                progress = float(chunk[0] @ chunk[1] / (chunk[1] @ chunk[1]))
                assert 2.5 < progress < 3.5

    asyncio.run(scenario())


@pytest.mark.parametrize("robust", METHODS)
def test_a_member_that_missed_a_guarded_round_gets_the_common_weights_in_the_next(
    robust: RobustMethod, caplog: pytest.LogCaptureFixture
) -> None:
    members = pool()

    async def scenario() -> None:
        async with running(members, [RING], options=options(robust)), asyncio.timeout(60):
            late = members["e"].rings[0]
            base = members["e"].tensors["w"].clone()
            move(members)
            await one_round(members)
            # As if this member had given the round up, which the others finished: it has the mean before.
            async with late.moved:
                await late.moved.wait_for(lambda: late.idle)
            late._member._finished, late._average._base = 0, base
            mean, moved = move(members)
            await one_round(members)
            assert (members["a"].tensors["w"].double() - mean).norm() < 0.25 * moved
            move(members)
            await one_round(members)
            assert all(torch.equal(member.tensors["w"], members["a"].tensors["w"]) for member in members.values())

    asyncio.run(scenario())
    assert "sender=" not in caplog.text


@pytest.mark.parametrize("step", [0, VALUE_STEPS])
def test_pieces_from_anybody_but_the_source_of_their_step_are_refused(step: int) -> None:
    members = pool()
    chunk = m.RingChunk(job_id="job", segment=0, round=1, step=step, chunk=1, weight=1.0, dtype="float32")

    async def scenario() -> None:
        async with running(members, [RING], options=options(RobustMethod.CLIPPED), drive=False):
            with pytest.raises(MalformedMessageError, match=f"b is not the member of step {step} of the ring"):
                members["a"].rings[0].chunk_arrived("b", chunk, bytearray(4))

    asyncio.run(scenario())


def test_one_member_cannot_take_the_room_of_the_others_with_chunks_of_later_rounds() -> None:
    members = pool()

    def chunk(number: int, step: int) -> m.RingChunk:
        return m.RingChunk(job_id="job", segment=0, round=number, step=step, chunk=number % 5, weight=1.0, dtype="float32")

    async def scenario() -> None:
        async with running(members, [RING], options=options(RobustMethod.CLIPPED), drive=False):
            ring = members["a"].rings[0]
            with pytest.raises(MalformedMessageError, match="e sends chunks of more rounds"):
                for number in range(1, 100):
                    ring.chunk_arrived("e", chunk(number, 0), bytearray(4))
            ring.chunk_arrived("d", chunk(1, 1), bytearray(4))

    asyncio.run(scenario())


@pytest.mark.parametrize(("robust", "step"), [(RobustMethod.NONE, 0), (RobustMethod.NONE, 5), (RobustMethod.CLIPPED, VALUE_STEPS)])
def test_a_sum_or_a_mean_of_more_samples_than_the_job_has_is_refused_and_its_sender_named(robust: RobustMethod, step: int) -> None:
    members = pool()
    chunk = m.RingChunk(job_id="job", segment=0, round=1, step=step, chunk=0, weight=2 * MOST_SAMPLES, dtype="float32")

    async def scenario() -> None:
        async with running(members, [RING], options=options(robust), drive=False):
            with pytest.raises(MalformedMessageError, match="e claims 2000 samples in segment 0, at most 1000 are believed"):
                members["a"].rings[0].chunk_arrived("e", chunk, bytearray(4))

    asyncio.run(scenario())


def test_of_two_members_the_plain_mean_is_taken_and_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    members = {name: member for name, member in pool().items() if name in ("a", "b")}
    two = SegmentPlan(index=0, tensors=("w",), nbytes=4 * SIZE, members=("a", "b"))

    async def scenario() -> None:
        async with running(members, [two], options=options(RobustMethod.TRIMMED)), asyncio.timeout(60):
            mean, _ = move(members)
            await one_round(members)
            torch.testing.assert_close(members["a"].tensors["w"].double(), mean, rtol=1e-5, atol=1e-5)

    asyncio.run(scenario())
    assert caplog.text.count("averaging_unguarded job=job segment=0 members=2 method=trimmed") == 2
