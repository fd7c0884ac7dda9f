"""Rings over the in-process transport: what members hold after a round, against the weighted mean computed directly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from roost import messages as m
from roost.agent.ring_driver import RingDriver
from roost.errors import MalformedMessageError
from roost.transport.inproc import InprocNetwork, InprocTransport
from roost.transport.interface import Buffer, Sender
from roost.types import Peer, Role, SegmentPlan

# Two clusters cut at different places: a | b and c | d | e over the tensors p0 .. p3.
CLUSTERS = [{"a": ["p0", "p1"], "b": ["p2", "p3"]}, {"c": ["p0"], "d": ["p1", "p2"], "e": ["p3"]}]
SEGMENTS = [
    SegmentPlan(index=0, tensors=("p0",), nbytes=28, members=("a", "c")),
    SegmentPlan(index=1, tensors=("p1",), nbytes=4, members=("a", "d")),
    SegmentPlan(index=2, tensors=("p2",), nbytes=48, members=("b", "d")),
    SegmentPlan(index=3, tensors=("p3",), nbytes=60, members=("b", "e")),
]
SHAPES = {"p0": (7,), "p1": (), "p2": (3, 4), "p3": (5, 3)}


@dataclass
class Member:
    """One node: its tensors, the samples it has applied, and its rings."""

    tensors: dict[str, Tensor]
    samples: int
    rings: dict[int, RingDriver] = field(default_factory=dict)

    async def snapshot(self, names: tuple[str, ...]) -> tuple[dict[str, Tensor], int]:
        return {name: self.tensors[name].clone() for name in names}, self.samples

    async def apply(self, average: dict[str, Tensor], snapshot: dict[str, Tensor]) -> None:
        for name, mean in average.items():
            same = torch.equal(self.tensors[name], snapshot[name])
            self.tensors[name] = mean if same else self.tensors[name] + (mean - snapshot[name])

    async def on_message(self, sender: Sender, message: m.Message, buffers: list[bytearray | memoryview]) -> None:
        assert isinstance(message, m.OpenRound | m.RingChunk)
        if isinstance(message, m.OpenRound):
            self.rings[message.segment].opened(sender.peer_id, message)
        else:
            self.rings[message.segment].chunk_arrived(sender.peer_id, message, buffers[0])

    async def on_call(self, sender: Sender, message: m.Message, buffers: list[bytearray | memoryview]) -> tuple[m.Message, list[Buffer]]:
        raise AssertionError("rings make no calls")


@contextlib.asynccontextmanager
async def running(members: dict[str, Member], segments: list[SegmentPlan], *, drive: bool = True) -> AsyncIterator[None]:
    network = InprocNetwork()
    transports = {name: InprocTransport(name, Role.NODE, network) for name in members}
    for name, transport in transports.items():
        await transport.start(members[name])
    peers = {name: Peer(peer_id=name, address=transport.address) for name, transport in transports.items()}
    tasks = []
    for segment in segments:
        for name in segment.members:
            member = members[name]
            driver = RingDriver(
                job_id="job",
                segment=segment,
                node_id=name,
                peers=peers,
                transport=transports[name],
                snapshot=lambda member=member, segment=segment: member.snapshot(segment.tensors),  # type: ignore[misc]
                apply=member.apply,
            )
            member.rings[segment.index] = driver
            if drive:
                tasks.append(asyncio.create_task(driver.run()))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(transport.stop() for transport in transports.values()))


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


def test_a_chunk_of_the_wrong_size_never_becomes_part_of_an_average() -> None:
    members, models = two_clusters((1, 1))

    async def scenario() -> None:
        async with running(members, SEGMENTS, drive=False), asyncio.timeout(20):
            ring = members["b"].rings[2]
            ring.chunk_arrived(
                "d", m.RingChunk(job_id="job", segment=2, round=1, step=0, chunk=1, weight=1.0, dtype="float32"), bytearray(4)
            )
            with pytest.raises(MalformedMessageError):
                await ring.run()

    asyncio.run(scenario())
    assert torch.equal(members["b"].tensors["p2"], models[0]["p2"])
