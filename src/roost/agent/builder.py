"""Builds the stage a node was asked to run: fetches the graph and its tensors, cuts, makes the runner."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from roost import messages as m
from roost.agent.assignment import Assignment
from roost.agent.budget import check_plan, check_tensors
from roost.agent.compute import ComputeThread
from roost.agent.stage_copy import FETCH_DEADLINE_S, StageCopy
from roost.agent.stage_driver import StageDriver
from roost.agent.state_transfer import FETCH_BYTES, gather_state
from roost.capture.bounded import bounded
from roost.capture.cut import cut
from roost.capture.graph_format import from_bytes
from roost.capture.program import StageProgram
from roost.capture.sizes import check_sizes, data_shapes
from roost.config import format_bytes
from roost.errors import GraphFormatError, MalformedMessageError
from roost.pipeline.allocator import release_freed_memory
from roost.pipeline.host_buffers import host_buffers
from roost.pipeline.stage_runner import StageRunner
from roost.transport.interface import Transport

logger = logging.getLogger(__name__)

FETCHED_PART = 16
"""A request asks for at most this part of the memory that a node lends: what arrives is held twice for a moment."""


async def build_stage(
    assignment: Assignment,
    *,
    transport: Transport,
    compute: ComputeThread,
    device: str,
    memory_bytes: int,
    held: StageDriver | None,
    copy: StageCopy | None,
    directory: str,
    on_failure: Callable[[BaseException, str], None],
) -> StageDriver:
    """Return a driver whose stage holds its tensors. Raises RoostError if nodes or the requester send something else.

    `held` is the stage of the job that this node had before, `copy` what it has of another's: they give what they can.
    Snapshots of the stage are written in `directory`, or if that is empty with the system's temporary files.

    `memory_bytes` is what this node lends: before any tensor is fetched, a graph is refused (GraphFormatError) that has a value
    in this stage which takes more, and a stage that needs more by its plan or for its tensors (OutOfBudgetError).
    """
    check_plan(assignment, memory_bytes)
    graph_bytes = await _fetch_graph(assignment, transport)
    programs = await asyncio.to_thread(_cut_graph, graph_bytes, assignment, memory_bytes)
    program = programs[assignment.stage.index]
    later_draw = any(other.draws_random for other in programs[assignment.stage.index + 1 :])
    records = program.tensors + program.shared
    state = await gather_state(assignment, transport, records, min(FETCH_BYTES, memory_bytes // FETCHED_PART), held, copy)
    tensors, optimizer = state.tensors, state.optimizer

    def make_runner() -> StageRunner:
        runner = StageRunner(
            program,
            tensors,
            assignment.config,
            assignment.cluster.share,
            device,
            carries_rng=later_draw,
            parameter_share=_parameter_share(programs, assignment.stage.index),
            recompute=assignment.stage.recompute,
        )
        if optimizer:
            runner.load_optimizer_state(optimizer)
        return runner

    runner = await compute.run(make_runner, paced=False)
    optimizer.clear()
    release_freed_memory()
    logger.info(
        "stage_built job=%s node=%s cluster=%d stage=%d tensors=%d",
        assignment.job_id,
        assignment.node_id,
        assignment.cluster.index,
        assignment.stage.index,
        len(records),
    )
    return StageDriver(
        assignment=assignment,
        program=program,
        runner=runner,
        compute=compute,
        transport=transport,
        host=host_buffers(device),
        directory=directory,
        on_failure=on_failure,
    )


def _cut_graph(data: bytes, assignment: Assignment, memory_bytes: int) -> tuple[StageProgram, ...]:
    """Return the cluster's stages; this node's own one looks at the shapes of whatever arrives before it computes."""
    graph = from_bytes(data)
    programs = list(cut(graph, assignment.boundaries))
    own = programs[assignment.stage.index]
    for record in (*own.tensors, *own.shared):
        if record.nbytes > memory_bytes:
            size, memory = format_bytes(record.nbytes), format_bytes(memory_bytes)
            raise GraphFormatError(f"tensor {record.name!r} takes {size}, this node has {memory}")
    check_tensors(assignment, (*own.tensors, *own.shared), memory_bytes)
    shapes = data_shapes(graph, assignment.config.micro_batch_size)
    # Where lengths vary, only what arrives can tell.
    if shapes is not None:
        check_sizes(graph, shapes, memory_bytes, nodes=range(own.start, own.stop))
    programs[assignment.stage.index] = bounded(own, graph, memory_bytes, mixed=assignment.config.precision == "bf16")
    return tuple(programs)


def _parameter_share(programs: tuple[StageProgram, ...], index: int) -> float:
    """Return the fraction of the model's trainable elements that stage `index` owns; 1.0 if there are none."""
    elements = [sum(math.prod(record.shape) for record in program.tensors if record.trainable) for program in programs]
    return elements[index] / sum(elements) if any(elements) else 1.0


async def _fetch_graph(assignment: Assignment, transport: Transport) -> bytes:
    request = m.FetchGraph(job_id=assignment.job_id)
    reply = await transport.call(assignment.requester, request, deadline_s=FETCH_DEADLINE_S)
    if not isinstance(reply.message, m.GraphReply) or len(reply.buffers) != 1:
        raise MalformedMessageError("the requester answered a request for the graph with something else")
    return bytes(reply.buffers[0])
