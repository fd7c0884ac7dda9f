"""Segments and the order of their rings."""

from __future__ import annotations

import itertools
import random

import pytest
from synthetic import MB, all_links, even_model, link, model, node, parameter, scene, unit

from roost.planning.network import Network, make_network
from roost.planning.segments import EXHAUSTIVE_RING, make_segments, ring_order
from roost.planning.stages import ClusterCut
from roost.types import ModelProfile, NodeProfile, TensorKind, TensorRecord


def cluster(profile: ModelProfile, nodes: list[NodeProfile], *inner: int) -> ClusterCut:
    """Return the nodes as one cluster that is cut before the units `inner`."""
    found = scene(profile, nodes).cutter().predict(nodes, (0, *inner, len(profile.units)), 2)
    assert found is not None
    return found


def equal_links(names: str) -> Network:
    return make_network(list(names), [])


def test_the_cuts_of_all_clusters_together_make_the_segments() -> None:
    profile = even_model(12, crossing=0)
    two = cluster(profile, [node("a"), node("b")], 6)
    three = cluster(profile, [node("c"), node("d"), node("e")], 4, 8)
    segments = make_segments(profile, [two, three], equal_links("abcde"))
    assert [len(segment.tensors) for segment in segments] == [4, 2, 2, 4]
    assert [segment.members for segment in segments] == [("a", "c"), ("a", "d"), ("b", "d"), ("b", "e")]
    assert [segment.nbytes for segment in segments] == [4 * MB, 2 * MB, 2 * MB, 4 * MB]


def test_tensors_that_are_not_averaged_and_slices_without_tensors_make_no_segment() -> None:
    counter = TensorRecord(name="steps", dtype="int64", shape=(), kind=TensorKind.BUFFER, trainable=False)
    profile = model([unit(0), unit(1, parameters=0, extra=[counter])])
    segments = make_segments(profile, [cluster(profile, [node("a"), node("b")], 1)], equal_links("ab"))
    assert [segment.tensors for segment in segments] == [("layers.0.weight",)]
    assert segments[0].members == ("a",)


def test_every_dtype_has_a_segment_of_its_own() -> None:
    profile = model([unit(0, extra=[parameter("half", 4000, dtype="float16")]), unit(1)])
    segments = make_segments(profile, [cluster(profile, [node("a")]), cluster(profile, [node("b")])], equal_links("ab"))
    assert [segment.tensors for segment in segments] == [("layers.0.weight", "layers.1.weight"), ("half",)]


def fast_around(*names: str) -> Network:
    """Links that are fast along the circle of `names` and slow across it."""
    nodes = [node(name) for name in names]
    circle = [link(a, b, rate=1e9) for a, b in zip(names, [*names[1:], names[0]], strict=True)]
    return make_network(names, [*all_links(nodes, rate=1e6), *circle])


def test_a_ring_follows_the_fast_links() -> None:
    assert ring_order(["a", "b", "c", "d"], fast_around("a", "c", "b", "d")) == ("a", "c", "b", "d")


def test_a_large_ring_follows_the_fast_links_too() -> None:
    circle = ["a", "i", "c", "e", "b", "h", "d", "g", "f"]
    assert ring_order(sorted(circle), fast_around(*circle)) == tuple(circle)


def test_a_ring_on_equal_links_keeps_the_order_of_clusters() -> None:
    assert ring_order(["c", "a", "b"], equal_links("abc")) == ("c", "a", "b")


@pytest.mark.parametrize("seed", range(6))
def test_no_other_small_ring_has_a_faster_slowest_link(seed: int) -> None:
    rng = random.Random(seed)
    names = "abcdef"
    assert len(names) <= EXHAUSTIVE_RING
    network = make_network(list(names), [link(s, t, rate=rng.uniform(1e6, 1e8)) for s in names for t in names if s != t])

    def slowest(order: tuple[str, ...]) -> float:
        return min(network.bytes_per_s(*hop) for hop in itertools.pairwise((*order, order[0])))

    ring = ring_order(list(names), network)
    assert ring[0] == "a"
    assert sorted(ring) == list(names)
    assert slowest(ring) == max(slowest(order) for order in itertools.permutations(names))


def test_of_equally_fast_rings_the_one_with_least_latency_is_taken() -> None:
    nodes = [node(name) for name in "abcd"]
    far = [link(s, t, latency=0.5) for s, t in ("ab", "cd")]
    ring = ring_order(list("abcd"), make_network(list("abcd"), [*all_links(nodes), *far]))
    assert not {("a", "b"), ("c", "d")} & set(itertools.pairwise((*ring, ring[0])))


def test_a_large_ring_holds_every_owner_once() -> None:
    rng = random.Random(4)
    names = [f"n{index}" for index in range(20)]
    network = make_network(names, [link(s, t, rate=rng.uniform(1e6, 1e8)) for s in names for t in names if s != t])
    ring = ring_order(names, network)
    assert ring[0] == names[0]
    assert sorted(ring) == sorted(names)
