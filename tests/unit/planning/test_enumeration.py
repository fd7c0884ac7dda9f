"""Clusters of one to three stages, where every cut is looked at."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from by_hand import ByHand
from synthetic import MB, all_links, even_model, link, model, node, random_scene, scene, unit

from roost.config import PlanningConfig
from roost.planning.enumeration import CutEnumerator
from roost.planning.stages import Orders


def every_order(count: int) -> Orders:
    return np.asarray(list(itertools.permutations(range(count))), dtype=np.intp)


@pytest.mark.parametrize(("seed", "count", "links"), [(s, c, k) for s in range(14) for c in (1, 2, 3) for k in ("mixed", "equal")])
def test_no_order_cut_or_depth_is_worth_more_than_the_one_found(seed: int, count: int, links: str) -> None:
    made = random_scene(random.Random(seed), nodes=count, units=6, links=links)
    for clusters in (1, 3):
        orders, cutter, by_hand = every_order(count), made.cutter(), ByHand(made, clusters)
        found = CutEnumerator(cutter=cutter).best(orders, clusters)
        best = by_hand.best_of_group(frozenset(range(count)))
        assert (found is None) == (best is None)
        if found is None or best is None:
            continue
        order = tuple(orders[found.row].tolist())
        assert cutter.value(order, found.period_s, found.staleness) == pytest.approx(best.value, rel=1e-9)
        # And it is not a promise only: these cuts reach it.
        same = max(by_hand.best_depth(order, found.cuts), key=lambda one: one.value)
        assert (same.period_s, same.staleness) == (pytest.approx(found.period_s), found.staleness)


def test_more_stages_than_units_have_no_cut() -> None:
    nodes = [node("a"), node("b"), node("c")]
    assert CutEnumerator(cutter=scene(even_model(2), nodes).cutter()).best(every_order(3), 1) is None
    assert CutEnumerator(cutter=scene(even_model(1), nodes[:2]).cutter()).best(every_order(2), 1) is None


@pytest.mark.parametrize("slow", [("a", "b"), ("b", "a")])
def test_a_link_that_is_slow_in_one_direction_binds_whichever_it_is(slow: tuple[str, str]) -> None:
    # Every line is fast: c sends to and receives from all. Only this one link is not.
    nodes = [node("a"), node("b"), node("c")]
    made = scene(even_model(2, crossing=50_000), nodes, [*all_links(nodes), link(*slow, rate=1e6)])
    found = CutEnumerator(cutter=made.cutter()).best(np.asarray([(0, 1), (1, 0)], dtype=np.intp), 1)
    assert found is not None
    assert found.period_s == pytest.approx(0.05)


def test_nothing_is_found_where_memory_is_short_for_every_cut() -> None:
    nodes = [node("a", memory=4 * MB), node("b", memory=4 * MB)]
    assert CutEnumerator(cutter=scene(even_model(6), nodes).cutter()).best(every_order(2), 1) is None


def test_of_two_orders_the_one_that_fits_is_found() -> None:
    # Large nodes usually come first, but here only the last unit needs one.
    profile = model([unit(0, parameters=MB), unit(1, parameters=6 * MB)])
    nodes = [node("a", memory=20 * MB), node("b", memory=5 * MB)]
    orders = np.asarray([(0, 1), (1, 0)], dtype=np.intp)
    found = CutEnumerator(cutter=scene(profile, nodes).cutter()).best(orders, 1)
    assert found is not None
    assert (found.row, found.cuts) == (1, (0, 1, 2))


def test_a_slower_cut_is_taken_where_staleness_costs_more_than_it_gains() -> None:
    nodes = [node("a"), node("b")]
    links = all_links(nodes, latency=0.002)
    eager = scene(even_model(4, crossing=0), nodes, links, options=PlanningConfig(staleness_cost=0.0))
    careful = scene(even_model(4, crossing=0), nodes, links, options=PlanningConfig(staleness_cost=0.9))
    fast = CutEnumerator(cutter=eager.cutter()).best(every_order(2), 1)
    fresh = CutEnumerator(cutter=careful.cutter()).best(every_order(2), 1)
    assert fast is not None
    assert fresh is not None
    assert (fast.period_s, fast.staleness) == (pytest.approx(0.006), 2)
    # 6 + 4 + 6 ms: three in flight hide it; with two of them it takes 8 ms, one update less stale. None of them older would take 16.
    assert (fresh.period_s, fresh.staleness, fresh.cuts) == (pytest.approx(0.008), 1, (0, 2, 4))
