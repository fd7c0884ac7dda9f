"""What the network between nodes carries."""

from __future__ import annotations

import math

import pytest
from synthetic import all_links, link, node

from roost.planning.network import DEFAULT_BYTES_PER_S, DEFAULT_LATENCY_S, make_network


def test_a_measured_link_is_taken_as_it_was_measured_in_each_direction() -> None:
    network = make_network(["a", "b"], [link("a", "b", rate=1e6, latency=0.001), link("b", "a", rate=3e6, latency=0.002)])
    assert (network.bytes_per_s("a", "b"), network.latency_s("a", "b")) == (1e6, 0.001)
    assert (network.bytes_per_s("b", "a"), network.latency_s("b", "a")) == (3e6, 0.002)


def test_a_pair_that_was_not_measured_is_as_fast_as_the_slower_of_its_two_lines() -> None:
    links = [link("a", "b", rate=4e6), link("a", "c", rate=9e6), link("b", "d", rate=2e6), link("c", "d", rate=5e6)]
    network = make_network(["a", "b", "c", "d"], links)
    # a was seen to send 9 MB/s, d to receive 5 MB/s.
    assert network.bytes_per_s("a", "d") == 5e6
    # b was seen to send 2 MB/s, c to receive 9 MB/s.
    assert network.bytes_per_s("b", "c") == 2e6


def test_a_line_is_the_most_that_any_link_of_its_node_carries() -> None:
    network = make_network(["a", "b", "c"], [link("a", "b", rate=4e6), link("a", "c", rate=9e6), link("b", "a", rate=1e6)])
    # c was never seen to send: the median of what the others send.
    assert list(network.up) == [9e6, 1e6, 5e6]
    assert list(network.down) == [1e6, 4e6, 9e6]


def test_the_latency_of_an_unmeasured_pair_is_the_mean_of_what_both_have_to_their_peers() -> None:
    links = [link("a", "b", latency=0.010), link("b", "a", latency=0.020), link("c", "b", latency=0.100)]
    network = make_network(["a", "b", "c"], links)
    # a: the median of 10 and 20 ms; c: 100 ms.
    assert network.latency_s("a", "c") == pytest.approx((0.015 + 0.100) / 2)


def test_a_node_nobody_measured_has_the_median_of_the_others() -> None:
    links = [link("a", "b", rate=1e6, latency=0.001), link("b", "a", rate=3e6, latency=0.003)]
    network = make_network(["a", "b", "new"], links)
    assert network.up[2] == network.down[2] == 2e6
    assert network.bytes_per_s("a", "new") == 1e6
    assert network.bytes_per_s("b", "new") == 2e6
    assert network.latency_s("a", "new") == pytest.approx(0.002)


def test_without_any_measured_link_the_documented_defaults_are_assumed() -> None:
    network = make_network(["a", "b"], [])
    assert network.bytes_per_s("a", "b") == DEFAULT_BYTES_PER_S
    assert network.latency_s("a", "b") == DEFAULT_LATENCY_S
    assert network.uniform


def test_links_to_nodes_that_are_not_in_the_pool_or_to_oneself_are_ignored() -> None:
    links = [link("a", "b", rate=1e6), link("b", "a", rate=1e6), link("a", "gone", rate=9e9), link("gone", "b", rate=9e9), link("a", "a")]
    network = make_network(["a", "b"], links)
    assert list(network.up) == list(network.down) == [1e6, 1e6]


def test_of_two_measurements_of_one_pair_the_later_counts() -> None:
    network = make_network(["a", "b"], [link("a", "b", rate=1e6), link("a", "b", rate=7e6)])
    assert network.bytes_per_s("a", "b") == network.up[0] == 7e6


def test_a_node_reaches_itself_at_once() -> None:
    network = make_network(["a", "b"], [link("a", "b")])
    assert math.isinf(network.bytes_per_s("a", "a"))
    assert network.latency_s("a", "a") == 0.0


@pytest.mark.parametrize(
    ("slower", "uniform"), [(link("a", "b"), True), (link("a", "b", rate=1e6), False), (link("a", "b", latency=0.5), False)]
)
def test_links_are_alike_only_if_rates_and_latencies_all_are(slower: object, uniform: bool) -> None:
    nodes = [node("a"), node("b"), node("c")]
    assert make_network(["a", "b", "c"], [*all_links(nodes), slower]).uniform is uniform  # type: ignore[list-item]


def test_a_part_of_a_network_has_the_same_links_under_new_places() -> None:
    links = [link("a", "b", rate=1e6, latency=0.1), link("b", "c", rate=2e6, latency=0.2), link("c", "a", rate=3e6, latency=0.3)]
    whole = make_network(["a", "b", "c"], links)
    part = whole.part([2, 0])
    assert part.places == {"c": 0, "a": 1}
    assert part.bytes_per_s("c", "a") == 3e6
    assert part.latency_s("a", "c") == whole.latency_s("a", "c")
    # Lines stay what they were in the whole pool.
    assert list(part.up) == [whole.up[2], whole.up[0]]
    assert list(part.down) == [whole.down[2], whole.down[0]]


def test_a_declared_line_stands_for_what_its_links_were_seen_to_carry() -> None:
    network = make_network(["a", "b"], [link("a", "b", rate=1e6), link("b", "a", rate=2e6)], {"a": (5e6, 0.0)})
    assert network.up.tolist() == [5e6, 2e6]
    assert network.down.tolist() == [2e6, 1e6]
    assert network.bytes_per_s("a", "b") == 1e6


def test_part_of_a_network_keeps_lines_that_links_to_others_told() -> None:
    network = make_network(["a", "b"], [link("a", "b", rate=1e6), link("b", "a", rate=2e6)])
    alone = network.part([0])
    assert (alone.places, alone.up.tolist(), alone.down.tolist()) == ({"a": 0}, [1e6], [2e6])
