from __future__ import annotations

import dataclasses

import pytest
from synthetic import MB, all_links, link, node

from roost.planning.variations import PoolView


def pool(*names: str) -> PoolView:
    nodes = [node(name) for name in names]
    return PoolView(nodes=tuple(nodes), links=tuple(all_links(nodes, rate=1e6, latency=0.01)))


def rates(view: PoolView) -> dict[tuple[str, str], float]:
    return {(link.source, link.target): link.bytes_per_s for link in view.links}


def test_more_memory_changes_that_node_and_nothing_else() -> None:
    before = pool("a", "b")
    after = before.with_memory("a", 7)
    assert [one.memory_bytes for one in after.nodes] == [7, 100 * MB]
    assert after.links == before.links
    assert before.node("a").memory_bytes == 100 * MB


def test_faster_links_from_a_node_leave_those_to_it_alone() -> None:
    after = rates(pool("a", "b", "c").with_faster_links_from("a", 2.0))
    assert {pair for pair, rate in after.items() if rate == 2e6} == {("a", "b"), ("a", "c")}


def test_faster_links_to_a_node_leave_those_from_it_alone() -> None:
    after = rates(pool("a", "b", "c").with_faster_links_to("a", 3.0))
    assert {pair for pair, rate in after.items() if rate == 3e6} == {("b", "a"), ("c", "a")}


def test_a_faster_link_between_two_is_faster_both_ways() -> None:
    after = rates(pool("a", "b", "c").with_faster_link_between("a", "b", 2.0))
    assert {pair for pair, rate in after.items() if rate == 2e6} == {("a", "b"), ("b", "a")}


def test_without_a_node_its_links_are_gone_too() -> None:
    after = pool("a", "b", "c").without("b")
    assert [one.node_id for one in after.nodes] == ["a", "c"]
    assert set(rates(after)) == {("a", "c"), ("c", "a")}


def test_a_node_alone_keeps_the_links_that_tell_what_its_line_carries() -> None:
    alone = pool("a", "b", "c").alone("b")
    assert alone.nodes == (node("b"),)
    assert {(link.source, link.target) for link in alone.links} == {("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")}


def test_a_declared_line_counts_before_links_and_grows_with_them() -> None:
    made = pool("a", "b")
    made = dataclasses.replace(
        made, nodes=tuple(dataclasses.replace(member, up_bytes_per_s=5e6, down_bytes_per_s=7e6) for member in made.nodes)
    )
    assert (made.up_bytes_per_s("a"), made.down_bytes_per_s("a")) == (5e6, 7e6)
    assert made.with_faster_links_from("a", 2).up_bytes_per_s("a") == 1e7
    assert made.with_faster_links_to("a", 2).down_bytes_per_s("a") == 1.4e7
    assert made.with_faster_links_to("a", 2).down_bytes_per_s("b") == 7e6


def test_twins_are_like_their_node_and_have_its_links_to_everybody_and_to_each_other() -> None:
    after = pool("a", "b").with_twins("a", 2)
    assert [one.node_id for one in after.nodes] == ["a", "b", "a-2", "a-3"]
    names = [one.node_id for one in after.nodes]
    assert set(rates(after)) == {(one, other) for one in names for other in names if one != other}
    assert set(rates(after).values()) == {1e6}
    assert all(one.latency_s == 0.01 for one in after.links)
    assert {dataclasses.replace(one, node_id="x") for one in after.nodes} == {node("x")}


def test_a_twin_gets_a_name_that_is_free() -> None:
    after = pool("a", "a-2").with_twins("a", 1)
    assert [one.node_id for one in after.nodes] == ["a", "a-2", "a-3"]


def test_the_link_between_twins_is_as_fast_as_the_slower_of_up_and_down() -> None:
    view = PoolView(nodes=(node("a"), node("b")), links=(link("a", "b", rate=3e6), link("b", "a", rate=5e6)))
    after = rates(view.with_twins("a", 1))
    assert after["a", "a-2"] == after["a-2", "a"] == 3e6
    assert after["a-2", "b"] == 3e6
    assert after["b", "a-2"] == 5e6


def test_a_twin_of_a_node_without_links_has_none() -> None:
    assert PoolView(nodes=(node("a"),), links=()).with_twins("a", 3).links == ()


def test_a_twin_has_a_machine_of_its_own() -> None:
    shared = dataclasses.replace(node("a"), host="box", host_cores=4)
    twin = PoolView(nodes=(shared,), links=()).with_twins("a", 1).node("a-2")
    assert (twin.host, twin.host_cores) == ("", 0)


@pytest.mark.parametrize(
    ("nodes", "kinds"),
    [
        ([node("a"), node("b")], ["a"]),
        ([node("b"), node("a")], ["a"]),
        ([node("a"), node("b", speed=1.02)], ["a"]),
        ([node("a"), node("b", speed=3.0)], ["b", "a"]),
        ([node("a"), node("b", speed=3.0), node("c")], ["a", "b"]),
        ([node("a"), node("b", memory=300 * MB)], ["a", "b"]),
        ([], []),
    ],
)
def test_kinds_are_told_apart_by_size_and_speed_and_the_commonest_comes_first(nodes: list[object], kinds: list[str]) -> None:
    assert [one.node_id for one in PoolView(nodes=tuple(nodes), links=()).kinds()] == kinds  # type: ignore[arg-type]
