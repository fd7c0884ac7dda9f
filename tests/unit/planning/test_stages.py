"""The best cut for nodes in a given order."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from by_hand import ByHand, Reached
from synthetic import KB, MB, Scene, all_links, even_model, job, link, model, node, random_scene, scene, unit

from roost.config import PlanningConfig
from roost.planning.stages import BALANCE_WEIGHT, ClusterCut, StageCutter
from roost.types import LinkProfile, ModelProfile, NodeProfile

BARE = PlanningConfig(headroom=1.0, staleness_cost=0.0)
"""Neither headroom nor staleness: numbers that are easy to follow."""


def predicted(made: Scene, cuts: tuple[int, ...], clusters: int = 1) -> ClusterCut | None:
    return made.cutter().predict(made.nodes, cuts, clusters)


def found_for(made: Scene, clusters: int = 1) -> ClusterCut | None:
    """Return the cut at the least period for the nodes in their order; of equal ones that which sends least."""
    cutter, order = made.cutter(), range(len(made.nodes))
    found = cutter.best(np.asarray([order], dtype=np.intp), clusters, least_s=0.0)
    if found is None:
        return None
    cuts = cutter.cuts_at(order, clusters, found[1])
    assert cuts is not None
    return cutter.balanced(cutter.at(order, cuts, clusters, found[1]), clusters)


def cut_of(profile: ModelProfile, nodes: Sequence[NodeProfile], links: Sequence[LinkProfile] | None = None, **fields: int) -> ClusterCut:
    found = found_for(scene(profile, nodes, links, config=job(**fields), options=BARE))
    assert found is not None
    return found


# ------------------------------------------------------------ what given cuts reach, by hand


def test_the_round_trip_is_both_ways_and_the_computation_behind() -> None:
    nodes = [node("a"), node("b"), node("c")]
    links = [
        link("a", "b", rate=10e6, latency=0.001),
        link("b", "a", rate=5e6, latency=0.002),
        link("b", "c", rate=2e6, latency=0.003),
        link("c", "b", rate=20e6, latency=0.004),
        link("a", "c"),
        link("c", "a"),
    ]
    cut = predicted(scene(even_model(6), nodes, links, options=PlanningConfig(headroom=2.0, staleness_cost=0.0)), (0, 1, 3, 6))
    assert cut is not None
    # Behind b: 3 + 5 ms there, 4 + 0.5 ms back, 9 ms at c. Behind a: 1 + 1 ms there, 2 + 2 ms back, 6 ms at b, and that.
    behind_b = 0.003 + 0.005 + 0.004 + 0.0005 + 0.009
    behind_a = 0.001 + 0.001 + 0.002 + 0.002 + 0.006 + behind_b
    trips = {"a": 0.003 + behind_a, "b": 0.006 + behind_b, "c": 0.009}
    assert cut.period_s == pytest.approx(0.009)
    assert cut.in_flight == tuple(math.ceil(trip / 0.009) for trip in trips.values()) == (5, 4, 1)
    # 3 + 2 * 33.5 ms and 6 + 2 * 21.5 ms: as many are allowed where there is room.
    assert cut.allowed == (8, 6, 1)
    waiting = {limit.node_id: limit.seconds for limit in cut.limits if limit.kind == "round trip"}
    assert waiting == pytest.approx({name: trip / math.ceil(trip / 0.009) for name, trip in trips.items()})
    assert cut.send_s == pytest.approx((0.002, 0.008, 0.0))
    assert cut.compute_s == pytest.approx((0.003, 0.006, 0.009))


def test_as_many_micro_batches_are_in_flight_as_hide_the_round_trip_and_no_more() -> None:
    nodes = [node("a"), node("b")]
    # The round trip from a is exactly three periods: 6 + 2 * 3 + 6 ms.
    cut = predicted(scene(even_model(4, crossing=0), nodes, all_links(nodes, latency=0.003), options=BARE), (0, 2, 4))
    assert cut is not None
    assert (cut.in_flight, cut.period_s) == ((3, 1), pytest.approx(0.006))


def test_a_bound_on_what_is_in_flight_makes_the_cluster_wait_for_the_round_trip() -> None:
    nodes = [node("a"), node("b")]
    links = all_links(nodes, latency=0.003)
    cut = predicted(scene(even_model(4, crossing=0), nodes, links, config=job(max_in_flight=2), options=BARE), (0, 2, 4))
    assert cut is not None
    assert (cut.in_flight, cut.period_s) == ((2, 1), pytest.approx(0.018 / 2))
    assert cut.bottleneck == "round trip from a with 2 in flight"
    assert cut.staleness == 1


def test_memory_for_few_micro_batches_makes_the_cluster_wait_for_the_round_trip() -> None:
    # Stage 0: 2 MB of parameters and as much of gradients, 1 MB of one being found, 20 kB of inputs.
    # Each in flight takes 200 kB, each but the first 2 MB.
    nodes = [node("a", memory=5 * MB + 2 * (2 * MB + 200 * KB) + 200 * KB + 20 * KB), node("b")]
    cut = predicted(scene(even_model(4, crossing=0), nodes, all_links(nodes, latency=0.006), options=BARE), (0, 2, 4))
    assert cut is not None
    # It takes four to hide 6 + 12 + 6 ms; three fit.
    assert (cut.in_flight, cut.period_s) == ((3, 1), pytest.approx(0.024 / 3))


def test_a_longer_period_is_worth_it_where_staleness_costs_more() -> None:
    nodes = [node("a"), node("b")]
    made = scene(even_model(4, crossing=0), nodes, all_links(nodes, latency=0.0005), options=PlanningConfig(staleness_cost=0.3))
    cut = predicted(made, (0, 2, 4))
    assert cut is not None
    # 6 + 1 + 6 ms: three in flight hide it, two (one update less stale) make it 8% slower.
    assert (cut.in_flight, cut.staleness) == ((2, 1), 1)
    assert cut.period_s == pytest.approx(0.0065)
    assert cut.value == pytest.approx(8 / 0.0065 / 1.3)


@pytest.mark.parametrize(
    ("headroom", "memory", "bound", "allowed"), [(1.0, 100, 0, 3), (2.0, 100, 0, 5), (2.0, 12, 0, 4), (2.0, 100, 4, 4)]
)
def test_headroom_is_allowed_where_memory_and_the_job_have_room(headroom: float, memory: int, bound: int, allowed: int) -> None:
    nodes = [node("a", memory=memory * MB), node("b")]
    made = scene(
        even_model(4, crossing=0),
        nodes,
        all_links(nodes, latency=0.003),
        config=job(max_in_flight=bound),
        options=PlanningConfig(headroom=headroom, staleness_cost=0.0),
    )
    cut = predicted(made, (0, 2, 4))
    assert cut is not None
    # 6 + 12 ms take three; with 6 + 2 * 12 ms five; 12 MB hold two copies and three older versions of 2 MB, and the activations.
    assert (cut.in_flight, cut.allowed) == ((3, 1), (allowed, 1))
    assert (cut.period_s, cut.staleness) == (pytest.approx(0.006), 2)


def test_the_value_is_less_for_nodes_that_are_often_away() -> None:
    nodes = [node("a", reliability=0.9), node("b", reliability=0.5)]
    cut = predicted(scene(even_model(4, crossing=0), nodes, all_links(nodes), options=BARE), (0, 2, 4))
    assert cut is not None
    assert cut.value == pytest.approx(8 / cut.period_s * 0.45)


def test_a_model_that_costs_nothing_has_a_finite_rate() -> None:
    profile = model([unit(0, seconds=0.0, parameters=0, saved=0, crossing=0)], input_bytes=0)
    cut = predicted(scene(profile, [node("a")]), (0, 1))
    assert cut is not None
    assert cut.period_s > 0


def test_cuts_that_do_not_fit_in_memory_reach_nothing() -> None:
    nodes = [node("a", memory=5 * MB), node("b")]
    assert predicted(scene(even_model(6), nodes), (0, 3, 6)) is None


# ------------------------------------------------------------ what binds


def test_the_bottleneck_is_the_slowest_node() -> None:
    cut = cut_of(model([unit(0), unit(1)]), [node("a"), node("b", speed=0.1)])
    assert cut.bottleneck == "compute of b"
    assert cut.period_s == pytest.approx(0.03)


def test_the_bottleneck_is_a_link_that_carries_more_than_it_can() -> None:
    nodes = [node("a"), node("b"), node("c")]
    # From a to c it is fast: so a's line is, and only this link is slow.
    slow = [*all_links(nodes), link("a", "b", rate=1e6)]
    cut = cut_of(even_model(3, crossing=50 * KB), nodes, slow)
    assert cut.bottleneck == "link a -> b"
    assert cut.period_s == pytest.approx(0.05)
    assert cut.send_s[0] == pytest.approx(0.0501)


def test_the_bottleneck_is_a_line_that_two_neighbours_share() -> None:
    nodes = [node("a"), node("b"), node("c")]
    slow = [*all_links(nodes), link("b", "a", rate=1e6), link("b", "c", rate=1e6)]
    cut = cut_of(even_model(3, crossing=50 * KB), nodes, slow)
    assert cut.bottleneck == "uplink of b"
    assert cut.period_s == pytest.approx(0.1)


def test_limits_are_listed_slowest_first() -> None:
    cut = cut_of(even_model(6), [node("a"), node("b"), node("c")])
    seconds = [limit.seconds for limit in cut.limits]
    assert seconds == pytest.approx(sorted(seconds, reverse=True))
    assert seconds[0] == cut.period_s
    assert {limit.kind for limit in cut.limits} == {"compute", "uplink", "downlink", "link", "round trip"}


# ------------------------------------------------------------ where it is cut


def test_each_node_gets_work_in_proportion_to_its_speed() -> None:
    cut = cut_of(even_model(12), [node("fast", speed=2.0), node("slow", speed=1.0)])
    assert cut.cuts == (0, 8, 12)
    assert cut.compute_s == pytest.approx((0.012, 0.012))


def test_memory_that_is_short_moves_the_cut() -> None:
    cut = cut_of(even_model(12, crossing=0), [node("a", memory=8 * MB), node("b")], max_in_flight=2)
    # Parameters, gradients and one older version: three times 1 MB a unit, so two units fit.
    assert cut.cuts == (0, 2, 12)


def test_a_slow_link_is_crossed_where_little_has_to_cross() -> None:
    units = [unit(index, crossing=10 if index == 1 else 10 * MB) for index in range(6)]
    nodes = [node("a"), node("b")]
    assert cut_of(model(units), nodes, all_links(nodes, rate=1e6)).cuts == (0, 2, 6)


def test_among_equally_fast_cuts_the_one_with_least_traffic_is_taken() -> None:
    # Unit 0 binds whatever follows; only the place of the second cut is free.
    units = [unit(0, seconds=1.0), *(unit(index, crossing=10 * KB if index == 3 else 500 * KB) for index in range(1, 6))]
    assert cut_of(model(units), [node("a"), node("b"), node("c")]).cuts == (0, 1, 4, 6)


def test_no_cut_is_returned_if_memory_cannot_suffice_or_units_are_too_few() -> None:
    assert found_for(scene(even_model(12), [node("a", memory=8 * MB), node("b", memory=8 * MB)])) is None
    assert found_for(scene(even_model(2), [node("a"), node("b"), node("c")])) is None


# ------------------------------------------------------------ against trying everything


def least_period(reached: Sequence[Reached]) -> float:
    return min((one.period_s for one in reached), default=math.inf)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_predicted_for_given_cuts_is_the_best_of_all_depths_by_hand(seed: int) -> None:
    rng = random.Random(seed)
    made = random_scene(rng, nodes=rng.choice([1, 2, 3, 4]), units=5)
    clusters = rng.choice([1, 2, 3])
    cutter, by_hand, order = made.cutter(), ByHand(made, clusters), tuple(range(len(made.nodes)))
    for inner in itertools.combinations(range(1, 5), len(order) - 1):
        cuts = (0, *inner, 5)
        cut = cutter.predict(made.nodes, cuts, clusters)
        best = max(by_hand.best_depth(order, cuts), key=lambda one: one.value, default=None)
        assert (cut is None) == (best is None)
        if cut is not None and best is not None:
            assert cut.value == pytest.approx(best.value, rel=1e-9)
            nodes = [made.nodes[place] for place in order]
            for depths in (cut.in_flight, cut.allowed):
                needed = [by_hand.memory(cuts[k], cuts[k + 1], depths[k], cut.recompute[k]) for k in range(len(order))]
                assert all(size <= member.memory_bytes for size, member in zip(needed, nodes, strict=True))
            assert all(least <= allowed for least, allowed in zip(cut.in_flight, cut.allowed, strict=True))
            slowest, trips = by_hand.terms(nodes, cuts, cut.recompute)
            assert cut.period_s == pytest.approx(max(slowest, *(trip / depth for trip, depth in zip(trips, cut.in_flight, strict=True))))


@pytest.mark.parametrize("seed", range(25))
def test_no_order_and_no_cut_keeps_a_shorter_period_than_the_one_found(seed: int) -> None:
    rng = random.Random(seed)
    made = random_scene(rng, nodes=rng.choice([2, 3, 4]), units=rng.choice([4, 6]))
    clusters = rng.choice([1, 2])
    orders = list(itertools.permutations(range(len(made.nodes))))
    found = made.cutter().best(np.asarray(orders, dtype=np.intp), clusters, least_s=0.0)
    by_order = [least_period(ByHand(made, clusters).everything([order])) for order in orders]
    assert (found is None) == math.isinf(min(by_order))
    if found is not None:
        assert found[1] == pytest.approx(min(by_order), rel=2e-7)
        assert by_order[found[0]] == pytest.approx(found[1], rel=2e-7)


@pytest.mark.parametrize("seed", range(15))
def test_a_cap_on_staleness_and_a_period_to_beat_are_respected(seed: int) -> None:
    rng = random.Random(100 + seed)
    made = random_scene(rng, nodes=3, units=5)
    orders = list(itertools.permutations(range(3)))
    everything = ByHand(made, 1).everything(orders)
    for staleness in (0, 1, 2):
        least = least_period([one for one in everything if one.staleness <= staleness])
        found = made.cutter().best(np.asarray(orders, dtype=np.intp), 1, least_s=0.0, staleness=staleness)
        assert (found is None) == math.isinf(least)
        if found is not None:
            assert found[1] == pytest.approx(least, rel=2e-7)
            rows = np.asarray(orders, dtype=np.intp)
            assert made.cutter().best(rows, 1, least_s=0.0, staleness=staleness, below_s=least * (1 - 1e-6)) is None
            assert made.cutter().best(rows, 1, least_s=0.0, staleness=staleness, below_s=least * (1 + 1e-6)) is not None


@pytest.mark.parametrize("seed", range(15))
def test_a_period_can_be_kept_exactly_if_it_is_no_shorter_than_the_least(seed: int) -> None:
    made = random_scene(random.Random(200 + seed), nodes=3, units=5)
    cutter = made.cutter()
    for order in itertools.permutations(range(3)):
        least = least_period(ByHand(made, 2).everything([order]))
        rows = np.asarray([order], dtype=np.intp)
        if math.isinf(least):
            assert math.isinf(cutter.round_trips(rows, 2, math.inf)[0])
            assert cutter.cuts_at(order, 2, math.inf) is None
            continue
        assert math.isinf(cutter.round_trips(rows, 2, least * (1 - 1e-6))[0])
        for period in (least * (1 + 1e-6), 3 * least):
            trip = cutter.round_trips(rows, 2, period)[0]
            cuts = cutter.cuts_at(order, 2, period)
            assert cuts is not None
            # The cuts that are traced have the round trip that was promised.
            nodes, cut = [made.nodes[place] for place in order], cutter.at(order, cuts, 2, period)
            assert ByHand(made, 2).terms(nodes, cuts, cut.recompute)[1][0] == pytest.approx(trip)
            assert cut.period_s <= period * (1 + 1e-8)


def traffic_and_imbalance(made: Scene, cut: ClusterCut, cuts: tuple[int, ...]) -> float | None:
    """Return what a balanced cut keeps small, by hand: flows both ways and a little of unequal work; None if these cuts are worse.

    The depth of every stage is that of `cut`; a stage recomputes only if it does not fit otherwise.
    """
    by_hand, nodes, limit = ByHand(made, 1), cut.nodes, cut.period_s * (1 + 1e-9)
    compute = []
    for k, member in enumerate(nodes):
        stage = cuts[k], cuts[k + 1]
        fitting = [again for again in (False, True) if by_hand.memory(*stage, cut.in_flight[k], again) <= member.memory_bytes]
        if not fitting or by_hand.own_terms(member, *stage, fitting[0])[1] > limit:
            return None
        compute.append(by_hand.compute(member, *stage, fitting[0]))
    flows = 0.0
    for k in range(len(nodes) - 1):
        ends = nodes[k].node_id, nodes[k + 1].node_id
        both = [by_hand.x(cuts[k + 1]) / by_hand.links[pair].bytes_per_s for pair in (ends, ends[::-1])]
        if max(both) > limit:
            return None
        flows += sum(both)
    return flows + BALANCE_WEIGHT * sum(seconds * seconds / cut.period_s for seconds in compute)


@pytest.mark.parametrize("seed", range(15))
def test_a_balanced_cut_keeps_period_and_memory_and_sends_least(seed: int) -> None:
    made = random_scene(random.Random(300 + seed), nodes=3, units=7)
    cutter = made.cutter()
    found = cutter.best(np.asarray([(0, 1, 2)], dtype=np.intp), 1, least_s=0.0)
    if found is None:
        return
    cuts = cutter.cuts_at((0, 1, 2), 1, found[1])
    assert cuts is not None
    first = cutter.at((0, 1, 2), cuts, 1, found[1])
    other = cutter.balanced(first, 1)
    assert other is not None
    every = [traffic_and_imbalance(made, first, (0, *inner, 7)) for inner in itertools.combinations(range(1, 7), 2)]
    assert traffic_and_imbalance(made, first, other.cuts) == pytest.approx(min(weight for weight in every if weight is not None))


def test_a_part_of_a_cutter_predicts_the_same_for_its_nodes() -> None:
    made = random_scene(random.Random(7), nodes=4, units=5)
    whole: StageCutter = made.cutter()
    part = whole.part([3, 1])
    for cuts in ((0, 2, 5), (0, 3, 5)):
        assert part.predict((made.nodes[3], made.nodes[1]), cuts, 2) == whole.predict((made.nodes[3], made.nodes[1]), cuts, 2)
