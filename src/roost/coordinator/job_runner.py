"""Carries one job through its life: performs the instructions of JobLifecycle over the transport."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roost import messages as m
from roost.config import CoordinatorConfig, JobConfig
from roost.errors import (
    DeadlineError,
    EmptyPoolError,
    ForbiddenError,
    MalformedMessageError,
    NodeLostError,
    PeerUnreachableError,
    RequesterLostError,
    RoostError,
    StageFailedError,
    error_from_code,
)
from roost.messages import JobState
from roost.planning.planner import make_plan
from roost.planning.staleness import chosen_correction
from roost.protocol import job_lifecycle as lifecycle
from roost.protocol.data_leases import LeaseBook
from roost.transport.interface import Transport
from roost.types import EpochResult, LinkProfile, NodeProfile, Peer, Plan, StageMetrics, StagePlan

logger = logging.getLogger(__name__)

PROBE_BYTES = 8 << 20
"""The most that is sent at once to measure a link; a node sends less over a slow one."""
END_DEADLINE_S = 5.0
MAX_LEASES = 64
"""Leases one request may get."""
UPDATE_S = 0.5
"""Seconds between progress reports to the requester."""


@dataclass(kw_only=True)
class EvaluationSums:
    """What the clusters have evaluated since the phase was opened."""

    samples: int = 0
    loss: float = 0.0
    metric: float = 0.0


class JobRunner:
    """One job: its lifecycle, leases, metrics and history."""

    def __init__(
        self,
        *,
        request: m.SubmitJob,
        nodes: Sequence[NodeProfile],
        config: CoordinatorConfig,
        transport: Transport,
        on_change: Callable[[JobRunner], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        """`on_change` is told of every move; `on_lost` of a node that could not be reached, and why."""
        self.config: JobConfig = request.config
        self.requester = request.requester
        self.nodes = tuple(nodes)
        self._request = request
        self._settings = config
        self._transport = transport
        self._on_change = on_change
        self._on_lost = on_lost
        self.lifecycle = lifecycle.JobLifecycle(self.job_id, evaluates=self.config.validation_samples > 0)
        self.plan: Plan | None = None
        self.planned: asyncio.Future[Plan] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.error: RoostError | None = None
        self.history: list[EpochResult] = []
        self.metrics: dict[str, StageMetrics] = {}
        self._paused: frozenset[str] = frozenset()
        self._leases: LeaseBook | None = None
        self._evaluation = EvaluationSums()
        self._to_evaluate: dict[int, tuple[int, int]] = {}
        self._order = 0
        self._started_at: float | None = None
        self._stopped_at: float | None = None
        self._loss_before = (0.0, 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ what others ask

    @property
    def job_id(self) -> str:
        return self.config.job_id

    @property
    def state(self) -> JobState:
        return self.lifecycle.state

    @property
    def epochs_done(self) -> float:
        return self._leases.epochs_done if self._leases is not None else float(self.config.start_epoch)

    def stage_of(self, node_id: str) -> StagePlan | None:
        """Return the stage a node runs, None if it runs none."""
        stages = self.plan.stages if self.plan is not None else ()
        return next((stage for stage in stages if stage.node_id == node_id), None)

    def elapsed_s(self) -> float:
        """Return the seconds since training started, 0 before."""
        if self._started_at is None:
            return 0.0
        return (self._stopped_at or time.monotonic()) - self._started_at

    # ------------------------------------------------------------ events

    def start(self) -> None:
        """Begin: enough nodes have joined."""
        self._spawn(self._report(), "report")
        self.event(lifecycle.NodesReady())

    def cancel(self) -> None:
        """Stop as soon as what was begun is done, and save."""
        if not self.lifecycle.ended:
            self.event(lifecycle.CancelRequested())

    def fail(self, error: RoostError) -> None:
        """End the job with `error`; only the first one counts."""
        if self.lifecycle.ended:
            return
        self.error = error
        logger.error("job_failed job=%s code=%s error=%s", self.job_id, error.code, error.message)
        self.event(lifecycle.FaultOccurred(reason=error.message))

    def event(self, event: lifecycle.JobEvent) -> None:
        """Move the job and carry out what follows."""
        before = self.state
        instructions = self.lifecycle.handle(event)
        if self.state is not before:
            logger.info("job_state job=%s from=%s to=%s", self.job_id, before, self.state)
        for instruction in instructions:
            self._perform(instruction)
        if self.lifecycle.ended and not self.planned.done():
            self.planned.set_exception(self.error or StageFailedError(f"job {self.job_id} was cancelled before it was planned"))
        self._changed.set()
        self._on_change(self)

    def lease(self, node_id: str, request: m.LeaseRequest) -> m.LeaseGrant:
        """Return leases for the cluster whose first stage asks. Raises ForbiddenError for any other node."""
        self._check_first_stage(node_id, request.cluster)
        if self._leases is None or self.state not in (JobState.TRAINING, JobState.EVALUATING):
            return m.LeaseGrant(leases=(), drained=True)
        leases, drained = self._leases.request(request.cluster, max(1, min(request.want, MAX_LEASES)))
        self._to_evaluate.update({lease.lease_id: (request.cluster, lease.samples) for lease in leases if not lease.training})
        return m.LeaseGrant(leases=leases, drained=drained)

    def leases_done(self, node_id: str, message: m.LeaseDone) -> None:
        """Take word that every stage of a cluster has applied these leases."""
        self._check_first_stage(node_id, message.cluster)
        self._book.done(message.cluster, message.lease_ids)
        self._check_drained()

    def evaluated(self, node_id: str, message: m.EvaluationDone) -> None:
        """Take the sums over some validation samples."""
        stage = self.stage_of(node_id)
        if stage is None or stage.cluster != message.cluster or self.state is not JobState.EVALUATING:
            raise ForbiddenError(f"node {node_id} reports an evaluation that it was not asked for")
        result = message.result
        owner, left = self._to_evaluate.get(result.lease_id, (-1, 0))
        if owner != message.cluster or result.samples > left:
            raise ForbiddenError(
                f"node {node_id} reports more evaluation samples than cluster {message.cluster} has in lease {result.lease_id}"
            )
        self._evaluation.samples += result.samples
        self._evaluation.loss += result.loss_sum
        self._evaluation.metric += result.metric_sum
        self._to_evaluate[result.lease_id] = (owner, left - result.samples)
        if left == result.samples:
            self._book.done(message.cluster, (result.lease_id,))
        if self._book.all_done:
            self.event(lifecycle.EvaluationFinished())

    def stage_failed(self, node_id: str, message: m.StageFailed) -> None:
        """A node gave up its stage: the job ends with its error. A node that misses a peer says so; the peer is what was lost."""
        if self.stage_of(node_id) is None:
            raise ForbiddenError(f"node {node_id} runs no stage of job {self.job_id}")
        error = error_from_code(message.code, message.message, message.hint)
        if isinstance(error, PeerUnreachableError | DeadlineError):
            away = RequesterLostError if error.message.startswith(f"{self.requester.peer_id} at ") else NodeLostError
            error = away(f"node {node_id} cannot go on without its peer: {error.message}")
        self.fail(error)

    def heartbeat(self, metrics: StageMetrics) -> None:
        """Take the newest counters of a stage."""
        if self.stage_of(metrics.node_id) is not None:
            self.metrics[metrics.node_id] = metrics

    def set_paused(self, nodes: frozenset[str]) -> None:
        """Take which nodes their owners have paused; the job waits for those that have a stage, however long that takes."""
        before, self._paused = self._paused, frozenset(filter(self.stage_of, nodes))
        if self._paused != before:
            self._changed.set()

    def _check_first_stage(self, node_id: str, cluster: int) -> None:
        stage = self.stage_of(node_id)
        if stage is None or stage.index != 0 or stage.cluster != cluster:
            raise ForbiddenError(f"node {node_id} does not run the first stage of cluster {cluster}")

    def _check_drained(self) -> None:
        if self.state is JobState.TRAINING and self._book.all_done:
            self.event(lifecycle.TrainingDrained())

    @property
    def _book(self) -> LeaseBook:
        assert self._leases is not None, "leases exist once the plan does"
        return self._leases

    # ------------------------------------------------------------ instructions

    def _perform(self, instruction: lifecycle.JobInstruction) -> None:
        match instruction:
            case lifecycle.JobInstruction.MEASURE_LINKS:
                self._spawn(self._measure_and_plan(), "plan")
            case lifecycle.JobInstruction.PREPARE_STAGES:
                self._spawn(self._prepare_stages(), "prepare")
            case lifecycle.JobInstruction.OPEN_TRAINING:
                self._open_training()
            case lifecycle.JobInstruction.STOP_LEASING:
                self._book.stop()
                self._check_drained()
            case lifecycle.JobInstruction.AVERAGE:
                self._spawn(self._average(), "average")
            case lifecycle.JobInstruction.OPEN_EVALUATION:
                self._open_evaluation()
            case lifecycle.JobInstruction.SAVE_CHECKPOINT:
                self._spawn(self._save(), "save")
            case lifecycle.JobInstruction.END_STAGES:
                self._stopped_at = time.monotonic()
                self._spawn(self._end_stages(), "end")

    async def _measure_and_plan(self) -> None:
        links = await self._measure_links()
        generator = random.Random(self.config.seed)
        plan = await asyncio.to_thread(make_plan, self._request.profile, self.nodes, links, self.config, generator)
        if self.lifecycle.ended:
            return
        self.plan = plan
        self.config = replace(self.config, correction=chosen_correction(self.config, plan))
        logger.info("correction_chosen job=%s correction=%s", self.job_id, self.config.correction)
        self._leases = LeaseBook(
            samples=self.config.samples,
            validation_samples=self.config.validation_samples,
            shares=tuple(cluster.share for cluster in plan.clusters),
            batch_size=self.config.batch_size,
            epochs=self.config.epochs,
            start_epoch=self.config.start_epoch,
            sync_interval=self.config.sync_interval,
            evaluate=self.config.validation_samples > 0,
        )
        self.planned.set_result(plan)
        self.event(lifecycle.LinksMeasured())

    async def _measure_links(self) -> list[LinkProfile]:
        """Return every link that could be measured. Nodes that have gone without a word are left out of the job.

        Raises EmptyPoolError if fewer are left than the requester waited for.
        """
        links: list[LinkProfile] = []
        # One node at a time: probes that run together would measure each other.
        for node in self.nodes:
            others = tuple(_peer(other) for other in self.nodes if other.node_id != node.node_id)
            try:
                links.extend(await self._probe(node, others))
            except NodeLostError as error:
                self._on_lost(node.node_id, error.message)
                self.nodes = tuple(other for other in self.nodes if other.node_id != node.node_id)
                if len(self.nodes) < max(1, self._request.wait_nodes):
                    raise EmptyPoolError(
                        f"{len(self.nodes)} of {self._request.wait_nodes} nodes are left: {error.message}",
                        hint="Start that node again, or ask for fewer nodes.",
                    ) from error
        return links

    async def _probe(self, node: NodeProfile, others: tuple[Peer, ...]) -> tuple[LinkProfile, ...]:
        request = m.ProbeLinks(targets=others, payload_bytes=PROBE_BYTES)
        reply = await self._call(node.node_id, request, self._settings.sync_s)
        if not isinstance(reply, m.LinkReport):
            raise MalformedMessageError(f"node {node.node_id} answered a link probe with {type(reply).__name__}")
        return reply.links

    async def _prepare_stages(self) -> None:
        plan = self._planned()
        used = {stage.node_id for stage in plan.stages}
        peers = tuple(_peer(node) for node in self.nodes if node.node_id in used)

        async def prepare(stage: StagePlan) -> None:
            message = m.PrepareStage(
                config=self.config,
                plan=plan,
                cluster=stage.cluster,
                stage=stage.index,
                peers=peers,
                requester=self.requester,
                resume=self._request.resume,
            )
            await self._call(stage.node_id, message, self._settings.prepare_s)

        await _together(prepare(stage) for stage in plan.stages)
        if not self.lifecycle.ended:
            self.event(lifecycle.StagesReady())

    def _open_training(self) -> None:
        if self._started_at is None:
            self._started_at = time.monotonic()
        self._book.open_training()
        self._spawn(self._continue(), "continue")

    def _open_evaluation(self) -> None:
        self._evaluation = EvaluationSums()
        self._to_evaluate.clear()
        self._book.open_evaluation()
        self._spawn(self._continue(), "continue")

    async def _continue(self) -> None:
        firsts = [cluster.stages[0] for cluster in self._planned().clusters]
        await _together(self._call(stage.node_id, m.ContinueJob(job_id=self.job_id), END_DEADLINE_S) for stage in firsts)

    async def _average(self) -> None:
        self._order += 1
        message = m.AverageNow(job_id=self.job_id, order=self._order)

        async def average(stage: StagePlan) -> None:
            reply = await self._call(stage.node_id, message, self._settings.sync_s)
            if isinstance(reply, m.StageReport):
                self.heartbeat(reply.metrics)

        await _together(average(stage) for stage in self._planned().stages)
        if not self.lifecycle.ended:
            self.event(lifecycle.ClustersAveraged())

    async def _save(self) -> None:
        plan = self._planned()
        epoch = int(self.epochs_done)
        name = f"epoch-{epoch:04d}" if not self.lifecycle.cancelled else f"stopped-{epoch:04d}"
        # The cluster that has seen the most data has the best optimizer state; parameters are the same everywhere.
        cluster = max(plan.clusters, key=lambda candidate: candidate.share)

        async def save(stage: StagePlan) -> None:
            segments = tuple(segment.index for segment in plan.segments if stage.node_id in segment.members)
            message = m.SaveStage(job_id=self.job_id, checkpoint=name, segments=segments)
            await self._call(stage.node_id, message, self._settings.sync_s)

        await _together(save(stage) for stage in cluster.stages)
        finish = m.FinishCheckpoint(job_id=self.job_id, checkpoint=name, epoch=epoch, updates=self._schedule_steps(), plan=plan)
        try:
            reply = (await self._transport.call(self.requester, finish, deadline_s=self._settings.sync_s)).message
        except (PeerUnreachableError, DeadlineError) as error:
            raise RequesterLostError(f"requester {self.requester.peer_id} did not finish checkpoint {name}: {error.message}") from error
        if not isinstance(reply, m.CheckpointWritten):
            raise MalformedMessageError(f"the requester answered a finished checkpoint with {type(reply).__name__}")
        self._record(reply.path)
        if not self.lifecycle.ended:
            self.event(lifecycle.CheckpointSaved(finished=self._book.at_end))

    def _schedule_steps(self) -> int:
        firsts = {cluster.stages[0].node_id for cluster in self._planned().clusters}
        return self.config.start_updates + sum(metrics.updates for node, metrics in self.metrics.items() if node in firsts)

    def _record(self, checkpoint: str) -> None:
        evaluated = self._evaluation.samples > 0
        loss_sum = sum(metrics.loss_sum for metrics in self.metrics.values())
        loss_samples = sum(metrics.loss_samples for metrics in self.metrics.values())
        before_sum, before_samples = self._loss_before
        new_samples = loss_samples - before_samples
        self._loss_before = (loss_sum, loss_samples)
        self.history.append(
            EpochResult(
                epoch=int(self.epochs_done),
                train_loss=(loss_sum - before_sum) / new_samples if new_samples else 0.0,
                validation_loss=self._evaluation.loss / self._evaluation.samples if evaluated else None,
                metric=self._evaluation.metric / self._evaluation.samples if evaluated else None,
                samples=self._book.samples_done,
                seconds=self.elapsed_s(),
                checkpoint=checkpoint or None,
            )
        )
        self._evaluation = EvaluationSums()

    async def _end_stages(self) -> None:
        reason = self.error.message if self.error is not None else "the job is over"
        message = m.EndJob(job_id=self.job_id, reason=reason[:500])

        async def end(stage: StagePlan) -> None:
            try:
                reply = await self._call(stage.node_id, message, END_DEADLINE_S)
            except RoostError as error:
                # The node may be what failed; it drops the stage by itself once it hears from the coordinator again.
                logger.warning("stage_not_ended job=%s node=%s error=%s", self.job_id, stage.node_id, error.message)
                if isinstance(error, NodeLostError):
                    self._on_lost(stage.node_id, error.message)
                return
            if isinstance(reply, m.StageReport):
                self.heartbeat(reply.metrics)

        stages = self.plan.stages if self.plan is not None else ()
        await asyncio.gather(*(end(stage) for stage in stages))
        await self._send_update()
        self.ended.set()
        self._changed.set()
        self._on_change(self)

    # ------------------------------------------------------------ reports

    async def _report(self) -> None:
        while not self.lifecycle.ended:
            await self._send_update()
            self._changed.clear()
            try:
                async with asyncio.timeout(UPDATE_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def repeat_last_update(self) -> None:
        """Send the end of the job again: a requester that still sends heartbeats has not heard of it."""
        if self.ended.is_set():
            self._spawn(self._send_update(), "repeat-update")

    async def _send_update(self) -> None:
        failed = None
        if self.error is not None:
            failed = m.Failed(code=self.error.code, message=self.error.message, hint=self.error.hint)
        update = m.JobUpdate(
            job_id=self.job_id,
            state=self.state,
            epochs_done=self.epochs_done,
            elapsed_s=self.elapsed_s(),
            metrics=tuple(self.metrics.values()),
            history=tuple(self.history),
            cancelled=self.lifecycle.cancelled,
            error=failed,
            paused=tuple(sorted(self._paused)),
        )
        try:
            await self._transport.send(self.requester, update, deadline_s=END_DEADLINE_S)
        except RoostError as error:
            logger.warning("update_not_sent job=%s error=%s", self.job_id, error.message)

    # ------------------------------------------------------------ tasks and calls

    def _planned(self) -> Plan:
        assert self.plan is not None, "asked for only after planning"
        return self.plan

    async def _call(self, node_id: str, message: m.Message, deadline_s: float) -> m.Message:
        """Return a node's reply. Raises NodeLostError if it cannot be reached or is silent, and whatever error it reports."""
        node = next(node for node in self.nodes if node.node_id == node_id)
        try:
            return (await self._transport.call(_peer(node), message, deadline_s=deadline_s)).message
        except (PeerUnreachableError, DeadlineError) as error:
            raise NodeLostError(f"node {node_id} is lost: {error.message}") from error

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=f"{name}-{self.job_id}")
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, RoostError):
            logger.error("job_task_broke job=%s task=%s", self.job_id, task.get_name(), exc_info=error)
            error = StageFailedError(f"the coordinator failed in {task.get_name()}: {type(error).__name__}: {error}")
        self.fail(error)

    async def close(self) -> None:
        """Cancel what is still under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _peer(node: NodeProfile) -> Peer:
    return Peer(peer_id=node.node_id, address=node.address)


async def _together(works: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Await all; the first failure cancels the rest and is raised as itself."""
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)
