"""Whether a plan is worth it, and what would make it better: every figure comes from planning again, not from a rule of thumb."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from roost.config import BYTES_PER_ENCODED_BYTE, JobConfig, PlanningConfig, format_bytes
from roost.errors import PlanningError
from roost.planning.planner import Planner
from roost.planning.variations import PoolView
from roost.types import ClusterPlan, LinkProfile, ModelProfile, NodeProfile, Plan, StagePlan

MOST_SINGLES = 64
"""Kinds of nodes of which it is asked what one alone would reach."""
MOST_KINDS = 3
"""Kinds of nodes of which it is asked what one more would bring."""
MOST_DROPPED = 3
"""Nodes of which it is asked what is lost without them: the slowest."""
FASTER_LINK = 2.0
MORE_MEMORY = 1.5
NOTHING_LOST = 0.02
"""A node may go if the plan without it loses at most this fraction."""
HARDLY = 1.05
"""A plan less than this factor faster than one node alone is hardly worth it."""
IDLE_LINE = 0.1
"""Lines in use for less than this fraction of the time cannot be what binds."""
ENOUGH_MEMORY = 1 << 60


class Verdict(StrEnum):
    """How a plan compares with the best node that can hold the model alone."""

    FASTER = "faster"
    HARDLY_FASTER = "hardly faster"
    SLOWER = "slower"
    ONE_NODE = "one node"
    """The plan is one node alone."""
    ONLY_TOGETHER = "only together"
    """No node can hold the model alone."""


class ChangeKind(StrEnum):
    """What is changed."""

    LINK = "link"
    MEMORY = "memory"
    MORE_NODES = "more nodes"
    FEWER_NODES = "fewer nodes"
    MICRO_BATCH = "micro-batch"
    IN_FLIGHT = "in flight"
    CLUSTERS = "clusters"


@dataclass(frozen=True, kw_only=True)
class SingleNode:
    """What one node alone would reach."""

    node_id: str
    samples_per_s: float
    """Predicted; where its memory is too small, as if it were enough."""
    short_bytes: int
    """Memory it lacks to hold the whole model; 0 if it can."""


@dataclass(frozen=True, kw_only=True)
class PoolChange:
    """One change to the pool or the job, and what planning again for it gives."""

    kind: ChangeKind
    what: str
    """For people: 'desk lends 12.0 GB instead of 8.0 GB'."""
    samples_per_s: float
    """Predicted after the change."""
    gain: float
    """Fraction of the present plan's samples per second that it adds; negative if it takes some. 0 where there is no plan yet."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The honest answer about a plan."""

    verdict: Verdict
    headline: str
    """The verdict for people, one or two sentences."""
    best_single: SingleNode | None
    """The fastest node that can hold the model alone; None if none can."""
    fastest: SingleNode
    """The fastest node, whether or not its memory is enough."""
    largest: SingleNode
    """The node that lacks least, or the fastest of those that lack nothing."""
    ratio: float
    """The plan's samples per second relative to `best_single`; 0 if there is none."""
    changes: tuple[PoolChange, ...]
    """By what they bring, the most first; those that bring nothing are there too."""


def advise(
    profile: ModelProfile,
    nodes: Sequence[NodeProfile],
    links: Sequence[LinkProfile],
    config: JobConfig,
    plan: Plan,
    rng: random.Random,
    options: PlanningConfig | None = None,
) -> Advice:
    """Return how `plan` compares with one node alone, and what single changes of the pool would bring.

    `plan` is what make_plan gave for the same inputs; pass an `rng` in the state it had then, so that every other plan is
    searched for in the same way. `rng` is not changed. Plans at most 2 * MOST_SINGLES times for one node and 11 times for a
    pool, whatever the inputs.
    """
    planner = Replanner(profile=profile, config=config, rng=rng, options=options or PlanningConfig())
    pool = PoolView(nodes=tuple(nodes), links=tuple(links))
    singles = single_nodes(planner, pool)
    able = [single for single in singles if not single.short_bytes]
    best = max(able, key=lambda single: single.samples_per_s, default=None)
    fastest = max(singles, key=lambda single: (single.samples_per_s, -single.short_bytes))
    largest = min(singles, key=lambda single: (single.short_bytes, -single.samples_per_s))
    verdict = _verdict(plan, best)
    return Advice(
        verdict=verdict,
        headline=_headline(verdict, plan, best, fastest, largest),
        best_single=best,
        fastest=fastest,
        largest=largest,
        ratio=plan.samples_per_s / best.samples_per_s if best is not None and best.samples_per_s else 0.0,
        changes=_changes(planner, pool, plan),
    )


@dataclass(frozen=True, kw_only=True)
class Replanner:
    """Plans for changed pools and jobs, always in the same way."""

    profile: ModelProfile
    config: JobConfig
    rng: random.Random
    """Copied before each use."""
    options: PlanningConfig

    def plan(self, pool: PoolView, config: JobConfig | None = None) -> Plan | None:
        """Return the plan for `pool`, None if there is none."""
        # Not make_plan: saying by how much a pool is too small takes longer than finding that it is.
        try:
            planner = Planner.of(self.profile, pool.nodes, pool.links, config or self.config, self.options)
            return planner.plan(copy.deepcopy(self.rng))
        except PlanningError:
            return None


def single_nodes(planner: Replanner, pool: PoolView) -> tuple[SingleNode, ...]:
    """Return what one node of every kind alone would reach, of at most MOST_SINGLES kinds: the fastest and the largest."""
    config = dataclasses.replace(planner.config, min_clusters=1, max_clusters=1)
    kinds: dict[tuple[object, ...], NodeProfile] = {}
    for node in sorted(pool.nodes, key=lambda node: node.node_id):
        plain = dataclasses.replace(node, node_id="", address="", host="", host_cores=0, reliability=1.0)
        line = pool.up_bytes_per_s(node.node_id), pool.down_bytes_per_s(node.node_id)
        kinds.setdefault((*dataclasses.astuple(plain), *line), node)
    fastest = sorted(kinds.values(), key=lambda node: -node.flop_per_s)[: MOST_SINGLES - 1]
    largest = max(kinds.values(), key=lambda node: node.memory_bytes)
    asked = fastest if largest in fastest else [*fastest, largest]
    return tuple(_single(planner, pool.alone(node.node_id), config) for node in asked)


def _single(planner: Replanner, alone: PoolView, config: JobConfig) -> SingleNode:
    (node,) = alone.nodes
    plan, short = planner.plan(alone, config), 0
    if plan is None:
        plan = planner.plan(alone.with_memory(node.node_id, ENOUGH_MEMORY), config)
        assert plan is not None, "with enough memory one node can hold any model"
        short = max(1, plan.stages[0].memory_needed_bytes - node.memory_bytes)
    return SingleNode(node_id=node.node_id, samples_per_s=plan.samples_per_s, short_bytes=short)


# ------------------------------------------------------------ is it worth it


def _verdict(plan: Plan, best: SingleNode | None) -> Verdict:
    if best is None:
        return Verdict.ONLY_TOGETHER
    if len(plan.stages) == 1 and plan.samples_per_s >= best.samples_per_s:
        return Verdict.ONE_NODE
    if plan.samples_per_s < best.samples_per_s:
        return Verdict.SLOWER
    return Verdict.FASTER if plan.samples_per_s >= HARDLY * best.samples_per_s else Verdict.HARDLY_FASTER


def _headline(verdict: Verdict, plan: Plan, best: SingleNode | None, fastest: SingleNode, largest: SingleNode) -> str:
    if best is None:
        text = f"no node can hold the model alone; the largest, {largest.node_id}, lacks {format_bytes(largest.short_bytes)}"
    elif verdict is Verdict.ONE_NODE:
        text = f"{best.node_id} alone is the best there is: {format_rate(best.samples_per_s)}"
    elif verdict is Verdict.SLOWER:
        text = f"slower than {best.node_id} alone ({format_rate(plan.samples_per_s)} against {format_rate(best.samples_per_s)}): use that"
    else:
        whose = "your fastest node" if best.samples_per_s >= fastest.samples_per_s / HARDLY else "your fastest node that can hold the model"
        text = f"{plan.samples_per_s / best.samples_per_s:.1f}x {whose} ({best.node_id} alone: {format_rate(best.samples_per_s)})"
        if verdict is Verdict.HARDLY_FASTER:
            text += ": hardly worth the other machines"
    if fastest.short_bytes and (best is None or fastest.samples_per_s > HARDLY * best.samples_per_s):
        text += (
            f". The fastest, {fastest.node_id}, would reach {format_rate(fastest.samples_per_s)} alone if it had "
            f"{format_bytes(fastest.short_bytes)} more memory"
        )
    return text


def format_rate(samples_per_s: float) -> str:
    """Return a rate for people: '120 samples/s', '0.35 samples/s'."""
    return f"{samples_per_s:.0f} samples/s" if samples_per_s >= 10 else f"{samples_per_s:.2g} samples/s"


# ------------------------------------------------------------ what would change it


def _changes(planner: Replanner, pool: PoolView, plan: Plan) -> tuple[PoolChange, ...]:
    variants = [
        *_faster_links(planner, pool, plan),
        *_more_memory(pool, plan),
        *((ChangeKind.MORE_NODES, f"one more node like {node.node_id}", pool.with_twins(node.node_id, 1)) for node in _some(pool.kinds())),
    ]
    found = []
    for kind, what, changed in variants:
        better = planner.plan(changed)
        # A search that is not exact may miss what it found before: then the change brings nothing, it does no harm.
        rate = max(plan.samples_per_s, better.samples_per_s if better is not None else 0.0)
        found.append(PoolChange(kind=kind, what=what, samples_per_s=rate, gain=_gain(rate, plan)))
    found += _fewer_nodes(planner, pool, plan)
    return tuple(sorted(found, key=lambda change: (-change.gain, change.what)))


def _some(kinds: Sequence[NodeProfile]) -> Sequence[NodeProfile]:
    return kinds[:MOST_KINDS]


def _gain(rate: float, plan: Plan) -> float:
    return rate / plan.samples_per_s - 1 if plan.samples_per_s else 0.0


def _more_memory(pool: PoolView, plan: Plan) -> list[tuple[ChangeKind, str, PoolView]]:
    """Return the pools in which a node lends half as much again: the stage with the least room, and the fastest backup."""
    fullest = max(plan.stages, key=lambda stage: (stage.binding == "memory", stage.memory_needed_bytes / stage.memory_available_bytes))
    chosen = [fullest.node_id]
    if plan.backups:
        chosen.append(max((pool.node(name) for name in plan.backups), key=lambda node: node.flop_per_s).node_id)
    variants = []
    for node_id in chosen:
        before = pool.node(node_id).memory_bytes
        after = round(before * MORE_MEMORY)
        what = f"{node_id} lends {format_bytes(after)} instead of {format_bytes(before)}"
        variants.append((ChangeKind.MEMORY, what, pool.with_memory(node_id, after)))
    return variants


def _fewer_nodes(planner: Replanner, pool: PoolView, plan: Plan) -> list[PoolChange]:
    """Return the nodes of the plan, among its slowest, without which it would be about as good."""
    used = [pool.node(stage.node_id) for stage in plan.stages]
    if len(used) < 2:
        return []
    found = []
    for node in sorted(used, key=lambda node: (node.flop_per_s, node.node_id))[:MOST_DROPPED]:
        fewer = planner.plan(pool.without(node.node_id))
        if fewer is not None and fewer.samples_per_s >= (1 - NOTHING_LOST) * plan.samples_per_s:
            found.append(
                PoolChange(
                    kind=ChangeKind.FEWER_NODES,
                    what=f"without {node.node_id}",
                    samples_per_s=fewer.samples_per_s,
                    gain=_gain(fewer.samples_per_s, plan),
                )
            )
    return found


@dataclass(frozen=True, kw_only=True)
class _Line:
    """Something that carries bytes both ways, and the fraction of the time that its busier direction is in use."""

    use: float
    what: str
    faster: PoolView
    """The pool in which it is FASTER_LINK times as fast."""


def _faster_links(planner: Replanner, pool: PoolView, plan: Plan) -> list[tuple[ChangeKind, str, PoolView]]:
    """Return the pools in which the busiest line of a node, and the busiest link between two nodes, are twice as fast."""
    rates = {(link.source, link.target): link.bytes_per_s for link in pool.links}
    lines, hops = [], []
    for cluster in plan.clusters:
        per_sample = cluster.samples_per_s / planner.profile.micro_batch_size
        flows = [size * per_sample for size in hop_bytes(planner.profile, cluster, planner.config, planner.options)]
        for stage in cluster.stages:
            lines += _line(pool, stage, flows)
        for before, after in zip(cluster.stages, cluster.stages[1:], strict=False):
            hops += _hop(pool, rates, before.node_id, after.node_id, flows[before.index])
    chosen = [max(group, key=lambda line: line.use) for group in (lines, hops) if group]
    return [(ChangeKind.LINK, line.what, line.faster) for line in chosen if line.use >= IDLE_LINE]


def hop_bytes(profile: ModelProfile, cluster: ClusterPlan, config: JobConfig, options: PlanningConfig) -> list[float]:
    """Return per stage the bytes of values to the next one per micro-batch of the profile, as many of gradients come back.

    0 for the last stage.
    """
    compression = options.activation_compression * BYTES_PER_ENCODED_BYTE[config.activation_compression]
    crossing = [profile.units[stage.last_unit - 1].crossing_bytes * compression for stage in cluster.stages]
    return [*crossing[:-1], 0.0]


def _line(pool: PoolView, stage: StagePlan, flows: Sequence[float]) -> list[_Line]:
    """Return the line of a stage's node, if its speed is known. `flows`: bytes per second onward from every stage."""
    node_id, k = stage.node_id, stage.index
    up, down = pool.up_bytes_per_s(node_id), pool.down_bytes_per_s(node_id)
    if not up or not down:
        return []
    own = flows[k] + (flows[k - 1] if k else 0.0)
    use = max(max(own, stage.sent_bytes_per_s) / up, max(own, stage.received_bytes_per_s) / down)
    what = f"{node_id}'s line twice as fast ({format_bytes(FASTER_LINK * up)}/s up, {format_bytes(FASTER_LINK * down)}/s down)"
    faster = pool.with_faster_links_from(node_id, FASTER_LINK).with_faster_links_to(node_id, FASTER_LINK)
    return [_Line(use=use, what=what, faster=faster)]


def _hop(pool: PoolView, rates: dict[tuple[str, str], float], before: str, after: str, flow: float) -> list[_Line]:
    known = [rates[pair] for pair in ((before, after), (after, before)) if pair in rates]
    if not known:
        return []
    what = f"the link between {before} and {after} twice as fast ({format_bytes(FASTER_LINK * min(known))}/s)"
    return [_Line(use=flow / min(known), what=what, faster=pool.with_faster_link_between(before, after, FASTER_LINK))]
