"""What `roost plan` says about a plan. The plans themselves are checked elsewhere: here, that the words follow from them."""

from __future__ import annotations

import random

import pytest
from synthetic import KB, MB, all_links, even_model, job, model, node, unit

from roost.config import JobConfig, PlanningConfig
from roost.planning import advice as advice_module
from roost.planning.advice import Advice, ChangeKind, PoolChange, Replanner, Verdict, advise, format_rate, single_nodes
from roost.planning.planner import make_plan
from roost.planning.variations import PoolView
from roost.types import LinkProfile, ModelProfile, NodeProfile, Plan

FAST = 125e6


def planned(
    profile: ModelProfile, nodes: list[NodeProfile], *, links: list[LinkProfile] | None = None, config: JobConfig | None = None
) -> tuple[Plan, Advice]:
    config, links = config or job(), all_links(nodes) if links is None else links
    plan = make_plan(profile, nodes, links, config, random.Random(0))
    return plan, advise(profile, nodes, links, config, plan, random.Random(0))


def change(given: Advice, kind: ChangeKind, *words: str) -> PoolChange:
    (found,) = (one for one in given.changes if one.kind is kind and all(word in one.what for word in words))
    return found


# ---------------------------------------------------------------- is it worth it


def test_a_pool_of_equal_nodes_that_each_hold_the_model_is_so_many_times_one() -> None:
    plan, given = planned(even_model(4), [node("a"), node("b"), node("c")])
    assert given.verdict is Verdict.FASTER
    assert given.ratio == pytest.approx(3.0, rel=0.1)
    assert given.best_single is not None
    assert given.best_single.samples_per_s == pytest.approx(8 / 0.012, rel=0.1)
    assert given.ratio == plan.samples_per_s / given.best_single.samples_per_s
    assert given.headline.startswith(f"{given.ratio:.1f}x your fastest node (")
    assert "alone: " in given.headline


def test_where_no_node_holds_the_model_the_largest_is_named_with_what_it_lacks() -> None:
    _, given = planned(even_model(12), [node("a", memory=14 * MB), node("b", memory=15 * MB), node("c", memory=14 * MB)])
    assert given.verdict is Verdict.ONLY_TOGETHER
    assert (given.best_single, given.ratio) == (None, 0.0)
    assert given.largest.node_id == "b"
    # Parameters and gradients of SGD take 24 MB.
    assert 9 * MB < given.largest.short_bytes < 15 * MB
    assert "no node can hold the model alone; the largest, b, lacks" in given.headline


def test_what_a_node_lacks_is_exact() -> None:
    profile, config = even_model(12), job()
    nodes = [node("a", memory=14 * MB)]
    planner = Replanner(profile=profile, config=config, rng=random.Random(0), options=PlanningConfig())
    (single,) = single_nodes(planner, PoolView(nodes=tuple(nodes), links=()))
    enough = nodes[0].memory_bytes + single.short_bytes
    assert make_plan(profile, [node("a", memory=enough)], [], config, random.Random(0)).stages
    assert planner.plan(PoolView(nodes=(node("a", memory=enough - 1),), links=())) is None


def test_a_node_that_alone_is_all_there_is_is_said_to_be() -> None:
    _, given = planned(even_model(4), [node("only")])
    assert given.verdict is Verdict.ONE_NODE
    assert given.ratio == pytest.approx(1.0)
    assert given.headline.startswith("only alone is the best there is")


def test_a_plan_that_loses_against_one_node_is_called_slower() -> None:
    profile, config = even_model(8), job()
    nodes = [node("slow", speed=0.1), node("fast", speed=10.0)]
    worse = make_plan(profile, [nodes[0]], [], config, random.Random(0))
    given = advise(profile, nodes, all_links(nodes), config, worse, random.Random(0))
    assert given.verdict is Verdict.SLOWER
    assert 0 < given.ratio < 0.05
    assert "slower than fast alone" in given.headline
    assert given.headline.endswith("use that")


def test_a_plan_that_gains_next_to_nothing_is_called_hardly_faster() -> None:
    profile, config = even_model(4), job()
    nodes = [node("fast", speed=1.0), node("tiny", speed=0.03)]
    plan, given = planned(profile, nodes, config=config)
    assert len(plan.stages) == 2
    assert given.verdict is Verdict.HARDLY_FASTER
    assert given.headline.endswith("hardly worth the other machines")


def test_the_fastest_node_is_compared_too_if_only_its_memory_is_missing() -> None:
    _, given = planned(even_model(6), [node("big", memory=100 * MB), node("quick", memory=3 * MB, speed=5.0)])
    assert given.best_single is not None
    assert (given.best_single.node_id, given.fastest.node_id) == ("big", "quick")
    assert given.fastest.samples_per_s == pytest.approx(5 * given.best_single.samples_per_s, rel=0.05)
    assert given.fastest.short_bytes > 0
    assert "The fastest, quick, would reach" in given.headline
    assert "more memory" in given.headline


def test_a_node_that_would_hardly_be_faster_with_more_memory_is_not_mentioned() -> None:
    _, given = planned(even_model(6), [node("big", memory=100 * MB), node("like", memory=5 * MB, speed=1.01)])
    assert "more memory" not in given.headline
    assert given.headline.split(" (")[0].endswith("your fastest node")


def test_equal_nodes_are_asked_once_and_the_number_of_single_nodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Replanner(profile=even_model(2), config=job(), rng=random.Random(0), options=PlanningConfig())
    assert len(single_nodes(planner, PoolView(nodes=tuple(node(f"n{i}") for i in range(20)), links=()))) == 1
    monkeypatch.setattr(advice_module, "MOST_SINGLES", 4)
    many = tuple(node(f"n{i:02d}", speed=1 + i, memory=(100 - i) * MB) for i in range(20))
    assert [single.node_id for single in single_nodes(planner, PoolView(nodes=many, links=()))] == ["n19", "n18", "n17", "n00"]


# ---------------------------------------------------------------- what would change it


def test_one_more_node_of_a_kind_brings_what_planning_with_it_gives() -> None:
    profile, nodes, config = even_model(4), [node("a"), node("b")], job()
    plan, given = planned(profile, nodes, config=config)
    more = [*nodes, node("a-2")]
    expected = make_plan(profile, more, all_links(more), config, random.Random(0)).samples_per_s
    found = change(given, ChangeKind.MORE_NODES, "one more node like a")
    assert found.samples_per_s == pytest.approx(expected)
    assert found.gain == pytest.approx(expected / plan.samples_per_s - 1)
    assert found.gain == pytest.approx(0.5, rel=0.1)


def test_at_most_three_kinds_are_asked_for() -> None:
    _, given = planned(even_model(4), [node(f"n{i}", speed=4.0**i) for i in range(5)])
    assert sum(one.kind is ChangeKind.MORE_NODES for one in given.changes) == 3


def test_a_slow_link_that_binds_is_named_and_twice_as_fast_brings_more() -> None:
    profile = model([unit(index, parameters=2 * MB, crossing=400 * KB) for index in range(6)])
    nodes = [node("a", memory=12 * MB), node("b", memory=22 * MB)]
    plan, given = planned(profile, nodes, links=all_links(nodes, rate=2e6))
    assert len(plan.stages) == 2
    found = [one for one in given.changes if one.kind is ChangeKind.LINK]
    assert found
    assert max(one.gain for one in found) > 0.2
    assert all("twice as fast (4.0 MB/s" in one.what for one in found)


def test_a_single_slow_link_among_fast_ones_is_named_as_that_link() -> None:
    profile = model([unit(index, parameters=2 * MB, crossing=400 * KB) for index in range(6)])
    nodes = [node("a", memory=12 * MB), node("b", memory=22 * MB), node("c", memory=1)]
    slow = {"a", "b"}
    links = [
        LinkProfile(source=x.node_id, target=y.node_id, latency_s=1e-4, bytes_per_s=2e6 if {x.node_id, y.node_id} == slow else 1e8)
        for x in nodes
        for y in nodes
        if x is not y
    ]
    _, given = planned(profile, nodes, links=links)
    found = change(given, ChangeKind.LINK, "the link between")
    assert found.gain > 0.2
    assert "a" in found.what
    assert "b" in found.what


def test_links_that_are_hardly_used_are_not_suggested() -> None:
    _, given = planned(even_model(4), [node("a", memory=7 * MB), node("b", memory=7 * MB)])
    assert not any(one.kind is ChangeKind.LINK for one in given.changes)


def test_without_measured_links_none_is_suggested() -> None:
    _, given = planned(even_model(4), [node("a", memory=7 * MB), node("b", memory=7 * MB)], links=[])
    assert not any(one.kind is ChangeKind.LINK for one in given.changes)


def test_memory_that_keeps_a_fast_node_from_doing_more_is_found() -> None:
    profile = even_model(8, parameters=2 * MB)
    _, given = planned(profile, [node("fast", memory=14 * MB, speed=8.0), node("slow", memory=60 * MB, speed=0.5)])
    found = change(given, ChangeKind.MEMORY, "fast lends 21.0 MB instead of 14.0 MB")
    assert found.gain > 0.1


def test_memory_of_a_backup_that_is_too_small_is_tried_too() -> None:
    plan, given = planned(even_model(4), [node("a"), node("b"), node("tiny", memory=1 * MB, speed=5.0)])
    assert plan.backups == ("tiny",)
    assert change(given, ChangeKind.MEMORY, "tiny lends 1.5 MB instead of 1.0 MB").gain >= 0


def test_a_node_whose_absence_costs_nothing_is_said_to_be_superfluous() -> None:
    plan, given = planned(even_model(4), [node("a"), node("b"), node("crumb", speed=0.01)])
    used = {stage.node_id for stage in plan.stages}
    if "crumb" in used:
        assert change(given, ChangeKind.FEWER_NODES, "without crumb").gain > -0.02
    assert not any(one.kind is ChangeKind.FEWER_NODES and "without a" in one.what for one in given.changes)


def test_changes_come_by_what_they_bring_and_none_does_harm() -> None:
    _, given = planned(even_model(8), [node("a", memory=9 * MB), node("b", memory=11 * MB, speed=2.0), node("c", speed=0.3)])
    gains = [one.gain for one in given.changes]
    assert gains == sorted(gains, reverse=True)
    assert all(one.gain >= 0 for one in given.changes if one.kind is not ChangeKind.FEWER_NODES)
    assert all(one.gain >= -0.02 for one in given.changes)


def test_equal_inputs_give_equal_advice_and_the_random_numbers_are_left_alone() -> None:
    profile, config = even_model(8), job()
    nodes = [node(f"n{i}", memory=(7 + i) * MB, speed=1 + i / 3) for i in range(4)]
    plan = make_plan(profile, nodes, all_links(nodes), config, random.Random(3))
    rng = random.Random(3)
    before = rng.getstate()
    first = advise(profile, nodes, all_links(nodes), config, plan, rng)
    assert rng.getstate() == before
    assert advise(profile, nodes, all_links(nodes), config, plan, rng) == first


def test_the_number_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    real = Replanner.plan

    def counted(self: Replanner, pool: PoolView, config: JobConfig | None = None) -> Plan | None:
        nonlocal calls
        calls += 1
        return real(self, pool, config)

    profile, config = even_model(8), job()
    nodes = [node(f"n{i}", memory=(7 + i) * MB, speed=1 + i) for i in range(4)]
    plan = make_plan(profile, nodes, all_links(nodes), config, random.Random(0))
    monkeypatch.setattr(Replanner, "plan", counted)
    advise(profile, nodes, all_links(nodes), config, plan, random.Random(0))
    assert calls <= 2 * len(nodes) + 11


@pytest.mark.parametrize(
    ("rate", "words"), [(1234.5, "1234 samples/s"), (12.34, "12 samples/s"), (1.234, "1.2 samples/s"), (0.0456, "0.046 samples/s")]
)
def test_rates_are_shown_with_the_digits_that_matter(rate: float, words: str) -> None:
    assert format_rate(rate) == words
