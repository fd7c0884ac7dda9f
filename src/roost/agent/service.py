"""The agent: registers its node, answers the coordinator and its peers, holds at most one stage."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

import roost
from roost import messages as m
from roost.agent.assignment import Assignment, assignment_from, changed_assignment
from roost.agent.builder import build_stage
from roost.agent.compute import ComputeThread
from roost.agent.links import measure_links
from roost.agent.message_probe import MessageProbe
from roost.agent.reporter import AWAY, patiently
from roost.agent.stage_copy import StageCopy
from roost.agent.stage_driver import StageDriver, failure_of
from roost.agent.state_transfer import state_reply
from roost.agent.switches import OwnerSwitch
from roost.config import LEAVE_FILE, PAUSE_FILE, AgentConfig
from roost.errors import (
    DeadlineError,
    ForbiddenError,
    JobRefusedError,
    MalformedMessageError,
    PeerUnreachableError,
    RoostError,
    StageFailedError,
    TransportError,
)
from roost.pipeline.allocator import release_freed_memory
from roost.transport.interface import Buffer, Lane, Sender, Transport
from roost.types import NodeProfile, Peer, Role

logger = logging.getLogger(__name__)

RECONNECT_S = 2.0
LEAVE_S = 600.0
"""How long another node may take to take over the stage of one that leaves."""
ORPHANED_S = 1800.0
"""How long a node keeps its stage while no coordinator is there: one that is started again finds it."""


class Agent:
    """The handler of a node."""

    def __init__(self, *, config: AgentConfig, transport: Transport, coordinator: Peer, profile: NodeProfile) -> None:
        self._config = config
        self._transport = transport
        self._coordinator = coordinator
        self._profile = profile
        lines = [line for line in (config.uplink_bytes_per_s, config.downlink_bytes_per_s) if line]
        self._message_probe = MessageProbe(transport, line_bytes_per_s=min(lines, default=0.0))
        self._compute = ComputeThread(threads=profile.threads, relative_speed=config.relative_speed)
        self._pause = OwnerSwitch(config.state_dir, PAUSE_FILE)
        self._leave = OwnerSwitch(config.state_dir, LEAVE_FILE)
        self._left = False
        self._news = asyncio.Event()  # something that the coordinator should hear of before the next heartbeat is due
        self._driver: StageDriver | None = None
        self._before: StageDriver | None = None
        """The stage that the node had before the one it has now, as long as others may fetch from it."""
        self._copy: tuple[StageCopy, asyncio.Task[None]] | None = None
        self._borrowers: frozenset[str] = frozenset()
        """Nodes that may fetch the state of the stage."""
        self._building: tuple[str, asyncio.Task[StageDriver]] | None = None
        self._registered = asyncio.Event()
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def node_id(self) -> str:
        return self._config.node_id

    async def run(self) -> None:
        """Serve until cancelled, or until the node has left: register, send heartbeats, register again when the coordinator comes back."""
        self._compute.start()
        self._transport.watch_streams(self._stream_broke)
        if self._pause.look():
            self._paused_or_resumed(self._pause.on)
        await self._transport.start(self)
        self._leave.clear()
        watching = [
            asyncio.create_task(self._pause.watch(self._paused_or_resumed), name="pause-watch"),
            asyncio.create_task(self._leave.watch(lambda on: self.leave() if on else None), name="leave-watch"),
        ]
        try:
            await self._measure_messages()
            registered, pause_s, heard = False, RECONNECT_S, time.monotonic()
            while not self._left:
                try:
                    if registered:
                        await self._heartbeat()
                    else:
                        pause_s = await self._register()
                        registered = True
                    heard = time.monotonic()
                    await self._until_heartbeat(pause_s)
                except TransportError as error:
                    logger.warning("coordinator_unreachable node=%s error=%s", self.node_id, error.message)
                    if time.monotonic() - heard > ORPHANED_S:
                        await self._drop_stage("no coordinator has been there for too long")
                    await asyncio.sleep(RECONNECT_S)
                except JobRefusedError:
                    # The coordinator was started again, or has given this node up: it says what becomes of the stage.
                    registered = False
        finally:
            for task in (*watching, *self._ending):
                task.cancel()
            self._stop_following()
            self._leave.clear()
            await self._drop_stage("the agent stops")
            await self._transport.stop()
            self._compute.stop()

    def leave(self) -> None:
        """Give the stage to another node, if there is one, and then end; nothing changes if the job cannot do without this node."""
        task = asyncio.create_task(self._give_up_stage(), name="leave")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _give_up_stage(self) -> None:
        logger.warning("leaving node=%s", self.node_id)
        try:
            await self._transport.call(self._coordinator, m.LeaveRequest(), deadline_s=LEAVE_S)
        except AWAY as error:
            logger.warning("left_without_word node=%s error=%s", self.node_id, error.message)
        except RoostError as error:
            logger.error("cannot_leave node=%s error=%s hint=%r", self.node_id, error.message, error.hint)
            self._leave.clear()
            return
        self._left = True
        self._news.set()

    def _paused_or_resumed(self, paused: bool) -> None:
        (self._compute.pause if paused else self._compute.resume)()
        logger.info("%s node=%s", "node_paused" if paused else "node_resumed", self.node_id)
        self._news.set()

    async def _until_heartbeat(self, seconds: float) -> None:
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    async def _measure_messages(self) -> None:
        cost = await self._message_probe.measure()
        self._profile = replace(
            self._profile, address=self._transport.address, message_s=cost.message_s, wire_s_per_byte=cost.wire_s_per_byte
        )

    async def _register(self) -> float:
        job = self._driver.assignment if self._driver is not None else None
        feeder = self._driver.feeder if self._driver is not None else None
        message = m.RegisterNode(
            protocol_version=m.PROTOCOL_VERSION,
            roost_version=roost.__version__,
            torch_version=torch.__version__,
            profile=self._profile,
            paused=self._pause.on,
            job_id=job.job_id if job is not None else "",
            cluster=job.number if job is not None else -1,
            generation=job.generation if job is not None else 0,
            granted=feeder.granted if feeder is not None else 0,
            reported=feeder.reported if feeder is not None else 0,
        )
        reply = (await self._transport.call(self._coordinator, message)).message
        if not isinstance(reply, m.Registered):
            raise MalformedMessageError(f"the coordinator answered a registration with {type(reply).__name__}")
        if not reply.keep:
            await self._drop_stage("the coordinator has given it to another node, or does not know its job")
        logger.info("registered node=%s address=%s kept=%s", self.node_id, self._profile.address, reply.keep)
        self._registered.set()
        return reply.heartbeat_s

    async def _heartbeat(self) -> None:
        driver = self._driver
        job_id = driver.assignment.job_id if driver is not None else ""
        message = m.Heartbeat(job_id=job_id, metrics=driver.metrics() if driver is not None else None, paused=self._pause.on)
        await self._transport.call(self._coordinator, message)

    # ------------------------------------------------------------ calls

    async def on_call(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> tuple[m.Message, Sequence[Buffer]]:
        """Answer the coordinator, or a peer that measures its link. Raises RoostError, which goes back to the caller."""
        try:
            return await self._answer(sender, message)
        except (PeerUnreachableError, DeadlineError) as error:
            # As it is, it would read as if the caller had not reached this node.
            raise StageFailedError(f"node {self.node_id} cannot go on: {error.message}", hint=error.hint) from error

    async def _answer(self, sender: Sender, message: m.Message) -> tuple[m.Message, Sequence[Buffer]]:
        match message:
            case m.Ping():
                return m.Done(), []
            case m.ProbeLinks():
                links = await measure_links(self._transport, self.node_id, message.targets, message.payload_bytes)
                return m.LinkReport(links=links), []
            case m.PrepareStage():
                await self._prepare(message)
            case m.HoldStage(job_id=job_id):
                driver = self._stage_of(job_id)
                self._borrowers |= frozenset(message.borrowers)
                await driver.hold()
                return m.StageReport(metrics=driver.metrics()), []
            case m.FollowStage():
                await self._follow(message)
            case m.ChangePlan(job_id=job_id):
                driver = self._stage_of(job_id)
                self._borrowers |= frozenset(message.borrowers)
                await driver.change_plan(changed_assignment(driver.assignment, message))
            case m.FetchState(job_id=job_id, names=names):
                return await self._lend_state(sender, job_id, names)
            case m.ContinueJob(job_id=job_id):
                self._before = None
                self._stop_following()
                self._stage_of(job_id).go()
            case m.AverageNow(job_id=job_id, order=order):
                driver = self._stage_of(job_id)
                await driver.average_exactly(order)
                return m.StageReport(metrics=driver.metrics()), []
            case m.SaveStage(job_id=job_id):
                await self._stage_of(job_id).save(message)
            case m.EndJob(job_id=job_id, reason=reason):
                if self._copy is not None and self._copy[0].message.job_id == job_id:
                    self._stop_following()
                if self._building is not None and self._building[0] == job_id:
                    self._building[1].cancel()
                if self._driver is not None and self._driver.assignment.job_id == job_id:
                    metrics = self._driver.metrics()
                    await self._drop_stage(reason)
                    return m.StageReport(metrics=metrics), []
            case _:
                raise MalformedMessageError(f"a node does not answer {type(message).__name__}")
        return m.Done(), []

    async def _prepare(self, message: m.PrepareStage) -> None:
        assignment = assignment_from(message, node_id=self.node_id, coordinator=self._coordinator)
        held = await self._make_way(assignment)
        build = asyncio.create_task(
            build_stage(
                assignment,
                transport=self._transport,
                compute=self._compute,
                device=self._config.device,
                memory_bytes=self._profile.memory_bytes,
                held=held,
                copy=self._copy[0] if self._copy is not None and self._copy[0].message.job_id == assignment.job_id else None,
                directory=self._config.state_dir,
                on_failure=lambda error, peer: self._stage_failed(assignment, error, peer),
            ),
            name=f"build-{assignment.job_id}",
        )
        self._building = (assignment.job_id, build)
        try:
            await asyncio.wait({build})
        finally:
            build.cancel()
            if self._building is not None and self._building[1] is build:
                self._building = None
        if build.cancelled():
            raise JobRefusedError(f"job {assignment.job_id} ended, or changed, while node {self.node_id} built its stage")
        driver = build.result()
        driver.start()
        # Others may still fetch what only the stage before has.
        self._driver, self._before = driver, held
        await driver.rings.ready()

    async def _make_way(self, assignment: Assignment) -> StageDriver | None:
        """Return the stage of the same job that this node has, held. Raises JobRefusedError if it is busy with something else."""
        if self._building is not None:
            job_id, build = self._building
            if job_id != assignment.job_id or assignment.generation == 0:
                raise JobRefusedError(f"node {self.node_id} already runs a stage of job {job_id}")
            # A plan that was given up before it was carried out.
            build.cancel()
            await asyncio.wait({build})
        held = self._driver
        if held is None:
            return None
        if held.assignment.job_id != assignment.job_id or held.assignment.generation >= assignment.generation:
            raise JobRefusedError(f"node {self.node_id} already runs a stage of job {self._running_job()}")
        await held.hold()
        # A stage that was built for a plan that was given up has less than the one before it.
        return self._before or held

    async def _lend_state(self, sender: Sender, job_id: str, names: tuple[str, ...]) -> tuple[m.Message, Sequence[Buffer]]:
        """Answer FetchState.

        Raises ForbiddenError for a node that the coordinator has not named, JobRefusedError, MalformedMessageError.
        """
        copy = self._copy[0] if self._copy is not None and self._copy[0].message.job_id == job_id else None
        driver = self._driver if self._driver is not None and self._driver.assignment.job_id == job_id else None
        if copy is not None and (driver is None or sender.peer_id in driver.assignment.peers) and copy.tensors.keys() >= set(names):
            return state_reply(*copy.part(names))
        driver = self._stage_of(job_id)
        backups = {backup.node_id for backup in driver.assignment.plan.backup_stages}
        if sender.peer_id not in self._borrowers | backups:
            raise ForbiddenError(f"node {sender.peer_id} may not fetch the stage of node {self.node_id}")
        owner = driver if driver.state().keys() >= set(names) else self._before
        if owner is None:
            raise MalformedMessageError(f"node {self.node_id} does not hold all tensors that {sender.peer_id} asks for")
        return state_reply(*await owner.current_state(names))

    async def _follow(self, message: m.FollowStage) -> None:
        if self._driver is not None or self._building is not None:
            raise JobRefusedError(f"node {self.node_id} already runs a stage of job {self._running_job()}")
        if self._copy is None or self._copy[0].message != message:
            self._stop_following()
            copy = StageCopy(message, self._transport)
            self._copy = copy, asyncio.create_task(copy.run(), name=f"follow-{message.job_id}")
        await self._copy[0].complete.wait()

    def _stop_following(self) -> None:
        if self._copy is not None:
            self._copy[1].cancel()
            self._copy = None

    def _running_job(self) -> str:
        if self._driver is not None:
            return self._driver.assignment.job_id
        return self._building[0] if self._building is not None else ""

    def _stage_of(self, job_id: str) -> StageDriver:
        if self._driver is None or self._driver.assignment.job_id != job_id:
            raise JobRefusedError(f"node {self.node_id} runs no stage of job {job_id}")
        return self._driver

    # ------------------------------------------------------------ messages

    async def on_message(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> None:
        """Take values, gradients and ring chunks from peers; what belongs to no running job is dropped."""
        if sender.peer_id == self.node_id:
            self._message_probe.arrived()
            return
        driver = self._driver
        if driver is None or getattr(message, "job_id", None) != driver.assignment.job_id:
            self._log_dropped(sender, message)
            return
        if sender.role is not Role.NODE or sender.peer_id not in driver.assignment.peers:
            raise ForbiddenError(f"{sender.peer_id} has no part in job {driver.assignment.job_id}")
        taken = True
        match message:
            case m.Activation():
                driver.activation_arrived(sender.peer_id, message, buffers)
            case m.Gradient():
                driver.gradient_arrived(sender.peer_id, message, buffers)
            case m.GradientNorm():
                driver.norm_arrived(sender.peer_id, message)
            case m.OpenRound():
                taken = driver.rings.opened(sender.peer_id, message)
            case m.RingChunk() if len(buffers) == 1:
                taken = driver.rings.chunk_arrived(sender.peer_id, message, buffers[0])
            case _:
                raise MalformedMessageError(f"node {self.node_id} does not take {type(message).__name__} from {sender.peer_id}")
        if not taken:
            self._log_dropped(sender, message)

    def _log_dropped(self, sender: Sender, message: m.Message) -> None:
        logger.debug("message_dropped node=%s sender=%s type=%s", self.node_id, sender.peer_id, type(message).__name__)

    # ------------------------------------------------------------ ends

    def _stream_broke(self, peer_id: str, lane: Lane, error: RoostError) -> None:
        """What was sent last to a peer may be lost: its cluster, or the round, cannot go on as if it had come."""
        driver = self._driver
        if driver is None or driver.held:
            return
        if lane is Lane.AVERAGING:
            driver.rings.peer_lost(peer_id)
            driver.suspect(peer_id)
        elif peer_id in {stage.node_id for stage in driver.assignment.cluster.stages}:
            self._stage_failed(driver.assignment, error, peer_id)

    def _stage_failed(self, assignment: Assignment, error: BaseException, peer: str) -> None:
        failure = failure_of(error, self.node_id)
        driver = self._driver
        if driver is None or driver.assignment.number != assignment.number or driver.held:
            return
        logger.error("stage_failed job=%s node=%s error=%s", assignment.job_id, self.node_id, failure.message, exc_info=error)
        task = asyncio.create_task(self._report_failure(driver, failure, peer), name="report-failure")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _report_failure(self, driver: StageDriver, failure: RoostError, peer: str) -> None:
        """Hold the stage, whose state others may need, and tell the coordinator."""
        await driver.hold()
        report = m.StageFailed(
            job_id=driver.assignment.job_id,
            code=failure.code,
            message=failure.message,
            hint=failure.hint,
            cluster=driver.assignment.number,
            peer=peer,
        )
        try:
            await patiently(self._transport, self._coordinator, report)
        except RoostError as error:
            logger.warning("failure_not_reported node=%s error=%s", self.node_id, error.message)

    async def _drop_stage(self, reason: str) -> None:
        driver, self._driver, self._before = self._driver, None, None
        self._borrowers = frozenset()
        if driver is None:
            return
        await driver.stop()
        for peer_id in driver.assignment.peers:
            if peer_id != self.node_id:
                await self._transport.forget(peer_id)
        logger.info("stage_dropped job=%s node=%s reason=%s", driver.assignment.job_id, self.node_id, reason)
        del driver
        release_freed_memory()
