"""Segments and the order of their rings."""

from __future__ import annotations

from synthetic import MB, all_links, even_model, job, link, model, node, parameter, unit

from roost.planning.cost import LinkTable, link_table, unit_costs
from roost.planning.memory import MemoryModel
from roost.planning.segments import make_segments, ring_order
from roost.planning.stages import ClusterCut, StageCutter
from roost.types import ModelProfile, NodeProfile, TensorKind, TensorRecord


def cluster(profile: ModelProfile, nodes: list[NodeProfile]) -> ClusterCut:
    costs = unit_costs(profile, job())
    cutter = StageCutter(costs=costs, memory=MemoryModel(costs=costs, optimizer_copies=0), links=link_table([]), in_flight_bound=0)
    found = cutter.cut(nodes, averaging=True)
    assert found is not None
    return found


def test_the_cuts_of_all_clusters_together_make_the_segments() -> None:
    profile = even_model(12, crossing=0)
    two = cluster(profile, [node("a"), node("b")])
    three = cluster(profile, [node("c"), node("d"), node("e")])
    segments = make_segments(profile, [two, three], link_table([]))
    assert [len(segment.tensors) for segment in segments] == [4, 2, 2, 4]
    assert [segment.members for segment in segments] == [("a", "c"), ("a", "d"), ("b", "d"), ("b", "e")]
    assert [segment.nbytes for segment in segments] == [4 * MB, 2 * MB, 2 * MB, 4 * MB]


def test_tensors_that_are_not_averaged_and_slices_without_tensors_make_no_segment() -> None:
    counter = TensorRecord(name="steps", dtype="int64", shape=(), kind=TensorKind.BUFFER, trainable=False)
    profile = model([unit(0), unit(1, parameters=0, extra=[counter])])
    segments = make_segments(profile, [cluster(profile, [node("a"), node("b")])], link_table([]))
    assert [segment.tensors for segment in segments] == [("layers.0.weight",)]
    assert segments[0].members == ("a",)


def test_every_dtype_has_a_segment_of_its_own() -> None:
    profile = model([unit(0, extra=[parameter("half", 4000, dtype="float16")]), unit(1)])
    segments = make_segments(profile, [cluster(profile, [node("a")]), cluster(profile, [node("b")])], link_table([]))
    assert [segment.tensors for segment in segments] == [("layers.0.weight", "layers.1.weight"), ("half",)]


def fast_around(*names: str) -> LinkTable:
    """Links that are fast along the circle of `names` and slow across it."""
    nodes = [node(name) for name in names]
    circle = [link(a, b, rate=1e9) for a, b in zip(names, [*names[1:], names[0]], strict=True)]
    return link_table([*all_links(nodes, rate=1e6), *circle])


def test_a_ring_follows_the_fast_links() -> None:
    assert ring_order(["a", "b", "c", "d"], fast_around("a", "c", "b", "d")) == ("a", "c", "b", "d")


def test_a_large_ring_follows_the_fast_links_too() -> None:
    circle = ["a", "i", "c", "e", "b", "h", "d", "g", "f"]
    assert ring_order(sorted(circle), fast_around(*circle)) == tuple(circle)


def test_a_ring_on_equal_links_keeps_the_order_of_clusters() -> None:
    assert ring_order(["c", "a", "b"], link_table([])) == ("c", "a", "b")
