"""A ring whose tensors are exact fractions and whose network delivers in any order that keeps each link's own order."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction

from roost.config import TensorCodec
from roost.protocol.averaging_events import CombineChunk
from roost.protocol.averaging_round import (
    NO_BASE,
    PLAIN,
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
    RoundTerms,
    ScaleChunk,
    SendChunk,
    SendOpen,
    SnapshotTaken,
    StartRequested,
    StoreChunk,
    TakeSnapshot,
    ordered_round,
)
from roost.protocol.guarded_round import GuardedMember

Sent = tuple[SendOpen | SendChunk, Fraction]


@dataclass
class Shell:
    """What a node does for its ring member: performs instructions on exact numbers."""

    member: RingMember
    values: list[Fraction]
    weight: int
    snapshot: list[Fraction] = field(default_factory=list)
    pieces: int = 1
    local: list[Fraction] = field(default_factory=list)
    base: list[Fraction] = field(default_factory=list)
    terms: RoundTerms = PLAIN
    buffers: dict[tuple[int, int, int], Fraction] = field(default_factory=dict)
    claims: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """The samples that came with each buffer."""
    pending: deque[TakeSnapshot | ApplyAverage] = field(default_factory=deque)
    applied: list[int] = field(default_factory=list)
    abandoned: list[AbandonRound] = field(default_factory=list)

    def perform(self, instructions: list[RingInstruction]) -> list[Sent]:
        """Carry out what is local at once, queue what waits for an update, and return what must be sent."""
        sent: list[Sent] = []
        for instruction in instructions:
            match instruction:
                case SendOpen():
                    sent.append((instruction, Fraction(0)))
                case SendChunk(chunk=chunk, piece=piece):
                    sent.append((instruction, self.local[chunk * self.pieces + piece]))
                case AddChunk(round=number, step=step, chunk=chunk, piece=piece):
                    self.local[chunk * self.pieces + piece] += self.buffers.pop((number, step, piece))
                case StoreChunk(round=number, step=step, chunk=chunk, piece=piece):
                    self.local[chunk * self.pieces + piece] = self.buffers.pop((number, step, piece))
                case ScaleChunk(chunk=chunk, piece=piece):
                    self.local[chunk * self.pieces + piece] /= int(instruction.total_weight)
                case CombineChunk():
                    self._combine(instruction)
                case TakeSnapshot() | ApplyAverage():
                    self.pending.append(instruction)
                case AbandonRound():
                    self.abandoned.append(instruction)
                    self.pending.clear()
        self.buffers = {key: value for key, value in self.buffers.items() if self.member.wants(key[0])}
        return sent

    def _combine(self, instruction: CombineChunk) -> None:
        """Take the plain mean in place of a robust one: it is known exactly."""
        place = instruction.chunk * self.pieces + instruction.piece
        total, weight = self.local[place] * self.weight, self.weight
        for key in sorted(self.buffers):
            if key[0] == instruction.round and key[1] < self.sources and key[2] == instruction.piece:
                total, weight = total + self.buffers.pop(key) * self.claims[key], weight + self.claims[key]
        self.local[place] = total / weight

    @property
    def sources(self) -> int:
        """How many others there are in guarded rounds; 0 in a ring of sums."""
        return len(self.local) // self.pieces - 1 if isinstance(self.member, GuardedMember) else 0

    def between_updates(self, now: float) -> list[Sent]:
        """Carry out what was waiting for the end of an update."""
        instruction = self.pending.popleft()
        if isinstance(instruction, TakeSnapshot):
            self.snapshot = list(self.values)
            self.terms = instruction.terms
            base = self.base if self.terms.base != NO_BASE else [Fraction(0)] * len(self.values)
            factor = 1 if isinstance(self.member, GuardedMember) else self.weight
            self.local = [(value - before) * factor for value, before in zip(self.values, base, strict=True)]
            return self.perform(self.member.handle(SnapshotTaken(round=instruction.round, weight=self.weight, now=now)))
        if self.terms.base != NO_BASE:
            self.local = [mean + before for mean, before in zip(self.local, self.base, strict=True)]
        self.base = list(self.local)
        self.values = [value + mean - old for value, mean, old in zip(self.values, self.local, self.snapshot, strict=True)]
        self.applied.append(instruction.round)
        return self.perform(self.member.handle(AverageApplied(round=instruction.round, now=now)))


class Ring:
    """Members, links that each keep their order, and a random choice of what happens next."""

    def __init__(
        self, size: int, seed: int, deadline_s: float = 1000.0, *, pieces: int = 1, differences: bool = False, guarded: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.names = tuple(f"node-{index}" for index in range(size))
        self.size = size * pieces
        codec = TensorCodec.INT8 if differences else TensorCodec.NONE
        kind = GuardedMember if guarded else RingMember
        self.shells = {
            name: Shell(
                member=kind(0, self.names, name, deadline_s, pieces=pieces, codec=codec, differences=differences),
                values=[Fraction(self.rng.randrange(-50, 50)) for _ in range(self.size)],
                weight=self.rng.randrange(1, 9),
                pieces=pieces,
                base=[Fraction(0)] * self.size,
            )
            for name in self.names
        }
        self.links: dict[tuple[str, str], deque[Sent]] = {}
        self.now = 0.0
        self.dead: set[str] = set()

    def mean(self) -> list[Fraction]:
        total = sum(shell.weight for shell in self.shells.values())
        return [
            sum((shell.values[index] * shell.weight for shell in self.shells.values()), Fraction(0)) / total for index in range(self.size)
        ]

    def give(self, name: str, event: RingEvent) -> None:
        """Hand an event to a member and carry out its answer."""
        shell = self.shells[name]
        self.post(name, shell.perform(shell.member.handle(event)))

    def post(self, name: str, sent: list[Sent]) -> None:
        for message in sent:
            self.links.setdefault((name, message[0].peer), deque()).append(message)

    def start(self, name: str, order: int = 0) -> None:
        self.give(name, StartRequested(now=self.now, order=order))

    def deliver(self, link: tuple[str, str]) -> None:
        instruction, value = self.links[link].popleft()
        target = link[1]
        if target in self.dead:
            return
        if isinstance(instruction, SendOpen):
            self.give(target, OpenReceived(round=instruction.round, now=self.now, terms=instruction.terms))
            return
        key = (instruction.round, instruction.step, instruction.piece)
        assert self.shells[target].member.source(instruction.step) == link[0]
        self.shells[target].buffers[key], self.shells[target].claims[key] = value, int(instruction.weight)
        event = ChunkArrived(
            round=instruction.round,
            step=instruction.step,
            chunk=instruction.chunk,
            weight=instruction.weight,
            now=self.now,
            piece=instruction.piece,
            terms=instruction.terms,
        )
        self.give(target, event)

    def step(self) -> bool:
        """Let one thing happen, chosen at random; return False if nothing can."""
        moves: list[tuple[str, str]] = [link for link, queue in self.links.items() if queue]
        moves += [(name, "") for name, shell in self.shells.items() if shell.pending and name not in self.dead]
        if not moves:
            return False
        source, target = self.rng.choice(moves)
        if target:
            self.deliver((source, target))
        else:
            self.post(source, self.shells[source].between_updates(self.now))
        return True

    def settle(self) -> None:
        """Let everything happen that can without the passing of time."""
        while self.step():
            pass


# ---------------------------------------------------------------- what any kind of ring is put through


def carry_out_orders_amid_requests(ring: Ring) -> None:
    """Ask every member for a round and for the first ordered one, at any moments: all end with the same values."""
    waiting = [(name, order) for name in ring.names for order in (0, 1)]
    ring.rng.shuffle(waiting)
    while waiting:
        if ring.rng.random() < 0.3:
            name, order = waiting.pop()
            ring.start(name, order=order)
        ring.step()
    ring.settle()
    assert len({tuple(shell.values) for shell in ring.shells.values()}) == 1
    assert all(shell.member.finished >= ordered_round(1) for shell in ring.shells.values())
    assert all(shell.member.idle and not shell.buffers for shell in ring.shells.values())


def give_up_and_meet_again(ring: Ring, steps: int) -> None:
    """Let some members of a ring whose deadline is 10 s give up before others do, with messages still on their way, and order a round."""
    ring.start(ring.rng.choice(ring.names))
    for _ in range(steps):
        ring.step()
    ring.now = 10.0
    for name in ring.rng.sample(ring.names, ring.rng.randrange(1, len(ring.names) + 1)):
        ring.give(name, DeadlinePassed(now=ring.now))
        for _ in range(ring.rng.randrange(4)):
            ring.step()
    ring.settle()
    ring.now = 25.0
    for name in ring.names:
        ring.give(name, DeadlinePassed(now=ring.now))
    ring.settle()
    assert all(shell.member.idle for shell in ring.shells.values())
    wanted = ring.mean()
    ring.start(ring.rng.choice(ring.names), order=1)
    ring.settle()
    assert all(shell.values == wanted and not shell.buffers for shell in ring.shells.values())


def lose_a_member(ring: Ring, steps: int) -> None:
    """Let a member of a ring whose deadline is 10 s die in the middle of a round: the others end idle, at most one round on."""
    ring.start(ring.names[0])
    for _ in range(steps):
        ring.step()
    ring.dead.add(ring.rng.choice(ring.names))
    ring.settle()
    ring.now = 30.0
    for name in ring.names:
        if name not in ring.dead:
            ring.give(name, DeadlinePassed(now=ring.now))
    ring.settle()
    for name, shell in ring.shells.items():
        assert name in ring.dead or shell.member.idle
        assert name in ring.dead or len(shell.applied) + len(shell.abandoned) <= 1
