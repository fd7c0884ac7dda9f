"""A cluster of simulated nodes: real schedules, exact and cheap arithmetic, random durations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction

from simulated_ring import SimulatedRing
from world import World

from roost.protocol.batches import micro_batches
from roost.protocol.pipeline_schedule import (
    DATA,
    Computation,
    ComputeFinished,
    GradientsArrived,
    PipelineSchedule,
    RunBackward,
    RunEvaluation,
    RunForward,
    RunUpdate,
    ScheduleEvent,
    ValuesArrived,
)
from roost.types import Lease, MicroBatch

Span = tuple[Lease, int, int]
"""A lease and the part of it that a micro-batch holds."""


class SimulatedStage:
    """One node: a schedule, the weights of some units, and its rings."""

    def __init__(self, *, cluster: SimulatedCluster, index: int, units: tuple[int, ...], schedule: PipelineSchedule, bound: int) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.index = index
        self.name = f"c{cluster.index}s{index}"
        self.units = units
        self.schedule = schedule
        self.bound = bound
        self.sources: set[int] = set()
        self.targets: set[int] = set()
        self.weights = {unit: Fraction(0) for unit in units}
        self.rings: list[SimulatedRing] = []
        self.gradient: Counter[int] = Counter()
        self.batch: list[MicroBatch] = []
        self.applied: Counter[tuple[int, int]] = Counter()  # (epoch, sample) -> updates that contained it
        self.samples = 0
        self.updates = 0
        self.running: Computation | None = None

    def handle(self, event: ScheduleEvent) -> None:
        """Hand an event to the schedule and start what it asks for."""
        for computation in self.schedule.handle(event):
            assert self.running is None, f"{self.name} is asked for two computations at once"
            self.running = computation
            duration = self.cluster.speed * self.world.rng.uniform(0.2, 1.0)
            if self.world.rng.random() < self.cluster.stall_rate:
                duration += self.world.rng.uniform(5.0, 60.0)
            self.world.after(duration, self.name, self.finish)

    def finish(self) -> None:
        computation, self.running = self.running, None
        assert computation is not None
        match computation:
            case RunForward(micro_batch=micro_batch):
                self.forward_done(micro_batch)
            case RunEvaluation(micro_batch=micro_batch):
                self.forward_done(micro_batch)
                if not self.targets:
                    self.cluster.evaluated(micro_batch)
            case RunBackward(micro_batch=micro_batch):
                self.backward_done(micro_batch)
            case RunUpdate():
                self.update_done(computation)
        for ring in self.rings:
            ring.between_updates()
        self.handle(ComputeFinished())

    def forward_done(self, micro_batch: MicroBatch) -> None:
        for target in sorted(self.targets):
            stage = self.cluster.stages[target]
            event = ValuesArrived(micro_batch=micro_batch, source=self.index)
            self.world.send(self.name, stage.name, lambda stage=stage, event=event: stage.handle(event))

    def backward_done(self, micro_batch: MicroBatch) -> None:
        lease, start, stop = self.cluster.spans[micro_batch.number]
        for unit in self.units:
            self.gradient[unit] += sum((unit + 1) * (lease.start + offset + 1) for offset in range(start, stop))
        self.batch.append(micro_batch)
        for source in sorted(self.sources - {DATA}):
            stage = self.cluster.stages[source]
            event = GradientsArrived(number=micro_batch.number, source=self.index)
            self.world.send(self.name, stage.name, lambda stage=stage, event=event: stage.handle(event))

    def update_done(self, update: RunUpdate) -> None:
        assert {micro_batch.batch for micro_batch in self.batch} == {update.batch}
        assert [micro_batch.position for micro_batch in self.batch] == list(range(self.batch[0].count))
        self.cluster.check_staleness(self, update)
        for unit in self.units:
            self.weights[unit] -= self.gradient[unit]
        for micro_batch in self.batch:
            lease, start, stop = self.cluster.spans[micro_batch.number]
            self.applied.update((lease.epoch, lease.start + offset) for offset in range(start, stop))
            self.samples += micro_batch.samples
        self.updates += 1
        lease_id = self.batch[0].lease
        self.gradient.clear()
        self.batch.clear()
        if self.index == 0:
            self.cluster.batch_done(lease_id)
        if self.updates % self.cluster.interval == 0:
            for ring in self.rings:
                ring.start()


class SimulatedCluster:
    """The stages of one cluster and the feeder of its first stage."""

    def __init__(self, *, world: World, index: int, batch_size: int, micro_batch_size: int, interval: int, ragged: bool) -> None:
        self.world = world
        self.index = index
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.interval = interval
        self.ragged = ragged
        self.speed = world.rng.choice([0.5, 1.0, 4.0])
        self.stall_rate = 0.0
        self.stages: list[SimulatedStage] = []
        self.spans: dict[int, Span] = {}
        self.open: dict[int, int] = {}  # lease -> batches (training) or micro-batches (evaluation) still to do
        self.next_number = 0
        self.next_batch = 0
        self.asking = False
        self.drained = True
        self.ask_coordinator: Callable[[int], None] = lambda want: None
        self.report_done: Callable[[SimulatedStage, int], None] = lambda stage, lease: None

    def check_staleness(self, stage: SimulatedStage, update: RunUpdate) -> None:
        per_batch = -(-self.batch_size // self.micro_batch_size)
        bound = stage.bound - 1 if self.ragged else -(-(stage.bound - 1) // per_batch)
        assert all(0 <= staleness <= bound for staleness in update.staleness), f"{stage.name}: {update} over {bound}"

    def resume(self) -> None:
        """The coordinator says that there may be leases."""
        self.drained = False
        self.ask()

    def ask(self) -> None:
        if not self.drained and not self.asking and len(self.open) < 3:
            self.asking = True
            self.ask_coordinator(3 - len(self.open))

    def granted(self, leases: tuple[Lease, ...], drained: bool) -> None:
        self.asking = False
        self.drained = drained
        for lease in leases:
            cut, self.next_number, self.next_batch = micro_batches(
                lease,
                batch_size=self.batch_size,
                micro_batch_size=self.micro_batch_size,
                next_number=self.next_number,
                next_batch=self.next_batch,
                seed=0,
                cluster=self.index,
            )
            self.open[lease.lease_id] = 1 if lease.training else len(cut)
            for header, start, stop in cut:
                self.spans[header.number] = (lease, start, stop)
                self.stages[0].handle(ValuesArrived(micro_batch=header, source=DATA))
        self.ask()

    def batch_done(self, lease_id: int) -> None:
        self._one_less(self.stages[0], lease_id)

    def evaluated(self, micro_batch: MicroBatch) -> None:
        self._one_less(self.stages[-1], micro_batch.lease)

    def _one_less(self, stage: SimulatedStage, lease_id: int) -> None:
        self.open[lease_id] -= 1
        if self.open[lease_id] == 0:
            del self.open[lease_id]
            self.report_done(stage, lease_id)
            self.ask()
