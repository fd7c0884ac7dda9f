"""Rings over the in-process transport: what members hold after a round, against the weighted mean computed directly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from ring_kit import Member, running
from torch import Tensor

from roost import messages as m
from roost.averaging.segment_average import AveragingOptions
from roost.config import TensorCodec
from roost.errors import MalformedMessageError, NonFiniteLossError
from roost.types import SegmentPlan

# Two clusters cut at different places: a | b and c | d | e over the tensors p0 .. p3.
CLUSTERS = [{"a": ["p0", "p1"], "b": ["p2", "p3"]}, {"c": ["p0"], "d": ["p1", "p2"], "e": ["p3"]}]
SEGMENTS = [
    SegmentPlan(index=0, tensors=("p0",), nbytes=28, members=("a", "c")),
    SegmentPlan(index=1, tensors=("p1",), nbytes=4, members=("a", "d")),
    SegmentPlan(index=2, tensors=("p2",), nbytes=48, members=("b", "d")),
    SegmentPlan(index=3, tensors=("p3",), nbytes=60, members=("b", "e")),
]
SHAPES = {"p0": (7,), "p1": (), "p2": (3, 4), "p3": (5, 3)}


def two_clusters(samples: tuple[int, int]) -> tuple[dict[str, Member], list[dict[str, Tensor]]]:
    """Return the five nodes of CLUSTERS, and each cluster's whole model."""
    generator = torch.Generator().manual_seed(3)
    models = [{name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for _ in CLUSTERS]
    members = {
        node: Member(tensors={name: model[name].clone() for name in names}, samples=count)
        for cluster, model, count in zip(CLUSTERS, models, samples, strict=True)
        for node, names in cluster.items()
    }
    return members, models


def replicas(members: dict[str, Member]) -> list[dict[str, Tensor]]:
    return [{name: members[node].tensors[name] for node, names in cluster.items() for name in names} for cluster in CLUSTERS]


@pytest.mark.parametrize("samples", [(100, 300), (64, 64), (0, 50)])
def test_an_ordered_round_gives_all_clusters_the_weighted_mean_though_their_cuts_differ(samples: tuple[int, int]) -> None:
    members, models = two_clusters(samples)

    async def scenario() -> None:
        async with running(members, SEGMENTS), asyncio.timeout(20):
            await asyncio.gather(*(ring.average_exactly(1) for member in members.values() for ring in member.rings.values()))

    asyncio.run(scenario())
    first, second = replicas(members)
    weights = [max(float(count), 1e-6) for count in samples]
    for name in SHAPES:
        mean = sum(weight * model[name].double() for weight, model in zip(weights, models, strict=True)) / sum(weights)
        torch.testing.assert_close(first[name].double(), mean, rtol=1e-6, atol=1e-6)
        assert torch.equal(first[name], second[name]), name


def test_a_background_round_keeps_what_was_learnt_while_it_ran() -> None:
    members, models = two_clusters((10, 30))
    original = members["a"].apply

    async def apply_after_an_update(average: dict[str, Tensor], snapshot: dict[str, Tensor]) -> None:
        for name in average:
            members["a"].tensors[name] = members["a"].tensors[name] + 1.0  # an update that came after the snapshot
        await original(average, snapshot)

    members["a"].apply = apply_after_an_update  # type: ignore[method-assign]

    async def scenario() -> None:
        async with running(members, SEGMENTS), asyncio.timeout(20):
            members["a"].rings[0].start_round()
            async with members["c"].rings[0].moved:
                await members["c"].rings[0].moved.wait_for(lambda: members["c"].rings[0].rounds_done == 1)
            async with members["a"].rings[0].moved:
                await members["a"].rings[0].moved.wait_for(lambda: members["a"].rings[0].rounds_done == 1)

    asyncio.run(scenario())
    mean = (10 * models[0]["p0"] + 30 * models[1]["p0"]) / 40
    torch.testing.assert_close(members["c"].tensors["p0"], mean)
    torch.testing.assert_close(members["a"].tensors["p0"], mean + 1.0)


def test_weights_count_only_the_samples_since_the_last_round() -> None:
    members, models = two_clusters((10, 10))

    async def scenario() -> None:
        async with running(members, SEGMENTS), asyncio.timeout(20):
            await asyncio.gather(*(members[name].rings[0].average_exactly(1) for name in ("a", "c")))
            members["a"].samples += 30
            members["a"].tensors["p0"] = torch.ones(7)
            await asyncio.gather(*(members[name].rings[0].average_exactly(2) for name in ("a", "c")))

    asyncio.run(scenario())
    # The second time only cluster 0 has consumed samples: everybody gets its weights.
    torch.testing.assert_close(members["c"].tensors["p0"], torch.ones(7), rtol=1e-6, atol=1e-6)


def test_chunks_from_anybody_but_the_previous_member_are_refused() -> None:
    members, _ = two_clusters((1, 1))
    chunk = m.RingChunk(job_id="job", segment=0, round=1, step=0, chunk=0, weight=1.0, dtype="float32")

    async def scenario() -> None:
        async with running(members, SEGMENTS):
            with pytest.raises(Exception, match="not the previous member"):
                members["a"].rings[0].chunk_arrived("e", chunk, bytearray(4))
            with pytest.raises(Exception, match="not in the ring"):
                members["a"].rings[0].opened("e", m.OpenRound(job_id="job", segment=0, round=1))

    asyncio.run(scenario())


def test_a_round_that_cannot_be_yet_is_refused_and_does_not_spoil_the_next_exact_average() -> None:
    members, models = two_clusters((10, 30))

    async def scenario() -> None:
        async with running(members, SEGMENTS), asyncio.timeout(20):
            with pytest.raises(MalformedMessageError, match="cannot be yet"):
                members["a"].rings[0].opened("c", m.OpenRound(job_id="job", segment=0, round=2**62))
            await asyncio.gather(*(members[name].rings[0].average_exactly(1) for name in ("a", "c")))

    asyncio.run(scenario())
    mean = (10 * models[0]["p0"] + 30 * models[1]["p0"]) / 40
    torch.testing.assert_close(members["a"].tensors["p0"], mean)


def test_a_chunk_of_a_wrong_step_is_dropped_and_the_ring_goes_on() -> None:
    members, models = two_clusters((10, 30))
    wrong = m.RingChunk(job_id="job", segment=0, round=1, step=0, chunk=0, weight=1.0, dtype="float32")

    async def scenario() -> None:
        async with running(members, SEGMENTS), asyncio.timeout(20):
            members["a"].rings[0].chunk_arrived("c", wrong, bytearray(16))
            await asyncio.gather(*(members[name].rings[0].average_exactly(1) for name in ("a", "c")))

    asyncio.run(scenario())
    torch.testing.assert_close(members["a"].tensors["p0"], (10 * models[0]["p0"] + 30 * models[1]["p0"]) / 40)


def test_a_flood_of_chunks_of_later_rounds_is_refused() -> None:
    members, _ = two_clusters((1, 1))

    async def scenario() -> None:
        async with running(members, SEGMENTS, drive=False):
            ring = members["a"].rings[0]
            with pytest.raises(MalformedMessageError, match="more rounds"):
                for number in range(1, 100):
                    ring.chunk_arrived(
                        "c", m.RingChunk(job_id="job", segment=0, round=number, step=0, chunk=1, weight=1.0, dtype="float32"), bytearray(12)
                    )
            with pytest.raises(MalformedMessageError, match="larger than"):
                members["b"].rings[2].chunk_arrived(
                    "d", m.RingChunk(job_id="job", segment=2, round=1, step=0, chunk=1, weight=1.0, dtype="float32"), bytearray(10**6)
                )

    asyncio.run(scenario())


def nan_chunk() -> bytearray:
    return bytearray(torch.full((6,), float("nan")).numpy().tobytes())


def absurd_chunk() -> bytearray:
    return bytearray(torch.full((6,), 1e8).numpy().tobytes())


@pytest.mark.parametrize(
    ("buffer", "dtype", "reason"),
    [
        (bytearray(4), "float32", "has 4 bytes, not 24"),
        (bytearray(24), "float64", "dtype float64"),
        (nan_chunk(), "float32", "not finite"),
        (absurd_chunk(), "float32", "values of size 5e+07, at most 1000 are believed"),
    ],
)
def test_a_chunk_that_cannot_be_averaged_ends_the_round_and_is_laid_at_its_senders_door(
    buffer: bytearray, dtype: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    members, models = two_clusters((1, 1))
    bad = m.RingChunk(job_id="job", segment=2, round=1, step=0, chunk=1, weight=1.0, dtype=dtype)

    async def scenario() -> None:
        async with running(members, SEGMENTS, drive=False), asyncio.timeout(20):
            ring = members["b"].rings[2]
            ring.chunk_arrived("d", bad, buffer)
            task = asyncio.create_task(ring.run())
            async with ring.moved:
                await ring.moved.wait_for(lambda: "round_abandoned" in caplog.text)
            assert ring.idle
            assert not task.done()
            task.cancel()

    asyncio.run(scenario())
    assert torch.equal(members["b"].tensors["p2"], models[0]["p2"])
    assert any("sender=d" in line and reason in line for line in caplog.text.splitlines())


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"codec": TensorCodec.INT8, "base": 0}, "unlike this job"),
        ({"codec": TensorCodec.FP16}, "unlike this job"),
        ({"base": 0}, "unlike this job"),
        ({"base": -2}, "unlike this job"),
    ],
)
def test_a_chunk_of_another_codec_or_dtype_is_refused_on_receipt(fields: dict[str, Any], why: str) -> None:
    members, _ = two_clusters((1, 1))
    chunk = m.RingChunk(**{"job_id": "job", "segment": 2, "round": 1, "step": 0, "chunk": 1, "weight": 1.0, "dtype": "float32"} | fields)

    async def scenario() -> None:
        async with running(members, SEGMENTS, drive=False):
            with pytest.raises(MalformedMessageError, match=f"d .*{why}"):
                members["b"].rings[2].chunk_arrived("d", chunk, bytearray(24))

    asyncio.run(scenario())


def test_weights_that_are_not_finite_end_the_stage() -> None:
    members, _ = two_clusters((1, 1))
    members["b"].tensors["p2"][1, 1] = float("nan")

    async def scenario() -> None:
        async with running(members, SEGMENTS, drive=False), asyncio.timeout(20):
            members["b"].rings[2].start_round()
            with pytest.raises(NonFiniteLossError):
                await members["b"].rings[2].run()

    asyncio.run(scenario())


# A segment that travels in several pieces, among three clusters of one node each.
LARGE = SegmentPlan(index=0, tensors=("w",), nbytes=4 * 700_001, members=("a", "b", "c"))


def three_clusters() -> dict[str, Member]:
    generator = torch.Generator().manual_seed(7)
    common = torch.randn(700_001, generator=generator)
    return {
        name: Member(tensors={"w": common.clone()}, samples=0, moves=0.01 * torch.randn(700_001, generator=generator))
        for name in LARGE.members
    }


async def train_and_average(members: dict[str, Member]) -> Tensor:
    """Let every node move its weights, run a background round, and return the mean there should be."""
    wanted = {name: member.rings[0].rounds_done + 1 for name, member in members.items()}
    for index, member in enumerate(members.values()):
        member.tensors["w"] = member.tensors["w"] + member.moves
        member.samples += 10 * (index + 1)
    mean = sum((index + 1) / 6 * member.tensors["w"].double() for index, member in enumerate(members.values()))
    members["b"].rings[0].start_round()
    for name, member in members.items():
        ring = member.rings[0]
        async with ring.moved:
            await ring.moved.wait_for(lambda ring=ring, name=name: ring.rounds_done >= wanted[name])  # type: ignore[misc]
    assert isinstance(mean, Tensor)
    return mean


@pytest.mark.parametrize(("codec", "close"), [(TensorCodec.NONE, 1e-5), (TensorCodec.FP16, 1e-3), (TensorCodec.INT8, 0.03)])
def test_rounds_of_every_codec_leave_the_same_bits_close_to_the_mean(codec: TensorCodec, close: float) -> None:
    members = three_clusters()

    async def scenario() -> None:
        async with running(members, [LARGE], options=AveragingOptions(codec=codec)), asyncio.timeout(60):
            for _ in range(3):
                before = members["a"].tensors["w"].double()
                mean = await train_and_average(members)
                first = members["a"].tensors["w"]
                assert torch.equal(members["b"].tensors["w"], first)
                assert torch.equal(members["c"].tensors["w"], first)
                assert (first.double() - mean).norm() < close * (mean - before).norm()
            assert members["a"].rings[0].times.round_s > 0
            # At a synchronisation point nothing is lost.
            for index, member in enumerate(members.values()):
                member.tensors["w"] = member.tensors["w"] + member.moves
                member.samples += 10 * (index + 1)
            mean = sum((index + 1) / 6 * member.tensors["w"].double() for index, member in enumerate(members.values()))
            await asyncio.gather(*(member.rings[0].average_exactly(1) for member in members.values()))
            torch.testing.assert_close(members["c"].tensors["w"].double(), mean, rtol=1e-5, atol=1e-6)

    asyncio.run(scenario())


def test_an_outer_optimizer_steps_the_same_on_every_member() -> None:
    members = three_clusters()
    options = AveragingOptions(outer_learning_rate=0.7, outer_momentum=0.9, parameters=frozenset({"w"}))
    parameter = torch.nn.Parameter(members["a"].tensors["w"].clone())
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)

    async def scenario() -> None:
        async with running(members, [LARGE], options=options), asyncio.timeout(60):
            for _ in range(3):
                mean = await train_and_average(members)
                parameter.grad = (parameter.detach().double() - mean).float()
                reference.step()
                torch.testing.assert_close(members["a"].tensors["w"], parameter.detach(), rtol=1e-4, atol=1e-5)
                assert torch.equal(members["a"].tensors["w"], members["c"].tensors["w"])

    asyncio.run(scenario())


def test_a_member_that_missed_a_round_gets_the_common_weights_in_the_next() -> None:
    members = three_clusters()
    options = AveragingOptions(codec=TensorCodec.INT8)

    async def scenario() -> None:
        async with running(members, [LARGE], options=options), asyncio.timeout(60):
            await train_and_average(members)
            # As if this member had given a round up that the others finished: it knows another base.
            late = members["c"].rings[0]
            async with late.moved:
                await late.moved.wait_for(lambda: late.idle)
            late._member._finished = 0
            before = members["a"].tensors["w"].double()
            mean = await train_and_average(members)
            assert torch.equal(members["a"].tensors["w"], members["c"].tensors["w"])
            # The round of differences was given up for one of the values themselves, which loses nothing.
            assert (members["a"].tensors["w"].double() - mean).norm() < 1e-4 * (mean - before).norm()
            await train_and_average(members)
            assert torch.equal(members["a"].tensors["w"], members["c"].tensors["w"])

    asyncio.run(scenario())


def test_a_ring_with_a_member_that_does_not_answer_does_not_hold_the_other_rings() -> None:
    members, _ = two_clusters((10, 30))

    async def never(average: dict[str, Tensor], snapshot: dict[str, Tensor]) -> None:
        await asyncio.Event().wait()

    members["c"].apply = never  # type: ignore[method-assign]

    async def scenario() -> None:
        async with running(members, SEGMENTS), asyncio.timeout(20):
            for ring in members["a"].rings.values():
                ring.start_round()
            async with members["a"].rings[1].moved:
                await members["a"].rings[1].moved.wait_for(lambda: members["a"].rings[1].rounds_done == 1)
            assert members["c"].rings[0].rounds_done == 0

    asyncio.run(scenario())
