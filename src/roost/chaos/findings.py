"""What a chaos run was like, read from its records: the requester's events.jsonl and the logs of the processes."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.chaos.injector import Incident
from roost.chaos.schedule import FaultKind

LOG_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) \S+ \S+ (\w+) (.*)$")
FIELD = re.compile(r"(\w+)=(\S+)")
SETTLING_S = 4.0
"""A change of the plan that comes later than this after the end of a fault has another reason."""
KILLED_S = 30.0
"""A killed node is always replaced; a change of the plan up to so much later is for that."""


@dataclass(frozen=True, kw_only=True)
class LoggedEvent:
    """One line of a log."""

    at: float
    """Unix time, to the millisecond."""
    event: str
    fields: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What a fault came to."""

    incident: Incident
    seconds: float | None
    """From the fault to the first update of a cluster that was built anew, or to the plan without it if none was; None if the plan
    did not have to change."""
    replanned: bool
    """True if the plan was changed because of it."""


def logged(paths: Iterable[Path], events: frozenset[str]) -> list[LoggedEvent]:
    """Return the lines of these logs that are such events, in the order of time; a log that is not there has none."""
    found = []
    for path in paths:
        if not path.exists():
            continue
        with path.open(errors="replace") as lines:
            for line in lines:
                match = LOG_LINE.match(line)
                if match is not None and match[3] in events:
                    at = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S")) + int(match[2]) / 1000
                    found.append(LoggedEvent(at=at, event=match[3], fields=dict(FIELD.findall(match[4]))))
    return sorted(found, key=lambda line: line.at)


def recorded(path: Path) -> list[dict[str, Any]]:
    """Return the events of a run's events.jsonl, what was rotated away included; a line that was cut short is left out."""
    events = []
    for part in (path.with_name(path.name + ".1"), path):
        if not part.exists():
            continue
        with part.open() as lines:
            for line in lines:
                try:
                    events.append(json.loads(line))
                except ValueError:
                    continue
    return events


def recoveries(incidents: Sequence[Incident], changes: Sequence[float], updates: Sequence[float]) -> list[Recovery]:
    """Return what every incident came to.

    `changes` are Unix times of new plans, `updates` of first updates of clusters that were built anew; both ascending. A restart is
    over with the first update after it; a job goes on without its coordinator, so that needs no repair.
    """
    found = []
    for incident in incidents:
        change = _change_for(incident, changes)
        if change is None:
            found.append(Recovery(incident=incident, seconds=None, replanned=False))
            continue
        following = next((at for at in changes if at > change), math.inf) if incident.kind is not FaultKind.RESTART else math.inf
        update = next((at for at in updates if change <= at < following), change)
        found.append(Recovery(incident=incident, seconds=update - incident.began, replanned=True))
    return found


def _change_for(incident: Incident, changes: Sequence[float]) -> float | None:
    """Return when a plan came that does without what was hit; None if none had to."""
    if incident.kind is FaultKind.RESTART:
        return incident.began
    # When a node without a stage is back the plan may change, too: that is no repair.
    if not incident.had_stage or incident.kind is FaultKind.COORDINATOR:
        return None
    ended = incident.ended if incident.ended is not None else incident.began
    latest = incident.began + KILLED_S if incident.kind is FaultKind.KILL else ended + SETTLING_S
    return next((at for at in changes if incident.began <= at <= latest), None)


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """Return the least of `values` that at least this fraction of them does not exceed; None if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else None
