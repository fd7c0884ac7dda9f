"""How long averaging rounds take."""

from __future__ import annotations

import pytest
from synthetic import MB, all_links, link, node

from roost.planning.averaging import round_seconds
from roost.planning.network import Network, make_network
from roost.types import LinkProfile, SegmentPlan


def ring(*members: str, megabytes: int = 3, index: int = 0) -> SegmentPlan:
    return SegmentPlan(index=index, tensors=(f"weight.{index}",), nbytes=megabytes * MB, members=members)


def network_of(names: str, *changes: LinkProfile, rate: float = 10e6, latency: float = 0.0) -> Network:
    links = all_links([node(name) for name in names], rate=rate, latency=latency)
    return make_network(list(names), [*links, *changes])


def test_each_member_sends_twice_the_segment_less_one_share() -> None:
    # 2 * 2/3 of 3 MB at 10 MB/s.
    assert round_seconds([ring("a", "b", "c")], network_of("abc"), {}, 1.0) == pytest.approx(0.4)
    assert round_seconds([ring("a", "b")], network_of("ab"), {}, 1.0) == pytest.approx(0.3)


def test_compression_makes_it_shorter_in_proportion() -> None:
    assert round_seconds([ring("a", "b", "c")], network_of("abc"), {}, 0.25) == pytest.approx(0.1)


def test_every_step_of_a_ring_pays_a_latency() -> None:
    # Four steps of 20 ms; of unequal latencies the mean.
    assert round_seconds([ring("a", "b", "c")], network_of("abc", latency=0.02), {}, 1.0) == pytest.approx(0.4 + 0.08)
    uneven = network_of("abc", link("a", "b", rate=10e6, latency=0.03), link("c", "a", rate=10e6, latency=0.06))
    assert round_seconds([ring("a", "b", "c")], uneven, {}, 1.0) == pytest.approx(0.4 + 4 * 0.03)


def test_a_ring_is_as_slow_as_its_slowest_hop() -> None:
    network = network_of("abc", link("c", "a", rate=1e6, latency=0.0))
    assert round_seconds([ring("a", "b", "c")], network, {}, 1.0) == pytest.approx(4.0)
    # The other way round it does not use that link.
    assert round_seconds([ring("a", "c", "b")], network, {}, 1.0) == pytest.approx(0.4)


def test_a_node_in_several_rings_sends_for_all_of_them_over_one_line() -> None:
    segments = [ring("a", "b", index=0), ring("a", "c", index=1), ring("a", "d", megabytes=6, index=2)]
    # a sends 3 + 3 + 6 MB over 10 MB/s.
    assert round_seconds(segments, network_of("abcd"), {}, 1.0) == pytest.approx(1.2)


def test_a_line_carries_as_much_each_way_as_its_slower_direction() -> None:
    # a sends fast but hears slowly: what comes round the ring must arrive too.
    network = network_of("abc", link("b", "a", rate=2e6, latency=0.0), link("c", "a", rate=2e6, latency=0.0), rate=20e6)
    assert round_seconds([ring("a", "b"), ring("a", "c", index=1)], network, {}, 1.0) == pytest.approx(6 / 2)


@pytest.mark.parametrize(("piped", "seconds"), [(0.0, 0.3), (2.5e6, 0.4), (5e6, 0.6), (9.9e6, 0.6)])
def test_the_pipeline_takes_its_part_of_a_line_but_leaves_half(piped: float, seconds: float) -> None:
    assert round_seconds([ring("a", "b")], network_of("ab"), {"b": piped}, 1.0) == pytest.approx(seconds)


def test_segments_of_one_owner_need_no_round() -> None:
    assert round_seconds([ring("a")], network_of("ab"), {}, 1.0) == 0.0
    assert round_seconds([], network_of("ab"), {}, 1.0) == 0.0
