"""The first stage's source of data: leases ranges, fetches their samples ahead of need, injects micro-batches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from torch import Tensor

from roost import messages as m
from roost.agent.assignment import Assignment
from roost.agent.reporter import AWAY, FIRST_PAUSE_S, MOST_PAUSE_S, Reporter
from roost.errors import ForbiddenError, JobRefusedError, MalformedMessageError
from roost.pipeline.tensor_bytes import from_buffer
from roost.protocol.batches import micro_batches
from roost.transport.interface import Reply, Transport
from roost.types import Lease, MicroBatch, Peer

logger = logging.getLogger(__name__)

PREFETCHED_LEASES = 4
"""Leases whose samples are fetched before their turn comes."""
AHEAD_S = 5.0
"""Seconds of training that are leased ahead: so long the cluster goes on while the coordinator is away."""
MOST_AHEAD = 64
FETCH_DEADLINE_S = 60.0
EVALUATION_WINDOW = 2
"""Evaluation micro-batches in the pipeline, per stage."""


class Feeder:
    """Keeps the pipeline of one cluster supplied while the coordinator grants leases."""

    def __init__(
        self,
        assignment: Assignment,
        transport: Transport,
        reporter: Reporter,
        *,
        inject: Callable[[MicroBatch, tuple[Tensor, ...]], None],
    ) -> None:
        self._job = assignment
        self._transport = transport
        self._reporter = reporter
        self._inject = inject
        self._go = asyncio.Event()
        self._ahead: asyncio.Queue[Lease] = asyncio.Queue()
        self._taken = asyncio.Event()  # a lease has left `_ahead`
        self._applied: deque[float] = deque(maxlen=MOST_AHEAD)  # when the last leases were done
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
        self._requests = 0
        self.granted = 0
        """The number of the last request that was given leases."""
        self.reported = 0
        """Leases reported done of which the coordinator has taken note."""

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

    def batch_applied(self, batch: int) -> None:
        """Report the lease of `batch` to the coordinator once all of its batches are applied by every stage."""
        lease_id = self._lease_of_batch.pop(batch)
        self._open_batches[lease_id] -= 1
        if self._open_batches[lease_id] > 0:
            return
        del self._open_batches[lease_id]
        self._applied.append(time.monotonic())
        self._reporter.put(m.LeaseDone(job_id=self._job.job_id, cluster=self._job.number, lease_ids=(lease_id,)), self._noted)

    def _noted(self) -> None:
        self.reported += 1

    async def run(self) -> None:
        """Lease, fetch and inject until cancelled, waiting where coordinator or requester are away. Raises MalformedMessageError."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._lease())
                group.create_task(self._fetch_in_order())
                group.create_task(self._inject_in_order())
        finally:
            for task in self._fetching:
                task.cancel()
            await asyncio.gather(*self._fetching, return_exceptions=True)

    async def _lease(self) -> None:
        while True:
            await self._go.wait()
            while (missing := self._wanted_ahead() - self._ahead.qsize()) <= 0:
                self._taken.clear()
                await self._taken.wait()
            self._requests += 1
            request = m.LeaseRequest(
                job_id=self._job.job_id,
                cluster=self._job.number,
                want=missing,
                number=self._requests,
                granted=self.granted,
                reported=self.reported,
            )
            self._go.clear()
            reply = (await self._insist(self._job.coordinator, request, None)).message
            if not isinstance(reply, m.LeaseGrant):
                raise MalformedMessageError(f"the coordinator answered a lease request with {type(reply).__name__}")
            if not reply.drained:
                self._go.set()
            if reply.leases:
                self.granted = request.number
            for lease in reply.leases:
                self._ahead.put_nowait(lease)

    def _wanted_ahead(self) -> int:
        """Return how many leases should wait here to be fetched: what is trained in AHEAD_S by the pace of the last ones."""
        if len(self._applied) < 2 or self._applied[-1] <= self._applied[0]:
            return 1
        pace = (len(self._applied) - 1) / (self._applied[-1] - self._applied[0])
        return max(1, min(MOST_AHEAD, int(AHEAD_S * pace)))

    async def _fetch_in_order(self) -> None:
        while True:
            lease = await self._ahead.get()
            self._taken.set()
            task = asyncio.create_task(self._fetch(lease), name=f"fetch-{lease.lease_id}")
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)
            await self._fetches.put((lease, task))

    async def _insist(self, peer: Peer, request: m.Message, deadline_s: float | None) -> Reply:
        """Return the reply, asked for again while the peer is away, or does not know this stage: the coordinator says what becomes of it.

        Raises whatever else the peer reports.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await self._transport.call(peer, request, deadline_s=deadline_s)
            except (*AWAY, JobRefusedError, ForbiddenError) as error:
                logger.info("data_delayed job=%s peer=%s error=%s", self._job.job_id, peer.peer_id, error.message)
            await asyncio.sleep(pause_s)
            pause_s = min(MOST_PAUSE_S, 2 * pause_s)

    async def _fetch(self, lease: Lease) -> tuple[Tensor, ...]:
        request = m.FetchSamples(job_id=self._job.job_id, lease=lease)
        reply = await self._insist(self._job.requester, request, FETCH_DEADLINE_S)
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
                cluster=self._job.number,
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
