from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree

import pytest
from plan_kit import MB, config, model, node, plan_for, planned

from roost.cli.plan_picture import BINDS, draw_plan, fit, wrap
from roost.types import BackupPlan, Plan, SegmentPlan

SVG = "{http://www.w3.org/2000/svg}"


def draw(plan: Plan, **fields: object) -> ElementTree.Element:
    """Return the picture of a plan, parsed."""
    settings = {"profile": model(), "config": config(), "advice": None, **fields}
    return ElementTree.fromstring(draw_plan(plan, **settings))  # type: ignore[arg-type]


def texts(picture: ElementTree.Element) -> list[str]:
    """Return every text as it is shown, without tooltips."""
    found = []
    for text in picture.iter(f"{SVG}text"):
        tips = [tip.text or "" for tip in text.iter(f"{SVG}title")]
        found.append("".join(text.itertext()).removeprefix("".join(tips)))
    return found


def two_clusters() -> Plan:
    nodes = [node("a", memory=16 * MB), node("b", memory=18 * MB), node("c", memory=16 * MB), node("d", memory=18 * MB)]
    return plan_for(model(), [*nodes, node("tiny", memory=1 * MB)], config(min_clusters=2, max_in_flight=2))


def test_every_cluster_stage_and_backup_is_there_and_the_legend() -> None:
    plan, words = two_clusters(), texts(draw(two_clusters()))
    assert [word for word in words if word.startswith("cluster ")] == [f"cluster {cluster.index}" for cluster in plan.clusters]
    for stage in plan.stages:
        assert stage.node_id in words
    assert "tiny" in words
    assert "backups" in words
    assert "what binds" in words
    assert "memory needed / lent" in words
    assert any(word.endswith("samples/s predicted") for word in words)


def test_links_show_bytes_per_second() -> None:
    plan = two_clusters()
    hops = sum(len(cluster.stages) - 1 for cluster in plan.clusters)
    assert hops
    assert sum(word.endswith("B/s") for word in texts(draw(plan))) == hops


def test_what_binds_is_in_colour_and_named() -> None:
    plan = two_clusters()
    picture = draw(plan)
    boxes = [box for box in picture.iter(f"{SVG}rect") if box.get("stroke") == BINDS]
    assert len(boxes) >= 1
    assert any(word.endswith(" binds") for word in texts(picture))
    assert any(word.startswith("bound by") for word in texts(picture))


def with_binding(plan: Plan, binding: str) -> Plan:
    """Return the plan with its first stage bound by `binding`, and no other stage."""
    (first, *others) = plan.clusters[0].stages
    stages = (dataclasses.replace(first, binding=binding), *(dataclasses.replace(stage, binding="") for stage in others))
    return dataclasses.replace(plan, clusters=(dataclasses.replace(plan.clusters[0], stages=stages), *plan.clusters[1:]))


@pytest.mark.parametrize(("binding", "bars", "arrows"), [("compute", 1, 0), ("memory", 1, 0), ("uplink", 0, 1), ("round trip", 0, 1)])
def test_the_bar_or_the_arrow_that_binds_has_the_colour(binding: str, bars: int, arrows: int) -> None:
    nodes = [node("a", memory=10 * MB), node("b", memory=14 * MB)]
    plan = with_binding(plan_for(model(), nodes, config(max_clusters=1)), binding)
    assert len(plan.stages) == 2
    picture = draw(plan)
    coloured = [bar for bar in picture.iter(f"{SVG}rect") if bar.get("fill") == BINDS and bar.get("width") != "22"]
    lines = [line for line in picture.iter(f"{SVG}path") if line.get("stroke") == BINDS]
    assert (len(coloured), len(lines)) == (bars, arrows)
    assert f"{binding} binds" in texts(picture)


def test_a_stage_that_recomputes_says_so() -> None:
    plan = two_clusters()
    (first, *others) = plan.clusters[0].stages
    stages = (dataclasses.replace(first, recompute=True), *others)
    again = dataclasses.replace(plan, clusters=(dataclasses.replace(plan.clusters[0], stages=stages), *plan.clusters[1:]))
    assert "stage 0, recomputes" in texts(draw(again))
    assert "stage 0, recomputes" not in texts(draw(plan))


def test_bars_are_as_long_as_what_they_show_and_never_longer_than_their_ground() -> None:
    for bar in draw(two_clusters()).iter(f"{SVG}rect"):
        if bar.get("height") == "9":
            assert 0 < float(bar.get("width", "0")) <= 76


def test_rings_are_dots_of_the_same_number_joined_by_a_curve() -> None:
    plan = two_clusters()
    assert plan.rings
    picture = draw(plan)
    curves = [line for line in picture.iter(f"{SVG}path") if line.get("stroke-dasharray")]
    assert len(curves) == len(plan.rings)
    dots = [dot for dot in picture.iter(f"{SVG}circle") if dot.get("r") == "8"]
    assert len(dots) == sum(len(ring.members) for ring in plan.rings)


def test_many_rings_are_dots_only_and_those_that_do_not_fit_are_counted() -> None:
    plan = two_clusters()
    members = plan.rings[0].members
    rings = tuple(SegmentPlan(index=index, tensors=(), nbytes=1, members=members) for index in range(30))
    picture = draw(dataclasses.replace(plan, segments=rings))
    assert not [line for line in picture.iter(f"{SVG}path") if line.get("stroke-dasharray")]
    assert "+23" in texts(picture)


def test_a_backup_says_which_stage_it_stands_in_for() -> None:
    plan = dataclasses.replace(two_clusters(), backup_stages=(BackupPlan(node_id="tiny", cluster=1, stage=0),))
    assert "for stage 0 of cluster 1" in texts(draw(plan))


def test_a_long_cluster_is_wrapped_and_everything_stays_inside_the_picture() -> None:
    nodes = [node(f"n{index}", memory=3_200_000) for index in range(9)]
    plan = plan_for(model(9), nodes, config(max_in_flight=1))
    assert len(plan.stages) == 9
    picture = draw(plan, profile=model(9))
    width, height = float(picture.get("width", "0")), float(picture.get("height", "0"))
    boxes = [box for box in picture.iter(f"{SVG}rect") if box.get("rx") == "9"]
    assert len(boxes) == 9
    for box in boxes:
        assert 0 <= float(box.get("x", "")) <= width - float(box.get("width", ""))
        assert 0 <= float(box.get("y", "")) <= height - float(box.get("height", ""))
    corners = {(box.get("x"), box.get("y")) for box in boxes}
    assert len(corners) == 9
    for text in picture.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x", "")) <= width
        assert 0 <= float(text.get("y", "")) <= height


def test_the_headline_of_the_advice_is_there() -> None:
    nodes = [node("a"), node("b")]
    plan, advice = planned(model(), nodes)
    assert advice.headline in texts(draw(plan, advice=advice))


NASTY = "<script>&\"'\x00\x1b]]> \ufffe\ud800 日本"


def test_names_cannot_break_out_of_the_picture() -> None:
    plan = plan_for(model(), [node(NASTY)])
    text = draw_plan(plan, model(name=NASTY, labels=[NASTY] * 6), config(), None)
    text.encode()
    assert "<script" not in text
    picture = ElementTree.fromstring(text)
    assert not list(picture.iter(f"{SVG}script"))
    assert any("日本" in word for word in picture.itertext())


def test_equal_plans_give_equal_pictures() -> None:
    plan = two_clusters()
    assert draw_plan(plan, model(), config(), None) == draw_plan(plan, model(), config(), None)


def test_long_words_are_cut_with_an_ellipsis_and_keep_their_whole_in_a_tooltip() -> None:
    plan = plan_for(model(), [node("n" * 64)])
    picture = draw(plan)
    assert any(word.endswith("…") for word in texts(picture))
    assert "n" * 64 in [tip.text for tip in picture.iter(f"{SVG}title")]


@pytest.mark.parametrize(
    ("words", "room", "shown"), [("short", 100, "short"), ("abcdefghij", 34.2, "abcde…"), ("a", 0, "a"), ("ab", 0, "…")]
)
def test_words_fit_their_room(words: str, room: float, shown: str) -> None:
    assert fit(words, room, 10) == shown


def test_lines_are_wrapped_and_the_last_takes_the_rest() -> None:
    assert wrap("one two three four five", 60, 10, most=2) == ["one two", "three four five"]
    assert wrap("one two", 600, 10, most=2) == ["one two"]
