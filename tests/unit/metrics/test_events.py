from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from roost.metrics.events import JsonLines


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_event_is_one_line_on_disk_at_once(tmp_path):
    path = tmp_path / "deep" / "events.jsonl"
    with closing(JsonLines(path, clock=lambda: 5.0)) as events:
        events.write("update", stage=1, loss=0.5, node="a\nb", plan={"clusters": [1, 2]})
        assert lines(path) == [{"time": 5.0, "event": "update", "stage": 1, "loss": 0.5, "node": "a\nb", "plan": {"clusters": [1, 2]}}]
        events.write("end")
    assert [line["event"] for line in lines(path)] == ["update", "end"]


def test_a_number_that_is_not_finite_becomes_null(tmp_path):
    with closing(JsonLines(tmp_path / "e.jsonl")) as events:
        events.write("loss", value=float("nan"), nested={"all": (1.0, float("inf"))})
    (line,) = lines(tmp_path / "e.jsonl")
    assert (line["value"], line["nested"]) == (None, {"all": [1.0, None]})


def test_the_files_stay_bounded_and_hold_the_newest_events(tmp_path):
    path = tmp_path / "e.jsonl"
    with closing(JsonLines(path, max_bytes=200)) as events:
        for number in range(100):
            events.write("tick", number=number)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["e.jsonl", "e.jsonl.1"]
    assert all(file.stat().st_size <= 200 for file in tmp_path.iterdir())
    assert lines(path)[-1]["number"] == 99


def test_events_are_appended_to_an_earlier_file_and_the_bound_counts_it(tmp_path):
    path = tmp_path / "e.jsonl"
    for number in range(2):
        with closing(JsonLines(path)) as events:
            events.write("start", number=number)
    assert [line["number"] for line in lines(path)] == [0, 1]
    with closing(JsonLines(path, max_bytes=path.stat().st_size)) as events:
        events.write("start", number=2)
    assert [line["number"] for line in lines(path)] == [2]


def test_no_file_is_made_without_an_event(tmp_path):
    JsonLines(tmp_path / "e.jsonl").close()
    assert list(tmp_path.iterdir()) == []
