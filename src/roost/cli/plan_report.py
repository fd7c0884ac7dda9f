"""A plan for people, as tables; for programs, as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from roost.cli.plan_change import change_record
from roost.cli.plan_text import averaging_line, backup_lines, layers_of, printable, sizes, title
from roost.codec import encode_record
from roost.config import JobConfig, format_bytes
from roost.errors import PlanningError, RoostError
from roost.planning.advice import Advice, PoolChange, Verdict, format_rate
from roost.planning.replan import PlanChange
from roost.planning.staleness import chosen_correction
from roost.types import ClusterPlan, LinkProfile, ModelProfile, NodeProfile, Plan

MOST_RINGS = 12
"""Rings that are listed."""
NOTHING_GAINED = 0.005
"""Gains below this fraction are shown as nothing."""
COLOURS = {Verdict.FASTER: "bold green", Verdict.ONLY_TOGETHER: "bold green", Verdict.SLOWER: "bold red"}


def print_plan(
    console: Console, profile: ModelProfile, config: JobConfig, nodes: Sequence[NodeProfile], plan: Plan, advice: Advice | None
) -> None:
    """Print the plan: clusters and stages, rings, backups, whether it is worth it, and what would change it."""
    emulated = {node.node_id for node in nodes if node.emulated}
    console.print(Text(f"{title(plan, profile, len(nodes))}, {format_rate(plan.samples_per_s)} predicted", style="bold"), soft_wrap=True)
    if advice is not None:
        console.print(Text(printable(advice.headline), style=COLOURS.get(advice.verdict, "bold yellow")), soft_wrap=True)
    for cluster in plan.clusters:
        console.print()
        console.print(Text(printable(_cluster_line(cluster)), style="bold"), soft_wrap=True)
        console.print(_cluster_table(cluster, profile, emulated))
    lines = _below(plan, config)
    if emulated:
        lines.append("* declared, not measured")
    if lines:
        console.print()
    for line in lines:
        console.print(Text(printable(line)), soft_wrap=True)
    # What binds a cluster stands above its table already.
    said = tuple(f"cluster {cluster.index} is bound by " for cluster in plan.clusters)
    for note in (note for note in plan.notes if not note.startswith(said)):
        console.print(Text(f"- {printable(note)}", style="dim"), soft_wrap=True)
    if advice is not None and advice.changes:
        console.print()
        console.print(_changes_table(advice.changes))


def _cluster_line(cluster: ClusterPlan) -> str:
    staleness = f", staleness up to {cluster.staleness}" if cluster.staleness else ""
    share = f"{cluster.share:.0%} of the data, {format_rate(cluster.samples_per_s)}"
    return f"cluster {cluster.index}: {share}, bound by {cluster.bottleneck}{staleness}"


def _cluster_table(cluster: ClusterPlan, profile: ModelProfile, emulated: set[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("node", overflow="fold", min_width=6)
    table.add_column("layers", overflow="fold", min_width=10)
    for name in ("memory", "vers.", "busy", "up/down /s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("binds", min_width=7)
    for stage in cluster.stages:
        table.add_row(
            str(stage.index),
            Text(f"{printable(stage.node_id)}{'*' if stage.node_id in emulated else ''}"),
            Text(layers_of(stage, profile)),
            sizes(stage.memory_needed_bytes, stage.memory_available_bytes),
            str(stage.versions),
            f"{stage.busy:.0%}",
            sizes(stage.sent_bytes_per_s, stage.received_bytes_per_s),
            Text(printable(stage.binding), style="" if stage.binding == "memory" else "bold red"),
        )
    return table


def _staleness(plan: Plan) -> int:
    return max(stage.versions for stage in plan.stages) - 1


def _below(plan: Plan, config: JobConfig) -> list[str]:
    lines = [f"staleness: at most {stale} updates, correction '{chosen_correction(config, plan)}'"] if (stale := _staleness(plan)) else []
    lines += [averaging_line(plan, config.planned_interval)] if plan.rings else []
    rings = [f"  ring {index}: {format_bytes(ring.nbytes)} on {' - '.join(ring.members)}" for index, ring in enumerate(plan.rings)]
    lines += rings[:MOST_RINGS]
    if len(rings) > MOST_RINGS:
        lines.append(f"  and {len(rings) - MOST_RINGS} more rings")
    return [*lines, *backup_lines(plan)]


def _changes_table(changes: Sequence[PoolChange]) -> Table:
    table = Table(
        title=Text("what would change it", style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    table.add_column("change", overflow="fold")
    table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column("gain", justify="right", no_wrap=True)
    for change in changes:
        gain = "nothing" if abs(change.gain) < NOTHING_GAINED else f"{change.gain:+.0%}"
        table.add_row(Text(printable(change.what)), format_rate(change.samples_per_s), gain)
    return table


def with_remedies(error: PlanningError, changes: Sequence[PoolChange]) -> PlanningError:
    """Make what would do the hint of `error`, one line per change, and return it."""
    if changes:
        lines = "".join(f"\n    - {printable(change.what)}: {format_rate(change.samples_per_s)} predicted" for change in changes)
        error.hint = f"Any one of these would do:{lines}"
    return error


def as_json(
    profile: ModelProfile,
    config: JobConfig,
    nodes: Sequence[NodeProfile],
    links: Sequence[LinkProfile],
    *,
    plan: Plan | None = None,
    advice: Advice | None = None,
    change: PlanChange | None = None,
    error: PlanningError | None = None,
    changes: Sequence[PoolChange] = (),
) -> str:
    """Return everything as one line of JSON: 'plan' with 'advice' or 'change', or 'error' with the changes that would do.

    `change` is None if the plan is no other than the job runs with.
    """
    model = {
        "name": profile.name,
        "units": len(profile.units),
        "labels": [unit.label for unit in profile.units],
        "tensor_bytes": sum(unit.tensor_bytes for unit in profile.units),
    }
    record = {
        "model": model,
        "config": encode_record(config),
        "nodes": [encode_record(node) for node in nodes],
        "links": [encode_record(link) for link in links],
        "plan": None if plan is None else encode_record(plan),
        "advice": None if advice is None else encode_record(advice),
        "change": None if change is None else change_record(change),
        "error": None if error is None else _failed(error, changes),
    }
    return json.dumps(record, separators=(",", ":"), allow_nan=False)


def error_json(error: RoostError) -> str:
    """Return an error that came before there was a pool to plan for, with the fields of as_json()."""
    empty: dict[str, Any] = {"model": None, "config": None, "nodes": [], "links": [], "plan": None, "advice": None, "change": None}
    return json.dumps({**empty, "error": _failed(error, ())}, separators=(",", ":"), allow_nan=False)


def _failed(error: RoostError, changes: Sequence[PoolChange]) -> dict[str, Any]:
    return {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "short_bytes": getattr(error, "short_bytes", 0),
        "changes": [encode_record(change) for change in changes],
    }
