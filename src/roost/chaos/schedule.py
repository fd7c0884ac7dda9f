"""Which faults come when: drawn from a seed, the same every time. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from roost.config import require


class FaultKind(StrEnum):
    """What can be done to a pool."""

    KILL = "kill"
    """A node's process ends at once (SIGKILL) and is started again a moment later."""
    FREEZE = "freeze"
    """A node's process stands still (SIGSTOP) and goes on a moment later."""
    CUT = "cut"
    """The connections between two nodes are closed, and new ones refused, for a moment."""
    BLACKHOLE = "blackhole"
    """Nothing gets to a node or away from it, without a word, for a moment: its cable is pulled."""
    COORDINATOR = "coordinator"
    """The coordinator's process is killed and started again with the same state directory."""
    RESTART = "restart"
    """Every process is killed; all are started again, and the job goes on from its last checkpoint."""


WEIGHTS = {
    FaultKind.KILL: 10,
    FaultKind.FREEZE: 6,
    FaultKind.CUT: 4,
    FaultKind.BLACKHOLE: 4,
    FaultKind.COORDINATOR: 3,
    FaultKind.RESTART: 1,
}
"""How often each kind comes, relative to the others."""
DURATIONS_S = {
    FaultKind.KILL: (0.5, 3.0),
    FaultKind.FREEZE: (2.0, 10.0),
    FaultKind.CUT: (1.0, 6.0),
    FaultKind.BLACKHOLE: (2.0, 12.0),
    FaultKind.COORDINATOR: (0.5, 3.0),
    FaultKind.RESTART: (0.5, 2.0),
}
"""Least and most seconds that each kind lasts: until the process is started again, goes on, or the link is back."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault to come."""

    kind: FaultKind
    at_s: float
    """Seconds of training after which it comes."""
    lasts_s: float
    """Seconds until what was broken is given back."""
    first: float
    """In [0, 1): which of the nodes that are there is hit."""
    second: float
    """In [0, 1): which of the others is at the other end of a link that is cut."""


def draw(*, seed: int, faults: int, seconds: float, kinds: Collection[FaultKind] = tuple(FaultKind)) -> tuple[Fault, ...]:
    """Return faults in the order in which they come, spread over `seconds` of training, each of `kinds` as often as WEIGHTS say.

    Every kind comes at least once if there are as many faults as kinds. Raises InvalidConfigError.
    """
    require(faults >= 1, f"there must be at least one fault, not {faults}")
    require(seconds > 0, f"faults need some time, not {seconds} s")
    require(len(kinds) > 0, "there must be at least one kind of fault")
    rng = random.Random(seed)
    chosen = [kind for kind in FaultKind if kind in kinds]
    order = _kinds(faults, chosen)
    rng.shuffle(order)
    step = seconds / faults
    drawn = []
    for index, kind in enumerate(order):
        least, most = DURATIONS_S[kind]
        fault = Fault(
            kind=kind,
            at_s=step * (index + rng.uniform(0.25, 0.75)),
            lasts_s=rng.uniform(least, most),
            first=rng.random(),
            second=rng.random(),
        )
        drawn.append(fault)
    return tuple(drawn)


def _kinds(faults: int, kinds: list[FaultKind]) -> list[FaultKind]:
    """Return so many kinds, in proportion to their weights, one of each first."""
    order: list[FaultKind] = []
    while len(order) < faults:
        # Whoever is furthest behind its share comes next.
        order.append(min(kinds, key=lambda kind: (order.count(kind) + (kind in order)) / WEIGHTS[kind]))
    return order


def pick(names: Collection[str], draw_of_it: float) -> str:
    """Return the name that a number in [0, 1) stands for, whatever order they come in."""
    ordered = sorted(names)
    return ordered[min(int(draw_of_it * len(ordered)), len(ordered) - 1)]
