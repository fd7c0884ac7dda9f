"""Saves a stage: a snapshot on the node's disk while training waits, its upload to the requester while training goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from roost import messages as m
from roost.agent.assignment import Assignment
from roost.agent.compute import ComputeThread
from roost.agent.reporter import Reporter
from roost.agent.spool import Spool
from roost.agent.uploads import upload_state
from roost.errors import RoostError
from roost.transport.dispatch import failed_from
from roost.transport.interface import Lane, Transport

logger = logging.getLogger(__name__)

BACKGROUND_BYTES = 1 << 20
"""What is uploaded at once beside training: activations, gradients and samples wait for no more than that."""
LINE_SHARE = 0.5
"""Part of the time in which a background upload is on the line."""

State = Callable[[tuple[str, ...]], tuple[dict[str, Tensor], dict[str, Tensor]]]
Start = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class StageSaver:
    """The snapshots of one stage, one at a time: a new one ends the upload of the one before."""

    def __init__(
        self, *, transport: Transport, reporter: Reporter, compute: ComputeThread, state: State, directory: str, start_task: Start
    ) -> None:
        """`state` returns tensors and optimizer state by name, in the compute thread; snapshots are written in `directory`."""
        self._transport = transport
        self._reporter = reporter
        self._compute = compute
        self._state = state
        self._directory = directory
        self._start_task = start_task
        self._uploading: asyncio.Task[None] | None = None

    async def save(self, message: m.SaveStage, assignment: Assignment, segments: Mapping[int, tuple[str, ...]]) -> None:
        """Save these tensors, by segment; returns once training may go on.

        In the background that is when they are on the disk, and the coordinator hears of the rest with StageSaved. If the disk does not
        take them they are uploaded first, as in the foreground. Raises what the upload raises.
        """
        await self.abandon()
        if message.background and (spool := await self._spooled(assignment, segments)) is not None:
            self._uploading = self._start_task(self._upload_spooled(message, assignment, spool), "upload")
            return
        for segment, names in segments.items():
            tensors, optimizer = await self._compute.run(partial(self._state, names), paced=False)
            await self._upload(message, assignment, segment, tensors, optimizer)
        if message.background:
            self._report(message, None)

    async def abandon(self) -> None:
        """End the upload that is under way, if there is one, and delete its snapshot."""
        if self._uploading is not None:
            self._uploading.cancel()
            await asyncio.gather(self._uploading, return_exceptions=True)
            self._uploading = None

    async def _spooled(self, assignment: Assignment, segments: Mapping[int, tuple[str, ...]]) -> Spool | None:
        """Return the tensors as they are now, None if the disk does not take them."""

        def write() -> Spool:
            with contextlib.ExitStack() as stack:
                spool = Spool(self._directory)
                stack.callback(spool.close)
                for segment, names in segments.items():
                    spool.add(segment, *self._state(names))
                stack.pop_all()
                return spool

        try:
            return await self._compute.run(write, paced=False)
        except OSError as error:
            logger.warning("snapshot_not_written job=%s node=%s error=%s", assignment.job_id, assignment.node_id, error)
            return None

    async def _upload_spooled(self, message: m.SaveStage, assignment: Assignment, spool: Spool) -> None:
        try:
            for segment, tensors, optimizer in spool.segments():
                await self._upload(message, assignment, segment, tensors, optimizer, spool)
        except RoostError as error:
            logger.warning("upload_failed job=%s node=%s error=%s", assignment.job_id, assignment.node_id, error.message)
            self._report(message, error)
        else:
            self._report(message, None)
        finally:
            spool.close()

    async def _upload(
        self,
        message: m.SaveStage,
        assignment: Assignment,
        segment: int,
        tensors: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        spool: Spool | None = None,
    ) -> None:
        upload = partial(
            upload_state,
            self._transport,
            assignment.requester,
            job_id=assignment.job_id,
            checkpoint=message.checkpoint,
            segment=segment,
            tensors=tensors,
            optimizer=optimizer,
            attempt=message.attempt,
        )
        if spool is None:
            await upload()
        else:
            await upload(most_bytes=BACKGROUND_BYTES, line_share=LINE_SHARE, lane=Lane.AVERAGING, sent=spool.forget_pages)

    def _report(self, message: m.SaveStage, error: RoostError | None) -> None:
        failed = failed_from(error) if error is not None else None
        self._reporter.put(m.StageSaved(job_id=message.job_id, checkpoint=message.checkpoint, attempt=message.attempt, failed=failed))
