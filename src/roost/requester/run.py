"""A run: one job on one pool, driven from a thread of the requester's process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from roost import messages as m
from roost.checkpoint.manifest import CheckpointContents
from roost.checkpoint.reader import load
from roost.checkpoint.writer import CheckpointWriter
from roost.codec import encode_record
from roost.config import JobConfig
from roost.errors import (
    CheckpointError,
    JobRefusedError,
    MalformedMessageError,
    RoostError,
    StageFailedError,
    TransportError,
    error_from_code,
)
from roost.messages import JobState
from roost.metrics.events import JsonLines
from roost.metrics.rates import ClusterProgress, RateMeter
from roost.planning.staleness import chosen_correction
from roost.requester.access import TensorPositions
from roost.requester.checkpoint_events import saved_beside, unheard
from roost.requester.data import SampleSource
from roost.requester.pools import Membership, Pool
from roost.requester.service import RequesterService
from roost.transport.interface import Transport
from roost.types import EpochResult, ModelProfile, NodeProfile, Peer, Plan, ReplayedLease, StageMetrics
from roost.weights.source import TensorSource

logger = logging.getLogger(__name__)

SUBMIT_MARGIN_S = 120.0
"""Time for probing links and planning, on top of the time nodes have to join."""
HEARTBEAT_S = 1.0
HEARTBEAT_DEADLINE_S = 5.0
COORDINATOR_AWAY_S = 600.0
"""How long a run waits for a coordinator that does not answer: nodes go on training, and it may be started again."""
FAREWELL_S = 5.0
"""How long a requester that gives up tries to tell the coordinator."""
KEPT_CHECKPOINTS = 3


def new_job_id(name: str) -> str:
    """Return a unique job id that starts with `name`."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:40].strip("-_") or "job"
    return f"{plain}-{secrets.token_hex(3)}"


class Observer(Protocol):
    """Watches a run, for example to draw its progress; called on the run's own thread."""

    def planned(self, plan: Plan, nodes: tuple[NodeProfile, ...], profile: ModelProfile) -> None:
        """The plan is made."""

    def updated(self, metrics: RunMetrics) -> None:
        """Something has moved on."""


@dataclass(frozen=True, kw_only=True)
class JobPackage:
    """A captured job, ready to be submitted."""

    config: JobConfig
    graph: bytes
    positions: TensorPositions
    """Which part of the graph needs which tensors."""
    weights: TensorSource
    """Every parameter and buffer as it is before training."""
    extras: frozenset[str]
    """Tensors the graph needs that the model's state_dict does not have (buffers that are not persistent, those of the loss)."""
    aliases: dict[str, str]
    optimizer: dict[str, Tensor]
    profile: ModelProfile
    training: SampleSource
    validation: SampleSource | None
    has_metric: bool
    directory: Path
    resume: bool

    @property
    def unused(self) -> frozenset[str]:
        """Tensors of the model that no unit of the graph owns."""
        owned = {tensor.name for unit in self.profile.units for tensor in unit.tensors}
        return frozenset(self.weights.names) - owned - self.extras


@dataclass(frozen=True, kw_only=True)
class RunMetrics:
    """Where a run is."""

    state: JobState
    epochs_done: float
    epochs: int
    elapsed_s: float
    """Since training started."""
    samples: int
    """Training samples that have been applied, all clusters together."""
    samples_per_s: float
    """Average since training started."""
    clusters: tuple[ClusterProgress, ...]
    history: tuple[EpochResult, ...]
    bytes_sent: int
    """By all nodes, over all links."""
    averaging_rounds: int
    """Finished by the ring that has finished most."""
    cpu_s: float
    """CPU seconds of all nodes since the job started."""
    staleness_max: int
    stages: tuple[StageMetrics, ...] = ()
    """What every stage has done so far."""
    paused: tuple[str, ...] = ()
    """Nodes that their owners have paused; the job waits for them."""
    saving: str = ""
    """The checkpoint that is being uploaded while training goes on; empty if none is."""


class Run:
    """A running job. Made by roost.train()."""

    def __init__(self, package: JobPackage, pool: Pool, *, observer: Observer | None, wait_s: float) -> None:
        self._package = package
        self._pool = pool
        self._observer = observer
        self._wait_s = wait_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Future[None] | None = None
        self._stop_requested = threading.Event()
        self._planned = threading.Event()
        self._ended = threading.Event()
        self._over: asyncio.Event | None = None
        self._cancel: asyncio.Event | None = None
        self._update: m.JobUpdate | None = None
        self._meter = RateMeter()
        self._progress: tuple[ClusterProgress, ...] = ()
        self._error: RoostError | None = None
        self._events = JsonLines(package.directory / "events.jsonl")
        self.plan: Plan | None = None
        self.nodes: tuple[NodeProfile, ...] = ()
        self.replayed: tuple[ReplayedLease, ...] = ()
        """Samples that were given out again because of a fault, and why; all others were applied once."""

    # ------------------------------------------------------------ for users

    @property
    def job_id(self) -> str:
        return self._package.config.job_id

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint of this run, None before the first."""
        history = self._update.history if self._update is not None else ()
        paths = [result.checkpoint for result in history if result.checkpoint is not None]
        return Path(paths[-1]) if paths else None

    def start(self) -> None:
        """Submit the job; returns once the plan is made. Raises RoostError if it is refused."""
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"roost-run-{self.job_id}")
        _ACTIVE.add(self)
        self._thread = executor.submit(self._main)
        executor.shutdown(wait=False)
        try:
            self._planned.wait()
        except KeyboardInterrupt:
            self.stop()
            self._ended.wait()
            raise
        self._raise_error()

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for the end and return this run. Ctrl+C stops it cleanly, with a checkpoint; a second one gives up.

        Raises the RoostError the job failed with, and TimeoutError if it is not over after `timeout` seconds.
        """
        try:
            finished = self._ended.wait(timeout)
        except KeyboardInterrupt:
            logger.warning("stopping job=%s", self.job_id)
            self.stop()
            finished = self._wait_or_give_up(timeout)
        if not finished:
            raise TimeoutError(f"job {self.job_id} is not over after {timeout} s")
        self._raise_error()
        return self

    def _wait_or_give_up(self, timeout: float | None) -> bool:
        try:
            return self._ended.wait(timeout)
        except KeyboardInterrupt:
            self._wake(self._over)
            raise

    def stop(self) -> None:
        """Ask the job to stop as soon as what was begun is done, and to save a checkpoint; wait() returns after that."""
        self._stop_requested.set()
        self._wake(self._cancel)

    def _wake(self, event: asyncio.Event | None) -> None:
        """Set an event of the run's own loop, from another thread."""
        if self._loop is not None and event is not None and not self._ended.is_set():
            # The loop may close in just this moment: then there is nobody left to wake.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(event.set)

    @property
    def ended(self) -> bool:
        """True if nothing of this run is running any more."""
        return self._ended.is_set()

    def join(self) -> None:
        """Wait until nothing of this run is running any more, whatever became of it; raises nothing."""
        self._ended.wait()

    @property
    def stopping(self) -> bool:
        """True if stop() was called, or Ctrl+C during wait()."""
        return self._stop_requested.is_set()

    @property
    def stopped(self) -> bool:
        """True if the run was stopped before all epochs were done."""
        return self._update is not None and self._update.cancelled

    def metrics(self) -> RunMetrics:
        """Return where the run is now."""
        update = self._update
        stages = update.metrics if update is not None else ()
        firsts = [stage for stage in stages if stage.stage == 0]
        samples = sum(stage.samples for stage in firsts)
        elapsed = update.elapsed_s if update is not None else 0.0
        rings = {node: sum(node in ring.members for ring in self.plan.rings) for node in (s.node_id for s in stages)} if self.plan else {}
        return RunMetrics(
            state=update.state if update is not None else JobState.SUBMITTED,
            epochs_done=update.epochs_done if update is not None else 0.0,
            epochs=self._package.config.epochs,
            elapsed_s=elapsed,
            samples=samples,
            samples_per_s=samples / elapsed if elapsed > 0 else 0.0,
            clusters=self._progress,
            history=update.history if update is not None else (),
            bytes_sent=sum(stage.bytes_sent for stage in stages),
            averaging_rounds=max((stage.rounds // rings[stage.node_id] for stage in stages if rings.get(stage.node_id)), default=0),
            cpu_s=sum(stage.cpu_s for stage in stages),
            staleness_max=max((stage.staleness_max for stage in stages), default=0),
            stages=stages,
            paused=update.paused if update is not None else (),
            saving=saved_beside(update),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model of the newest checkpoint, under the model's own names. Raises CheckpointError."""
        path = self.checkpoint
        if path is None:
            raise CheckpointError(f"job {self.job_id} has no checkpoint yet", hint="Call wait() first, or stop() for one now.")
        return load(path).model

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
        if self._ended.is_set() and self._thread is not None and (error := self._thread.exception()) is not None:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error

    # ------------------------------------------------------------ the thread

    def _main(self) -> None:
        try:
            asyncio.run(self._session())
        finally:
            self._events.close()
            _ACTIVE.discard(self)
            self._ended.set()
            self._planned.set()

    async def _session(self) -> None:
        self._over, self._cancel = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._stop_requested.is_set():
            self._cancel.set()
        work = asyncio.create_task(self._work(), name="work")
        cancelled = asyncio.create_task(self._cancel.wait(), name="cancelled")
        await asyncio.wait({work, cancelled}, return_when=asyncio.FIRST_COMPLETED)
        cancelled.cancel()
        if not work.done() and not self._planned.is_set():
            self._fail(JobRefusedError(f"job {self.job_id} was stopped before it was planned", hint="Start it again."))
            work.cancel()
        await asyncio.wait({work})
        if not work.cancelled():
            work.result()

    async def _work(self) -> None:
        async with self._pool.enter(on_failure=self._fail) as membership:
            transport = membership.transport
            service = self._service()
            await transport.start(service)
            try:
                await self._drive(transport, service, membership)
            finally:
                await transport.stop()
                service.close()

    async def _drive(self, transport: Transport, service: RequesterService, membership: Membership) -> None:
        coordinator = membership.coordinator
        heartbeats = asyncio.create_task(self._send_heartbeats(transport, coordinator), name="heartbeats")
        submit = asyncio.create_task(self._submit(transport, service, membership), name="submit")
        cancel = asyncio.create_task(self._pass_cancel_on(transport, coordinator), name="cancel")
        assert self._over is not None
        over = asyncio.create_task(self._over.wait(), name="over")
        try:
            await asyncio.wait({submit, over}, return_when=asyncio.FIRST_COMPLETED)
            if submit.done():
                submit.result()
                await over
        finally:
            for task in (heartbeats, submit, cancel, over):
                task.cancel()
            await asyncio.gather(heartbeats, submit, cancel, over, return_exceptions=True)
            if self._update is None or self._update.state not in (JobState.DONE, JobState.FAILED):
                await self._tell_cancelled(transport, coordinator)

    def _service(self) -> RequesterService:
        package = self._package
        return RequesterService(
            config=package.config,
            graph=package.graph,
            positions=package.positions,
            weights=package.weights,
            unused=package.unused,
            optimizer=package.optimizer,
            training=package.training,
            validation=package.validation,
            writer=CheckpointWriter(package.directory, keep=KEPT_CHECKPOINTS),
            contents=self._contents,
            on_update=self._take_update,
            on_plan=self._take_plan,
        )

    async def _submit(self, transport: Transport, service: RequesterService, membership: Membership) -> None:
        request = m.SubmitJob(
            protocol_version=m.PROTOCOL_VERSION,
            torch_version=torch.__version__,
            config=self._package.config,
            profile=self._package.profile,
            requester=Peer(peer_id=transport.peer_id, address=transport.address),
            wait_nodes=membership.wait_nodes,
            wait_s=self._wait_s,
            resume=self._package.resume,
        )
        reply = (await transport.call(membership.coordinator, request, deadline_s=self._wait_s + SUBMIT_MARGIN_S)).message
        if not isinstance(reply, m.JobAccepted):
            raise MalformedMessageError(f"the coordinator answered a job with {type(reply).__name__}")
        self.plan, self.nodes = reply.plan, reply.nodes
        service.set_plan(reply.plan)
        self._log_event("planned", {"plan": encode_record(reply.plan), "correction": chosen_correction(self._package.config, reply.plan)})
        if self._observer is not None:
            self._observer.planned(reply.plan, reply.nodes, self._package.profile)
        self._planned.set()

    async def _send_heartbeats(self, transport: Transport, coordinator: Peer) -> None:
        heard = time.monotonic()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                heartbeat = m.RequesterHeartbeat(job_id=self.job_id)
                reply = (await transport.call(coordinator, heartbeat, deadline_s=HEARTBEAT_DEADLINE_S)).message
                heard = time.monotonic()
                if isinstance(reply, m.JobEnded):
                    self._take_end(reply)
            except JobRefusedError:
                # Until the submission has arrived the coordinator knows nothing of the job.
                if self._planned.is_set():
                    self._fail(StageFailedError(f"the coordinator {coordinator.address} does not know the job any more"))
                    return
            except TransportError as error:
                logger.warning("coordinator_unreachable job=%s error=%s", self.job_id, error.message)
            if (away_s := time.monotonic() - heard) > COORDINATOR_AWAY_S:
                self._fail(
                    StageFailedError(
                        f"the coordinator {coordinator.address} has not answered for {away_s:.0f} s",
                        hint="Start it again with the same state directory, then the job with resume= and its last checkpoint.",
                    )
                )
                return

    async def _pass_cancel_on(self, transport: Transport, coordinator: Peer) -> None:
        assert self._cancel is not None
        await self._cancel.wait()
        if self._planned.is_set():
            await self._tell_cancelled(transport, coordinator)

    async def _tell_cancelled(self, transport: Transport, coordinator: Peer) -> None:
        try:
            await transport.call(coordinator, m.CancelJob(job_id=self.job_id), deadline_s=FAREWELL_S)
        except RoostError as error:
            logger.info("cancel_not_taken job=%s error=%s", self.job_id, error.message)

    def _take_plan(self, change: m.PlanChanged) -> None:
        """Note that the job goes on with another plan, and what has to be trained again."""
        self.plan, self.nodes = change.plan, change.nodes
        self.replayed += change.replayed
        logger.warning(
            "plan_changed job=%s generation=%d reason=%r replayed_leases=%d checkpoint=%s",
            self.job_id,
            change.generation,
            change.reason,
            len(change.replayed),
            change.checkpoint or "-",
        )
        self._log_event("plan_changed", encode_record(change))
        if self._observer is not None:
            self._observer.planned(change.plan, change.nodes, self._package.profile)

    def _take_update(self, update: m.JobUpdate) -> None:
        if not self._package.has_metric:
            # The coordinator adds up what the nodes report, and without a metric they report zero.
            update = replace(update, history=tuple(replace(result, metric=None) for result in update.history))
        for event in unheard(self._update, update):
            self._log_event(f"checkpoint_{event.state}", encode_record(event))
        self._update = update
        self._progress = self._meter.progress(update.metrics, update.elapsed_s)
        # First what the run itself needs: an observer may raise.
        if update.error is not None:
            self._fail(error_from_code(update.error.code, update.error.message, update.error.hint))
        elif update.state is JobState.DONE and self._over is not None:
            self._over.set()
        metrics = self.metrics()
        self._log_event("progress", encode_record(metrics))
        if self._observer is not None:
            self._observer.updated(metrics)

    def _take_end(self, end: m.JobEnded) -> None:
        """Take word of an end whose update was lost with the coordinator that knew more."""
        if self._update is None or self._over is None or self._over.is_set():
            return
        reached = float(end.history[-1].epoch) if end.history else self._update.epochs_done
        cancelled = self._update.cancelled or reached < self._package.config.epochs
        self._take_update(
            replace(self._update, state=end.state, history=end.history, error=end.error, epochs_done=reached, cancelled=cancelled)
        )

    def _log_event(self, event: str, fields: dict[str, Any]) -> None:
        try:
            self._events.write(event, **fields)
        except OSError as error:
            logger.warning("event_not_written job=%s event=%s error=%s", self.job_id, event, error)

    def _fail(self, error: RoostError) -> None:
        if self._error is None:
            self._error = error
        if self._over is not None:
            self._over.set()

    def _contents(self, message: m.FinishCheckpoint) -> CheckpointContents:
        package = self._package
        return CheckpointContents(
            epoch=message.epoch,
            updates=message.updates,
            tensors=tuple(package.weights.spec(name) for name in package.weights.names if name not in package.extras),
            aliases=tuple(package.aliases.items()),
            config=replace(package.config, correction=chosen_correction(package.config, message.plan)),
            plan=message.plan,
        )


_ACTIVE: set[Run] = set()
"""Runs whose thread has not ended."""


def _finish_active_runs() -> None:
    """Wait for the runs of a script that ended without waiting for them; those of a script that raised are stopped."""
    for run in list(_ACTIVE):
        if getattr(sys, "last_value", None) is not None:
            run.stop()
        try:
            run.wait()
        except RoostError as error:
            logger.error("run_failed job=%s error=%s", run.job_id, error)


# The one hook that runs while threads may still be started and thread pools still take work; concurrent.futures uses it, too.
threading._register_atexit(_finish_active_runs)  # type: ignore[attr-defined]
