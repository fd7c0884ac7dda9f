"""Faults that are drawn from a seed."""

from __future__ import annotations

from collections import Counter

import pytest

from roost.chaos.schedule import DURATIONS_S, WEIGHTS, FaultKind, draw, pick
from roost.errors import InvalidConfigError


def test_a_seed_gives_the_same_faults_and_another_seed_others() -> None:
    assert draw(seed=3, faults=20, seconds=100) == draw(seed=3, faults=20, seconds=100)
    assert draw(seed=3, faults=20, seconds=100) != draw(seed=4, faults=20, seconds=100)


def test_faults_come_in_order_within_their_time_and_last_as_long_as_their_kind_does() -> None:
    faults = draw(seed=0, faults=50, seconds=200)
    times = [fault.at_s for fault in faults]
    assert times == sorted(times)
    assert times[0] > 0 and times[-1] < 200
    for fault in faults:
        least, most = DURATIONS_S[fault.kind]
        assert least <= fault.lasts_s <= most


def test_kinds_come_in_proportion_and_each_at_least_once() -> None:
    whole = sum(WEIGHTS.values())
    counts = Counter(fault.kind for fault in draw(seed=1, faults=10 * whole, seconds=100))
    assert all(abs(counts[kind] - 10 * weight) <= 2 for kind, weight in WEIGHTS.items())
    assert {fault.kind for fault in draw(seed=1, faults=len(FaultKind), seconds=100)} == set(FaultKind)


def test_only_the_kinds_that_were_asked_for_come() -> None:
    faults = draw(seed=1, faults=9, seconds=100, kinds=[FaultKind.KILL, FaultKind.CUT])
    assert {fault.kind for fault in faults} == {FaultKind.KILL, FaultKind.CUT}


@pytest.mark.parametrize("wrong", [{"faults": 0}, {"seconds": 0.0}, {"kinds": []}])
def test_a_schedule_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    settings: dict[str, object] = {"seed": 0, "faults": 3, "seconds": 10.0, **wrong}
    with pytest.raises(InvalidConfigError):
        draw(**settings)  # type: ignore[arg-type]


def test_a_draw_picks_every_name_with_the_same_chance_whatever_the_order() -> None:
    picked = Counter(pick({"c", "a", "b"}, step / 300) for step in range(300))
    assert picked == {"a": 100, "b": 100, "c": 100}
