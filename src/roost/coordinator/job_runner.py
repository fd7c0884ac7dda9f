"""Carries one job through its life: performs the instructions of JobLifecycle over the transport."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from roost import messages as m
from roost.config import CoordinatorConfig, JobConfig
from roost.coordinator.checkpointing import GIVEN_UP, Checkpointing, Snapshot
from roost.coordinator.job_record import JobRecord, LeaseOperation
from roost.coordinator.job_reports import JobReports
from roost.coordinator.lease_desk import LeaseDesk
from roost.coordinator.link_probes import measure_links
from roost.coordinator.node_calls import NodeCalls, first_error, together
from roost.coordinator.plan_keeper import PlanKeeper
from roost.coordinator.plan_review import PlanReview
from roost.coordinator.progress import JobProgress
from roost.coordinator.repairer import Repairer
from roost.errors import (
    CheckpointError,
    DeadlineError,
    ForbiddenError,
    JobRefusedError,
    NodeLostError,
    ProtocolError,
    RequesterLostError,
    RoostError,
    StageFailedError,
    StaleCoordinatorError,
    TransportError,
    error_from_code,
)
from roost.messages import JobState
from roost.planning.planner import make_plan
from roost.planning.staleness import chosen_correction
from roost.planning.takeover import Transition
from roost.protocol import job_lifecycle as lifecycle
from roost.protocol.data_leases import LeaseBook, LeasePhase
from roost.transport.dispatch import failed_from
from roost.transport.interface import Transport
from roost.types import ClusterPlan, EpochResult, NodeProfile, Plan, StageMetrics, StagePlan

logger = logging.getLogger(__name__)

END_DEADLINE_S = 5.0
MOST_SETBACKS = 3
"""Steps in a row that may fail at a synchronisation point, or stages that may fail, before the job does."""


CHECK_S = 1.0
"""Deadline for a node to answer whom another node could not reach."""
RETURN_S = 10.0
"""How long a coordinator that was started again waits for the nodes of its job: they look for it every other second."""
ATTEMPTS = 1 << 20
"""More attempts to save than there are in one generation."""
LEASING = frozenset({JobState.TRAINING, JobState.EVALUATING, JobState.REPAIRING})
MENDABLE = frozenset(
    {
        JobState.PREPARING,
        JobState.TRAINING,
        JobState.AVERAGING,
        JobState.EVALUATING,
        JobState.SAVING,
        JobState.REPAIRING,
    }
)
"""States in which the plan can be changed."""
MENDED = (StageFailedError, TransportError, ProtocolError)
"""Why a stage may fail that can be mended by building its cluster anew; everything else would fail again."""
RETRIED = (StageFailedError, JobRefusedError, DeadlineError)
"""What may go away when a step is tried again."""


class JobRunner:
    """One job: its lifecycle, leases, progress, and the plan that a PlanKeeper keeps."""

    def __init__(
        self,
        *,
        request: m.SubmitJob,
        nodes: Sequence[NodeProfile],
        config: CoordinatorConfig,
        transport: Transport,
        on_change: Callable[[JobRunner], None],
        on_lost: Callable[[str, str], None],
        pool: Callable[[], Sequence[NodeProfile]] = tuple,
        on_record: Callable[[JobRecord], None] = lambda record: None,
        on_operation: Callable[[LeaseOperation], None] = lambda operation: None,
    ) -> None:
        """`on_change` is told of every move; `on_lost` of a node that could not be reached, and why; `pool` returns the nodes that the
        job may use now, those it has among them. What `on_record` and `on_operation` are given another process can go on with."""
        self.config: JobConfig = request.config
        self.requester = request.requester
        self.nodes = tuple(nodes)
        self._request = request
        self._settings = config
        self._transport = transport
        self._on_change = on_change
        self._on_lost = on_lost
        self._pool = pool
        self._on_record = on_record
        self._on_operation = on_operation
        self.lifecycle = lifecycle.JobLifecycle(self.job_id, evaluates=self.config.validation_samples > 0)
        self.planned: asyncio.Future[Plan] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.error: RoostError | None = None
        self.progress = JobProgress()
        self.repairs = 0
        self._calls = NodeCalls(transport, nodes)
        self.keeper = PlanKeeper(
            profile=request.profile, config=self.config, calls=self._calls, settings=config, prepare=self._prepare_message
        )
        self._repairer: Repairer | None = None
        self._checkpoints = Checkpointing(
            job_id=self.job_id, calls=self._calls, transport=transport, requester=request.requester, settings=config
        )
        self._uploading: asyncio.Task[None] | None = None
        self._review = PlanReview(
            job_id=self.job_id,
            seed=self.config.seed,
            keeper=self.keeper,
            calls=self._calls,
            pool=pool,
            is_training=lambda: self.state is JobState.TRAINING,
            order=lambda: self._order,
            on_better=self._change_plan,
        )
        self._paused: frozenset[str] = frozenset()
        self._desk: LeaseDesk | None = None
        self._moved = asyncio.Event()
        self._checked: set[str] = set()  # nodes that are asked whether they are there
        self._order = 0
        self._attempt = 0
        self._returning: set[str] = set()  # nodes of a job that was restored, until they register
        self._setbacks = 0
        self._started_at: float | None = None
        self._stopped_at: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._steps: set[asyncio.Task[None]] = set()  # those of them that end when the plan breaks
        self._repairing: asyncio.Task[None] | None = None
        self._reviewing: asyncio.Task[None] | None = None
        self._reports = JobReports(request.requester, transport, self._update)

    # ------------------------------------------------------------ what others ask

    @property
    def job_id(self) -> str:
        return self.config.job_id

    @property
    def state(self) -> JobState:
        return self.lifecycle.state

    @property
    def plan(self) -> Plan | None:
        """The plan that is carried out, None before there is one."""
        return self.keeper.plan

    @property
    def history(self) -> list[EpochResult]:
        return self.progress.history

    @property
    def epochs_done(self) -> float:
        return self._book.epochs_done if self._desk is not None else float(self.config.start_epoch)

    def stage_of(self, node_id: str) -> StagePlan | None:
        """Return the stage a node runs, None if it runs none."""
        return self.keeper.stage_of(node_id)

    def keeps(self, node_id: str, message: m.RegisterNode) -> bool:
        """Return True if the stage that a node says it holds is its own."""
        if message.job_id != self.job_id or self.lifecycle.ended:
            return False
        if self._overtaken(message):
            return False
        kept = message.cluster >= 0 and self.keeper.number_of(node_id) == message.cluster
        if kept:
            self._returning.discard(node_id)
            self._moved.set()
        return kept

    def elapsed_s(self) -> float:
        """Return the seconds since training started, 0 before."""
        if self._started_at is None:
            return 0.0
        return (self._stopped_at or time.monotonic()) - self._started_at

    # ------------------------------------------------------------ events

    def start(self) -> None:
        """Begin: enough nodes have joined."""
        self._spawn(self._reports.run(lambda: self.lifecycle.ended), "report")
        self.event(lifecycle.NodesReady())

    def restore(self, record: JobRecord, operations: tuple[LeaseOperation, ...], history: Sequence[EpochResult]) -> None:
        """Take over the job from a coordinator that is no more, before anything of it has started."""
        self.nodes = record.nodes
        self.config = replace(self.config, correction=record.correction)
        self._calls.nodes.update({node.node_id: node for node in record.nodes})
        self.keeper.restore(record)
        self._desk = LeaseDesk(self._make_book(record.plan), self._on_operation)
        self._desk.restore(record, operations)
        self._repairer = self._make_repairer(self._book)
        self._repairer.checkpoint = record.checkpoint
        self._order, self.repairs = record.order, record.repairs
        self.progress.history, self.progress.past = list(history), record.past
        self._started_at = time.monotonic() - record.elapsed_s
        self.lifecycle = lifecycle.JobLifecycle(
            self.job_id, evaluates=self.config.validation_samples > 0, state=JobState.REPAIRING, cancelled=record.cancelled
        )
        self.planned.set_result(record.plan)
        self._returning = {stage.node_id for stage in record.plan.stages} - set(record.gone)

    def take_over(self) -> None:
        """Go on with a job that was restored, as soon as its nodes have said that they are still there."""
        logger.warning("job_found_again job=%s generation=%d clusters=%d", self.job_id, self.keeper.generation, len(self.keeper.numbers))
        self._spawn(self._reports.run(lambda: self.lifecycle.ended), "report")
        self._spawn(self._await_nodes(), "await-nodes", step=True)

    async def _await_nodes(self) -> None:
        """Wait until all nodes have come back, or for RETURN_S; those that have not are lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETURN_S):
                while self._returning:
                    self._moved.clear()
                    await self._moved.wait()
        missing, self._returning = self._returning, set()
        for node_id in sorted(missing):
            self.node_lost(node_id, "did not come back to the coordinator")
        self.event(lifecycle.PlanBroken())

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
        self._reports.changed()
        self._write_down()
        self._on_change(self)

    def _write_down(self) -> None:
        """Let the store keep where the job is, so that another process can go on with it."""
        if self._desk is None or self._repairer is None or self.plan is None or self.lifecycle.ended:
            return
        keeper = self.keeper
        record = JobRecord(
            plan=self.plan,
            numbers=keeper.numbers,
            next_number=keeper.next_number,
            broken=tuple(sorted(keeper.broken)),
            gone=tuple(sorted(keeper.gone)),
            generation=keeper.generation,
            built=keeper.built,
            nodes=tuple(self._calls.nodes.values()),
            links=tuple(keeper.links),
            correction=self.config.correction,
            order=self._order,
            repairs=self.repairs,
            cancelled=self.lifecycle.cancelled,
            checkpoint=self._repairer.checkpoint,
            elapsed_s=self.elapsed_s(),
            past=self.progress.past,
            leases=self._book.record(),
            grants=self._desk.last_grants,
        )
        self._on_record(record)

    def lease(self, node_id: str, request: m.LeaseRequest) -> m.LeaseGrant:
        """Return leases for the cluster whose first stage asks. Raises ForbiddenError for any other node."""
        number = request.cluster
        self._check_first_stage(node_id, number)
        if self._overtaken(request):
            return m.LeaseGrant(leases=(), drained=True)
        if self._desk is not None and (given := self._desk.answered(number, request)) is not None:
            return given
        closed = number in self.keeper.broken or (self._repairer is not None and number in self._repairer.draining)
        if self._desk is None or closed or self.state not in LEASING:
            return m.LeaseGrant(leases=(), drained=True)
        grant = self._desk.grant(number, request)
        for lease in grant.leases:
            if not lease.training:
                self.progress.lease_given(number, lease)
        return grant

    def _overtaken(self, said: m.LeaseRequest | m.RegisterNode) -> bool:
        """Return True if a cluster has come further than the coordinator knows: what was trained cannot be told any more."""
        number = said.cluster
        replaced = number < self.keeper.next_number and number not in self.keeper.numbers
        if self._desk is None or replaced or self._desk.knows_of(number, granted=said.granted, reported=said.reported):
            return False
        what = f"cluster {number} has trained what the coordinator does not know of: its state directory shows an earlier state of the job"
        self.fail(StaleCoordinatorError(what))
        return True

    def leases_done(self, node_id: str, message: m.LeaseDone) -> None:
        """Take word that every stage of a cluster has applied these leases."""
        self._check_first_stage(node_id, message.cluster)
        if message.cluster in self.keeper.broken:
            raise ForbiddenError(f"the leases of cluster {message.cluster} were given to others")
        self._planned_desk.done(message.cluster, message.lease_ids)
        if self._repairer is not None:
            self._repairer.drained.set()
        self._check_drained()

    def evaluated(self, node_id: str, message: m.EvaluationDone) -> None:
        """Take the sums over some validation samples."""
        number = self.keeper.number_of(node_id)
        if number < 0 or number != message.cluster or self.state is not JobState.EVALUATING:
            raise ForbiddenError(f"node {node_id} reports an evaluation that it was not asked for")
        if self.progress.evaluated(number, message.number, message.result):
            self._book.done(number, (message.result.lease_id,))
        if self._book.all_done:
            self.event(lifecycle.EvaluationFinished())

    def stage_failed(self, node_id: str, message: m.StageFailed) -> None:
        """A node gave up its stage, which it still holds. Raises ForbiddenError if it has none."""
        number = self.keeper.number_of(node_id)
        if number < 0:
            raise ForbiddenError(f"node {node_id} runs no stage of job {self.job_id}")
        error = error_from_code(message.code, message.message, message.hint)
        logger.warning("stage_failed job=%s node=%s code=%s error=%s", self.job_id, node_id, error.code, error.message)
        if number != message.cluster or self.lifecycle.ended:
            return
        if message.peer:
            # Both ends of a link report that it broke: that is one quarrel.
            if number not in self.keeper.broken:
                self.keeper.quarrels.add(node_id, message.peer)
            self.suspect(node_id, message.peer)
        elif not isinstance(error, MENDED) or self._set_back():
            self.fail(error)
            return
        self._break(number)

    def suspect(self, node_id: str, peer: str) -> None:
        """A node could not reach another one. Raises ForbiddenError if it has no stage itself."""
        if self.stage_of(node_id) is None:
            raise ForbiddenError(f"node {node_id} runs no stage of job {self.job_id}")
        if self.stage_of(peer) is not None and peer not in self._checked:
            logger.info("node_doubted job=%s node=%s by=%s", self.job_id, peer, node_id)
            self._checked.add(peer)
            self._spawn(self._check(peer), "check")

    async def _check(self, node_id: str) -> None:
        """Ask a node that another could not reach whether it is there: if it does not answer soon, it is lost."""
        try:
            await self._calls.call(node_id, m.ProbeLinks(targets=(), payload_bytes=0), CHECK_S)
        except NodeLostError as error:
            self._lost_in_repair(node_id, error.message)
        finally:
            self._checked.discard(node_id)

    def node_lost(self, node_id: str, what: str) -> None:
        """A node is not there any more, or has lost its stage: the job goes on without it."""
        stage, concerned = self.stage_of(node_id), self.keeper.concerns(node_id)
        if self.lifecycle.ended or self.plan is None or not concerned:
            return
        where = f"stage {stage.index} of cluster {stage.cluster}" if stage is not None else "a stage that it was building"
        logger.warning("stage_lost job=%s node=%s stage=%s reason=%s", self.job_id, node_id, where, what)
        number = self.keeper.lose(node_id)
        if number >= 0:
            self._break(number, newly=True)
        elif self.state in MENDABLE:
            self.event(lifecycle.PlanBroken())
        self.pool_changed()

    def _break(self, number: int, *, newly: bool = False) -> None:
        known = number in self.keeper.broken and self._desk is not None and self._desk.released(number)
        self.keeper.broken.add(number)
        if self._desk is not None and not known:
            self._desk.release(number)
            self._write_down()
        if self.state in MENDABLE and (newly or not known or self.state is not JobState.REPAIRING):
            self.event(lifecycle.PlanBroken())

    def _set_back(self) -> bool:
        """Count a failure that may go away when it is tried again; True if there have been too many in a row."""
        self._setbacks += 1
        return self._setbacks > MOST_SETBACKS

    def pool_changed(self) -> None:
        """Nodes have come or gone: look whether another plan is better."""
        if self._repairer is not None:
            self._repairer.pool_changed()
        if self.state is not JobState.TRAINING:
            return
        if self._reviewing is not None and not self._reviewing.done():
            self._review.look_again()
            return
        self._reviewing = self._spawn(self._review.run(), "review", step=True)

    async def leave(self, node_id: str) -> None:
        """Return once a node has no stage any more. Raises JobRefusedError if the job cannot go on without it."""
        if self.stage_of(node_id) is None:
            return
        await self._review.let_leave(node_id)
        if self.state in MENDABLE:
            self.event(lifecycle.PlanBroken())
        while self.stage_of(node_id) is not None and not self.lifecycle.ended:
            self._moved.clear()
            await self._moved.wait()

    def heartbeat(self, metrics: StageMetrics) -> None:
        """Take the newest counters of a stage."""
        if self.keeper.number_of(metrics.node_id) == metrics.number:
            self.progress.metrics[metrics.node_id] = metrics

    def set_paused(self, nodes: frozenset[str]) -> None:
        """Take which nodes their owners have paused; the job waits for those that have a stage, however long that takes."""
        before, self._paused = self._paused, frozenset(filter(self.stage_of, nodes))
        if self._paused != before:
            self._reports.changed()

    def _check_first_stage(self, node_id: str, number: int) -> None:
        stage = self.stage_of(node_id)
        if stage is None or stage.index != 0 or self.keeper.number_of(node_id) != number:
            raise ForbiddenError(f"node {node_id} does not run the first stage of cluster {number}")

    def _check_drained(self) -> None:
        if self.state is JobState.TRAINING and self._book.all_done:
            self.event(lifecycle.TrainingDrained())

    @property
    def _planned_desk(self) -> LeaseDesk:
        assert self._desk is not None, "leases exist once the plan does"
        return self._desk

    @property
    def _book(self) -> LeaseBook:
        return self._planned_desk.book

    # ------------------------------------------------------------ instructions

    def _perform(self, instruction: lifecycle.JobInstruction) -> None:
        match instruction:
            case lifecycle.JobInstruction.MEASURE_LINKS:
                self._spawn(self._measure_and_plan(), "plan")
            case lifecycle.JobInstruction.PREPARE_STAGES:
                self._spawn(self._prepare_stages(), "prepare", step=True)
            case lifecycle.JobInstruction.OPEN_TRAINING:
                self._open_training()
            case lifecycle.JobInstruction.STOP_LEASING:
                self._book.stop()
                self._check_drained()
            case lifecycle.JobInstruction.AVERAGE:
                self._spawn(self._average(), "average", step=True)
            case lifecycle.JobInstruction.OPEN_EVALUATION:
                self._open_evaluation()
            case lifecycle.JobInstruction.SAVE_CHECKPOINT:
                self._spawn(self._save(), "save", step=True)
            case lifecycle.JobInstruction.REPAIR:
                for task in self._steps:
                    task.cancel()
                self._repairing = self._spawn(self._repair(), "repair", step=True)
            case lifecycle.JobInstruction.GO_ON:
                self._go_on()
            case lifecycle.JobInstruction.END_STAGES:
                self._stopped_at = time.monotonic()
                self._spawn(self._end_stages(), "end")

    async def _measure_and_plan(self) -> None:
        nodes, links = await measure_links(
            self.nodes,
            self._calls,
            deadline_s=self._settings.sync_s,
            least_nodes=self._request.wait_nodes,
            on_lost=self._on_lost,
        )
        self.nodes, self.keeper.links = nodes, links
        generator = random.Random(self.config.seed)
        plan = await asyncio.to_thread(make_plan, self._request.profile, nodes, links, self.config, generator)
        if self.lifecycle.ended:
            return
        self.keeper.begin(plan)
        self.config = replace(self.config, correction=chosen_correction(self.config, plan))
        logger.info("correction_chosen job=%s correction=%s", self.job_id, self.config.correction)
        self._desk = LeaseDesk(self._make_book(plan), self._on_operation)
        self._repairer = self._make_repairer(self._book)
        self.planned.set_result(plan)
        self.event(lifecycle.LinksMeasured())

    def _make_book(self, plan: Plan) -> LeaseBook:
        return LeaseBook(
            samples=self.config.samples,
            validation_samples=self.config.validation_samples,
            shares=tuple(cluster.share for cluster in plan.clusters),
            batch_size=self.config.batch_size,
            epochs=self.config.epochs,
            start_epoch=self.config.start_epoch,
            sync_interval=self.config.sync_interval,
            evaluate=self.config.validation_samples > 0,
        )

    def _make_repairer(self, book: LeaseBook) -> Repairer:
        return Repairer(
            job_id=self.job_id,
            seed=self.config.seed,
            keeper=self.keeper,
            book=book,
            calls=self._calls,
            transport=self._transport,
            requester=self.requester,
            settings=self._settings,
            pool=self._pool,
            on_lost=self._lost_in_repair,
        )

    def _prepare_message(self, cluster: ClusterPlan, stage: StagePlan, way: Transition) -> m.PrepareStage:
        returned = self._repairer.returned if self._repairer is not None else None
        checkpoint = returned.checkpoint if returned is not None else ""
        return m.PrepareStage(
            config=replace(self.config, start_updates=self._schedule_steps()),
            plan=way.plan,
            cluster=cluster.index,
            stage=stage.index,
            peers=(),
            requester=self.requester,
            resume=self._request.resume and not checkpoint,
            order=self._order,
            checkpoint=checkpoint,
        )

    async def _prepare_stages(self) -> None:
        await self.keeper.build()
        if not self.lifecycle.ended:
            self.event(lifecycle.StagesReady())

    def _open_training(self) -> None:
        if self._started_at is None:
            self._started_at = time.monotonic()
            self._reviewing = self._spawn(self._review.run(), "review", step=True)
        self._book.open_training()
        self._spawn(self._continue(), "continue", step=True)

    def _open_evaluation(self) -> None:
        self.progress.open_evaluation()
        self._book.open_evaluation()
        self._spawn(self._continue(), "continue", step=True)

    async def _continue(self) -> None:
        await self.keeper.let_go_on(self._planned().stages)

    async def _average(self) -> None:
        self._order += 1
        message = m.AverageNow(job_id=self.job_id, order=self._order)

        async def average(stage: StagePlan) -> None:
            reply = await self._calls.call(stage.node_id, message, self._settings.sync_s)
            if isinstance(reply, m.StageReport):
                self.heartbeat(reply.metrics)

        await together(average(stage) for stage in self._planned().stages)
        if not self.lifecycle.ended:
            self.event(lifecycle.ClustersAveraged())

    async def _save(self) -> None:
        plan, epoch = self._planned(), int(self.epochs_done)
        final = self._ends_here
        self.progress.record(epoch=epoch, samples=self._book.samples_done, seconds=self.elapsed_s())
        self._attempt += 1
        snapshot = Snapshot(
            name=f"stopped-{epoch:04d}" if self.lifecycle.cancelled else f"epoch-{epoch:04d}",
            # A coordinator that takes over counts from 0 again, but with another generation.
            attempt=self.keeper.generation * ATTEMPTS + self._attempt,
            epoch=epoch,
            updates=self._schedule_steps(),
            plan=plan,
            mark=self._book.mark(),
            background=not final and self._checkpoints.trusted,
        )
        if self._uploading is not None and not self._uploading.done() and not final:
            self._checkpoints.skip(snapshot, "the one before is still being uploaded")
        else:
            await self._end_upload()
            await self._checkpoints.take(snapshot)
            # It may have been stopped meanwhile: there is nothing to go on with then.
            if snapshot.background and not self._ends_here:
                self._uploading = self._spawn(self._await_upload(snapshot), "upload", step=True)
            else:
                await self._complete(snapshot)
        if not self.lifecycle.ended:
            self.event(lifecycle.CheckpointSaved(finished=self._book.at_end))

    @property
    def _ends_here(self) -> bool:
        """True if the job does not go on after this synchronisation point."""
        return self.lifecycle.cancelled or self._book.at_end

    async def _end_upload(self) -> None:
        if self._uploading is not None:
            self._uploading.cancel()
            await asyncio.gather(self._uploading, return_exceptions=True)

    async def _await_upload(self, snapshot: Snapshot) -> None:
        """Complete a checkpoint while training goes on; if that fails, the one before stays the newest."""
        try:
            await self._complete(snapshot)
        except asyncio.CancelledError:
            self._checkpoints.abandon(snapshot, GIVEN_UP)
            raise
        except RoostError as error:
            # The requester cannot write: it would fail again.
            if isinstance(error, CheckpointError):
                raise
            self._checkpoints.abandon(snapshot, error.message)
        finally:
            self._reports.changed()

    async def _complete(self, snapshot: Snapshot) -> None:
        path = await self._checkpoints.complete(snapshot)
        self._book.kept(snapshot.mark)
        self._setbacks = 0
        if self._repairer is not None:
            self._repairer.checkpoint = snapshot.name
        self.progress.saved(snapshot.epoch, path)
        logger.info("checkpoint_complete job=%s checkpoint=%s background=%s", self.job_id, snapshot.name, snapshot.background)
        self._reports.changed()
        self._write_down()
        self._on_change(self)

    def stage_saved(self, node_id: str, message: m.StageSaved) -> None:
        """A node has uploaded its part of a checkpoint, or could not."""
        self._checkpoints.saved(node_id, message)

    def _schedule_steps(self) -> int:
        done = self._book.batches_done if self._desk is not None else 0
        return self.config.start_updates + done

    # ------------------------------------------------------------ another plan

    async def _repair(self) -> None:
        assert self._repairer is not None, "nothing is repaired before it is planned"
        await self._repairer.repair(self._order, leaving=self._review.leaving)
        if self.lifecycle.ended or self._repairing is not asyncio.current_task():
            return
        self.repairs += 1
        self._planned_desk.all_mended(self.keeper.numbers)
        self._review.forget_left()
        self._moved.set()
        numbers = set(self.keeper.numbers)
        self.progress.keep_only(lambda metrics: metrics.number in numbers)
        self.event(lifecycle.PlanRepaired())
        # Only what was broken has been changed.
        self.pool_changed()

    def _go_on(self) -> None:
        self._book.drop_evaluation()
        if self._book.phase is LeasePhase.CLOSED:
            self._open_training()
            return
        self._spawn(self._continue(), "continue", step=True)
        self._check_drained()

    def _lost_in_repair(self, node_id: str, what: str) -> None:
        self._on_lost(node_id, what)
        # It may be there, and registered, but have lost its stage.
        self.node_lost(node_id, what)

    def _change_plan(self, following: Plan, pool: Sequence[NodeProfile]) -> None:
        """Nothing is broken, but another plan is better."""
        assert self._repairer is not None, "a plan is reviewed only while it trains"
        self._repairer.expect(following, pool)
        self.event(lifecycle.PlanBroken())

    # ------------------------------------------------------------ the end

    async def _end_stages(self) -> None:
        reason = self.error.message if self.error is not None else "the job is over"
        message = m.EndJob(job_id=self.job_id, reason=reason[:500])

        async def end(stage: StagePlan) -> None:
            try:
                reply = await self._calls.call(stage.node_id, message, END_DEADLINE_S)
            except RoostError as error:
                # The node may be what failed; it drops the stage by itself once it hears from the coordinator again.
                logger.warning("stage_not_ended job=%s node=%s error=%s", self.job_id, stage.node_id, error.message)
                if isinstance(error, NodeLostError):
                    self._on_lost(stage.node_id, error.message)
                return
            if isinstance(reply, m.StageReport):
                self.heartbeat(reply.metrics)

        for task in self._steps:
            task.cancel()
        stages = [stage for stage in (self.plan.stages if self.plan is not None else ()) if stage.node_id not in self.keeper.gone]
        await asyncio.gather(*(end(stage) for stage in stages))
        await self._reports.send()
        self.ended.set()
        self._moved.set()
        self._reports.changed()
        self._on_change(self)

    # ------------------------------------------------------------ reports

    def repeat_last_update(self) -> None:
        """Send the end of the job again: a requester that still sends heartbeats has not heard of it."""
        if self.ended.is_set():
            self._spawn(self._reports.send(), "repeat-update")

    def _update(self) -> m.JobUpdate:
        return m.JobUpdate(
            job_id=self.job_id,
            state=self.state,
            epochs_done=self.epochs_done,
            elapsed_s=self.elapsed_s(),
            metrics=self.progress.every,
            history=tuple(self.history),
            cancelled=self.lifecycle.cancelled,
            error=failed_from(self.error) if self.error is not None else None,
            repairs=self.repairs,
            paused=tuple(sorted(self._paused)),
            checkpoints=self._checkpoints.events,
        )

    # ------------------------------------------------------------ tasks

    def _planned(self) -> Plan:
        assert self.plan is not None, "asked for only after planning"
        return self.plan

    def _spawn(self, work: Coroutine[Any, Any, None], name: str, *, step: bool = False) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{name}-{self.job_id}")
        self._tasks.add(task)
        if step:
            self._steps.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        step = task in self._steps
        repairs = task is self._repairing
        self._steps.discard(task)
        if task.cancelled() or (raised := task.exception()) is None:
            return
        error = first_error(raised)
        if not isinstance(error, RoostError):
            logger.error("job_task_broke job=%s task=%s", self.job_id, task.get_name(), exc_info=error)
            error = StageFailedError(f"the coordinator failed in {task.get_name()}: {type(error).__name__}: {error}")
        if step and self.state is JobState.REPAIRING and not repairs:
            logger.info("step_superseded job=%s task=%s error=%s", self.job_id, task.get_name(), error.message)
        elif step and self.state in MENDABLE and not repairs:
            self._step_failed(error)
        else:
            self.fail(error)

    def _step_failed(self, error: RoostError) -> None:
        """A step of the job's life did not succeed: without the node that is to blame it is tried again."""
        if isinstance(error, NodeLostError) and error.node:
            self._lost_in_repair(error.node, error.message)
        elif self.state is not JobState.PREPARING and isinstance(error, RequesterLostError):
            # The repair waits for it, too.
            logger.warning("requester_away job=%s error=%s", self.job_id, error.message)
            self.event(lifecycle.PlanBroken())
        elif self.state is JobState.PREPARING or not isinstance(error, RETRIED) or self._set_back():
            self.fail(error)
        else:
            logger.warning("step_failed job=%s state=%s error=%s", self.job_id, self.state, error.message)
            self.event(lifecycle.PlanBroken())

    async def close(self) -> None:
        """Cancel what is still under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
