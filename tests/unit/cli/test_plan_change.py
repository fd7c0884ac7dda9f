from __future__ import annotations

import dataclasses
import io
import json
import math
import random

import pytest
from plan_kit import MB, config, links, model, node, plan_for
from rich.console import Console

from roost.cli.plan_change import change_record, move_line, print_change, print_no_change, worth_line
from roost.planning.relocation import Move
from roost.planning.replan import PlanChange, propose_change

DESK, SHED, BARN = node("desk"), node("shed", speed=0.5), node("barn")
MOVE = Move(target="shed", source="desk", first_unit=0, last_unit=3, tensors=("layers.0.weight",), nbytes=812 * MB, seconds=64.96)
PLAN = plan_for(model(), [DESK, SHED])
CHANGE = PlanChange(
    plan=dataclasses.replace(PLAN, samples_per_s=15.0),
    moves=(MOVE,),
    move_s=70.2,
    gain_samples_per_s=5.0,
    pays_back_s=210.0,
    forced=False,
    reason="because of this",
)


def shown(change: PlanChange, *, there: tuple[str, ...] = ("desk", "shed")) -> str:
    out = io.StringIO()
    print_change(Console(file=out, width=80, highlight=False), change, PLAN, [node(name) for name in there], model())
    return out.getvalue()


def test_a_move_says_what_goes_from_where_to_where_and_how_long_it_takes() -> None:
    assert move_line(MOVE, model()) == "desk -> shed: layers.0 .. 2, 812.0 MB in 65 s"
    one = dataclasses.replace(MOVE, source="", last_unit=1, seconds=0.347)
    assert move_line(one, model()) == "the requester's checkpoint -> shed: layers.0, 812.0 MB in 0.35 s"


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "the slowest node has its bytes after 70 s; +5 samples/s (+50%); it has paid for itself after 210 s"),
        ({"moves": (), "move_s": 0.0, "pays_back_s": 0.0}, "no node has to wait; +5 samples/s (+50%); it pays from the first moment on"),
        (
            {"gain_samples_per_s": 15.0},
            "the slowest node has its bytes after 70 s; +15 samples/s; it has paid for itself after 210 s",
        ),
        (
            {"gain_samples_per_s": -5.0, "pays_back_s": math.inf, "forced": True},
            "the slowest node has its bytes after 70 s; -5 samples/s (-25%); "
            "it will not train more samples, but what is left now is not what the job asks for",
        ),
        (
            {"gain_samples_per_s": 0.0, "pays_back_s": math.inf},
            "the slowest node has its bytes after 70 s; +0 samples/s (+0%); "
            "it will not train more samples, but it loses less to absent nodes and to staleness",
        ),
    ],
)
def test_what_a_change_is_worth_is_one_line(fields: dict[str, object], line: str) -> None:
    assert worth_line(dataclasses.replace(CHANGE, **fields)) == line  # type: ignore[arg-type]


def test_a_change_says_whether_and_why() -> None:
    text = shown(CHANGE)
    assert text.splitlines()[0] == "the plan should change: because of this"
    assert "  desk -> shed: layers.0 .. 2, 812.0 MB in 65 s" in text
    assert "it has paid for itself after 210 s" in text


def test_a_change_that_cannot_be_avoided_says_who_is_gone() -> None:
    forced = dataclasses.replace(CHANGE, forced=True)
    assert shown(forced, there=("desk",)).splitlines()[0] == "the plan must change (shed gone): because of this"
    assert shown(forced).splitlines()[0] == "the plan must change: because of this"


def test_of_many_moves_the_first_are_listed() -> None:
    text = shown(dataclasses.replace(CHANGE, moves=(MOVE,) * 23))
    assert text.count("desk -> shed") == 20
    assert "  and 3 more, 2.4 GB in all" in text


def test_no_change_says_what_the_plan_reaches_now() -> None:
    out = io.StringIO()
    slower = dataclasses.replace(PLAN, samples_per_s=12.3)
    print_no_change(Console(file=out, width=80, highlight=False), dataclasses.replace(PLAN, samples_per_s=14.0), slower, 600.0)
    assert out.getvalue().splitlines()[:2] == [
        "nothing is worth changing: no change would train 2% more within 600 s",
        "as it is, the plan reaches 12 samples/s on the pool as it is now; when it was made, 14 samples/s were predicted",
    ]


def test_the_record_has_all_but_the_plan_and_is_json_whatever_it_brings() -> None:
    nodes = [DESK, BARN]
    real = propose_change(PLAN, model(), nodes, links(nodes), config(), random.Random(0))
    assert real is not None
    for change, paid in ((real, real.pays_back_s), (dataclasses.replace(real, pays_back_s=math.inf), None)):
        record = json.loads(json.dumps(change_record(change), allow_nan=False))
        assert set(record) == {"moves", "move_s", "gain_samples_per_s", "pays_back_s", "forced", "reason"}
        assert record["pays_back_s"] == paid
        assert record["moves"][0]["source"] == real.moves[0].source
