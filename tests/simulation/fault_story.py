"""What goes wrong in a run, drawn from its seed."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from whole_pool import COORDINATOR, REQUESTER, WholePool

from roost.messages import JobState


class Mishap(StrEnum):
    """Kinds of faults."""

    RESET = "reset"
    """What is open between two peers breaks; they may connect again at once."""
    CUT = "cut"
    """Two peers refuse each other for a while."""
    ONE_WAY = "one-way"
    """Nothing arrives in one direction for a while."""
    BLACKHOLE = "blackhole"
    """Nothing arrives between two peers for a while."""
    ISOLATE = "isolate"
    """A node hears nobody and is heard by nobody for a while."""
    SLOW = "slow"
    """A link takes many times longer for a while."""
    WALL_CLOCK = "wall-clock"
    """A machine's wall clock jumps."""
    KILL = "kill"
    """A node's process ends at any point; it may be started again."""
    VANISH = "vanish"
    """A node's machine is gone without a word; it may come back."""
    FREEZE = "freeze"
    """A node's process is stopped for a while."""
    COORDINATOR = "coordinator"
    """The coordinator's process ends at any point and is started again."""
    STALE_COORDINATOR = "stale-coordinator"
    """The same, and its disk has an older state."""
    FREEZE_COORDINATOR = "freeze-coordinator"
    """The coordinator's process is stopped for a while."""
    REQUESTER_AWAY = "requester-away"
    """The requester hears nobody and is heard by nobody for a while."""


HARMLESS = frozenset({Mishap.SLOW, Mishap.WALL_CLOCK})
"""What a job notices nothing of."""
OF_NODES = frozenset(
    {Mishap.RESET, Mishap.CUT, Mishap.ONE_WAY, Mishap.BLACKHOLE, Mishap.ISOLATE, Mishap.KILL, Mishap.VANISH, Mishap.FREEZE}
)


LOOK_S = 0.1
MOST_LOOKS = 600
"""A story waits so many times LOOK_S for a plan."""
AT_STATEMENT = 0.4
"""Share of the coordinator's deaths that come between two statements of its database."""
MOST_LIFE_S = 0.4
"""A process that is to end does so by then, however little it does."""


@dataclass(frozen=True, kw_only=True)
class FaultRates:
    """How many faults of which kinds."""

    weights: Mapping[Mishap, float]
    """How often a kind is drawn, relative to the others."""
    most: int = 4
    """Faults in a run."""
    within_s: float = 8.0
    """Seconds in which they begin."""
    early: bool = False
    """They begin when the job is submitted, not when it is planned."""
    shortest_s: float = 0.5
    longest_s: float = 25.0
    """How long those last that pass."""
    gone_for_good: float = 0.25
    """Share of killed nodes that do not come back."""


class FaultStory:
    """Draws faults and makes them happen, one after the other; they may overlap."""

    def __init__(self, seed: int, rates: FaultRates) -> None:
        self._rng = random.Random(f"faults {seed}")
        self._rates = rates
        self._lasting: set[asyncio.Task[None]] = set()
        self.happened: list[Mishap] = []
        self.lost_for_good: set[str] = set()
        self.disturbed: dict[str, float] = {}
        """Nodes that were gone, or could not be reached by somebody, and until when; those that did not come back, for ever."""
        self.requester_away_s = 0.0
        """The longest time in which the requester was away, or could not reach somebody."""

    async def tell(self, pool: WholePool) -> None:
        """Make every fault; return when the last one has passed."""
        kinds = list(self._rates.weights)
        count = self._rng.randint(1, self._rates.most)
        assert pool.run is not None
        for _ in range(MOST_LOOKS):
            if self._rates.early or pool.run.plan is not None or pool.error is not None:
                break
            await asyncio.sleep(LOOK_S)
        began = pool.loop.now
        times = sorted(began + self._rng.uniform(0.0, self._rates.within_s) for _ in range(count))
        for when in times:
            await asyncio.sleep(max(0.0, when - pool.loop.now))
            kind = self._rng.choices(kinds, [self._rates.weights[known] for known in kinds])[0]
            if pool.error is not None or pool.state is JobState.DONE:
                break
            task = asyncio.create_task(self._happen(pool, kind))
            self._lasting.add(task)
        await asyncio.gather(*sorted(self._lasting, key=hash))

    async def _happen(self, pool: WholePool, kind: Mishap) -> None:
        acts: dict[Mishap, Callable[[WholePool], Coroutine[Any, Any, None]]] = {
            Mishap.RESET: self._reset,
            Mishap.CUT: self._cut,
            Mishap.ONE_WAY: self._one_way,
            Mishap.BLACKHOLE: self._blackhole,
            Mishap.ISOLATE: lambda pool: self._isolate(pool, self._node(pool)),
            Mishap.SLOW: self._slow,
            Mishap.WALL_CLOCK: self._wall_clock,
            Mishap.KILL: lambda pool: self._kill(pool, silently=False),
            Mishap.VANISH: lambda pool: self._kill(pool, silently=True),
            Mishap.FREEZE: lambda pool: self._freeze(pool, self._node(pool)),
            Mishap.COORDINATOR: lambda pool: self._restart_coordinator(pool, stale=False),
            Mishap.STALE_COORDINATOR: lambda pool: self._restart_coordinator(pool, stale=True),
            Mishap.FREEZE_COORDINATOR: lambda pool: self._freeze(pool, COORDINATOR),
            Mishap.REQUESTER_AWAY: lambda pool: self._isolate(pool, REQUESTER),
        }
        pool.note("fault", kind.value)
        self.happened.append(kind)
        await acts[kind](pool)
        pool.note("fault over", kind.value)

    # ------------------------------------------------------------ who and how long

    def _node(self, pool: WholePool) -> str:
        return self._rng.choice([name for name in pool.hosts if name not in (COORDINATOR, REQUESTER)])

    def _pair(self, pool: WholePool) -> tuple[str, str]:
        first = self._node(pool)
        return first, self._rng.choice([name for name in pool.hosts if name != first])

    async def _pass(self, *who: str) -> None:
        """Let some time go by in which something is wrong with these."""
        seconds = self._rng.choice([self._rates.shortest_s, self._rng.uniform(self._rates.shortest_s, self._rates.longest_s)])
        if REQUESTER in who:
            self.requester_away_s = max(self.requester_away_s, seconds)
        until = asyncio.get_running_loop().time() + seconds
        for name in who:
            lasts = math.inf if name in self.lost_for_good else until
            self.disturbed[name] = max(lasts, self.disturbed.get(name, lasts))
        await asyncio.sleep(seconds)

    # ------------------------------------------------------------ links

    async def _reset(self, pool: WholePool) -> None:
        first, second = self._pair(pool)
        pool.note("reset", first, second)
        pool.network.reset(first, second)

    async def _cut(self, pool: WholePool) -> None:
        first, second = self._pair(pool)
        pool.note("cut", first, second)
        pool.network.cut(first, second)
        await self._pass(first, second)
        pool.network.mend(first, second)

    async def _one_way(self, pool: WholePool) -> None:
        first, second = self._rng.sample(self._pair(pool), 2)
        pool.note("silence", first, second)
        pool.network.silence(first, second)
        await self._pass(first, second)
        pool.network.restore(first, second)

    async def _blackhole(self, pool: WholePool) -> None:
        first, second = self._pair(pool)
        await self._silence_all(pool, [(first, second), (second, first)], first, second)

    async def _isolate(self, pool: WholePool, name: str) -> None:
        others = [other for other in pool.hosts if other != name]
        await self._silence_all(pool, [(name, other) for other in others] + [(other, name) for other in others], name)

    async def _silence_all(self, pool: WholePool, ways: list[tuple[str, str]], *who: str) -> None:
        for source, target in ways:
            pool.note("silence", source, target)
            pool.network.silence(source, target)
        await self._pass(*who)
        for source, target in ways:
            pool.network.restore(source, target)

    async def _slow(self, pool: WholePool) -> None:
        way = pool.network.way(*self._pair(pool))
        factor = self._rng.choice([5.0, 20.0])
        way.delay_s *= factor
        await self._pass()
        way.delay_s /= factor

    async def _wall_clock(self, pool: WholePool) -> None:
        machine = pool.hosts[self._rng.choice(list(pool.hosts))].machine
        if machine is not None:
            machine.wall_offset_s += self._rng.choice([-3600.0, -1.0, 1.0, 86_400.0])

    # ------------------------------------------------------------ processes

    async def _kill(self, pool: WholePool, *, silently: bool) -> None:
        name = self._node(pool)
        if not pool.hosts[name].up:
            return
        for_good = self._rng.random() < self._rates.gone_for_good
        if for_good:
            self.lost_for_good.add(name)
        await self._end(pool, name, silently=silently)
        await self._pass(name)
        if name not in self.lost_for_good and not pool.hosts[name].up:
            pool.start_node(name)

    async def _end(self, pool: WholePool, name: str, *, silently: bool = False) -> None:
        """End a process after some callbacks more, or when it has run none for a while."""
        machine = pool.hosts[name].machine
        if name == COORDINATOR and self._rng.random() < AT_STATEMENT:
            pool.kill_at_statement(self._rng.randrange(6))
        else:
            pool.kill(name, after=self._rng.choice([0, self._rng.randrange(60)]), silently=silently)
        await asyncio.sleep(MOST_LIFE_S)
        if machine is not None and not machine.dead and pool.hosts[name].machine is machine:
            pool.kill(name, silently=silently)

    async def _freeze(self, pool: WholePool, name: str) -> None:
        if not pool.hosts[name].up:
            return
        pool.freeze(name)
        await self._pass(name)
        pool.thaw(name)

    async def _restart_coordinator(self, pool: WholePool, *, stale: bool) -> None:
        if not pool.hosts[COORDINATOR].up:
            return
        copy = pool.copy_disk() if stale else None
        if stale:
            await self._pass()
            if not pool.hosts[COORDINATOR].up:
                return
        await self._end(pool, COORDINATOR)
        await self._pass()
        if not pool.hosts[COORDINATOR].up:
            pool.start_coordinator(stale=copy)
