from __future__ import annotations

from roost.config import AUTOMATIC_INTERVAL
from roost.protocol.averaging_pace import COMPUTE_SHARE, LINE_SHARE, AveragingPace


def due_after(pace: AveragingPace, *, idle: bool = True, began_at: float = 0.0, round_s: float = 0.0, held_s: float = 0.0) -> list[int]:
    """Return the seconds, of the first 100, at whose update a round is due, with one update per second."""
    return [
        second for second in range(1, 101) if pace.updated(now=float(second), idle=idle, began_at=began_at, round_s=round_s, held_s=held_s)
    ]


def test_a_fixed_interval_counts_updates_whatever_the_ring_does() -> None:
    assert due_after(AveragingPace(30), idle=False, round_s=1000.0) == [30, 60, 90]


def test_the_first_automatic_round_comes_after_the_interval_that_the_planner_counts_with() -> None:
    assert due_after(AveragingPace(0))[0] == AUTOMATIC_INTERVAL


def test_automatic_rounds_take_at_most_their_share_of_the_line() -> None:
    due = due_after(AveragingPace(0), round_s=10.0)
    assert [second - before for before, second in zip(due, due[1:], strict=False)] == [10.0 / LINE_SHARE] * (len(due) - 1)


def test_automatic_rounds_take_at_most_their_share_of_computing() -> None:
    due = due_after(AveragingPace(0), round_s=0.1, held_s=0.25)
    assert due[1] - due[0] == 0.25 / COMPUTE_SHARE


def test_no_automatic_round_is_asked_for_while_one_runs() -> None:
    assert due_after(AveragingPace(0), idle=False, round_s=0.1) == []


def test_a_round_that_another_member_opened_counts() -> None:
    assert due_after(AveragingPace(0), began_at=50.0, round_s=10.0)[0] == 50 + 10 / LINE_SHARE
