"""A node's part in one ring, on exact numbers: carries out what RingMember decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from fractions import Fraction

from world import World

from roost.protocol.averaging_round import (
    AbandonRound,
    AddChunk,
    ApplyAverage,
    AverageApplied,
    ChunkArrived,
    DeadlinePassed,
    OpenReceived,
    RingEvent,
    RingInstruction,
    RingMember,
    ScaleChunk,
    SendChunk,
    SendOpen,
    SnapshotTaken,
    StartRequested,
    StoreChunk,
    TakeSnapshot,
    ordered_round,
)

Values = dict[int, Fraction]
"""Unit -> its exact weight."""


class SimulatedRing:
    """One member of one ring; `units` are the part of the node's weights that the ring averages."""

    def __init__(
        self,
        *,
        world: World,
        node: str,
        units: tuple[int, ...],
        member: RingMember,
        size: int,
        weights: Values,
        samples: Callable[[], int],
        computing: Callable[[], bool],
    ) -> None:
        self.world = world
        self.node = node
        self.units = units
        self.member = member
        self.size = size
        self.peers: dict[str, SimulatedRing] = {}
        self.weights = weights
        self.samples = samples
        self.computing = computing
        self.pending: deque[TakeSnapshot | ApplyAverage] = deque()
        self.snapshot: Values = {}
        self.weight = 0
        self.local: Values = {}
        self.buffers: dict[tuple[int, int], Values] = {}
        self.samples_applied = 0
        self.samples_at_snapshot = 0
        self.snapshots: dict[int, tuple[Values, int]] = {}  # round -> what was averaged, with its weight
        self.order = 0
        self.closed = False
        self.on_order: Callable[[], None] = lambda: None

    def chunk(self, number: int) -> list[int]:
        return list(self.units[number :: self.size])

    def handle(self, event: RingEvent) -> None:
        """Hand an event to the member and carry out its answer; a closed ring was replaced by another."""
        if self.closed:
            return
        for instruction in self.member.handle(event):
            self.perform(instruction)
        self.buffers = {key: values for key, values in self.buffers.items() if self.member.wants(key[0])}
        deadline = self.member.deadline
        if deadline is not None:
            self.world.at(deadline, self.node, self.expire)
        if not self.computing():
            self.between_updates()

    def expire(self) -> None:
        if self.member.deadline is not None and self.world.now >= self.member.deadline:
            self.handle(DeadlinePassed(now=self.world.now))

    def start(self, order: int = 0) -> None:
        """Ask for a background round, or for the ordered one."""
        self.order = max(self.order, order)
        self.handle(StartRequested(now=self.world.now, order=order))
        self.report()

    def report(self) -> None:
        if self.order and self.member.finished >= ordered_round(self.order):
            self.on_order()

    def perform(self, instruction: RingInstruction) -> None:
        match instruction:
            case SendOpen(peer=peer, round=number):
                target = self.peers[peer]
                self.world.send(self.node, peer, lambda: target.handle(OpenReceived(round=number, now=self.world.now)))
            case SendChunk():
                self.send(instruction)
            case AddChunk(round=number, step=step):
                for unit, value in self.buffers.pop((number, step)).items():
                    self.local[unit] += value
            case StoreChunk(round=number, step=step):
                self.local.update(self.buffers.pop((number, step)))
            case ScaleChunk(chunk=chunk, total_weight=total):
                self.local.update({unit: self.local[unit] / int(total) for unit in self.chunk(chunk)})
            case TakeSnapshot() | ApplyAverage():
                self.pending.append(instruction)
            case AbandonRound(round=number):
                self.pending.clear()
                self.world.note(f"{self.node} abandons round {number}")
                if self.order and number >= ordered_round(self.order):
                    self.world.after(1.0, self.node, lambda: self.start(self.order))

    def send(self, instruction: SendChunk) -> None:
        target = self.peers[instruction.peer]
        values = {unit: self.local[unit] for unit in self.chunk(instruction.chunk)}

        def arrive() -> None:
            target.buffers[instruction.round, instruction.step] = values
            event = ChunkArrived(
                round=instruction.round,
                step=instruction.step,
                chunk=instruction.chunk,
                weight=instruction.weight,
                now=self.world.now,
            )
            target.handle(event)

        self.world.send(self.node, instruction.peer, arrive)

    def between_updates(self) -> None:
        """Carry out what had to wait for the end of a computation."""
        while self.pending:
            instruction = self.pending.popleft()
            if isinstance(instruction, TakeSnapshot):
                self.take_snapshot(instruction.round)
            else:
                for unit in self.units:
                    self.weights[unit] += self.local[unit] - self.snapshot[unit]
                self.samples_applied = self.samples_at_snapshot
                self.world.note(f"{self.node} applies round {instruction.round}")
                self.handle(AverageApplied(round=instruction.round, now=self.world.now))
                self.report()

    def take_snapshot(self, number: int) -> None:
        self.samples_at_snapshot = self.samples()
        self.weight = max(1, self.samples_at_snapshot - self.samples_applied)
        self.snapshot = {unit: self.weights[unit] for unit in self.units}
        self.local = {unit: value * self.weight for unit, value in self.snapshot.items()}
        self.snapshots[number] = (dict(self.snapshot), self.weight)
        self.handle(SnapshotTaken(round=number, weight=self.weight, now=self.world.now))
