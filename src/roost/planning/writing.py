"""Writes a plan down: stages, shares, rings, backups, predictions, and sentences for people."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from roost.config import format_bytes
from roost.planning.averaging import round_seconds
from roost.planning.memory import older_versions
from roost.planning.segments import make_segments
from roost.planning.shares import data_shares
from roost.planning.sharing import shares_of_cores
from roost.planning.stages import ClusterCut, StageCutter
from roost.types import BackupPlan, ClusterPlan, ModelProfile, NodeProfile, Plan, SegmentPlan, StagePlan

BINDS = 0.98
"""A term of a node that is at least this fraction of its cluster's period binds."""
STRETCHED = 1.05
"""Rounds that take this many times the interval asked for are worth a note."""
NO_GAIN = "no cluster would gain from it, so using it would not raise the predicted samples per second"
"""Why a node that could hold a stage is a backup."""


def write_plan(
    profile: ModelProfile,
    cutter: StageCutter,
    clusters: Sequence[ClusterCut],
    *,
    unable: Sequence[str] = (),
    unused_because: str = NO_GAIN,
) -> Plan:
    """Return the plan of these clusters, cut over all units of `profile`; nodes of the pool that are in none become backups.

    `unused_because` says for people why those of them are that could hold a stage. `unable` are further nodes, which cannot compute in
    the job's precision: backups of nothing.
    """
    shared = shares_of_cores(cutter, clusters)
    periods = [cut.period_s / share for cut, share in zip(clusters, shared, strict=True)]
    rates = [cutter.costs.micro_batch_size / period for period in periods]
    network = cutter.maker.network
    segments = make_segments(profile, clusters, network)
    round_s = round_seconds(segments, network, _piped(cutter, clusters, periods), cutter.maker.averaging_compression)
    fastest = min(periods) * cutter.costs.micro_batches_per_batch
    interval = cutter.maker.config.planned_interval
    round_updates = max(float(interval), round_s / fastest) if len(clusters) > 1 else 0.0
    plans = tuple(
        ClusterPlan(
            index=index,
            stages=_stages(profile, cutter, index, cut, len(clusters), round_updates * fastest, periods[index]),
            share=share,
            samples_per_s=rate,
            bottleneck=cut.bottleneck if shared[index] == 1 else "cores of the machine that nodes share",
            staleness=older_versions(cut.allowed[0], cutter.costs.micro_batches_per_batch),
        )
        for index, (cut, rate, share) in enumerate(zip(clusters, rates, data_shares(rates), strict=True))
    )
    used = {node.node_id for cut in clusters for node in cut.nodes}
    unused = [node for node in cutter.nodes if node.node_id not in used]
    notes = [*_of_clusters(plans), *_crowded(shared), *_rounds(segments, round_s, round_updates, interval)]
    notes += [_why_unused(node, cutter, len(clusters) > 1, unused_because) for node in unused]
    notes += [f"{name} is left out: its device cannot compute in {cutter.maker.config.precision}" for name in unable]
    return Plan(
        clusters=plans,
        segments=segments,
        backups=tuple(sorted([*(node.node_id for node in unused), *unable])),
        samples_per_s=math.fsum(rates),
        notes=tuple(notes),
        round_s=round_s,
        round_updates=round_updates,
        backup_stages=_backups(cutter.nodes, unused, plans),
    )


def _stages(
    profile: ModelProfile,
    cutter: StageCutter,
    cluster: int,
    cut: ClusterCut,
    clusters: int,
    between_rounds_s: float,
    period_s: float,
) -> tuple[StagePlan, ...]:
    averaging, maker = clusters > 1, cutter.maker
    stages = []
    for index, node in enumerate(cut.nodes):
        first, last = cut.cuts[index], cut.cuts[index + 1]
        needed = float(maker.memory.stage_bytes(first, last, cut.allowed[index], averaging, cut.recompute[index]))
        sent, received, _ = maker.line_bytes(first, last, clusters)
        averaged = maker.round_bytes(first, last, clusters) / between_rounds_s if averaging else 0.0
        stage = StagePlan(
            cluster=cluster,
            index=index,
            node_id=node.node_id,
            first_unit=first,
            last_unit=last,
            start=profile.units[first].start,
            stop=profile.units[last - 1].stop,
            max_in_flight=cut.allowed[index],
            memory_needed_bytes=math.ceil(needed),
            memory_available_bytes=node.memory_bytes,
            compute_s=cut.compute_s[index],
            send_s=cut.send_s[index],
            versions=1 + older_versions(cut.allowed[index], cutter.costs.micro_batches_per_batch),
            busy=min(1.0, cut.compute_s[index] / period_s),
            sent_bytes_per_s=sent / period_s + averaged,
            received_bytes_per_s=received / period_s + averaged,
            recompute=bool(cut.recompute[index]),
        )
        binding = "cores" if period_s > cut.period_s and node.host else _binding(stage, cutter, cut, averaging)
        stages.append(dataclasses.replace(stage, binding=binding))
    return tuple(stages)


def _binding(stage: StagePlan, cutter: StageCutter, cut: ClusterCut, averaging: bool) -> str:
    """Return what keeps a node from doing more: one of its terms that is as long as the period, or memory for another unit."""
    for limit in cut.limits:
        if limit.node_id == stage.node_id and limit.seconds >= BINDS * cut.period_s:
            return "uplink" if limit.kind == "link" else limit.kind
    memory, units = cutter.maker.memory, cutter.costs.units
    wider = [(stage.first_unit - 1, stage.last_unit)] if stage.first_unit > 0 else []
    wider += [(stage.first_unit, stage.last_unit + 1)] if stage.last_unit < units else []
    needed = (float(memory.stage_bytes(*units, stage.max_in_flight, averaging, stage.recompute)) for units in wider)
    fits = any(size <= stage.memory_available_bytes for size in needed)
    return "memory" if wider and not fits else ""


def _full(stage: StagePlan) -> str:
    return (
        f"{stage.node_id} could compute more ({stage.busy:.0%} busy), but its memory is full: "
        f"{format_bytes(stage.memory_needed_bytes)} of {format_bytes(stage.memory_available_bytes)}"
    )


def _piped(cutter: StageCutter, clusters: Sequence[ClusterCut], periods: Sequence[float]) -> dict[str, float]:
    """Return the bytes per second that every node's pipeline sends."""
    return {
        node.node_id: cutter.maker.line_bytes(cut.cuts[k], cut.cuts[k + 1], 1)[0] / period
        for cut, period in zip(clusters, periods, strict=True)
        for k, node in enumerate(cut.nodes)
    }


def _of_clusters(plans: Sequence[ClusterPlan]) -> list[str]:
    stages = [stage for plan in plans for stage in plan.stages]
    notes = [f"cluster {plan.index} is bound by the {plan.bottleneck}: {plan.samples_per_s:.4g} samples/s" for plan in plans]
    notes += [_full(stage) for stage in stages if stage.binding == "memory"]
    recomputing = ", ".join(stage.node_id for stage in stages if stage.recompute)
    if recomputing:
        notes.append(f"recomputed on {recomputing}: memory does not hold the activations of all that is in flight")
    return notes


def _crowded(shared: Sequence[float]) -> list[str]:
    if min(shared) == 1.0:
        return []
    return [
        f"nodes that share a machine have too few cores for this plan: it reaches {min(shared):.0%} of what the same nodes would "
        "reach on machines of their own"
    ]


def _rounds(segments: Sequence[SegmentPlan], round_s: float, round_updates: float, interval: int) -> list[str]:
    if not any(len(segment.members) > 1 for segment in segments) or round_updates < interval * STRETCHED:
        return []
    return [
        f"an averaging round takes {round_s:.3g} s on the slowest ring, longer than {interval} updates: rounds follow each other, "
        f"about every {round_updates:.0f} updates"
    ]


def _backups(pool: Sequence[NodeProfile], unused: Sequence[NodeProfile], plans: Sequence[ClusterPlan]) -> tuple[BackupPlan, ...]:
    """Return for each backup the least reliable stage that it can hold and that has no backup yet; the fastest choose first."""
    reliability = {node.node_id: node.reliability for node in pool}
    open_stages = sorted(
        (stage for plan in plans for stage in plan.stages),
        key=lambda stage: (reliability[stage.node_id], stage.cluster, stage.index),
    )
    backups = []
    for node in sorted(unused, key=lambda node: (-node.flop_per_s, node.node_id)):
        stage = next((stage for stage in open_stages if stage.memory_needed_bytes <= node.memory_bytes), None)
        if stage is not None:
            open_stages.remove(stage)
            backups.append(BackupPlan(node_id=node.node_id, cluster=stage.cluster, stage=stage.index))
    return tuple(sorted(backups, key=lambda backup: (backup.cluster, backup.stage)))


def _why_unused(node: NodeProfile, cutter: StageCutter, averaging: bool, because: str) -> str:
    smallest = math.ceil(cutter.maker.memory.least_for_units(averaging).min())
    if node.memory_bytes < smallest:
        return (
            f"{node.node_id} is a backup: the smallest stage needs {exact_bytes(smallest)} and it lends {exact_bytes(node.memory_bytes)}, "
            f"{exact_bytes(smallest - node.memory_bytes)} short"
        )
    return f"{node.node_id} is a backup: {because}"


def exact_bytes(size: int) -> str:
    """Return a size for people with its exact number of bytes."""
    return f"{format_bytes(size)} ({size} bytes)"
