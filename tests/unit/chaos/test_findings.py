"""Reading a chaos run's records."""

from __future__ import annotations

import json
import time
from pathlib import Path

from roost.chaos.findings import logged, percentile, recorded, recoveries
from roost.chaos.injector import Incident
from roost.chaos.schedule import FaultKind


def incident(kind: FaultKind = FaultKind.KILL, *, began: float = 100.0, ended: float = 102.0, had_stage: bool = True) -> Incident:
    node = "" if kind is FaultKind.RESTART else "desk"
    return Incident(kind=kind, node=node, other="", began=began, ended=ended, had_stage=had_stage)


def test_a_repair_lasts_until_the_first_update_of_a_cluster_that_was_built_anew() -> None:
    (found,) = recoveries([incident()], changes=[50.0, 101.0], updates=[60.0, 101.5, 102.0])
    assert (found.replanned, found.seconds) == (True, 1.5)


def test_a_cluster_that_was_only_dissolved_is_repaired_with_the_plan() -> None:
    (found,) = recoveries([incident()], changes=[101.0, 120.0], updates=[121.0])
    assert found.seconds == 1.0


def test_what_needed_no_other_plan_has_no_repair() -> None:
    cut = incident(FaultKind.CUT)
    without_stage = incident(had_stage=False)
    coordinator = incident(FaultKind.COORDINATOR)
    found = recoveries([cut, without_stage, coordinator], changes=[110.0], updates=[110.5])
    assert [(one.replanned, one.seconds) for one in found] == [(False, None)] * 3


def test_a_restart_is_over_with_the_next_update_whatever_plans_are_made() -> None:
    (found,) = recoveries([incident(FaultKind.RESTART)], changes=[130.0, 131.0], updates=[135.0])
    assert found.seconds == 35.0


def test_log_lines_of_some_events_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    first.write_text("noise\n2026-01-02 03:04:06,250 INFO roost.agent first_update job=j node=a cluster=3\n")
    second.write_text(
        "2026-01-02 03:04:05,000 INFO roost.agent first_update job=j node=b cluster=2\n2026-01-02 03:04:05,1 INFO x other a=b\n"
    )
    lines = logged([first, second, tmp_path / "none.log"], frozenset({"first_update"}))
    assert [line.fields["node"] for line in lines] == ["b", "a"]
    assert lines[1].at - lines[0].at == 1.25
    assert time.localtime(lines[0].at).tm_hour == 3


def test_events_are_read_with_those_that_were_rotated_away_and_without_a_line_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    (tmp_path / "events.jsonl.1").write_text(json.dumps({"event": "old"}) + "\n")
    path.write_text(json.dumps({"event": "new"}) + '\n{"event": "ha')
    assert [event["event"] for event in recorded(path)] == ["old", "new"]


def test_percentiles_are_values_that_were_found() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.99) == 4.0
    assert percentile([], 0.5) is None
