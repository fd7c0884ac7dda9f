"""A new plan for a pool that has changed: with few bytes to move, and only if it pays (docs/planning.md, re-planning).

Candidates run from cheap to dear: a waiting node takes a lost node's stage as it is, a cut moves between two neighbours, a
cluster is cut anew with a node more, less or another, a cluster is dissolved or formed, and the whole pool is planned anew.
The one with which most is trained within the payback time is chosen; clusters that change stand still while bytes move.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from roost.config import JobConfig, PlanningConfig, format_bytes
from roost.errors import PlanningError
from roost.planning.planner import Planner, make_plan
from roost.planning.relocation import Forecast, Layout, Move, Relocation, layouts_of
from roost.types import LinkProfile, ModelProfile, NodeProfile, Plan

LEAST_GAIN = 0.02
"""A change that is not forced must train so much more within the payback time, relative to changing nothing; planning the whole
pool anew so much more than small steps."""
PAYBACK_S = 600.0
SLACK = 1e-9
"""Relative rounding error that is forgiven when two rates are compared."""
MOST_STEPS = 6
"""Improvements that are put on top of each other."""
MOST_TRIED = 200
"""Candidates that one step looks at."""
MOST_NAMED = 4
"""Nodes that a sentence names."""
MOST_WAITING = 6
"""Waiting nodes that one step tries in a place, the fastest first."""
MOST_SWAPS = 600
"""Exchanges of two nodes that are tried to make a wholly new plan resemble the current one."""


DEFAULTS = PlanningConfig()


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """A new plan, what it takes to get there, and what it brings."""

    plan: Plan
    moves: tuple[Move, ...]
    move_s: float
    """Seconds until the last node has all it needs."""
    gain_samples_per_s: float
    """Predicted, over what the current plan reaches on the pool as it is now."""
    pays_back_s: float
    """Seconds after the decision from which on more has been trained than without the change; infinite if never."""
    forced: bool
    """True if a cluster can no longer run (a node is gone, or lends too little): it stands still until it is changed."""
    reason: str
    """A sentence for people."""


def propose_change(
    current: Plan,
    profile: ModelProfile,
    nodes: Sequence[NodeProfile],
    links: Sequence[LinkProfile],
    config: JobConfig,
    rng: random.Random,
    *,
    options: PlanningConfig = DEFAULTS,
    payback_s: float = PAYBACK_S,
    copies: Mapping[str, tuple[int, int]] | None = None,
    apart: Collection[frozenset[str]] = (),
    improve: bool = True,
) -> PlanChange | None:
    """Return the change that trains most within `payback_s`, or None if leaving the plan as it is does about as well.

    `nodes` and `links` are the pool as it is now; nodes of `current` may be gone. `copies` are units (first, last; half-open)
    that nodes hold besides their stage: backups with a copy. `apart` are pairs that cannot reach each other. Without `improve` only
    clusters that cannot run are changed, which is decided sooner and disturbs no other. Equal inputs, `rng` included, give equal
    answers. Raises PlanningError (see make_plan) if a cluster can no longer run and the pool can no longer hold what the job asks for.
    """
    forecast = Forecast(planner=Planner.of(profile, nodes, links, config, options), apart=frozenset(apart))
    old = layouts_of(current)
    relocation = Relocation(forecast=forecast, old=old, copies=dict(copies or {}))
    search = _ChangeSearch(forecast=forecast, relocation=relocation, old=old, payback_s=payback_s, options=options)
    best = search.stepwise(improve=improve)
    try:
        if not improve and best is not None:
            return _written(best, search, forced=True) if best.layouts != old else None
        anew = search.resembling(make_plan(profile, nodes, links, config, rng, options=options))
        if any(forecast.broken(layout) for layout in anew.layouts):
            raise PlanningError("no plan was found that keeps nodes apart which cannot reach each other")
        if best is None or (search.allowed(anew) and search.score(anew)[0] > search.score(best)[0] * (1 + LEAST_GAIN)):
            best = anew
    except PlanningError:
        if best is None:
            raise
    forced = any(not forecast.rate(layout, len(old)) for layout in old)
    if best.layouts == old or not (forced or search.score(best)[0] >= search.score(_Option(old, ()))[0] * (1 + LEAST_GAIN)):
        return None
    return _written(best, search, forced)


def predict_again(
    current: Plan,
    profile: ModelProfile,
    nodes: Sequence[NodeProfile],
    links: Sequence[LinkProfile],
    config: JobConfig,
    *,
    options: PlanningConfig = DEFAULTS,
) -> Plan:
    """Return `current` as it is, with what it is predicted to reach on the pool as it is now.

    Raises PlanningError if a cluster can no longer run there; it can if propose_change returns None.
    """
    forecast, old = Forecast(planner=Planner.of(profile, nodes, links, config, options)), layouts_of(current)
    for layout in old:
        if not forecast.rate(layout, len(old)):
            raise PlanningError(f"the cluster of {_listed(layout.nodes)} cannot run on the pool as it is now")
    return forecast.write(old)


def _written(option: _Option, search: _ChangeSearch, forced: bool) -> PlanChange:
    forecast, clusters = search.forecast, len(option.layouts)
    moves, waits = search.relocation.moves(option.layouts)
    plan = forecast.write(option.layouts)
    now = math.fsum(forecast.rate(layout, len(search.old)) for layout in search.old)
    rates = [forecast.rate(layout, clusters) for layout in option.layouts]
    move_s, nbytes = max(waits, default=0.0), sum(move.nbytes for move in moves)
    moving = f"{format_bytes(nbytes)} move in {move_s:.1f} s" if moves else "nothing has to move"
    return PlanChange(
        plan=plan,
        moves=moves,
        move_s=move_s,
        gain_samples_per_s=math.fsum(rates) - now,
        pays_back_s=_pays_back_s(now, rates, waits),
        forced=forced,
        reason=f"{'; '.join(option.why)}: {moving}, then {math.fsum(rates):.3g} instead of {now:.3g} samples/s",
    )


def _pays_back_s(now: float, rates: Sequence[float], waits: Sequence[float]) -> float:
    """Return when clusters that start after `waits` at `rates` have trained as much as one that goes on at the rate `now`."""
    running, lost = 0.0, 0.0  # samples trained by time t: running * t - lost
    starts = sorted(zip(waits, rates, strict=True))
    for index, (wait, rate) in enumerate(starts):
        running, lost = running + rate, lost + rate * wait
        if running > now * (1 + SLACK):
            even = max(lost / (running - now), wait)
            if index + 1 == len(starts) or even <= starts[index + 1][0]:
                return even if lost > 0 else 0.0
    return 0.0 if lost == 0.0 and running >= now * (1 - SLACK) else math.inf


def _listed(names: Sequence[str]) -> str:
    """Return names for people, the first few of many."""
    few = ", ".join(names[:MOST_NAMED])
    return few if len(names) <= MOST_NAMED else f"{few} and {len(names) - MOST_NAMED} more"


def _verb(names: Sequence[str], verb: str) -> str:
    """Return the verb in the form that fits so many nodes."""
    return f"{verb}s" if len(names) == 1 else verb


@dataclass(frozen=True)
class _Option:
    """Clusters that the pool could form, and how they come from the current ones."""

    layouts: tuple[Layout, ...]
    why: tuple[str, ...]

    def replaced(self, index: int, layouts: Sequence[Layout], why: str) -> _Option:
        """Return the option in which cluster `index` gives way to `layouts`."""
        return _Option((*self.layouts[:index], *layouts, *self.layouts[index + 1 :]), (*self.why, why))


_Score = tuple[float, ...]
"""What is trained within the payback time; then, between equals, few clusters that change, little waiting, a high rate, few bytes."""


@dataclass(kw_only=True, eq=False)
class _ChangeSearch:
    """Looks for the option with the best score."""

    forecast: Forecast
    relocation: Relocation
    old: tuple[Layout, ...]
    payback_s: float
    options: PlanningConfig

    def score(self, option: _Option) -> _Score:
        moves, waits = self.relocation.moves(option.layouts)
        worths = [self.forecast.worth(layout, len(option.layouts)) for layout in option.layouts]
        trained = math.fsum(worth * max(0.0, self.payback_s - wait) for worth, wait in zip(worths, waits, strict=True))
        nbytes = sum(move.nbytes for move in moves)
        return trained, -len(set(option.layouts) - set(self.old)), -max(waits, default=0.0), math.fsum(worths), -nbytes

    def allowed(self, option: _Option) -> bool:
        """Return True if the job's bounds hold and every cluster that was changed can run, none of them far too slowly."""
        config, count = self.forecast.planner.config, len(option.layouts)
        if count < config.min_clusters or (config.max_clusters and count > max(config.max_clusters, len(self.old))):
            return False
        rates = {layout: self.forecast.rate(layout, count) for layout in option.layouts}
        least = self.options.slowest_cluster * max(rates.values()) if count > config.min_clusters else 0.0
        known = set(self.old)
        return all(rate > 0 and rate >= least for layout, rate in rates.items() if layout not in known) and all(
            rate > 0 or not self.forecast.rate(layout, len(self.old)) for layout, rate in rates.items() if layout in known
        )

    def stepwise(self, *, improve: bool) -> _Option | None:
        """Return the best option that small steps lead to: every broken cluster repaired, then what else helps; None without repair."""
        option = _Option(self.old, ())
        for _ in self.old:
            broken = [i for i, layout in enumerate(option.layouts) if not self.forecast.rate(layout, len(option.layouts))]
            if not broken:
                break
            repaired = self._best(self._repairs(option, broken[0]))
            if repaired is None:
                return None
            option = repaired
        for _ in range(MOST_STEPS if improve else 0):
            better, reached = self._best(self._improvements(option)), self.score(option)[0]
            # As a cluster that changes moves bytes and starts anew, a step must be worth it for one cluster of an ordinary size.
            if better is None or self.score(better)[0] <= reached * (1 + LEAST_GAIN / len(option.layouts)):
                break
            option = better
        return option

    def _best(self, options: Iterator[_Option]) -> _Option | None:
        most = math.ceil(MOST_TRIED * self.options.effort)
        tried = (option for option in itertools.islice(options, most) if self.allowed(option))
        return max(tried, key=self.score, default=None)

    def _waiting(self, option: _Option) -> list[str]:
        """Return the nodes without a stage, the fastest first."""
        used = {name for layout in option.layouts for name in layout.nodes}
        nodes = self.forecast.nodes
        return sorted(
            (name for name in nodes if name not in used), key=lambda name: (-nodes[name].flop_per_s, -nodes[name].memory_bytes, name)
        )

    # ------------------------------------------------------------ small steps

    def _repairs(self, option: _Option, index: int) -> Iterator[_Option]:
        """Yield ways on for a cluster that cannot run, the cheapest first."""
        layout = option.layouts[index]
        if len(option.layouts) > 1:
            yield option.replaced(index, [], f"the cluster of {_listed(layout.nodes)} is dissolved")
        gone = [name for name in layout.nodes if name not in self.forecast.nodes]
        pair = self.forecast.apart_in(layout.nodes)
        if gone or pair is None:
            yield from self._repairs_without(option, index, gone)
        else:
            # One of two that cannot reach each other has to go, whichever.
            for name in sorted(pair):
                yield from self._repairs_without(option, index, [name])

    def _repairs_without(self, option: _Option, index: int, gone: Sequence[str]) -> Iterator[_Option]:
        """Yield ways on for a cluster without some of its nodes: others take over from them, or the model is cut anew."""
        layout, waiting = option.layouts[index], self._waiting(option)
        lost = [place for place, name in enumerate(layout.nodes) if name in gone]
        rest = [name for name in layout.nodes if name not in gone]
        if lost:
            for chosen in itertools.islice(itertools.permutations(waiting, len(lost)), MOST_TRIED // 2):
                names = list(layout.nodes)
                for place, name in zip(lost, chosen, strict=True):
                    names[place] = name
                yield option.replaced(
                    index, [Layout(tuple(names), layout.cuts)], f"{_listed(chosen)} {_verb(chosen, 'take')} over from {_listed(gone)}"
                )
        what = f"without {_listed(gone)}, " if lost else ""
        yield from self._recut(option, index, rest, f"{what}the model is cut anew for {_listed(rest)}")
        at = lost[0] if lost else len(rest)
        holds = False
        for names in (*([name] for name in waiting[:MOST_WAITING]), *(waiting[:size] for size in range(2, len(waiting) + 1))):
            # Long pipelines take long to cut: they are looked at only until one holds the model.
            if holds and len(names) > MOST_WAITING:
                break
            joined = [*rest[:at], *names, *rest[at:]]
            for repaired in self._recut(option, index, joined, f"{what}the model is cut anew for {_listed(joined)}"):
                holds = True
                yield repaired

    def _recut(self, option: _Option, index: int, names: Sequence[str], why: str) -> Iterator[_Option]:
        """Yield the option with one cluster cut anew for these nodes, if that makes a cluster which runs faster."""
        count, before = len(option.layouts), self.forecast.predict(option.layouts[index], len(option.layouts))
        # With fewer nodes it may be slower, and worth it: the node that leaves may have been unreliable, or of use elsewhere.
        joined = before is not None and len(names) >= len(before.nodes)
        found = self.forecast.cut(names, count, before.period_s if joined and before is not None else math.inf)
        if found is not None and found != option.layouts[index]:
            yield option.replaced(index, [found], why)

    def _improvements(self, option: _Option) -> Iterator[_Option]:
        """Yield what one step can change, beginning with the clusters that reach least of what they used to."""
        yield from self._formed(option)
        count, waiting = len(option.layouts), self._waiting(option)[:MOST_WAITING]
        order = sorted(range(count), key=lambda index: self.forecast.rate(option.layouts[index], count))
        steps = [self._changed(option, index, waiting) for index in order]
        # One of each in turn, so that the bound on what is tried leaves no cluster out.
        for ready in itertools.zip_longest(*steps):
            yield from (step for step in ready if step is not None)

    def _formed(self, option: _Option) -> Iterator[_Option]:
        """Yield clusters of waiting nodes: the first few that hold the model, by speed and by memory."""
        waiting, nodes = self._waiting(option), self.forecast.nodes
        for ordered in (waiting, sorted(waiting, key=lambda name: -nodes[name].memory_bytes)):
            for size in range(1, len(ordered) + 1):
                found = self.forecast.cut(ordered[:size], len(option.layouts) + 1)
                if found is not None:
                    yield _Option(
                        (*option.layouts, found), (*option.why, f"{_listed(ordered[:size])} {_verb(ordered[:size], 'form')} a cluster")
                    )
                    break

    def _changed(self, option: _Option, index: int, waiting: Sequence[str]) -> Iterator[_Option]:
        """Yield what can be changed in one cluster."""
        layout = option.layouts[index]
        names, cuts = list(layout.nodes), layout.cuts
        who = _listed(names)
        yield from self._recut(option, index, names, f"the model is cut anew for {who}")
        for place, name in enumerate(names):
            for other in waiting:
                exchanged = [*names[:place], other, *names[place + 1 :]]
                yield option.replaced(index, [Layout(tuple(exchanged), cuts)], f"{other} takes over from {name}")
                yield from self._recut(option, index, exchanged, f"{other} replaces {name}, and the model is cut anew")
        for place in range(len(names) + 1):
            for other in waiting:
                yield from self._split(option, index, place, other)
                yield from self._recut(option, index, [*names[:place], other, *names[place:]], f"{other} joins {who}")
        for place in range(1, len(names)):
            for step in (1, -1, 2, -2, 4, -4, 8, -8):
                if cuts[place - 1] < cuts[place] + step < cuts[place + 1]:
                    shifted = Layout(layout.nodes, (*cuts[:place], cuts[place] + step, *cuts[place + 1 :]))
                    yield option.replaced(index, [shifted], f"the cut between {names[place - 1]} and {names[place]} moves")
        for place, name in enumerate(names):
            yield from self._recut(option, index, [*names[:place], *names[place + 1 :]], f"{name} leaves the cluster of {who}")
        yield option.replaced(index, [], f"the cluster of {who} is dissolved")

    def _split(self, option: _Option, index: int, place: int, other: str) -> Iterator[_Option]:
        """Yield the stage before `place` shared with a new node after it: nothing else moves."""
        layout = option.layouts[index]
        first, last = layout.stage(max(place - 1, 0))
        for cut in sorted({first + (last - first) * part // 4 for part in (1, 2, 3)}):
            if first < cut < last:
                names = (*layout.nodes[:place], other, *layout.nodes[place:])
                cuts = tuple(sorted((*layout.cuts, cut)))
                yield option.replaced(index, [Layout(names, cuts)], f"{other} takes units from {layout.nodes[max(place - 1, 0)]}")

    # ------------------------------------------------------------ the whole pool anew

    def resembling(self, plan: Plan) -> _Option:
        """Return the clusters of `plan`, with nodes exchanged where that saves moves and costs nothing."""
        layouts = layouts_of(plan)
        for tries, (one, other) in enumerate(self._exchanges(layouts)):
            if tries == MOST_SWAPS:
                break
            layouts = self._exchanged(layouts, one, other)
        return _Option(self._in_old_order(layouts), ("the whole pool is planned anew",))

    def _exchanges(self, layouts: Sequence[Layout]) -> Iterator[tuple[str, str]]:
        """Yield pairs: the node of a stage, and one that holds more of the stage's bytes now, most first."""
        weigh = self.relocation.overlap
        names = sorted(self.forecast.nodes)
        for layout in layouts:
            for place, name in enumerate(layout.nodes):
                stage = layout.stage(place)
                mine = weigh(name, stage)
                better = sorted((-weigh(other, stage), other) for other in names if weigh(other, stage) > mine)
                yield from ((name, other) for _, other in better[:4])

    def _exchanged(self, layouts: tuple[Layout, ...], one: str, other: str) -> tuple[Layout, ...]:
        """Return `layouts` with two nodes exchanged if that saves bytes and no cluster loses by it; else unchanged."""
        names = {one: other, other: one}
        swapped = tuple(Layout(tuple(names.get(name, name) for name in layout.nodes), layout.cuts) for layout in layouts)
        pairs = [(before, after) for before, after in zip(layouts, swapped, strict=True) if before != after]
        count = len(layouts)
        worth = [math.fsum(self.forecast.worth(pair[side], count) for pair in pairs) for side in (0, 1)]
        if any(self.forecast.predict(after, count) is None for _, after in pairs) or worth[1] < worth[0] * (1 - SLACK):
            return layouts
        kept = [sum(self._kept(pair[side]) for pair in pairs) for side in (0, 1)]
        return swapped if kept[1] > kept[0] else layouts

    def _kept(self, layout: Layout) -> int:
        return sum(self.relocation.overlap(name, layout.stage(place)) for place, name in enumerate(layout.nodes))

    def _in_old_order(self, layouts: Sequence[Layout]) -> tuple[Layout, ...]:
        """Return the clusters so that each stands where the current cluster stands that it has most nodes from."""

        def place(layout: Layout) -> tuple[int, int]:
            shared = [(-len(set(layout.nodes) & set(before.nodes)), index) for index, before in enumerate(self.old)]
            most, index = min(shared, default=(0, 0))
            return (index if most else len(self.old)), most

        return tuple(sorted(layouts, key=place))
