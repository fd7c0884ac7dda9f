"""What should change about the plan that a job runs with, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from roost.cli.plan_text import duration, layers_of
from roost.codec import encode_record
from roost.config import format_bytes
from roost.planning.advice import format_rate
from roost.planning.relocation import Move
from roost.planning.replan import LEAST_GAIN, PlanChange
from roost.types import ModelProfile, NodeProfile, Plan

MOST_MOVES = 20
"""Moves that are listed."""
MOST_GONE = 8
"""Nodes that are named as gone."""
CHECKPOINT = "the requester's checkpoint"
"""As the source of bytes that no node has; no node can have this name."""


def print_change(console: Console, change: PlanChange, current: Plan, nodes: Sequence[NodeProfile], profile: ModelProfile) -> None:
    """Print what should change about `current` on the pool of `nodes` and why, which bytes move, how long that takes and what it brings."""
    verdict, colour = ("the plan must change", "bold red") if change.forced else ("the plan should change", "bold green")
    here = {node.node_id for node in nodes}
    gone = [stage.node_id for stage in current.stages if stage.node_id not in here]
    if gone:
        verdict += f" ({', '.join(gone[:MOST_GONE])}{f' and {len(gone) - MOST_GONE} more' if len(gone) > MOST_GONE else ''} gone)"
    console.print(Text(f"{verdict}: {change.reason}", style=colour), soft_wrap=True)
    for move in change.moves[:MOST_MOVES]:
        console.print(Text(f"  {move_line(move, profile)}"), soft_wrap=True)
    rest = change.moves[MOST_MOVES:]
    if rest:
        console.print(Text(f"  and {len(rest)} more, {format_bytes(sum(move.nbytes for move in rest))} in all"), soft_wrap=True)
    console.print(Text(worth_line(change)), soft_wrap=True)
    console.print()


def print_no_change(console: Console, current: Plan, predicted: Plan, payback_s: float) -> None:
    """Print that nothing is worth changing. `current` is the plan as it was made, `predicted` as it is on the pool now."""
    verdict = f"nothing is worth changing: no change would train {LEAST_GAIN:.0%} more within {duration(payback_s)}"
    console.print(Text(verdict, style="bold green"), soft_wrap=True)
    now, then = format_rate(predicted.samples_per_s), format_rate(current.samples_per_s)
    console.print(
        Text(f"as it is, the plan reaches {now} on the pool as it is now; when it was made, {then} were predicted"), soft_wrap=True
    )
    console.print()


def move_line(move: Move, profile: ModelProfile) -> str:
    """Return a move for people: 'desk -> laptop: layers.0 .. 4, 812.0 MB in 65 s'."""
    layers = layers_of(move, profile)
    what = f"{layers}, " if layers else ""
    return f"{move.source or CHECKPOINT} -> {move.target}: {what}{format_bytes(move.nbytes)} in {duration(move.seconds)}"


def worth_line(change: PlanChange) -> str:
    """Return how long a change takes, what it brings and when it has paid for itself."""
    waits = f"the slowest node has its bytes after {duration(change.move_s)}" if change.moves else "no node has to wait"
    before = change.plan.samples_per_s - change.gain_samples_per_s
    relative = f" ({change.gain_samples_per_s / before:+.0%})" if before > change.plan.samples_per_s * 1e-9 else ""
    sign = "-" if change.gain_samples_per_s < 0 else "+"
    gain = f"{sign}{format_rate(abs(change.gain_samples_per_s))}{relative}"
    if math.isinf(change.pays_back_s):
        kept = "what is left now is not what the job asks for" if change.forced else "it loses less to absent nodes and to staleness"
        paid = f"it will not train more samples, but {kept}"
    elif change.pays_back_s == 0:
        paid = "it pays from the first moment on"
    else:
        paid = f"it has paid for itself after {duration(change.pays_back_s)}"
    return f"{waits}; {gain}; {paid}"


def change_record(change: PlanChange) -> dict[str, Any]:
    """Return a change as JSON-ready dicts, lists and scalars: all but the plan, which stands beside it.

    'pays_back_s' is None if it never does; the 'source' of a move is empty where only the requester's checkpoint has the bytes.
    """
    record: dict[str, Any] = encode_record(change)
    del record["plan"]
    if math.isinf(change.pays_back_s):
        record["pays_back_s"] = None
    return record
