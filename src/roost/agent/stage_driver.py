"""Runs one stage: feeds arrivals to the pure schedule and carries out what it says on the compute thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from roost import messages as m
from roost.agent.assignment import Assignment
from roost.agent.compute import ComputeThread
from roost.agent.doubts import Doubts
from roost.agent.feeder import EVALUATION_WINDOW, Feeder
from roost.agent.outbox import Outbox
from roost.agent.reporter import Reporter
from roost.agent.saver import StageSaver
from roost.agent.stage_rings import StageRings
from roost.agent.value_wire import PackedValues, ValueWire, WireValue
from roost.errors import MalformedMessageError, RoostError, StageFailedError
from roost.pipeline.host_buffers import HostBuffers
from roost.pipeline.program_interface import RunnableProgram
from roost.pipeline.stage_runner import EvaluateResult, ForwardResult, StageRunner, add_gradients
from roost.pipeline.tensor_bytes import from_buffer, to_buffer
from roost.protocol import pipeline_schedule as schedules
from roost.transport.interface import Buffer, Transport
from roost.types import EvaluationResult, MicroBatch, StageMetrics, TensorSpec

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Arrivals:
    """Values of one micro-batch that wait for its turn."""

    values: dict[int, Tensor | WireValue] = field(default_factory=dict)
    rng: Tensor | None = None


@dataclass(kw_only=True)
class Counters:
    """What this stage has done; StageMetrics is made of them."""

    updates: int = 0
    micro_batches: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    loss_samples: int = 0
    staleness_max: int = 0
    staleness_sum: int = 0
    batch_samples: dict[int, int] = field(default_factory=dict)


class StageDriver:
    """Joins schedule, runner, compute thread, feeder and rings of one stage."""

    def __init__(
        self,
        *,
        assignment: Assignment,
        program: RunnableProgram,
        runner: StageRunner,
        compute: ComputeThread,
        transport: Transport,
        host: HostBuffers,
        directory: str,
        on_failure: Callable[[BaseException, str], None],
    ) -> None:
        """`on_failure` is told why the stage cannot go on, and which peer could not be reached, if that is why.

        Snapshots are written in `directory`, or if it is empty with the system's temporary files.
        """
        self.assignment = assignment
        self._wire = ValueWire(assignment.config.activation_compression, program.differentiable, host)
        self._program = program
        self._runner = runner
        self._compute = compute
        self._transport = transport
        self._on_failure = on_failure
        index = assignment.stage.index
        self._sources = frozenset(program.receives) | ({schedules.DATA} if assignment.is_first else {index - 1})
        self._targets = frozenset(program.sends) | (frozenset() if assignment.is_last else {index + 1})
        exact = assignment.config.mode == "sync" and assignment.config.clip_norm > 0
        self._other_stages = frozenset(range(len(assignment.cluster.stages))) - {index} if exact else frozenset[int]()
        self._squares: dict[int, float] = {}  # per stage, of the batch that is about to be applied
        self._schedule = schedules.PipelineSchedule(
            stage=index,
            stages=len(assignment.cluster.stages),
            sources=self._sources,
            targets=self._targets,
            max_in_flight=assignment.stage.max_in_flight,
            flush=assignment.config.mode == "sync",
            norm_sources=self._other_stages,
        )
        self._outbox = Outbox(transport, on_failure=on_failure)
        self._reporter = Reporter(transport, assignment.coordinator)
        self.feeder = Feeder(assignment, transport, self._reporter, inject=self._inject) if assignment.is_first else None
        self._arrivals: dict[int, Arrivals] = {}
        # An honest pipeline has at most the first stage's micro-batches in flight, or the feeder's evaluation window.
        self._most_waiting = assignment.cluster.stages[0].max_in_flight + EVALUATION_WINDOW * len(assignment.cluster.stages)
        self._gradients: dict[int, dict[int, dict[int, WireValue]]] = {}
        self._work: asyncio.Queue[schedules.Computation] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._counters = Counters()
        self._started_cpu_s = 0.0
        self.held = False
        """True if the stage trains no more, and only keeps its state for whoever fetches it."""
        self.rings = StageRings(
            assignment=assignment,
            parameters=frozenset(record.name for record in program.tensors if record.trainable),
            runner=runner,
            compute=compute,
            transport=transport,
            samples=lambda: self._counters.samples,
            start_task=self._spawn,
            suspect=self.suspect,
        )
        self._doubts = Doubts(self.suspect)
        self._saver = StageSaver(
            transport=transport,
            reporter=self._reporter,
            compute=compute,
            state=self._state_of,
            directory=directory,
            start_task=self._spawn,
        )

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start the tasks of this stage and its rings; training begins with `go`."""
        self._started_cpu_s = time.process_time()
        self._spawn(self._compute_in_order(), "compute")
        self._spawn(self._reporter.run(), "reporter")
        if self.feeder is not None:
            self._spawn(self.feeder.run(), "feeder")
        self.rings.start()

    async def stop(self) -> None:
        """Stop all tasks; nothing of this stage runs afterwards."""
        await self.rings.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._outbox.close()

    async def hold(self) -> None:
        """Stop all tasks and drop what is in flight; weights and optimizer state stay, for `current_state`."""
        if self.held:
            return
        self.held = True
        await self.stop()
        await self._compute.run(self._runner.abandon, paced=False)
        self._arrivals.clear()
        self._gradients.clear()

    def suspect(self, peer_id: str) -> None:
        """Tell the coordinator that a peer may be away, which this stage can do without for now."""
        self._reporter.put(m.PeerSuspected(job_id=self.assignment.job_id, peer=peer_id))

    def go(self) -> None:
        """Average in the background, and ask for leases (first stage)."""
        self.rings.go()
        if self.feeder is not None:
            self.feeder.go()

    async def change_plan(self, assignment: Assignment) -> None:
        """Go on with the same stage in another plan: other rings, another share of the data."""
        # The coordinator has given up the checkpoint of the plan before.
        await self._saver.abandon()
        self.assignment = assignment
        await self._compute.run(partial(self._runner.set_share, assignment.cluster.share), paced=False)
        await self.rings.change(assignment)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{name}-{self.assignment.job_id}")
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.remove(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error, "")

    # ------------------------------------------------------------ arrivals

    def _inject(self, micro_batch: MicroBatch, tensors: tuple[Tensor, ...]) -> None:
        wanted = self._program.receives.get(schedules.DATA, ())
        if len(wanted) != len(tensors):
            raise MalformedMessageError(f"the graph takes {len(wanted)} inputs, the data has {len(tensors)}")
        values: dict[int, Tensor | WireValue] = dict(zip(wanted, tensors, strict=True))
        self._arrivals[micro_batch.number] = Arrivals(values=values)
        self._handle(schedules.ValuesArrived(micro_batch=micro_batch, source=schedules.DATA))

    def activation_arrived(self, sender: str, message: m.Activation, buffers: Sequence[Buffer]) -> None:
        """Take values from an earlier stage. Raises MalformedMessageError if the sender does not run it.

        What that stage sends wrongly ends the job: the micro-batch would be missing for ever.
        """
        self._check_stage(sender, message.source_stage, self._sources)
        if self._stale(message.cluster):
            return
        with self._fatal(sender):
            self._take_values(sender, message, buffers)

    def _take_values(self, sender: str, message: m.Activation, buffers: Sequence[Buffer]) -> None:
        expected = self._program.receives.get(message.source_stage, ())
        own = buffers[1:] if message.rng else buffers
        named = self._wire.arrived(message.values, message.codecs, own, expected, training=message.micro_batch.training, sender=sender)
        if len(self._arrivals) > self._most_waiting:
            raise MalformedMessageError(f"stage {message.source_stage} sends more micro-batches than may be in flight")
        arrivals = self._arrivals.setdefault(message.micro_batch.number, Arrivals())
        arrivals.values.update(named)
        if message.rng:
            arrivals.rng = from_buffer(TensorSpec(name="rng", dtype="uint8", shape=(len(buffers[0]),)), buffers[0])
        self._handle(schedules.ValuesArrived(micro_batch=message.micro_batch, source=message.source_stage))

    def gradient_arrived(self, sender: str, message: m.Gradient, buffers: Sequence[Buffer]) -> None:
        """Take gradients from a later stage. Raises MalformedMessageError if the sender does not run it."""
        if self._stale(message.cluster):
            return
        if self.feeder is not None and message.source_stage == len(self.assignment.cluster.stages) - 1 and message.evaluation:
            self._check_stage(sender, message.source_stage, frozenset({message.source_stage}))
            self.feeder.evaluated()
            return
        self._check_stage(sender, message.source_stage, self._targets)
        with self._fatal(sender):
            self._take_gradients(sender, message, buffers)

    def _stale(self, number: int) -> bool:
        """Return True for what was sent in a cluster that this one has replaced, or while this stage is held."""
        return self.held or number != self.assignment.number

    @contextlib.contextmanager
    def _fatal(self, sender: str) -> Iterator[None]:
        try:
            yield
        except RoostError as error:
            logger.error("peer_misbehaves job=%s peer=%s error=%s", self.assignment.job_id, sender, error.message)
            error.message = f"{error.message} (sent by {sender})"
            self._on_failure(error, "")

    def _take_gradients(self, sender: str, message: m.Gradient, buffers: Sequence[Buffer]) -> None:
        allowed = self._program.sends.get(message.source_stage, ())
        named = self._wire.arrived(message.values, message.codecs, buffers, allowed, training=True, sender=sender)
        self._gradients.setdefault(message.micro_batch, {})[message.source_stage] = named
        self._handle(schedules.GradientsArrived(number=message.micro_batch, source=message.source_stage))

    def norm_arrived(self, sender: str, message: m.GradientNorm) -> None:
        """Take the norm of another stage's gradient. Raises MalformedMessageError if the sender does not run it."""
        self._check_stage(sender, message.source_stage, self._other_stages)
        if self._stale(message.cluster):
            return
        with self._fatal(sender):
            if message.square < 0:
                raise MalformedMessageError(f"stage {message.source_stage} sends a negative square")
            self._squares[message.source_stage] = message.square
            self._handle(schedules.NormArrived(batch=message.batch, source=message.source_stage))

    def _check_stage(self, sender: str, stage: int, allowed: frozenset[int]) -> None:
        stages = self.assignment.cluster.stages
        if stage not in allowed or not 0 <= stage < len(stages) or stages[stage].node_id != sender:
            raise MalformedMessageError(f"{sender} speaks for stage {stage}, which sends nothing here")

    # ------------------------------------------------------------ compute

    def _handle(self, event: schedules.ScheduleEvent) -> None:
        for instruction in self._schedule.handle(event):
            self._work.put_nowait(instruction)

    async def _compute_in_order(self) -> None:
        following = "" if self.assignment.is_last else self.assignment.peer_of_stage(self.assignment.stage.index + 1).peer_id
        while True:
            # Gradients of what is in flight are due some time; whether there is more data, nobody here knows.
            awaited = following if self._runner.in_flight else ""
            instruction = await self._doubts.next_of(self._work, awaited)
            # A paused node still copies and averages its weights: that is short, and other clusters wait for it.
            await self._compute.permission()
            match instruction:
                case schedules.RunForward(micro_batch=micro_batch):
                    await self._forward(micro_batch)
                case schedules.RunBackward(micro_batch=micro_batch):
                    await self._backward(micro_batch)
                case schedules.RunEvaluation(micro_batch=micro_batch):
                    await self._evaluate(micro_batch)
                case schedules.RunUpdate(batch=batch, staleness=staleness):
                    await self._update(batch, staleness)

    async def _forward(self, micro_batch: MicroBatch) -> None:
        arrivals = self._arrivals.pop(micro_batch.number)
        if self.feeder is not None:
            self.feeder.forward_started(micro_batch)
        counters = self._counters
        counters.batch_samples[micro_batch.batch] = micro_batch.batch_samples

        def propagate() -> tuple[ForwardResult, dict[int, PackedValues]]:
            result = self._runner.forward(micro_batch, self._wire.unpack(arrivals.values), arrivals.rng)
            return result, self._packed(result.outputs, training=True)

        result, packed = await self._compute.run(propagate)
        self._handle(schedules.ComputeFinished())
        if result.loss is not None:
            counters.loss_sum += result.loss * micro_batch.samples
            counters.loss_samples += micro_batch.samples
        self._send_values(micro_batch, packed, result.rng_state)

    def _packed(self, outputs: Mapping[int, Tensor], *, training: bool) -> dict[int, PackedValues]:
        """Return by target stage what it is sent."""
        sends = self._program.sends
        by_target = {target: {value: outputs[value] for value in sends.get(target, ())} for target in self._targets}
        return {target: self._wire.pack(values, training=training) for target, values in by_target.items()}

    def _send_values(self, micro_batch: MicroBatch, packed: Mapping[int, PackedValues], rng: Tensor | None) -> None:
        index = self.assignment.stage.index
        for target in sorted(self._targets):
            values = packed[target]
            carries = rng is not None and target == index + 1
            message = m.Activation(
                job_id=self.assignment.job_id,
                source_stage=index,
                cluster=self.assignment.number,
                micro_batch=micro_batch,
                values=values.specs,
                rng=carries,
                codecs=values.codecs,
            )
            state: list[Buffer] = [to_buffer(rng)] if carries and rng is not None else []
            self._outbox.put(self.assignment.peer_of_stage(target), message, state + values.buffers, values.wait)

    async def _backward(self, micro_batch: MicroBatch) -> None:
        by_stage = self._gradients.pop(micro_batch.number, {})
        measures = bool(self._other_stages) and micro_batch.position == micro_batch.count - 1

        def differentiate() -> tuple[dict[int, PackedValues], float]:
            gradients = {stage: self._wire.unpack(values) for stage, values in by_stage.items()}
            back = self._runner.backward(micro_batch.number, add_gradients(gradients))
            packed = {source: self._wire.pack(back.get(source, {}), training=True) for source in self._sources - {schedules.DATA}}
            return packed, self._runner.gradient_square(micro_batch.batch) if measures else 0.0

        packed, square = await self._compute.run(differentiate)
        if measures:
            self._send_square(micro_batch.batch, square)
        self._handle(schedules.ComputeFinished())
        self._counters.micro_batches += 1
        for source in sorted(packed):
            self._send_gradient(source, micro_batch.number, packed[source])

    def _send_square(self, batch: int, square: float) -> None:
        index = self.assignment.stage.index
        self._squares[index] = square
        message = m.GradientNorm(
            job_id=self.assignment.job_id, source_stage=index, cluster=self.assignment.number, batch=batch, square=square
        )
        for stage in sorted(self._other_stages):
            self._outbox.put(self.assignment.peer_of_stage(stage), message)

    def _send_gradient(self, source: int, number: int, values: PackedValues) -> None:
        message = m.Gradient(
            job_id=self.assignment.job_id,
            source_stage=self.assignment.stage.index,
            cluster=self.assignment.number,
            micro_batch=number,
            values=values.specs,
            evaluation=False,
            codecs=values.codecs,
        )
        self._outbox.put(self.assignment.peer_of_stage(source), message, values.buffers, values.wait)

    def _send_evaluated(self, number: int) -> None:
        """Tell the first stage that an evaluation micro-batch is through."""
        index = self.assignment.stage.index
        word = m.Gradient(
            job_id=self.assignment.job_id,
            source_stage=index,
            cluster=self.assignment.number,
            micro_batch=number,
            values=(),
            evaluation=True,
        )
        self._outbox.put(self.assignment.peer_of_stage(0), word)

    async def _evaluate(self, micro_batch: MicroBatch) -> None:
        arrivals = self._arrivals.pop(micro_batch.number)

        def evaluate() -> tuple[EvaluateResult, dict[int, PackedValues]]:
            result = self._runner.evaluate(micro_batch, self._wire.unpack(arrivals.values))
            return result, self._packed(result.outputs, training=False)

        result, packed = await self._compute.run(evaluate)
        self._handle(schedules.ComputeFinished())
        self._send_values(micro_batch, packed, None)
        if not self.assignment.is_last:
            return
        if self.feeder is not None:
            self.feeder.evaluated()
        else:
            self._send_evaluated(micro_batch.number)
        samples = micro_batch.samples
        done = m.EvaluationDone(
            job_id=self.assignment.job_id,
            cluster=self.assignment.number,
            number=micro_batch.number,
            result=EvaluationResult(
                lease_id=micro_batch.lease,
                samples=samples,
                loss_sum=(result.loss or 0.0) * samples,
                metric_sum=(result.metric or 0.0) * samples,
            ),
        )
        self._reporter.put(done)

    async def _update(self, batch: int, staleness: tuple[int, ...]) -> None:
        counters = self._counters
        # Every stage adds the squares in the same order, so all of them clip by the same bits.
        norm = math.sqrt(sum(self._squares[stage] for stage in sorted(self._squares))) if self._squares else None
        self._squares.clear()

        def apply() -> None:
            # Counted on the compute thread, so that a snapshot taken there sees weights and samples that belong together.
            self._runner.update(batch, norm)
            counters.updates += 1
            counters.samples += counters.batch_samples.pop(batch)

        await self._compute.run(apply)
        self._handle(schedules.ComputeFinished())
        if counters.updates == 1:
            job = self.assignment
            logger.info("first_update job=%s node=%s cluster=%d", job.job_id, job.node_id, job.number)
        counters.staleness_max = max(counters.staleness_max, *staleness)
        counters.staleness_sum += sum(staleness)
        self.rings.updated()
        if self.feeder is not None:
            self.feeder.batch_applied(batch)

    # ------------------------------------------------------------ averaging and saving

    async def average_exactly(self, order: int) -> None:
        """Take part in the ordered round of every ring and wait for its result. Raises DeadlineError, JobRefusedError."""
        await self.rings.average_exactly(order)

    async def save(self, message: m.SaveStage) -> None:
        """Save tensors of this stage with their optimizer state, segment by segment; returns once training may go on."""
        segments = {segment.index: segment.tensors for segment in self.assignment.segments}
        wanted = {index: names for index, names in segments.items() if index in message.segments}
        if message.rest:
            averaged = {name for names in segments.values() for name in names}
            rest = tuple(record.name for record in self._program.tensors if record.name not in averaged)
            wanted |= {-1 - self.assignment.stage.index: rest} if rest else {}
        await self._saver.save(message, self.assignment, wanted)

    def _state_of(self, names: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return tensors and optimizer state in host memory; on the cpu they share the stage's storage."""
        state = self.state()
        optimizer = self._runner.optimizer_state(names)
        return {name: state[name].cpu() for name in names}, {key: tensor.cpu() for key, tensor in optimizer.items()}

    async def current_state(self, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return copies of tensors and their optimizer state in host memory, as they are between two updates.

        Raises MalformedMessageError for a tensor that is not this stage's.
        """
        if missing := set(names) - self.state().keys():
            raise MalformedMessageError(f"node {self.assignment.node_id} does not hold tensor {min(missing)!r}")

        def copy() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            tensors, optimizer = self._state_of(tuple(names))
            return {name: tensor.clone() for name, tensor in tensors.items()}, {key: value.clone() for key, value in optimizer.items()}

        return await self._compute.run(copy, paced=False)

    def lend_state(self, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return tensors and their optimizer state of a stage that is held; they are its own."""
        state = self.state()
        own = tuple(name for name in names if name in state)
        return {name: state[name] for name in own}, self._runner.optimizer_state(own)

    def state(self) -> dict[str, Tensor]:
        """Return the stage's parameters and buffers; they share its storage."""
        return self._runner.state()

    def metrics(self) -> StageMetrics:
        """Return the counters of this stage so far."""
        counters, traffic = self._counters, self._transport.traffic
        return StageMetrics(
            node_id=self.assignment.node_id,
            cluster=self.assignment.cluster.index,
            stage=self.assignment.stage.index,
            updates=counters.updates,
            micro_batches=counters.micro_batches,
            samples=counters.samples,
            loss_sum=counters.loss_sum,
            loss_samples=counters.loss_samples,
            staleness_max=counters.staleness_max,
            staleness_sum=counters.staleness_sum,
            compute_s=self._compute.busy_s,
            cpu_s=time.process_time() - self._started_cpu_s,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            rounds=self.rings.rounds_done,
            number=self.assignment.number,
        )


def failure_of(error: BaseException, node_id: str) -> RoostError:
    """Return the RoostError in `error`, looking into exception groups; anything else becomes a StageFailedError."""
    if isinstance(error, BaseExceptionGroup):
        return failure_of(error.exceptions[0], node_id)
    if isinstance(error, RoostError):
        return error
    return StageFailedError(f"node {node_id}: {type(error).__name__}: {error}")
