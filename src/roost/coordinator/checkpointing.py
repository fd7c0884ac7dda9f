"""Checkpoints of a running job: snapshots at a synchronisation point, uploads while training goes on (docs/failover.md)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from roost import messages as m
from roost.config import CoordinatorConfig
from roost.coordinator.node_calls import NodeCalls, together
from roost.errors import (
    DeadlineError,
    MalformedMessageError,
    PeerUnreachableError,
    RequesterLostError,
    RoostError,
    error_from_code,
)
from roost.protocol.data_leases import LeaseMark
from roost.transport.interface import Transport
from roost.types import CheckpointEvent, CheckpointState, Peer, Plan

logger = logging.getLogger(__name__)

UPLOAD_S = 6 * 3600.0
"""Deadline for all uploads of a checkpoint, over slow lines, too. What is stuck is noticed long before: every message of an upload has a
deadline of its own (agent/uploads.py), and a node that is away is missed by its heartbeats."""
MOST_ABANDONED = 2
"""Checkpoints in a row that may come to nothing in the background; training waits for the next one."""
KEPT_EVENTS = 8
"""What the requester is told of at a time: more than can happen between two updates."""
GIVEN_UP = "the plan changes, or the job ends"


@dataclass(frozen=True, kw_only=True)
class StageSave:
    """What one node uploads."""

    node_id: str
    segments: tuple[int, ...]
    rest: bool
    """Also what is in no segment."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A checkpoint of which every part has been copied, and not all are uploaded."""

    name: str
    attempt: int
    epoch: int
    updates: int
    """Schedule steps taken until then."""
    plan: Plan
    mark: LeaseMark
    """What had been trained by then."""
    background: bool


def spread(plan: Plan) -> tuple[StageSave, ...]:
    """Return who uploads what: segments go round the clusters, as after an exact round their parameters are the same everywhere.

    Optimizer state is each cluster's own, and comes from the same node as its parameters. What is in no segment (all of it with one
    cluster) comes from the cluster that has seen the most data.
    """
    clusters = sorted(plan.clusters, key=lambda cluster: -cluster.share)
    first = {stage.node_id for stage in clusters[0].stages}
    found: dict[str, list[int]] = {stage.node_id: [] for stage in clusters[0].stages}
    for position, segment in enumerate(plan.segments):
        names = {stage.node_id for stage in clusters[position % len(clusters)].stages}
        member = next(member for member in segment.members if member in names)
        found.setdefault(member, []).append(segment.index)
    return tuple(StageSave(node_id=node_id, segments=tuple(segments), rest=node_id in first) for node_id, segments in found.items())


class Checkpointing:
    """Takes one snapshot after the other, and hears of their uploads."""

    def __init__(self, *, job_id: str, calls: NodeCalls, transport: Transport, requester: Peer, settings: CoordinatorConfig) -> None:
        self._job_id = job_id
        self._calls = calls
        self._transport = transport
        self._requester = requester
        self._settings = settings
        self._attempt = -1
        self._missing: set[str] = set()
        self._failed: RoostError | None = None
        self._moved = asyncio.Event()
        self._abandoned = 0
        self._events: deque[CheckpointEvent] = deque(maxlen=KEPT_EVENTS)

    @property
    def events(self) -> tuple[CheckpointEvent, ...]:
        """The last things that have become of checkpoints, in order."""
        return tuple(self._events)

    @property
    def trusted(self) -> bool:
        """True if checkpoints come about beside training; if they do not, training waits for one."""
        return self._abandoned < MOST_ABANDONED

    async def take(self, snapshot: Snapshot) -> None:
        """Let all nodes copy their parts; in the foreground, upload them, too. Raises NodeLostError and what nodes report."""
        saves = spread(snapshot.plan)
        self._attempt, self._failed = snapshot.attempt, None
        self._missing = {save.node_id for save in saves} if snapshot.background else set()

        async def save(part: StageSave) -> None:
            message = m.SaveStage(
                job_id=self._job_id,
                checkpoint=snapshot.name,
                segments=part.segments,
                attempt=snapshot.attempt,
                background=snapshot.background,
                rest=part.rest,
            )
            # In the foreground, or if a disk does not take the copy, the answer comes after the upload.
            await self._calls.call(part.node_id, message, UPLOAD_S)

        self._note(snapshot, CheckpointState.BEGUN)
        with self._noting_failure(snapshot):
            await together(save(part) for part in saves)

    def saved(self, node_id: str, message: m.StageSaved) -> None:
        """A node has uploaded its part, or cannot; what is said of another attempt is out of date."""
        if message.attempt != self._attempt or node_id not in self._missing:
            return
        self._missing.discard(node_id)
        if message.failed is not None and self._failed is None:
            self._failed = error_from_code(message.failed.code, f"node {node_id}: {message.failed.message}", message.failed.hint)
        self._moved.set()

    async def complete(self, snapshot: Snapshot) -> str:
        """Return where the checkpoint is, once it is whole. Raises what nodes and requester report, and RequesterLostError."""
        with self._noting_failure(snapshot):
            await self._uploaded(snapshot)
            path = await self._finish(snapshot)
        self._abandoned = 0
        self._note(snapshot, CheckpointState.COMPLETE, path)
        return path

    async def _uploaded(self, snapshot: Snapshot) -> None:
        """Return once every node has uploaded its part."""
        try:
            async with asyncio.timeout(UPLOAD_S):
                while self._missing and self._failed is None:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            raise DeadlineError(
                f"{', '.join(sorted(self._missing))} did not upload checkpoint {snapshot.name} in {UPLOAD_S:.0f} s"
            ) from None
        if self._failed is not None:
            raise self._failed

    async def _finish(self, snapshot: Snapshot) -> str:
        """Let the requester write the checkpoint, and return where it is."""
        finish = m.FinishCheckpoint(
            job_id=self._job_id,
            checkpoint=snapshot.name,
            epoch=snapshot.epoch,
            updates=snapshot.updates,
            plan=snapshot.plan,
            attempt=snapshot.attempt,
        )
        try:
            reply = (await self._transport.call(self._requester, finish, deadline_s=self._settings.sync_s)).message
        except (PeerUnreachableError, DeadlineError) as error:
            what = f"requester {self._requester.peer_id} did not finish checkpoint {snapshot.name}: {error.message}"
            raise RequesterLostError(what) from error
        if not isinstance(reply, m.CheckpointWritten):
            raise MalformedMessageError(f"the requester answered a finished checkpoint with {type(reply).__name__}")
        return reply.path

    def abandon(self, snapshot: Snapshot, reason: str) -> None:
        """A checkpoint in the background has come to nothing: the one before stays the newest."""
        self._abandoned += 1
        self._missing.clear()
        logger.warning("checkpoint_abandoned job=%s checkpoint=%s reason=%s", self._job_id, snapshot.name, reason)

    def skip(self, snapshot: Snapshot, reason: str) -> None:
        """A synchronisation point has no checkpoint."""
        logger.warning("checkpoint_skipped job=%s epoch=%d reason=%s", self._job_id, snapshot.epoch, reason)
        self._note(snapshot, CheckpointState.SKIPPED, reason)

    @contextlib.contextmanager
    def _noting_failure(self, snapshot: Snapshot) -> Iterator[None]:
        try:
            yield
        except RoostError as error:
            self._note(snapshot, CheckpointState.ABANDONED, error.message)
            raise
        except asyncio.CancelledError:
            self._note(snapshot, CheckpointState.ABANDONED, GIVEN_UP)
            raise

    def _note(self, snapshot: Snapshot, state: CheckpointState, detail: str = "") -> None:
        event = CheckpointEvent(
            name=snapshot.name,
            attempt=snapshot.attempt,
            epoch=snapshot.epoch,
            state=state,
            background=snapshot.background,
            detail=detail,
        )
        self._events.append(event)
