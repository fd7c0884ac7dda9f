"""Words and numbers of a plan that its table and its picture share."""

from __future__ import annotations

from collections.abc import Sequence

from roost.config import format_bytes
from roost.planning.relocation import Move
from roost.types import ModelProfile, Plan, StagePlan

SHOWN_AT_LEAST = 0.1
"""A size below this in the unit of another has a unit of its own."""


def printable(text: str) -> str:
    """Return text that a terminal only shows: a control character, which could do anything to it, becomes '?'."""
    return "".join("?" if ord(letter) < 32 or 127 <= ord(letter) < 160 else letter for letter in text)


def layers_of(part: StagePlan | Move, profile: ModelProfile) -> str:
    """Return the modules that a stage runs, or of which tensors move: 'layers.0 .. 3'."""
    units = profile.units[part.first_unit : part.last_unit]
    labels = list(dict.fromkeys(printable(unit.label) for unit in units if unit.label))
    if len(labels) < 2:
        return "".join(labels)
    parent, dot, _ = labels[0].rpartition(".")
    return f"{labels[0]} .. {labels[-1].removeprefix(parent + dot)}"


def duration(seconds: float) -> str:
    """Return a time for people: '65 s', '0.35 s'."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def sizes(first: float, second: float) -> str:
    """Return two sizes, in one unit if that shows both: '5.6/8.0 GB', '30.2 kB/8.0 GB'."""
    one, other = format_bytes(first), format_bytes(second)
    number, unit = other.split()
    if one.endswith(f" {unit}"):
        return f"{one.removesuffix(f' {unit}')}/{other}"
    scale = second / float(number) if float(number) else 1.0
    same = f"{first / scale:.1f}"
    return f"{same}/{other}" if float(same) >= SHOWN_AT_LEAST else f"{one}/{other}"


def backup_lines(plan: Plan) -> list[str]:
    """Return a line per backup that stands in for a stage."""
    owners = {(stage.cluster, stage.index): stage.node_id for stage in plan.stages}
    return [
        f"{backup.node_id} backs up stage {backup.stage} of cluster {backup.cluster} ({owners[backup.cluster, backup.stage]})"
        for backup in plan.backup_stages
    ]


def averaging_line(plan: Plan, interval: int) -> str:
    """Return how clusters average, '' with one cluster."""
    if not plan.rings:
        return ""
    words = f"averaging: {_count(plan.rings, 'ring')}"
    if plan.round_s:
        words += f", a round takes {plan.round_s:.2g} s on the slowest"
    if plan.round_updates:
        real = f"every {plan.round_updates:.0f} updates"
        words += f", {real}" if plan.round_updates < interval + 0.5 else f", {real}: the links cannot keep up with every {interval}"
    return words


def title(plan: Plan, profile: ModelProfile, nodes: int) -> str:
    """Return the plan in one line."""
    return f"{printable(profile.name)}: {_count(plan.clusters, 'cluster')} on {len(plan.stages)} of {nodes} nodes"


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}" + ("" if len(things) == 1 else "s")
