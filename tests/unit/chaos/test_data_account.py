"""Counting what became of every sample."""

from __future__ import annotations

from roost.chaos.account import DataAccount, TrainedPart, account
from roost.types import Lease


def lease(number: int, epoch: int, start: int, stop: int) -> Lease:
    return Lease(lease_id=number, training=True, epoch=epoch, start=start, stop=stop)


def part(*leases: Lease, start: int = 0, end: float, replayed: tuple[int, ...] = ()) -> TrainedPart:
    return TrainedPart(start_epoch=start, end=end, served=leases, replayed=frozenset(replayed))


def test_an_epoch_whose_leases_were_all_served_once_is_whole() -> None:
    found = account([part(lease(0, 0, 0, 6), lease(1, 0, 6, 10), end=1.0)], samples=10)
    assert found == DataAccount(trained=10, lost=0, applied_twice=0, replayed=0)


def test_a_range_that_was_given_out_again_and_reported_counts_once() -> None:
    found = account([part(lease(0, 0, 0, 6), lease(1, 0, 6, 10), lease(2, 0, 0, 6), end=1.0, replayed=(0,))], samples=10)
    assert found == DataAccount(trained=10, lost=0, applied_twice=0, replayed=6)


def test_a_range_that_was_given_out_again_without_a_report_was_applied_twice() -> None:
    found = account([part(lease(0, 0, 0, 6), lease(1, 0, 6, 10), lease(2, 0, 4, 6), end=1.0)], samples=10)
    assert found.applied_twice == 2


def test_a_range_that_was_reported_and_never_served_again_is_lost() -> None:
    found = account([part(lease(0, 0, 0, 6), lease(1, 0, 6, 10), end=1.0, replayed=(1,))], samples=10)
    assert (found.trained, found.lost) == (6, 4)


def test_an_epoch_that_was_stopped_half_way_lacks_only_what_was_counted_as_done() -> None:
    assert account([part(lease(0, 0, 0, 6), end=0.6)], samples=10).lost == 0
    assert account([part(lease(0, 0, 0, 6), end=0.8)], samples=10).lost == 2


def test_what_a_run_did_after_the_checkpoint_that_the_next_one_resumed_does_not_count() -> None:
    first = part(lease(0, 0, 0, 10), lease(1, 1, 0, 7), end=1)
    second = part(lease(0, 1, 0, 10), start=1, end=2.0)
    assert account([first, second], samples=10) == DataAccount(trained=20, lost=0, applied_twice=0, replayed=0)
