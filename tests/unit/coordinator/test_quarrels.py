"""Links that do not work between nodes that are both there."""

from __future__ import annotations

from hand_clock import HandClock
from roost.coordinator.quarrels import FORGIVEN_S, MOST_FORGIVEN_S, QUARRELS, USELESS_BYTES_PER_S, Quarrels


def test_nodes_that_lose_each_other_once_may_try_again_and_twice_are_kept_apart() -> None:
    quarrels = Quarrels("job", HandClock())
    for _ in range(QUARRELS):
        assert not quarrels.useless("attic", "barn")
        assert quarrels.links == ()
        quarrels.add("attic", "barn")
    assert quarrels.useless("barn", "attic")
    assert not quarrels.useless("attic", "cellar")
    assert [(link.source, link.target, link.bytes_per_s) for link in quarrels.links] == [
        ("attic", "barn", USELESS_BYTES_PER_S),
        ("barn", "attic", USELESS_BYTES_PER_S),
    ]


def test_after_a_while_the_link_is_tried_again_and_each_time_later_if_it_does_not_work_then() -> None:
    clock = HandClock()
    quarrels = Quarrels("job", clock)
    quarrels.avoid("attic", "barn")
    clock.now = FORGIVEN_S - 1
    assert quarrels.useless("attic", "barn")
    clock.now = FORGIVEN_S
    assert not quarrels.useless("attic", "barn")
    assert quarrels.links == ()
    quarrels.add("attic", "barn")
    clock.now += 2 * FORGIVEN_S - 1
    assert quarrels.pairs == {frozenset(("attic", "barn"))}
    clock.now += 1
    assert quarrels.pairs == frozenset()
    for _ in range(20):
        quarrels.add("attic", "barn")
        clock.now += MOST_FORGIVEN_S
        assert not quarrels.useless("attic", "barn")
