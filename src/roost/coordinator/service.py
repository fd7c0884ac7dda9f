"""The coordinator: knows the nodes, runs one job at a time, tells who asks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from roost import messages as m
from roost.config import CoordinatorConfig
from roost.coordinator.job_runner import JobRunner
from roost.coordinator.pool_planner import check_request, plan_for_pool
from roost.coordinator.store import ENDED, Store
from roost.errors import (
    EmptyPoolError,
    ForbiddenError,
    JobRefusedError,
    MalformedMessageError,
    RequesterLostError,
    StageFailedError,
    VersionMismatchError,
)
from roost.protocol import membership
from roost.transport.dispatch import failed_from
from roost.transport.interface import Buffer, Sender, Transport
from roost.types import EpochResult, NodeProfile

logger = logging.getLogger(__name__)

QUICK_NODES = 500
"""Up to so many nodes send heartbeats as often as is configured; of more, each sends them less often."""
LEAST_SILENCE_S = 2.0
LEAST_BEATS = 4
"""A node that has missed fewer heartbeats, or was silent for less than LEAST_SILENCE_S, is never given up."""
LEAVE_S = 600.0
"""How long a node that wants to leave may have to wait for another to take its stage."""
ABANDONED_S = 3.0
"""A requester sends a heartbeat every second: one that submits a job and has sent none for so long has lost the job it had."""
ABANDONED_END_S = 10.0
"""How long the nodes of such a job may take to be free."""
CLOSE_S = 3.0
"""How long a coordinator that is stopped waits for nodes and requester to hear of it."""


@dataclass(kw_only=True)
class Submission:
    """A job that waits for nodes to join."""

    job_id: str
    requester_id: str
    withdrawn: bool = False


class Coordinator:
    """The handler of the matchmaking process. Times come from the monotonic clock; the store gets wall-clock times."""

    def __init__(self, *, config: CoordinatorConfig, transport: Transport, store: Store) -> None:
        self._config = config
        self._transport = transport
        self._store = store
        self._nodes = membership.NodeTable(lost_after_s=config.lost_after_s, least_s=max(LEAST_SILENCE_S, LEAST_BEATS * config.heartbeat_s))
        self._profiles: dict[str, NodeProfile] = {}
        self._torch_versions: dict[str, str] = {}
        self._paused: set[str] = set()
        self._joined = asyncio.Condition()
        self._job: JobRunner | None = None
        self._submission: Submission | None = None
        self._planning: Submission | None = None
        """A job whose plan is asked for, while links are measured and it is planned."""
        self._saved_plan = ""
        self._saved_history: frozenset[EpochResult] = frozenset()  # of the same job, as it is in the store
        self._requester_heard = 0.0

    async def watch(self) -> None:
        """Look for nodes and requesters that have fallen silent, until cancelled."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            now = time.monotonic()
            deaf_s = now - looked - self._config.heartbeat_s
            if deaf_s > self._config.heartbeat_s:
                # This process, or its whole machine, has stood still: nobody can have been heard.
                logger.warning("coordinator_stalled seconds=%.1f", deaf_s)
                self._nodes.excuse(deaf_s)
                self._requester_heard += deaf_s
            looked = now
            await self._expire(now)

    def restore(self) -> None:
        """Find the job again that ran when the coordinator before this one ended; call it before the transport starts.

        One that had not been planned has failed.
        """
        for stored in self._store.unfinished_jobs():
            job_id = stored.config.job_id
            found = self._store.running(job_id)
            if found is None or self._job is not None:
                lost = StageFailedError(f"the coordinator ended before job {job_id} was planned", hint="Submit it again.")
                self._store.set_state(job_id, m.JobState.FAILED, now=time.time(), error=failed_from(lost))
                self._store.forget_running(job_id)
                continue
            request, record, operations = found
            self._job = self._make_job(request, record.nodes)
            history = self._store.history(job_id)
            self._job.restore(record, operations, history)
            self._saved_history = frozenset(history)
            self._requester_heard = time.monotonic()

    def take_over(self) -> None:
        """Go on with the job that was found again; call it once the transport has started."""
        if self._job is not None:
            self._job.take_over()

    async def close(self) -> None:
        """Stop. A job that is planned goes on without a coordinator, and is found again by the next one; nodes are not waited for."""
        if self._submission is not None:
            await self._withdraw(self._submission)
        job = self._job
        if job is None:
            return
        if not job.lifecycle.ended:
            if job.plan is None:
                job.fail(StageFailedError("the coordinator was stopped", hint="Start it again, then submit the job again."))
            else:
                logger.warning("job_left job=%s hint=%r", job.job_id, "start the coordinator again with the same state directory")
        if job.lifecycle.ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await job.ended.wait()
        await job.close()

    # ------------------------------------------------------------ messages

    async def on_call(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> tuple[m.Message, Sequence[Buffer]]:
        """Answer one call. Raises RoostError, which goes back to the caller."""
        match message:
            case m.RegisterNode():
                return await self._register(sender, message), []
            case m.Heartbeat():
                return await self._heartbeat(sender, message), []
            case m.LeaseDone():
                self._running(message.job_id).leases_done(sender.peer_id, message)
                return m.Done(), []
            case m.EvaluationDone():
                self._running(message.job_id).evaluated(sender.peer_id, message)
                return m.Done(), []
            case m.StageFailed():
                self._running(message.job_id).stage_failed(sender.peer_id, message)
                return m.Done(), []
            case m.StageSaved():
                self._running(message.job_id).stage_saved(sender.peer_id, message)
                return m.Done(), []
            case m.PeerSuspected():
                self._running(message.job_id).suspect(sender.peer_id, message.peer)
                return m.Done(), []
            case m.LeaveRequest():
                await self._leave(sender)
                return m.Done(), []
            case m.LeaseRequest():
                return self._running(message.job_id).lease(sender.peer_id, message), []
            case m.SubmitJob():
                return await self._submit(sender, message), []
            case m.PlanRequest():
                return await self._plan(sender, message), []
            case m.RequesterHeartbeat():
                return self._requester_there(sender, message.job_id), []
            case m.CancelJob():
                await self._cancel(sender, message.job_id)
                return m.Done(), []
            case m.StatusRequest():
                return self._status(time.monotonic()), []
            case _:
                raise MalformedMessageError(f"the coordinator does not answer {type(message).__name__}")

    async def on_message(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> None:
        """Everything that the coordinator is told, it answers."""
        raise MalformedMessageError(f"the coordinator does not take {type(message).__name__}")

    # ------------------------------------------------------------ nodes

    async def _register(self, sender: Sender, message: m.RegisterNode) -> m.Registered:
        if message.protocol_version != m.PROTOCOL_VERSION:
            raise VersionMismatchError(
                f"node {sender.peer_id} speaks protocol {message.protocol_version} (roost {message.roost_version}), "
                f"this coordinator speaks {m.PROTOCOL_VERSION}"
            )
        if message.profile.node_id != sender.peer_id:
            raise ForbiddenError(f"{sender.peer_id} registers as {message.profile.node_id}")
        self._profiles[sender.peer_id] = message.profile
        self._torch_versions[sender.peer_id] = message.torch_version
        kept = self._job is not None and self._job.keeps(sender.peer_id, message)
        if not kept and self._job is not None:
            self._job.node_lost(sender.peer_id, "was started again")
        self._nodes.handle(membership.NodeJoined(node_id=sender.peer_id, now=time.monotonic()))
        logger.info("node_registered node=%s address=%s kept=%s", sender.peer_id, message.profile.address, kept)
        self._note_pause(sender.peer_id, message.paused)
        if self._job is not None:
            self._assign(self._job)
            self._job.pool_changed()
        async with self._joined:
            self._joined.notify_all()
        # The heartbeats of a very large pool must not fill the coordinator's processor.
        heartbeat_s = self._config.heartbeat_s * max(1.0, len(self._profiles) / QUICK_NODES)
        return m.Registered(heartbeat_s=heartbeat_s, keep=kept)

    async def _leave(self, sender: Sender) -> None:
        job = self._job
        if job is None or job.lifecycle.ended:
            return
        async with asyncio.timeout(LEAVE_S):
            await job.leave(sender.peer_id)

    def _note_pause(self, node_id: str, paused: bool) -> bool:
        """Remember whether the owner of a node has paused it; return whether that is news."""
        if paused == (node_id in self._paused):
            return False
        (self._paused.add if paused else self._paused.discard)(node_id)
        logger.info("%s node=%s", "node_paused" if paused else "node_resumed", node_id)
        if self._job is not None:
            self._job.set_paused(frozenset(self._paused))
        return True

    async def _heartbeat(self, sender: Sender, message: m.Heartbeat) -> m.Done:
        if sender.peer_id not in self._profiles:
            raise JobRefusedError(f"node {sender.peer_id} is not registered", hint="It registers again by itself.")
        for _ in self._nodes.handle(membership.NodeHeard(node_id=sender.peer_id, now=time.monotonic())):
            raise JobRefusedError(f"node {sender.peer_id} must register again: it was given up for lost", hint="It does so by itself.")
        if self._note_pause(sender.peer_id, message.paused) and not message.paused:
            async with self._joined:
                self._joined.notify_all()
        if message.job_id:
            job = self._running(message.job_id)
            if message.metrics is not None:
                if message.metrics.node_id != sender.peer_id:
                    raise ForbiddenError(f"{sender.peer_id} reports metrics of {message.metrics.node_id}")
                job.heartbeat(message.metrics)
        return m.Done()

    async def _expire(self, now: float) -> None:
        for node_id in self._nodes.expire(now):
            del self._profiles[node_id]
            self._note_pause(node_id, False)
            self._node_lost(node_id, "has not been heard of for too long")
        if now - self._requester_heard <= self._requester_patience():
            return
        job = self._job
        if job is not None and not job.lifecycle.ended:
            seconds = now - self._requester_heard
            job.fail(RequesterLostError(f"requester {job.requester.peer_id} has not been heard of for {seconds:.0f} s"))
        if self._submission is not None:
            await self._withdraw(self._submission)

    def _requester_patience(self) -> float:
        """Return the seconds of silence after which a requester is given up: one whose job trains may come back."""
        trains = self._job is not None and self._job.plan is not None and self._submission is None
        return self._config.requester_away_s if trains else self._config.lost_after_s

    def _node_unreachable(self, node_id: str, why: str) -> None:
        """Give up a node that a job could not reach, so that the next job does not count on it."""
        if node_id in self._profiles:
            del self._profiles[node_id]
            self._note_pause(node_id, False)
            self._nodes.handle(membership.NodeSilent(node_id=node_id))
            self._node_lost(node_id, f"cannot be reached: {why}")

    def _node_lost(self, node_id: str, what: str) -> None:
        logger.warning("node_lost node=%s reason=%s", node_id, what)
        if self._job is not None:
            self._job.node_lost(node_id, what)

    # ------------------------------------------------------------ jobs

    async def _submit(self, sender: Sender, message: m.SubmitJob) -> m.JobAccepted:
        if message.protocol_version != m.PROTOCOL_VERSION:
            raise VersionMismatchError(f"the requester speaks protocol {message.protocol_version}, this coordinator {m.PROTOCOL_VERSION}")
        if message.requester.peer_id != sender.peer_id:
            raise ForbiddenError(f"{sender.peer_id} submits a job for {message.requester.peer_id}")
        await self._end_abandoned(sender)
        self._refuse_if_busy()
        self._submission = submission = Submission(job_id=message.config.job_id, requester_id=sender.peer_id)
        self._requester_heard = time.monotonic()
        try:
            nodes = await self._wait_for_nodes(message, submission)
            self._check_versions(message.torch_version, nodes)
            self._store.add_job(message.config, now=time.time())
            self._store.add_request(message.config.job_id, message)
            self._job = job = self._make_job(message, nodes)
        finally:
            self._submission = None
        job.start()
        plan = await asyncio.shield(job.planned)
        return m.JobAccepted(plan=plan, nodes=job.nodes)

    async def _end_abandoned(self, sender: Sender) -> None:
        """End the job of a requester that has started anew: one that still has it sends heartbeats."""
        job = self._job
        if job is None or job.lifecycle.ended or job.requester.peer_id != sender.peer_id:
            return
        await asyncio.sleep(max(0.0, self._requester_heard + ABANDONED_S - time.monotonic()))
        if time.monotonic() - self._requester_heard < ABANDONED_S or job.lifecycle.ended:
            return
        job.fail(RequesterLostError(f"requester {sender.peer_id} was started again and submits another job"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABANDONED_END_S):
                await job.ended.wait()

    def _make_job(self, request: m.SubmitJob, nodes: Sequence[NodeProfile]) -> JobRunner:
        job_id = request.config.job_id
        self._saved_history = frozenset()
        return JobRunner(
            request=request,
            nodes=nodes,
            config=self._config,
            transport=self._transport,
            on_change=self._job_changed,
            on_lost=self._node_unreachable,
            pool=self._usable,
            on_record=partial(self._store.set_record, job_id),
            on_operation=partial(self._store.add_operation, job_id),
        )

    async def _plan(self, sender: Sender, message: m.PlanRequest) -> m.PoolPlan:
        """Return what a job would get. Links are not measured while a job runs: that would slow it, and measure it."""
        check_request(message)
        self._refuse_if_busy()
        submission = Submission(job_id=message.config.job_id, requester_id=sender.peer_id)
        nodes = await self._wait_for_nodes(message, submission)
        if message.torch_version:
            self._check_versions(message.torch_version, nodes)
        self._refuse_if_busy()
        self._planning = submission
        try:
            return await plan_for_pool(message, nodes, self._transport, on_lost=self._node_unreachable)
        finally:
            self._planning = None

    def _refuse_if_busy(self) -> None:
        job = self._job
        if self._planning is not None:
            raise JobRefusedError(
                f"the coordinator is busy: it measures links for a plan that {self._planning.requester_id} asked for",
                hint="Try again in a few seconds.",
            )
        if self._submission is not None:
            raise JobRefusedError(f"the coordinator is busy: job {self._submission.job_id} waits for nodes")
        if job is not None and not job.ended.is_set():
            raise JobRefusedError(f"the coordinator is busy with job {job.job_id} of {job.requester.peer_id}")

    async def _cancel(self, sender: Sender, job_id: str) -> None:
        job = self._of_requester(sender, job_id)
        if job is not None:
            job.cancel()
        elif self._submission is not None:
            await self._withdraw(self._submission)

    async def _withdraw(self, submission: Submission) -> None:
        submission.withdrawn = True
        async with self._joined:
            self._joined.notify_all()

    async def _wait_for_nodes(self, message: m.SubmitJob | m.PlanRequest, submission: Submission) -> list[NodeProfile]:
        wanted = max(1, message.wait_nodes)
        try:
            async with asyncio.timeout(message.wait_s), self._joined:
                await self._joined.wait_for(lambda: len(self._free()) >= wanted or submission.withdrawn)
        except TimeoutError:
            paused = f", and {len(self._paused)} that their owners have paused" if self._paused else ""
            raise EmptyPoolError(f"{len(self._free())} of {wanted} nodes have joined after {message.wait_s:.0f} s{paused}") from None
        if submission.withdrawn:
            raise JobRefusedError(f"job {message.config.job_id} was withdrawn before it was planned", hint="Submit it again.")
        return [self._profiles[node_id] for node_id in self._free()]

    def _free(self) -> list[str]:
        return [node_id for node_id in self._nodes.in_state(membership.NodeState.JOINED) if node_id not in self._paused]

    def _usable(self) -> list[NodeProfile]:
        """Return the nodes that the running job may use: those it has, and those that are free."""
        job = self._job
        used = {stage.node_id for stage in job.plan.stages} if job is not None and job.plan is not None else set()
        names = [*self._free(), *(node_id for node_id in self._nodes.in_state(membership.NodeState.ACTIVE) if node_id in used)]
        return [self._profiles[node_id] for node_id in sorted(names)]

    def _check_versions(self, torch_version: str, nodes: Sequence[NodeProfile]) -> None:
        release = _release(torch_version)
        for node in nodes:
            found = self._torch_versions[node.node_id]
            if _release(found) != release:
                raise VersionMismatchError(f"node {node.node_id} has torch {found}, the requester {torch_version}")

    def _job_changed(self, job: JobRunner) -> None:
        self._assign(job)
        job.set_paused(frozenset(self._paused))
        now = time.time()
        if job.plan is not None and self._saved_plan != job.job_id:
            self._store.set_plan(job.job_id, job.plan, now=now)
            self._saved_plan = job.job_id
        self._store.set_state(job.job_id, job.state, now=now, error=failed_from(job.error) if job.error is not None else None)
        for result in job.history:
            if result not in self._saved_history:
                self._store.add_result(job.job_id, result, now=now)
        self._saved_history = frozenset(job.history)
        if job.lifecycle.ended:
            self._store.forget_running(job.job_id)

    def _assign(self, job: JobRunner) -> None:
        """Mark the nodes of a plan as taken while its job runs, and as free afterwards."""
        used = {stage.node_id for stage in job.plan.stages if job.stage_of(stage.node_id)} if job.plan is not None else set()
        for node_id in self._nodes.in_state(membership.NodeState.JOINED):
            if node_id in used and not job.lifecycle.ended:
                self._nodes.handle(membership.NodeAssigned(node_id=node_id))
        for node_id in self._nodes.in_state(membership.NodeState.ACTIVE):
            if job.ended.is_set() or (node_id not in used and not job.lifecycle.ended):
                self._nodes.handle(membership.NodeFreed(node_id=node_id))

    def _running(self, job_id: str) -> JobRunner:
        if self._job is None or self._job.job_id != job_id or self._job.lifecycle.ended:
            raise JobRefusedError(f"job {job_id} is not running here")
        return self._job

    def _requester_there(self, sender: Sender, job_id: str) -> m.Message:
        try:
            job = self._of_requester(sender, job_id)
        except JobRefusedError:
            stored = self._store.job(job_id)
            if stored is None or stored.state not in ENDED:
                raise
            return m.JobEnded(state=stored.state, history=self._store.history(job_id), error=stored.error)
        self._requester_heard = time.monotonic()
        if job is not None:
            job.repeat_last_update()
        return m.Done()

    def _of_requester(self, sender: Sender, job_id: str) -> JobRunner | None:
        """Return the requester's job, None while it waits for nodes. Raises JobRefusedError, ForbiddenError if it is another's."""
        submission, job = self._submission, self._job
        if submission is not None and submission.job_id == job_id:
            owner, found = submission.requester_id, None
        elif job is not None and job.job_id == job_id:
            owner, found = job.requester.peer_id, job
        else:
            raise JobRefusedError(f"job {job_id} is not running here")
        if owner != sender.peer_id:
            raise ForbiddenError(f"job {job_id} belongs to {owner}, not to {sender.peer_id}")
        return found

    def _status(self, now: float) -> m.Status:
        job = self._job
        nodes = []
        for node_id, profile in sorted(self._profiles.items()):
            stage = job.stage_of(node_id) if job is not None and not job.lifecycle.ended else None
            nodes.append(
                m.NodeStatus(
                    profile=profile,
                    state="paused" if node_id in self._paused else self._nodes.state(node_id),
                    last_heard_s=now - self._nodes.last_heard(node_id),
                    cluster=stage.cluster if stage is not None else -1,
                    stage=stage.index if stage is not None else -1,
                )
            )
        return m.Status(
            nodes=tuple(nodes),
            job_id=job.job_id if job is not None else "",
            job_state=job.state if job is not None else "",
            plan=job.plan if job is not None else None,
            metrics=tuple(job.progress.metrics.values()) if job is not None else (),
            epochs_done=job.epochs_done if job is not None else 0.0,
        )


def _release(version: str) -> tuple[str, ...]:
    """Return major and minor of a torch version; '2.13.0+cpu' and '2.13.1' compute the same graphs."""
    return tuple(version.split("+")[0].split(".")[:2])
