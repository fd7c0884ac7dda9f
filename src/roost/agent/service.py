"""The agent: registers its node, answers the coordinator and its peers, holds at most one stage."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

import roost
from roost import messages as m
from roost.agent.assignment import Assignment, assignment_from
from roost.agent.builder import build_stage
from roost.agent.compute import ComputeThread
from roost.agent.links import measure_links
from roost.agent.message_probe import MessageProbe
from roost.agent.pause import PauseSwitch
from roost.agent.stage_driver import StageDriver, failure_of
from roost.config import AgentConfig
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
from roost.transport.interface import Buffer, Sender, Transport
from roost.types import NodeProfile, Peer, Role

logger = logging.getLogger(__name__)

RECONNECT_S = 2.0


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
        self._pause = PauseSwitch(config.state_dir)
        self._news = asyncio.Event()  # something that the coordinator should hear of before the next heartbeat is due
        self._driver: StageDriver | None = None
        self._building: tuple[str, asyncio.Task[StageDriver]] | None = None
        self._registered = asyncio.Event()
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def node_id(self) -> str:
        return self._config.node_id

    async def run(self) -> None:
        """Serve until cancelled: register, send heartbeats, and register again whenever the coordinator comes back."""
        self._compute.start()
        if self._pause.look():
            self._paused_or_resumed(self._pause.paused)
        await self._transport.start(self)
        watching = asyncio.create_task(self._pause.watch(self._paused_or_resumed), name="pause-watch")
        try:
            await self._measure_messages()
            registered, pause_s = False, RECONNECT_S
            while True:
                try:
                    if registered:
                        await self._heartbeat()
                    else:
                        pause_s = await self._register()
                        registered = True
                    await self._until_heartbeat(pause_s)
                except TransportError as error:
                    logger.warning("coordinator_unreachable node=%s error=%s", self.node_id, error.message)
                    await asyncio.sleep(RECONNECT_S)
                except JobRefusedError as error:
                    registered = False
                    await self._drop_stage(error.message)
        finally:
            watching.cancel()
            await self._drop_stage("the agent stops")
            await self._transport.stop()
            self._compute.stop()

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
        message = m.RegisterNode(
            protocol_version=m.PROTOCOL_VERSION,
            roost_version=roost.__version__,
            torch_version=torch.__version__,
            profile=self._profile,
            paused=self._pause.paused,
        )
        reply = (await self._transport.call(self._coordinator, message)).message
        if not isinstance(reply, m.Registered):
            raise MalformedMessageError(f"the coordinator answered a registration with {type(reply).__name__}")
        logger.info("registered node=%s address=%s", self.node_id, self._profile.address)
        self._registered.set()
        return reply.heartbeat_s

    async def _heartbeat(self) -> None:
        driver = self._driver
        job_id = driver.assignment.job_id if driver is not None else ""
        message = m.Heartbeat(job_id=job_id, metrics=driver.metrics() if driver is not None else None, paused=self._pause.paused)
        await self._transport.call(self._coordinator, message)

    # ------------------------------------------------------------ calls

    async def on_call(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> tuple[m.Message, Sequence[Buffer]]:
        """Answer the coordinator, or a peer that measures its link. Raises RoostError, which goes back to the caller."""
        try:
            return await self._answer(message)
        except (PeerUnreachableError, DeadlineError) as error:
            # As it is, it would read as if the caller had not reached this node.
            raise StageFailedError(f"node {self.node_id} cannot go on: {error.message}", hint=error.hint) from error

    async def _answer(self, message: m.Message) -> tuple[m.Message, Sequence[Buffer]]:
        match message:
            case m.Ping():
                return m.Done(), []
            case m.ProbeLinks():
                links = await measure_links(self._transport, self.node_id, message.targets, message.payload_bytes)
                return m.LinkReport(links=links), []
            case m.PrepareStage():
                await self._prepare(message)
            case m.ContinueJob(job_id=job_id):
                self._stage_of(job_id).go()
            case m.AverageNow(job_id=job_id, order=order):
                driver = self._stage_of(job_id)
                await driver.average_exactly(order)
                return m.StageReport(metrics=driver.metrics()), []
            case m.SaveStage(job_id=job_id, checkpoint=checkpoint):
                await self._stage_of(job_id).save(checkpoint)
            case m.EndJob(job_id=job_id, reason=reason):
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
        if self._driver is not None or self._building is not None:
            raise JobRefusedError(f"node {self.node_id} already runs a stage of job {self._running_job()}")
        assignment = assignment_from(message, node_id=self.node_id, coordinator=self._coordinator)
        build = asyncio.create_task(
            build_stage(
                assignment,
                transport=self._transport,
                compute=self._compute,
                device=self._config.device,
                memory_bytes=self._profile.memory_bytes,
                on_failure=lambda error: self._stage_failed(assignment, error),
            ),
            name=f"build-{assignment.job_id}",
        )
        self._building = (assignment.job_id, build)
        try:
            await asyncio.wait({build})
        finally:
            self._building = None
            build.cancel()
        if build.cancelled():
            raise JobRefusedError(f"job {assignment.job_id} ended while node {self.node_id} built its stage")
        driver = build.result()
        driver.start()
        self._driver = driver
        await driver.ready()

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
            logger.debug("message_dropped node=%s sender=%s type=%s", self.node_id, sender.peer_id, type(message).__name__)
            return
        if sender.role is not Role.NODE or sender.peer_id not in driver.assignment.peers:
            raise ForbiddenError(f"{sender.peer_id} has no part in job {driver.assignment.job_id}")
        match message:
            case m.Activation():
                driver.activation_arrived(sender.peer_id, message, buffers)
            case m.Gradient():
                driver.gradient_arrived(sender.peer_id, message, buffers)
            case m.GradientNorm():
                driver.norm_arrived(sender.peer_id, message)
            case m.OpenRound(segment=segment) if segment in driver.rings:
                driver.rings[segment].opened(sender.peer_id, message)
            case m.RingChunk(segment=segment) if segment in driver.rings and len(buffers) == 1:
                driver.rings[segment].chunk_arrived(sender.peer_id, message, buffers[0])
            case _:
                raise MalformedMessageError(f"node {self.node_id} does not take {type(message).__name__} from {sender.peer_id}")

    # ------------------------------------------------------------ ends

    def _stage_failed(self, assignment: Assignment, error: BaseException) -> None:
        failure = failure_of(error, self.node_id)
        logger.error("stage_failed job=%s node=%s error=%s", assignment.job_id, self.node_id, failure.message, exc_info=error)
        if self._driver is None or self._driver.assignment is not assignment:
            return
        task = asyncio.create_task(self._report_failure(assignment, failure), name="report-failure")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _report_failure(self, assignment: Assignment, failure: RoostError) -> None:
        report = m.StageFailed(job_id=assignment.job_id, code=failure.code, message=failure.message, hint=failure.hint)
        try:
            await self._transport.send(self._coordinator, report)
        except TransportError as error:
            logger.warning("failure_not_reported node=%s error=%s", self.node_id, error.message)
        await self._drop_stage(failure.message)

    async def _drop_stage(self, reason: str) -> None:
        driver, self._driver = self._driver, None
        if driver is None:
            return
        await driver.stop()
        for peer_id in driver.assignment.peers:
            if peer_id != self.node_id:
                await self._transport.forget(peer_id)
        logger.info("stage_dropped job=%s node=%s reason=%s", driver.assignment.job_id, self.node_id, reason)
        del driver
        release_freed_memory()
