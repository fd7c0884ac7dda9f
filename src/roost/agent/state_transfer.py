"""How the state of a stage gets from the nodes that hold it to the node that takes it over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from roost import messages as m
from roost.agent.assignment import Assignment
from roost.agent.stage_copy import FETCH_DEADLINE_S, StageCopy
from roost.agent.stage_driver import StageDriver
from roost.errors import MalformedMessageError
from roost.pipeline.tensor_bytes import from_buffer, spec_of, to_buffer
from roost.transport.interface import Buffer, Reply, Transport
from roost.types import TensorRecord, TensorSpec

logger = logging.getLogger(__name__)

FETCH_BYTES = 64 << 20
"""Bytes of tensors per request, so that a large stage over a slow link meets the deadline of each."""


@dataclass(kw_only=True)
class StageTensors:
    """What a stage begins with."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    """As 'PARAMETER/KEY'."""

    def update(self, tensors: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        self.tensors.update(tensors)
        self.optimizer.update(optimizer)


async def gather_state(
    assignment: Assignment,
    transport: Transport,
    records: Sequence[TensorRecord],
    most_bytes: int,
    held: StageDriver | None,
    copy: StageCopy | None,
) -> StageTensors:
    """Return the tensors of `records`, and the optimizer state there is of them.

    From the stage this node `held` before or its `copy` of another's (neither is copied), from the sources of the assignment, else from
    the requester, in requests of about `most_bytes`. Raises MalformedMessageError for anything else than was asked for, and TransportError.
    """
    found = StageTensors()
    by_name = {record.name: record for record in records}
    for source in assignment.sources:
        wanted = [by_name[name] for name in source.tensors if name in by_name]
        if source.node_id == assignment.node_id:
            names = tuple(record.name for record in wanted)
            if held is not None:
                found.update(*held.lend_state(names))
            if copy is not None:
                found.update(*copy.part(tuple(name for name in names if name in copy.tensors and name not in found.tensors)))
        elif source.node_id != assignment.node_id:
            await _fetch_from_node(assignment, transport, source.node_id, wanted, most_bytes, found)
    rest = [record for record in records if record.name not in found.tensors]
    await _fetch_from_requester(assignment, transport, rest, most_bytes, found)
    return found


async def _fetch_from_node(
    assignment: Assignment,
    transport: Transport,
    node_id: str,
    records: Sequence[TensorRecord],
    most_bytes: int,
    found: StageTensors,
) -> None:
    peer = assignment.peers.get(node_id)
    if peer is None:
        raise MalformedMessageError(f"the coordinator names {node_id} as a source of tensors, but not where it is reached")
    for group in groups(records, most_bytes):
        request = m.FetchState(job_id=assignment.job_id, names=tuple(record.name for record in group))
        reply = await transport.call(peer, request, deadline_s=FETCH_DEADLINE_S)
        if not isinstance(reply.message, m.StateReply) or reply.message.tensors != tuple(record.spec for record in group):
            raise MalformedMessageError(f"{node_id} sent other tensors than it was asked for")
        specs = (*reply.message.tensors, *reply.message.optimizer)
        _check_optimizer(reply, {record.name for record in group}, node_id)
        copies = await asyncio.to_thread(_copies, specs, reply.buffers)
        split = len(group)
        found.update(dict(copies[:split]), dict(copies[split:]))
    logger.info("state_fetched job=%s node=%s source=%s tensors=%d", assignment.job_id, assignment.node_id, node_id, len(records))


def _check_optimizer(reply: Reply, names: set[str], node_id: str) -> None:
    message = reply.message
    assert isinstance(message, m.StateReply)
    foreign = [spec.name for spec in message.optimizer if spec.name.rpartition("/")[0] not in names]
    if foreign or len(reply.buffers) != len(message.tensors) + len(message.optimizer):
        raise MalformedMessageError(f"{node_id} sent optimizer state it was not asked for: {foreign[:3]}")


async def _fetch_from_requester(
    assignment: Assignment, transport: Transport, records: Sequence[TensorRecord], most_bytes: int, found: StageTensors
) -> None:
    for group in groups(records, most_bytes):
        names = tuple(record.name for record in group)
        request = m.FetchTensors(job_id=assignment.job_id, names=names, checkpoint=assignment.checkpoint)
        reply = await transport.call(assignment.requester, request, deadline_s=FETCH_DEADLINE_S)
        expected = tuple(record.spec for record in group)
        if not isinstance(reply.message, m.TensorsReply) or reply.message.tensors != expected or len(reply.buffers) != len(expected):
            raise MalformedMessageError("the requester sent other tensors than this stage's")
        # Into torch's own memory at once: as a whole, the stage is then never held twice.
        found.tensors.update(await asyncio.to_thread(_copies, expected, reply.buffers))
        if assignment.resume or assignment.checkpoint:
            trained = tuple(record.name for record in group if record.trainable)
            found.optimizer.update(await _fetch_optimizer(assignment, transport, trained))


async def _fetch_optimizer(assignment: Assignment, transport: Transport, names: tuple[str, ...]) -> dict[str, Tensor]:
    request = m.FetchOptimizer(job_id=assignment.job_id, names=names, checkpoint=assignment.checkpoint)
    reply = await transport.call(assignment.requester, request, deadline_s=FETCH_DEADLINE_S)
    if not isinstance(reply.message, m.TensorsReply) or len(reply.message.tensors) != len(reply.buffers):
        raise MalformedMessageError("the requester answered a request for optimizer state with something else")
    return dict(await asyncio.to_thread(_copies, reply.message.tensors, reply.buffers))


def _copies(specs: Sequence[TensorSpec], buffers: Sequence[Buffer]) -> list[tuple[str, Tensor]]:
    return [(spec.name, from_buffer(spec, buffer).clone()) for spec, buffer in zip(specs, buffers, strict=True)]


def groups(records: Iterable[TensorRecord], most_bytes: int) -> Iterator[list[TensorRecord]]:
    """Yield the records in groups of at most `most_bytes`, or one record that is larger."""
    group: list[TensorRecord] = []
    size = 0
    for record in records:
        if group and size + record.nbytes > most_bytes:
            yield group
            group, size = [], 0
        group.append(record)
        size += record.nbytes
    if group:
        yield group


def state_reply(tensors: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> tuple[m.StateReply, list[Buffer]]:
    """Return the answer to FetchState."""
    message = m.StateReply(
        tensors=tuple(spec_of(name, tensor) for name, tensor in tensors.items()),
        optimizer=tuple(spec_of(name, tensor) for name, tensor in optimizer.items()),
    )
    return message, [to_buffer(tensor) for tensor in (*tensors.values(), *optimizer.values())]
