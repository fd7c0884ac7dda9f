"""A deterministic world: a clock that jumps from event to event, and links that delay messages but keep their order."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

Action = Callable[[], None]


class World:
    """Runs actions in the order of their time; everything random comes from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.dead: set[str] = set()
        self.log: list[tuple[float, str]] = []
        self._heap: list[tuple[float, int, str, Action]] = []
        self._sequence = itertools.count()
        self._arrival: dict[tuple[str, str], float] = {}
        self._latency: dict[tuple[str, str], float] = {}

    def note(self, what: str) -> None:
        """Record what happens, so that two runs can be compared."""
        self.log.append((self.now, what))

    def at(self, when: float, owner: str, action: Action) -> None:
        """Run `action` at time `when`, unless its owner is dead by then."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._sequence), owner, action))

    def after(self, delay: float, owner: str, action: Action) -> None:
        self.at(self.now + delay, owner, action)

    def send(self, source: str, target: str, action: Action) -> None:
        """Run `action` when a message from `source` reaches `target`: after a random delay, never before an earlier message."""
        if source in self.dead:
            return
        link = (source, target)
        latency = self._latency.setdefault(link, self.rng.choice([0.01, 0.1, 0.5]))
        arrival = max(self.now + latency * self.rng.uniform(0.5, 2.0), self._arrival.get(link, 0.0))
        self._arrival[link] = arrival
        self.at(arrival, target, action)

    def run(self, finished: Callable[[], bool], check: Action, *, most_events: int) -> None:
        """Run until `finished`, with `check` after every event; fails if nothing is left to happen or it takes too long."""
        for _ in range(most_events):
            if finished():
                return
            assert self._heap, f"deadlock at {self.now:.2f}: nothing is left to happen"
            self.now, _, owner, action = heapq.heappop(self._heap)
            if owner not in self.dead:
                action()
                check()
        raise AssertionError(f"no end after {most_events} events, at {self.now:.2f}")
