from __future__ import annotations

import dataclasses
import random
import re

import pytest
from synthetic import KB, MB, all_links, even_model, job, node

from roost.config import JobConfig, parse_bytes
from roost.errors import PlanningError
from roost.planning.advice import ChangeKind, PoolChange
from roost.planning.planner import make_plan
from roost.planning.remedies import remedies
from roost.planning.variations import PoolView
from roost.types import ModelProfile, NodeProfile


def found(profile: ModelProfile, nodes: list[NodeProfile], config: JobConfig) -> dict[ChangeKind, list[PoolChange]]:
    """Return what would do for a pool that cannot be planned for, by kind."""
    with pytest.raises(PlanningError):
        make_plan(profile, nodes, all_links(nodes), config, random.Random(0))
    changes = remedies(profile, nodes, all_links(nodes), config, random.Random(0))
    assert all(change.samples_per_s > 0 for change in changes)
    by_kind: dict[ChangeKind, list[PoolChange]] = {}
    for change in changes:
        by_kind.setdefault(change.kind, []).append(change)
    return by_kind


def works(profile: ModelProfile, view: PoolView, config: JobConfig) -> bool:
    try:
        make_plan(profile, view.nodes, view.links, config, random.Random(0))
    except PlanningError:
        return False
    return True


SMALL = [node("a", memory=8 * MB), node("b", memory=7 * MB)]
"""Together too small for twelve units of a megabyte with their gradients."""


def test_the_fewest_nodes_that_would_do_are_found() -> None:
    profile, config = even_model(12), job(max_in_flight=1)
    pool = PoolView(nodes=tuple(SMALL), links=tuple(all_links(SMALL)))
    for change in found(profile, SMALL, config)[ChangeKind.MORE_NODES]:
        match = re.fullmatch(r"(?:(\d+) more nodes|one more node) like (\w+)", change.what)
        assert match is not None
        count = int(match[1] or 1)
        assert works(profile, pool.with_twins(match[2], count), config)
        assert not works(profile, pool.with_twins(match[2], count - 1), config)


def test_the_memory_one_node_would_have_to_lend_is_enough_and_hardly_more() -> None:
    profile, config = even_model(12), job()
    changes = found(profile, SMALL, config)[ChangeKind.MEMORY]
    pool = PoolView(nodes=tuple(SMALL), links=tuple(all_links(SMALL)))
    assert {change.what.split()[0] for change in changes} == {"a", "b"}
    more = []
    for change in changes:
        match = re.fullmatch(r"(\w) lends (.*) instead of (.*) \((.*) more\)", change.what)
        assert match is not None
        more.append(parse_bytes(match[4]))
        # What is shown is rounded to a tenth of a megabyte.
        assert works(profile, pool.with_memory(match[1], parse_bytes(match[2]) + 60 * KB), config)
        assert not works(profile, pool.with_memory(match[1], parse_bytes(match[2]) - 500 * KB), config)
    assert more == sorted(more)


def test_a_smaller_micro_batch_is_found_where_activations_are_what_is_large() -> None:
    profile = even_model(4, parameters=100 * KB, saved=4 * MB)
    config = job(batch_size=8, micro_batch_size=8)
    (change,) = found(profile, [node("a", memory=9 * MB)], config)[ChangeKind.MICRO_BATCH]
    match = re.fullmatch(r"micro_batch_size=(\d+) in the job instead of 8", change.what)
    assert match is not None
    size = int(match[1])
    alone = PoolView(nodes=(node("a", memory=9 * MB),), links=())
    assert works(profile, alone, dataclasses.replace(config, micro_batch_size=size))
    assert not works(profile, alone, dataclasses.replace(config, micro_batch_size=2 * size))


def test_fewer_clusters_are_found_where_the_job_asks_for_many() -> None:
    profile, config = even_model(4), job(min_clusters=3)
    nodes = [node("a", memory=20 * MB), node("b", memory=20 * MB), node("c", memory=1 * MB)]
    (change,) = found(profile, nodes, config)[ChangeKind.CLUSTERS]
    assert change.what == "min_clusters=2 in the job instead of 3"


def test_too_few_nodes_for_the_clusters_asked_for_are_mended_too() -> None:
    changes = found(even_model(4), [node("a")], job(min_clusters=2))
    assert [change.what for change in changes[ChangeKind.MORE_NODES]] == ["one more node like a"]
    assert changes[ChangeKind.CLUSTERS][0].what == "min_clusters=1 in the job instead of 2"


def test_a_unit_that_fits_nowhere_needs_memory_and_no_number_of_nodes_helps() -> None:
    profile = even_model(3, parameters=10 * MB)
    changes = found(profile, [node("a", memory=8 * MB), node("b", memory=9 * MB)], job())
    assert ChangeKind.MORE_NODES not in changes
    assert ChangeKind.MEMORY in changes


def test_settings_of_the_job_come_before_anything_that_costs_money() -> None:
    profile = even_model(4, parameters=100 * KB, saved=4 * MB)
    changes = remedies(profile, [node("a", memory=9 * MB)], [], job(max_in_flight=1), random.Random(0))
    kinds = [change.kind for change in changes]
    assert kinds.index(ChangeKind.MICRO_BATCH) < kinds.index(ChangeKind.MEMORY) < kinds.index(ChangeKind.MORE_NODES)


def test_equal_inputs_give_equal_remedies_and_the_random_numbers_are_left_alone() -> None:
    rng = random.Random(5)
    before = rng.getstate()
    first = remedies(even_model(12), SMALL, all_links(SMALL), job(), rng)
    assert rng.getstate() == before
    assert remedies(even_model(12), SMALL, all_links(SMALL), job(), rng) == first


def test_without_nodes_there_is_nothing_to_change() -> None:
    assert remedies(even_model(2), [], [], job(), random.Random(0)) == ()
