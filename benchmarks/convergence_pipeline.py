"""Trains the stages of `benchmarks.convergence` in one process, in the order that the real schedule gives, under an exact clock.

What is real: PipelineSchedule decides, StageRunner computes, averages are applied as `w += average - snapshot`. What is left out is
the network: it decides when a value arrives, and so the order in which a stage works, but nothing about what is computed. Here a
stage's forward takes FORWARD, its backward BACKWARD, in whole numbers, and values arrive at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from benchmarks.convergence_model import LOSSES, TARGETS, TOKENS, GptStage, Sizes, text, windows
from roost.config import JobConfig
from roost.pipeline.stage_runner import StageRunner, add_gradients
from roost.protocol import pipeline_schedule as schedules
from roost.types import MicroBatch

FORWARD, BACKWARD, UPDATE = 1, 2, 0
"""Time units of a stage's computations; an update is taken at once."""
STRIDE, STRIDE_AT_THE_END = 24, 4
"""Every so many windows of the held-out text are used, for the curve and for the figure at its end."""
WAITING_AT_FIRST = 2
"""Micro-batches that wait at the first stage, as the agent's feeder keeps them."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One training run of all seeds."""

    config: JobConfig
    sizes: Sizes
    seeds: tuple[int, ...]
    clusters: int
    micro_batches: int
    """Over all clusters, per seed; a multiple of clusters x per_update."""
    per_update: int
    """Micro-batches per batch."""
    evaluations: int
    """Points of the curve."""
    round_time: int
    """Time units from an averaging round's snapshots to its application."""


@dataclass(kw_only=True)
class Curve:
    """What a run gives."""

    points: list[tuple[int, list[float]]] = field(default_factory=list)
    """Micro-batches that were applied, and the validation loss of every seed."""
    delays: list[float] = field(default_factory=list)
    """Mean measured delay of every stage, in updates."""

    @property
    def final(self) -> list[float]:
        """Validation loss of every seed at the end."""
        return self.points[-1][1]


class Clock:
    """Calls what is due, in the order of time, and of asking within one time."""

    def __init__(self) -> None:
        self.now = 0
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._asked = 0

    def after(self, delay: int, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay, self._asked, call))
        self._asked += 1

    def run(self) -> None:
        """Call until nothing is due."""
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()


class Stage:
    """A stage of one cluster: its schedule, its runner, and what has arrived for it."""

    def __init__(self, plan: RunPlan, index: int, pipeline: Pipeline) -> None:
        stages = plan.sizes.stages
        self.program = GptStage(index, plan.sizes)
        self.runner = StageRunner(self.program, self.program.initial(plan.seeds), plan.config, 1.0 / plan.clusters)
        self.index = index
        self.delay_sum = self.delays = 0
        self._pipeline = pipeline
        self._values: dict[int, dict[int, Tensor]] = {}
        self._gradients: dict[int, dict[int, Tensor]] = {}
        self._schedule = schedules.PipelineSchedule(
            index,
            stages,
            frozenset({index - 1} if index else {schedules.DATA}),
            frozenset() if self.program.is_last else frozenset({index + 1}),
            schedules.bubble_free_in_flight(index, stages),
            flush=plan.config.mode == "sync",
        )

    def values_arrived(self, micro_batch: MicroBatch, values: dict[int, Tensor]) -> None:
        self._values[micro_batch.number] = values
        source = self.index - 1 if self.index else schedules.DATA
        self._handle(schedules.ValuesArrived(micro_batch=micro_batch, source=source))

    def gradients_arrived(self, number: int, gradients: dict[int, Tensor]) -> None:
        self._gradients[number] = gradients
        self._handle(schedules.GradientsArrived(number=number, source=self.index + 1))

    def _handle(self, event: schedules.ScheduleEvent) -> None:
        for computation in self._schedule.handle(event):
            send, duration = self._compute(computation)
            self._pipeline.clock.after(duration, partial(self._finished, send))

    def _finished(self, send: Callable[[], None]) -> None:
        self._handle(schedules.ComputeFinished())
        send()

    def _compute(self, computation: schedules.Computation) -> tuple[Callable[[], None], int]:
        """Compute now, as nothing else happens at this stage meanwhile; return what to send when it is done, and when that is."""
        match computation:
            case schedules.RunForward(micro_batch=micro_batch):
                if self.index == 0:
                    self._pipeline.feed()
                result = self.runner.forward(micro_batch, self._values.pop(micro_batch.number), None)
                return partial(self._pipeline.forwarded, self.index, micro_batch, result.outputs), FORWARD
            case schedules.RunBackward(micro_batch=micro_batch):
                parts = {self.index + 1: self._gradients.pop(micro_batch.number, {})}
                back = self.runner.backward(micro_batch.number, add_gradients(parts))
                return partial(self._pipeline.backwarded, self.index, micro_batch.number, back.get(self.index - 1, {})), BACKWARD
            case schedules.RunUpdate(batch=batch, staleness=staleness):
                self.runner.update(batch)
                self.delay_sum += sum(staleness)
                self.delays += len(staleness)
                return partial(self._pipeline.updated, self.index), UPDATE
        raise AssertionError(f"no evaluation is fed: {computation}")


class Pipeline:
    """The stages of one cluster and its data: every `clusters`-th micro-batch, from its own number on."""

    def __init__(self, plan: RunPlan, cluster: int, clock: Clock, on_update: Callable[[int, int], None]) -> None:
        self.clock = clock
        self.stages = [Stage(plan, index, self) for index in range(plan.sizes.stages)]
        self._plan = plan
        self._cluster = cluster
        self._on_update = on_update
        self._fed = 0
        self._count = plan.micro_batches // plan.clusters

    def start(self) -> None:
        for _ in range(WAITING_AT_FIRST):
            self.feed()

    def feed(self) -> None:
        """Let one more micro-batch wait at the first stage, if there is one."""
        if self._fed < self._count:
            self.clock.after(0, partial(self._inject, self._fed))
            self._fed += 1

    def _inject(self, number: int) -> None:
        sizes = self._plan.sizes
        place = number * self._plan.clusters + self._cluster
        codes = text()[0]
        starts = torch.stack([_starts(seed, place, sizes.micro_batch, len(codes) - sizes.context - 1) for seed in self._plan.seeds])
        tokens, targets = windows(codes, starts, sizes.context)
        size, count = sizes.micro_batch, self._plan.per_update
        header = MicroBatch(
            number=number,
            batch=number // count,
            position=number % count,
            count=count,
            samples=size,
            batch_samples=size * count,
            training=True,
            seed=place,
            lease=0,
        )
        self.stages[0].values_arrived(header, {TOKENS: tokens, TARGETS: targets})

    def forwarded(self, index: int, micro_batch: MicroBatch, outputs: dict[int, Tensor]) -> None:
        if index + 1 < len(self.stages):
            self.stages[index + 1].values_arrived(micro_batch, outputs)

    def backwarded(self, index: int, number: int, gradients: dict[int, Tensor]) -> None:
        if index > 0:
            self.stages[index - 1].gradients_arrived(number, gradients)

    def updated(self, index: int) -> None:
        self._on_update(self._cluster, index)


class Training:
    """One run: the pipelines of all clusters under one clock, their averaging rounds, and the curve."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._clock = Clock()
        self._pipelines = [Pipeline(plan, cluster, self._clock, self._updated) for cluster in range(plan.clusters)]
        self._open: set[int] = set()
        self._curve = Curve()
        self._next_point = 0

    def run(self) -> Curve:
        """Train to the end, average exactly, and return the curve."""
        for pipeline in self._pipelines:
            pipeline.start()
        self._clock.run()
        if self._plan.clusters > 1:
            for index in range(self._plan.sizes.stages):
                self._apply(index, self._snapshots(index))
        self._add_point(self._plan.micro_batches, STRIDE_AT_THE_END)
        stages = [stage for pipeline in self._pipelines for stage in pipeline.stages]
        count = self._plan.sizes.stages
        self._curve.delays = [sum(stage.delay_sum / stage.delays for stage in stages[i::count]) / self._plan.clusters for i in range(count)]
        return self._curve

    def _updated(self, cluster: int, index: int) -> None:
        updates = self._pipelines[cluster].stages[index].runner.updates
        if self._plan.clusters > 1 and updates % self._plan.config.averaging_interval == 0 and index not in self._open:
            self._open.add(index)
            self._clock.after(self._plan.round_time, partial(self._close, index, self._snapshots(index)))
        applied = updates * self._plan.clusters * self._plan.per_update
        if (cluster, index) == (0, 0) and applied * self._plan.evaluations >= self._plan.micro_batches * (self._next_point + 1):
            if applied < self._plan.micro_batches:
                self._add_point(applied, STRIDE)
            self._next_point += 1

    def _snapshots(self, index: int) -> list[tuple[dict[str, Tensor], int]]:
        runners = [pipeline.stages[index].runner for pipeline in self._pipelines]
        return [(runner.snapshot(runner.state()), runner.samples) for runner in runners]

    def _close(self, index: int, snapshots: list[tuple[dict[str, Tensor], int]]) -> None:
        self._apply(index, snapshots)
        self._open.discard(index)

    def _apply(self, index: int, snapshots: list[tuple[dict[str, Tensor], int]]) -> None:
        average = _mean(snapshots)
        for pipeline, (snapshot, _) in zip(self._pipelines, snapshots, strict=True):
            pipeline.stages[index].runner.apply_average(average, snapshot)

    def _add_point(self, applied: int, stride: int) -> None:
        weights = [_mean(self._snapshots(index)) for index in range(self._plan.sizes.stages)]
        programs = [stage.program for stage in self._pipelines[0].stages]
        self._curve.points.append((applied, validation_losses(programs, weights, self._plan, stride)))


def validation_losses(programs: Sequence[GptStage], weights: Sequence[Mapping[str, Tensor]], plan: RunPlan, stride: int) -> list[float]:
    """Return every replica's mean loss on every `stride`-th window of the held-out text."""
    codes = text()[1]
    starts = torch.arange(0, len(codes) - plan.sizes.context - 1, stride * plan.sizes.context)
    tokens, targets = windows(codes, starts.expand(len(plan.seeds), -1), plan.sizes.context)
    values = {TOKENS: tokens, TARGETS: targets}
    with torch.no_grad():
        for program, tensors in zip(programs, weights, strict=True):
            values = program.run(values, tensors, training=False)
    losses: list[float] = values[LOSSES].tolist()
    return losses


def _mean(snapshots: Sequence[tuple[dict[str, Tensor], int]]) -> dict[str, Tensor]:
    """Return the mean weighted by samples, as rings compute it; of one snapshot that itself."""
    if len(snapshots) == 1 or not any(samples for _, samples in snapshots):
        return snapshots[0][0]
    total = sum(samples for _, samples in snapshots)
    return {name: sum(tensors[name] * samples for tensors, samples in snapshots) / total for name in snapshots[0][0]}


def _starts(seed: int, place: int, count: int, most: int) -> Tensor:
    return torch.randint(most, (count,), generator=torch.Generator().manual_seed((seed << 32) + place))
