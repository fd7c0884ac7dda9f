"""Choosing the best clusters among many that share nodes."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from roost.planning.groups import Group
from roost.planning.packing import RELATIVE_GAP, Packing
from roost.planning.partitions import Bounds

FREE = Bounds(least=1, most=0, slowest=0.0)
ENDS, MIDDLE = [frozenset((0, 1)), frozenset((2, 3))], frozenset((1, 2))


def chosen(groups: list[Group], values: list[float], *, nodes: int, bounds: Bounds = FREE) -> set[Group] | None:
    found = Packing(nodes=nodes, groups=groups, values=values, bounds=bounds).choose()
    return None if found is None else set(found)


def test_two_groups_beside_a_better_one_are_taken_if_they_are_worth_more_together() -> None:
    assert chosen([*ENDS, MIDDLE], [2.0, 2.0, 3.0], nodes=4) == set(ENDS)
    assert chosen([*ENDS, MIDDLE], [2.0, 2.0, 5.0], nodes=4) == {MIDDLE}


def test_nodes_that_are_in_no_group_do_not_matter() -> None:
    assert chosen([frozenset((7,)), frozenset((2, 7))], [1.0, 2.0], nodes=9) == {frozenset((2, 7))}


def test_no_more_groups_are_taken_than_allowed() -> None:
    groups, values = [frozenset((place,)) for place in range(4)], [4.0, 3.0, 2.0, 1.0]
    assert chosen(groups, values, nodes=4) == set(groups)
    assert chosen(groups, values, nodes=4, bounds=Bounds(least=1, most=2, slowest=0.0)) == set(groups[:2])
    assert chosen([*ENDS, MIDDLE], [2.0, 2.0, 3.0], nodes=4, bounds=Bounds(least=1, most=1, slowest=0.0)) == {MIDDLE}


def test_as_many_groups_are_taken_as_asked_for_even_if_fewer_are_worth_more() -> None:
    bounds = Bounds(least=2, most=0, slowest=0.0)
    assert chosen([*ENDS, MIDDLE], [1.0, 1.0, 9.0], nodes=4, bounds=bounds) == set(ENDS)


def test_nothing_is_chosen_if_so_many_groups_do_not_exist() -> None:
    assert chosen([*ENDS, MIDDLE], [1.0, 1.0, 1.0], nodes=4, bounds=Bounds(least=3, most=0, slowest=0.0)) is None


def most_by_hand(groups: list[Group], values: list[float], bounds: Bounds) -> float | None:
    totals = []
    for size in range(1, len(groups) + 1):
        for rows in itertools.combinations(range(len(groups)), size):
            members = [place for row in rows for place in groups[row]]
            if len(set(members)) == len(members) and bounds.allow(size):
                totals.append(math.fsum(values[row] for row in rows))
    return max(totals, default=None)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_is_worth_more(seed: int) -> None:
    rng = random.Random(seed)
    groups = list({frozenset(rng.sample(range(8), rng.randint(1, 4))) for _ in range(11)})
    values = [rng.uniform(0.5, 2.0) * len(group) for group in groups]
    bounds = Bounds(least=rng.choice([1, 2, 3]), most=rng.choice([0, 3]), slowest=0.0)
    found = chosen(groups, values, nodes=8, bounds=bounds)
    most = most_by_hand(groups, values, bounds)
    assert (found is None) == (most is None)
    if found is not None and most is not None:
        assert sum(map(len, found)) == len(frozenset().union(*found))
        assert bounds.allow(len(found))
        assert math.fsum(values[groups.index(group)] for group in found) >= most * (1 - 2 * RELATIVE_GAP)
