"""The first stage's source of data: leases ranges, fetches their samples ahead of need, injects micro-batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from torch import Tensor

from roost import messages as m
from roost.agent.assignment import Assignment
from roost.errors import MalformedMessageError
from roost.pipeline.tensor_bytes import from_buffer
from roost.protocol.batches import micro_batches
from roost.transport.interface import Transport
from roost.types import Lease, MicroBatch

logger = logging.getLogger(__name__)

PREFETCHED_LEASES = 4
FETCH_DEADLINE_S = 60.0
EVALUATION_WINDOW = 2
"""Evaluation micro-batches in the pipeline, per stage."""


class Feeder:
    """Keeps the pipeline of one cluster supplied while the coordinator grants leases."""

    def __init__(self, assignment: Assignment, transport: Transport, *, inject: Callable[[MicroBatch, tuple[Tensor, ...]], None]) -> None:
        self._job = assignment
        self._transport = transport
        self._inject = inject
        self._go = asyncio.Event()
        self._fetches: asyncio.Queue[tuple[Lease, asyncio.Task[tuple[Tensor, ...]]]] = asyncio.Queue(maxsize=PREFETCHED_LEASES)
        self._training_slots = asyncio.Semaphore(2)
        self._evaluation_slots = asyncio.Semaphore(EVALUATION_WINDOW * len(assignment.cluster.stages))
        self._evaluating = 0
        self._next_number = 0
        # A resumed run goes on with the seeds that the run before it would have used next.
        self._next_batch = assignment.config.start_updates
        self._lease_of_batch: dict[int, int] = {}
        self._open_batches: dict[int, int] = {}
        self._fetching: set[asyncio.Task[tuple[Tensor, ...]]] = set()

    def go(self) -> None:
        """Ask for leases again: training starts, or goes on after a synchronisation point."""
        self._go.set()

    def forward_started(self, micro_batch: MicroBatch) -> None:
        """A training micro-batch went into the first stage: room for another to wait there."""
        if micro_batch.training:
            self._training_slots.release()

    def evaluated(self) -> None:
        """An evaluation micro-batch left the last stage: room for another in the pipeline."""
        if self._evaluating > 0:
            self._evaluating -= 1
            self._evaluation_slots.release()

    async def batch_applied(self, batch: int) -> None:
        """Report the lease of `batch` to the coordinator once all of its batches are applied by every stage."""
        lease_id = self._lease_of_batch.pop(batch)
        self._open_batches[lease_id] -= 1
        if self._open_batches[lease_id] > 0:
            return
        del self._open_batches[lease_id]
        done = m.LeaseDone(job_id=self._job.job_id, cluster=self._job.cluster.index, lease_ids=(lease_id,))
        await self._transport.send(self._job.coordinator, done)

    async def run(self) -> None:
        """Lease, fetch and inject until cancelled. Raises RoostError if coordinator or requester fail."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._lease_and_fetch())
                group.create_task(self._inject_in_order())
        finally:
            for task in self._fetching:
                task.cancel()
            await asyncio.gather(*self._fetching, return_exceptions=True)

    async def _lease_and_fetch(self) -> None:
        while True:
            await self._go.wait()
            free = max(1, PREFETCHED_LEASES - self._fetches.qsize())
            request = m.LeaseRequest(job_id=self._job.job_id, cluster=self._job.cluster.index, want=free)
            self._go.clear()
            reply = (await self._transport.call(self._job.coordinator, request)).message
            if not isinstance(reply, m.LeaseGrant):
                raise MalformedMessageError(f"the coordinator answered a lease request with {type(reply).__name__}")
            if not reply.drained:
                self._go.set()
            for lease in reply.leases:
                task = asyncio.create_task(self._fetch(lease), name=f"fetch-{lease.lease_id}")
                self._fetching.add(task)
                task.add_done_callback(self._fetching.discard)
                await self._fetches.put((lease, task))

    async def _fetch(self, lease: Lease) -> tuple[Tensor, ...]:
        request = m.FetchSamples(job_id=self._job.job_id, lease=lease)
        reply = await self._transport.call(self._job.requester, request, deadline_s=FETCH_DEADLINE_S)
        if not isinstance(reply.message, m.TensorsReply) or len(reply.message.tensors) != len(reply.buffers):
            raise MalformedMessageError("the requester answered a request for samples with something else")
        batch = tuple(from_buffer(spec, buffer) for spec, buffer in zip(reply.message.tensors, reply.buffers, strict=True))
        if not batch or any(tensor.dim() == 0 or len(tensor) != lease.samples for tensor in batch):
            raise MalformedMessageError(f"the requester sent another number of samples than the {lease.samples} of the lease")
        return batch

    async def _inject_in_order(self) -> None:
        config = self._job.config
        while True:
            lease, task = await self._fetches.get()
            tensors = await task
            pieces, self._next_number, self._next_batch = micro_batches(
                lease,
                batch_size=config.batch_size,
                micro_batch_size=config.micro_batch_size,
                next_number=self._next_number,
                next_batch=self._next_batch,
                seed=config.seed,
                cluster=self._job.cluster.index,
            )
            if lease.training:
                batches = {micro_batch.batch for micro_batch, _, _ in pieces}
                self._open_batches[lease.lease_id] = len(batches)
                self._lease_of_batch.update(dict.fromkeys(batches, lease.lease_id))
            for micro_batch, start, stop in pieces:
                slots = self._training_slots if micro_batch.training else self._evaluation_slots
                await slots.acquire()
                self._evaluating += not micro_batch.training
                self._inject(micro_batch, tuple(tensor[start:stop] for tensor in tensors))
