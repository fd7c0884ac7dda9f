from __future__ import annotations

import dataclasses
import io
import json

import pytest
from plan_kit import MB, config, links, model, node, planned
from rich.console import Console

from roost.cli.plan_report import as_json, print_plan, with_remedies
from roost.cli.plan_text import averaging_line, backup_lines, layers_of, sizes
from roost.codec import decode_record
from roost.errors import PoolTooSmallError
from roost.planning.advice import Advice, ChangeKind, PoolChange
from roost.types import BackupPlan, Plan


def shown(plan: Plan, advice: Advice | None, nodes: list[object], *, width: int = 80, **fields: int) -> str:
    out = io.StringIO()
    print_plan(Console(file=out, width=width, highlight=False), model(), config(**fields), nodes, plan, advice)  # type: ignore[arg-type]
    return out.getvalue()


def test_the_report_says_who_runs_what_what_binds_and_whether_it_is_worth_it() -> None:
    nodes = [node("desk", memory=10 * MB), node("shed", memory=14 * MB, emulated=False), node("tiny", memory=MB)]
    plan, advice = planned(model(), nodes, config(max_clusters=1))
    text = shown(plan, advice, list(nodes))
    assert f"made-up: 1 cluster on {len(plan.stages)} of 3 nodes" in text
    assert advice.headline in text
    assert "desk*" in text
    assert "shed " in text
    assert "* declared, not measured" in text
    assert "cluster 0: 100% of the data" in text
    assert "bound by" in text
    assert "- tiny is a backup: " in text
    assert "what would change it" in text
    assert "one more node like" in text
    said_in_one_line = ("- ", "  ring", "made-up", "cluster", advice.headline)
    tables = [line for line in text.splitlines() if not line.startswith(said_in_one_line)]
    assert max(map(len, tables)) <= 80


def test_two_clusters_have_rings_and_an_averaging_line() -> None:
    plan, advice = planned(model(), [node("a"), node("b")], config(min_clusters=2))
    text = shown(plan, advice, [node("a"), node("b")])
    assert "averaging: 1 ring" in text
    assert "ring 0: 6.0 MB on " in text


def test_without_advice_nothing_is_said_about_it() -> None:
    plan, _ = planned(model(), [node("a", emulated=False)])
    text = shown(plan, None, [node("a", emulated=False)])
    assert "what would change it" not in text
    assert "declared" not in text


def test_changes_that_bring_nothing_are_said_to_bring_nothing() -> None:
    plan, advice = planned(model(), [node("a")])
    nothing = PoolChange(kind=ChangeKind.LINK, what="a change", samples_per_s=10.0, gain=0.001)
    less = PoolChange(kind=ChangeKind.FEWER_NODES, what="another", samples_per_s=9.9, gain=-0.012)
    text = shown(plan, dataclasses.replace(advice, changes=(nothing, less)), [node("a")])
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "a change 10 samples/s nothing" in rows
    assert "another 9.9 samples/s -1%" in rows


@pytest.mark.parametrize("label", ["[bold]", "layers[0]", "[/]"])
def test_brackets_in_names_are_shown_as_they_are(label: str) -> None:
    plan, advice = planned(model(), [node("a")])
    out = io.StringIO()
    named = model(labels=[label] * 6, name=label)
    print_plan(Console(file=out, width=100), named, config(), [node("a")], dataclasses.replace(plan, notes=(label,)), advice)
    assert out.getvalue().count(label) == 3


def test_the_json_is_one_line_and_the_plan_in_it_comes_back() -> None:
    nodes = [node("a"), node("b")]
    plan, advice = planned(model(), nodes)
    line = as_json(model(), config(), nodes, links(nodes), plan=plan, advice=advice)
    assert "\n" not in line
    record = json.loads(line)
    assert decode_record(Plan, record["plan"]) == plan
    assert decode_record(Advice, record["advice"]) == advice
    assert [item["node_id"] for item in record["nodes"]] == ["a", "b"]
    assert len(record["links"]) == 2
    assert record["model"]["units"] == 6
    assert record["error"] is None


def test_an_error_has_its_bytes_and_what_would_do() -> None:
    change = PoolChange(kind=ChangeKind.MEMORY, what="a lends more", samples_per_s=3.0, gain=0.0)
    error = with_remedies(PoolTooSmallError("too small", short_bytes=7), [change])
    record = json.loads(as_json(model(), config(), [], [], error=error, changes=[change]))
    assert record["plan"] is None
    assert (record["error"]["code"], record["error"]["short_bytes"]) == ("R301", 7)
    assert record["error"]["changes"] == [{"kind": "memory", "what": "a lends more", "samples_per_s": 3.0, "gain": 0.0}]
    assert "Any one of these would do:\n    - a lends more: 3 samples/s predicted" in str(error)


def test_an_error_without_changes_keeps_its_own_hint() -> None:
    error = PoolTooSmallError("too small")
    assert with_remedies(error, []).hint == PoolTooSmallError.default_hint


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (5.6e9, 8e9, "5.6/8.0 GB"),
        (250e6, 8e9, "0.2/8.0 GB"),
        (30e6, 8e9, "30.0 MB/8.0 GB"),
        (0, 0, "0/0 B"),
        (3, 7, "3/7 B"),
        (2e6, 1e3, "2000.0/1.0 kB"),
    ],
)
def test_two_sizes_share_a_unit_where_that_shows_both(first: float, second: float, text: str) -> None:
    assert sizes(first, second) == text


def test_the_layers_of_a_stage_name_the_first_and_the_last() -> None:
    plan, _ = planned(model(), [node("a")])
    (stage,) = plan.stages
    assert layers_of(stage, model()) == "layers.0 .. 5"
    assert layers_of(dataclasses.replace(stage, last_unit=1), model()) == "layers.0"


def test_backups_name_the_stage_they_stand_in_for() -> None:
    plan, _ = planned(model(), [node("a"), node("tiny", memory=MB)])
    assert backup_lines(plan) == []
    plan = dataclasses.replace(plan, backup_stages=(BackupPlan(node_id="tiny", cluster=0, stage=0),))
    assert backup_lines(plan) == ["tiny backs up stage 0 of cluster 0 (a)"]


def test_averaging_says_whether_the_links_keep_up() -> None:
    plan, _ = planned(model(), [node("a"), node("b")], config(min_clusters=2))
    steady = dataclasses.replace(plan, round_s=1.25, round_updates=16.0)
    assert averaging_line(steady, 16) == "averaging: 1 ring, a round takes 1.2 s on the slowest, every 16 updates"
    late = dataclasses.replace(plan, round_s=90.0, round_updates=40.0)
    assert averaging_line(late, 16).endswith("every 40 updates: the links cannot keep up with every 16")
    assert averaging_line(dataclasses.replace(plan, segments=()), 16) == ""


def test_control_characters_never_reach_the_terminal() -> None:
    profile = model(name="made\x1b[2Jup", labels=[f"layers\x07.{index}" for index in range(6)])
    plan, _ = planned(profile, [node("a")])
    plan = dataclasses.replace(plan, notes=("a\rnote\x9b",))
    out = io.StringIO()
    print_plan(Console(file=out, width=80, highlight=False), profile, config(), [node("a")], plan, None)
    assert all(letter == "\n" or letter.isprintable() for letter in out.getvalue())
    assert "made?[2Jup: " in out.getvalue()
    assert "- a?note?" in out.getvalue()
    assert layers_of(plan.stages[0], profile) == "layers?.0 .. 5"
