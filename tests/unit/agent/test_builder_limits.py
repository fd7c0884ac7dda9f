"""A graph that a node's memory cannot hold is refused before a single tensor is fetched."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.hostile_graphs import as_bytes, calling, sample_graph

from roost import messages as m
from roost.agent.assignment import Assignment, assignment_from
from roost.agent.builder import build_stage
from roost.agent.compute import ComputeThread
from roost.config import JobConfig, NamedArguments
from roost.errors import GraphFormatError, MalformedMessageError
from roost.types import ClusterPlan, Peer, Plan, StagePlan

MEMORY = 10**6
NODE, REQUESTER, COORDINATOR = (Peer(peer_id=name, address=f"{name}:1") for name in ("node", "requester", "coordinator"))


class Requester:
    """Answers for the requester; keeps what it was asked."""

    def __init__(self, graph: bytes) -> None:
        self._graph = graph
        self.asked: list[m.Message] = []

    async def call(self, peer: Peer, message: m.Message, buffers: Any = (), *, deadline_s: float) -> SimpleNamespace:
        self.asked.append(message)
        if isinstance(message, m.FetchGraph):
            return SimpleNamespace(message=m.GraphReply(), buffers=[self._graph])
        return SimpleNamespace(message=m.Done(), buffers=[])


def assignment(nodes: int) -> Assignment:
    config = JobConfig(job_id="job", optimizer=NamedArguments(name="SGD"), samples=8, batch_size=8, micro_batch_size=8)
    stage = StagePlan(
        cluster=0,
        index=0,
        node_id="node",
        first_unit=0,
        last_unit=1,
        start=0,
        stop=nodes,
        max_in_flight=1,
        memory_needed_bytes=1,
        memory_available_bytes=MEMORY,
        compute_s=0.1,
        send_s=0.0,
    )
    cluster = ClusterPlan(index=0, stages=(stage,), share=1.0, samples_per_s=1.0, bottleneck="compute")
    plan = Plan(clusters=(cluster,), segments=(), backups=(), samples_per_s=1.0, notes=())
    message = m.PrepareStage(config=config, plan=plan, cluster=0, stage=0, peers=(NODE,), requester=REQUESTER, resume=False)
    return assignment_from(message, node_id="node", coordinator=COORDINATOR)


def build(graph: bytes, nodes: int) -> tuple[list[type], str]:
    """Build the only stage of a graph, which fails at the latest when no tensors come. Return what was asked for, and the failure."""
    requester = Requester(graph)
    with pytest.raises((GraphFormatError, MalformedMessageError)) as failure:
        asyncio.run(
            build_stage(
                assignment(nodes),
                transport=requester,  # type: ignore[arg-type]
                compute=ComputeThread(threads=1, relative_speed=1.0),
                device="cpu",
                memory_bytes=MEMORY,
                held=None,
                copy=None,
                directory="",
                on_failure=lambda error, peer: None,
            )
        )
    return [type(message) for message in requester.asked], str(failure.value)


@pytest.mark.parametrize(
    ("graph", "nodes", "words"),
    [
        (calling("aten.zeros.default", [[1000, 1000]]), 10, "node 9.*over the limit"),
        (calling("aten.add.Tensor", [{"value": 0}, {"value": 2}]), 10, "node 9.*refuses its arguments"),
        (
            as_bytes(
                {**sample_graph(), "tensors": [["first.weight", "float32", [10**6, 6], "parameter", True], *sample_graph()["tensors"][1:]]}
            ),
            9,
            "takes",
        ),
    ],
)
def test_no_tensor_is_fetched_for_a_graph_that_takes_too_much(graph: bytes, nodes: int, words: str) -> None:
    asked, failure = build(graph, nodes)
    assert asked == [m.FetchGraph]
    assert re.search(words, failure)


def test_tensors_are_fetched_for_a_graph_that_fits() -> None:
    asked, _ = build(as_bytes(sample_graph()), 9)
    assert asked == [m.FetchGraph, m.FetchTensors]
