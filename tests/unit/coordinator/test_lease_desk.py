"""Leases over the counter: asked for again, written down, and found to be older than what nodes remember."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roost import messages as m
from roost.coordinator.job_record import JobRecord, LeaseOperation
from roost.coordinator.lease_desk import MAX_LEASES, LeaseDesk
from roost.protocol.data_leases import LeaseBook
from roost.types import Plan

PLAN = Plan(clusters=(), segments=(), backups=(), samples_per_s=1.0, notes=())


def book() -> LeaseBook:
    opened = LeaseBook(
        samples=400, validation_samples=0, shares=(1.0,), batch_size=4, epochs=1, start_epoch=0, sync_interval=1, evaluate=False
    )
    opened.open_training()
    return opened


def desk() -> tuple[LeaseDesk, list[LeaseOperation]]:
    journal: list[LeaseOperation] = []
    return LeaseDesk(book(), journal.append), journal


def request(number: int, want: int = 1) -> m.LeaseRequest:
    return m.LeaseRequest(job_id="job", cluster=0, want=want, number=number)


def written(counter: LeaseDesk) -> JobRecord:
    return JobRecord(
        plan=PLAN,
        numbers=(0,),
        next_number=1,
        broken=(),
        gone=(),
        generation=0,
        built=True,
        nodes=(),
        links=(),
        correction="none",
        order=0,
        repairs=0,
        cancelled=False,
        checkpoint="",
        elapsed_s=0.0,
        past=None,
        leases=counter.book.record(),
        grants=counter.last_grants,
    )


def test_a_request_whose_answer_was_lost_is_given_the_same_leases_again() -> None:
    counter, journal = desk()
    first = counter.grant(0, request(1))
    assert counter.answered(0, request(1)) == first
    assert counter.answered(0, request(2)) is None
    assert [operation.number for operation in journal] == [1]


def test_one_request_gets_no_more_than_the_most() -> None:
    counter, _ = desk()
    assert len(counter.grant(0, request(1, want=10_000)).leases) <= MAX_LEASES


@pytest.mark.parametrize("journalled", [True, False], ids=["from the journal", "from the record"])
def test_another_coordinator_gives_the_same_answer_and_knows_what_was_granted_and_reported(journalled: bool) -> None:
    counter, journal = desk()
    before = written(counter)
    grant = counter.grant(0, request(1))
    counter.done(0, (grant.leases[0].lease_id,))
    record, operations = (before, tuple(journal)) if journalled else (written(counter), ())
    other, _ = desk()
    other.restore(record, operations)
    assert other.answered(0, request(1)) == grant
    assert other.knows_of(0, granted=1, reported=1)
    assert other.book.samples_done == counter.book.samples_done > 0


def test_a_coordinator_with_an_older_state_does_not_know_what_was_granted_or_reported_since() -> None:
    counter, journal = desk()
    counter.grant(0, request(1))
    older = written(counter)
    counter.done(0, (counter.last_grants[0].grant.leases[0].lease_id,))
    counter.grant(0, request(2))
    other, _ = desk()
    other.restore(older, ())
    assert other.knows_of(0, granted=1, reported=0)
    assert not other.knows_of(0, granted=1, reported=1)
    assert not other.knows_of(0, granted=2, reported=0)
    assert other.knows_of(7, granted=0, reported=0)
    assert len(journal) == 3


def test_clusters_that_are_no_more_are_forgotten() -> None:
    counter, _ = desk()
    counter.grant(0, request(1))
    counter.release(0)
    assert counter.released(0)
    counter.all_mended([3])
    assert not counter.released(0)
    assert counter.last_grants == ()
    assert replace(written(counter), grants=()) == written(counter)
