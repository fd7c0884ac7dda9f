"""What a seed stands for: a pool, its faults, and what is expected of them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass

from fault_story import HARMLESS, FaultRates, FaultStory, Mishap
from pool_invariants import PoolInvariants
from small_job import captured_job
from whole_pool import WholePool

from roost.errors import (
    JobRefusedError,
    NodeLostError,
    PlanningError,
    RequesterLostError,
    RoostError,
    StageFailedError,
    StaleCoordinatorError,
    TransportError,
)
from roost.messages import JobState
from roost.planning.planner import make_plan
from roost.types import Role

PROGRESS_S = 600.0
"""After the last fault a job ends within that: a round of a ring may last 60 s, a step of a synchronisation point 120 s."""

REQUESTER_MISSED_S = 5.0
"""A requester that is away for less is waited for; after more a job may end for want of it."""
BACK_S = 20.0
"""A node that has been back for so long counts as there."""
TOO_FEW = (NodeLostError, PlanningError, StageFailedError)
"""What a job may fail with when too few nodes are left."""
UNPLANNED = (PlanningError, JobRefusedError, TransportError, StageFailedError)
"""What a submission may fail with before there is a plan: it is asked for once, by somebody who can do so again."""
EXCUSES: tuple[tuple[frozenset[Mishap], tuple[type[RoostError], ...]], ...] = (
    (frozenset({Mishap.STALE_COORDINATOR}), (StaleCoordinatorError, StageFailedError, JobRefusedError, TransportError)),
)
"""Faults that a job need not survive, and what it then fails with: a coordinator whose disk shows an earlier state may not even know it."""

FAMILIES: dict[str, FaultRates | None] = {
    "none": None,
    "harmless": FaultRates(weights=dict.fromkeys(sorted(HARMLESS), 1.0)),
    "links": FaultRates(weights={Mishap.RESET: 3, Mishap.CUT: 1, Mishap.ONE_WAY: 1, Mishap.BLACKHOLE: 1, Mishap.SLOW: 1}),
    "nodes": FaultRates(weights={Mishap.KILL: 2, Mishap.VANISH: 1, Mishap.FREEZE: 1, Mishap.ISOLATE: 1}, most=3),
    "coordinator": FaultRates(weights={Mishap.COORDINATOR: 2, Mishap.STALE_COORDINATOR: 1, Mishap.FREEZE_COORDINATOR: 1}, most=2),
    "requester": FaultRates(weights={Mishap.REQUESTER_AWAY: 1}, most=2, longest_s=10.0),
    "early": FaultRates(weights={kind: 1.0 for kind in Mishap if kind is not Mishap.REQUESTER_AWAY}, early=True),
    "everything": FaultRates(weights={kind: 1.0 for kind in Mishap if kind is not Mishap.REQUESTER_AWAY}, most=5),
}
"""Kinds of stories, by name."""
SHARES = {"none": 2, "harmless": 1, "links": 3, "nodes": 4, "coordinator": 3, "requester": 1, "early": 1, "everything": 4}
"""How often each is drawn."""


@dataclass(frozen=True, kw_only=True)
class PlayedSeed:
    """A run that is over."""

    family: str
    pool: WholePool
    story: FaultStory | None
    invariants: PoolInvariants

    @property
    def problems(self) -> list[str]:
        """What must not have been."""
        return self.pool.problems

    def described(self) -> str:
        """Return what a person needs to look into it."""
        faults = [entry for entry in self.pool.record if entry[1] in DESCRIBED]
        shape = self.pool.shape
        lines = [f"seed {self.pool.seed}: family {self.family}, clusters of {shape.stages} nodes, {shape.spares} spares, {shape.settings}"]
        lines += [f"  {when:10.3f} s  {kind} {' '.join(map(str, rest))}" for when, kind, *rest in faults]
        return "\n".join([*lines, "problems:", *(f"  {problem}" for problem in self.problems), f"outcome: {self.pool.outcome}"])


DESCRIBED = frozenset(
    {"fault", "fault over", "kill", "dead", "start", "freeze", "thaw", "silence", "cut", "reset", "replayed", "problem", "ended"}
)
"""Entries of the record that tell the story."""


def family_of(seed: int) -> str:
    """Return the kind of faults of a seed."""
    return random.Random(f"family {seed}").choices(list(SHARES), list(SHARES.values()))[0]


def play(seed: int, *, family: str = "") -> PlayedSeed:
    """Return the run of a seed, with everything checked that must hold."""
    name = family or family_of(seed)
    rates = FAMILIES[name]
    pool = WholePool(seed)
    story = FaultStory(seed, rates) if rates is not None else None
    invariants = PoolInvariants(pool)
    with invariants.watching():
        pool.play(story.tell if story is not None else no_faults, bound_s=PROGRESS_S)
    judge_outcome(pool, story, invariants)
    return PlayedSeed(family=name, pool=pool, story=story, invariants=invariants)


async def no_faults(pool: WholePool) -> None:
    """Let everything go well."""


def judge_outcome(pool: WholePool, story: FaultStory | None, invariants: PoolInvariants) -> None:
    """Tell the pool of a problem if its job should not have ended as it did."""
    error = pool.error
    if error is None:
        if pool.state is JobState.DONE:
            invariants.judge()
        return
    if story is None or not set(story.happened) - HARMLESS:
        pool.problem(f"nothing happened, and the job ended with {pool.outcome}")
        return
    if pool.run is not None and pool.run.plan is None and isinstance(error, UNPLANNED):
        return
    for kinds, excused in EXCUSES:
        if kinds & set(story.happened) and isinstance(error, excused):
            return
    if story.requester_away_s >= REQUESTER_MISSED_S and isinstance(error, RequesterLostError):
        return
    there = {name for name, host in pool.hosts.items() if host.up and story.disturbed.get(name, 0.0) + BACK_S < pool.ended_at}
    if not could_go_on(pool, there) and isinstance(error, TOO_FEW):
        return
    nodes = sorted(name for name in there if pool.hosts[name].role is Role.NODE)
    pool.problem(f"{', '.join(nodes)} had been there long enough to go on, and the job ended with {pool.outcome}")


def could_go_on(pool: WholePool, names: Iterable[str]) -> bool:
    """Return True if the nodes among `names` can hold the model."""
    assert pool.run is not None
    config = pool.run._package.config
    nodes = [pool.profile(name) for name in sorted(names) if pool.hosts[name].role is Role.NODE]
    try:
        make_plan(captured_job().profile, nodes, [], config, random.Random(0))
    except PlanningError:
        return False
    return True


def record_digest(played: PlayedSeed) -> str:
    """Return a short name of everything that happened in a run."""
    return hashlib.sha256(repr(played.pool.record).encode()).hexdigest()[:16]
