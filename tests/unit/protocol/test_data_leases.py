"""Every sample of every epoch is applied exactly once."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roost.codec import decode_record, encode_record
from roost.errors import IllegalTransitionError, ProtocolError
from roost.protocol.data_leases import LeaseBook, LeasePhase, divide, interleave
from roost.types import Lease, LeaseRecord


def book(
    *,
    samples: int = 100,
    validation: int = 0,
    shares: tuple[float, ...] = (1.0,),
    batch_size: int = 10,
    epochs: int = 1,
    start_epoch: int = 0,
    sync_interval: int = 1,
) -> LeaseBook:
    return LeaseBook(samples, validation, shares, batch_size, epochs, start_epoch, sync_interval, validation > 0)


def drain(leases: LeaseBook, cluster: int) -> list[Lease]:
    taken: list[Lease] = []
    drained = False
    while not drained:
        given_now, drained = leases.request(cluster, 3)
        taken += given_now
    return taken


def test_nothing_is_leased_before_training_is_opened() -> None:
    leases = book()
    assert leases.phase is LeasePhase.CLOSED
    assert leases.request(0, 4) == ((), True)


def test_one_cluster_gets_the_whole_epoch_in_order() -> None:
    leases = book(samples=25)
    leases.open_training()
    assert [(lease.start, lease.stop) for lease in drain(leases, 0)] == [(0, 10), (10, 20), (20, 25)]


def test_the_last_lease_of_a_phase_comes_with_drained() -> None:
    leases = book(samples=20)
    leases.open_training()
    assert leases.request(0, 1)[1] is False
    assert leases.request(0, 1)[1] is True


def test_clusters_get_their_shares_interleaved_over_the_epoch() -> None:
    leases = book(samples=100, shares=(0.7, 0.3))
    leases.open_training()
    slow, _ = leases.request(1, 3)
    fast, _ = leases.request(0, 7)
    assert [lease.start for lease in slow] == [10, 50, 80]
    assert [lease.start for lease in fast] == [0, 20, 30, 40, 60, 70, 90]


def test_a_cluster_that_used_up_its_own_takes_from_the_others() -> None:
    leases = book(samples=100, shares=(0.5, 0.5))
    leases.open_training()
    assert len(drain(leases, 0)) == 10
    assert leases.request(1, 1) == ((), True)


def test_the_next_epoch_is_leased_before_the_last_one_is_done_up_to_the_synchronisation_point() -> None:
    leases = book(samples=20, epochs=5, sync_interval=2)
    leases.open_training()
    assert [lease.epoch for lease in drain(leases, 0)] == [0, 0, 1, 1]
    assert not leases.all_done


def test_synchronisation_points_count_epochs_of_the_resumed_run() -> None:
    leases = book(samples=10, epochs=5, start_epoch=1, sync_interval=2)
    stops = []
    while not leases.at_end:
        leases.open_training()
        leases.done(0, [lease.lease_id for lease in drain(leases, 0)])
        stops.append(leases.epochs_done)
    assert stops == [2.0, 4.0, 5.0]


def test_a_phase_must_be_done_before_the_next_is_opened() -> None:
    leases = book(validation=10)
    leases.open_training()
    with pytest.raises(ProtocolError, match="training is not done"):
        leases.open_evaluation()


def test_evaluation_is_not_opened_twice_in_a_row() -> None:
    leases = book(validation=10)
    leases.open_evaluation()
    leases.done(0, [lease.lease_id for lease in drain(leases, 0)])
    with pytest.raises(IllegalTransitionError):
        leases.open_evaluation()


def test_evaluation_covers_the_validation_samples_and_counts_as_no_training() -> None:
    leases = book(validation=25, shares=(0.5, 0.5))
    leases.open_evaluation()
    taken = [*leases.request(0, 1)[0], *drain(leases, 1)]
    assert sorted((lease.start, lease.stop, lease.training) for lease in taken) == [(0, 10, False), (10, 20, False), (20, 25, False)]
    leases.done(0, [taken[0].lease_id])
    leases.done(1, [lease.lease_id for lease in taken[1:]])
    assert leases.all_done
    assert leases.samples_done == 0


def test_evaluation_without_validation_data_is_done_at_once() -> None:
    leases = book()
    leases.open_evaluation()
    assert leases.request(0, 1) == ((), True)
    assert leases.all_done


@pytest.mark.parametrize(
    ("cluster", "ids", "words"), [(0, [5], "lease 5.*unknown"), (1, [0], "belongs to cluster 0"), (0, [0, 0], "twice")]
)
def test_unknown_foreign_and_repeated_leases_are_refused(cluster: int, ids: list[int], words: str) -> None:
    leases = book(shares=(0.5, 0.5))
    leases.open_training()
    leases.request(0, 1)
    with pytest.raises(ProtocolError, match=words):
        leases.done(cluster, ids)
    assert leases.samples_done == 0


def test_a_lease_that_is_reported_again_counts_once() -> None:
    leases = book()
    leases.open_training()
    (lease,), _ = leases.request(0, 1)
    for _ in range(2):
        leases.done(0, [lease.lease_id])
        assert leases.samples_done == lease.samples


def test_the_leases_of_a_lost_cluster_go_to_others_and_it_cannot_report_them() -> None:
    leases = book(samples=20, shares=(0.5, 0.5))
    leases.open_training()
    lost, _ = leases.request(1, 1)
    assert drain(leases, 0)
    assert leases.release(1) == lost
    again, drained = leases.request(0, 5)
    assert [(lease.start, lease.stop) for lease in again] == [(lost[0].start, lost[0].stop)]
    assert drained
    with pytest.raises(ProtocolError, match="unknown or already done"):
        leases.done(1, [lost[0].lease_id])


def test_a_request_of_a_lost_cluster_that_was_on_its_way_gets_nothing() -> None:
    leases = book(shares=(0.5, 0.5))
    leases.open_training()
    leases.release(1)
    assert leases.request(1, 3) == ((), True)
    assert len(drain(leases, 0)) == 10


def test_stopping_ends_the_run_once_what_is_leased_is_done() -> None:
    leases = book(samples=100, epochs=3)
    leases.open_training()
    (lease,), _ = leases.request(0, 1)
    leases.stop()
    assert leases.request(0, 1) == ((), True)
    assert not leases.at_end
    leases.done(0, [lease.lease_id])
    assert leases.all_done
    assert leases.at_end
    assert leases.samples_done == 10


def test_an_unknown_cluster_and_an_empty_wish_are_refused() -> None:
    leases = book()
    with pytest.raises(ProtocolError, match="cluster 3 is not one of the clusters .0."):
        leases.request(3, 1)
    with pytest.raises(ProtocolError, match="asks for 0 leases"):
        leases.request(0, 0)


@given(total=st.integers(0, 1000), shares=st.lists(st.floats(0.001, 1), min_size=1, max_size=6))
def test_division_by_share_is_whole_and_off_by_less_than_one(total: int, shares: list[float]) -> None:
    counts = divide(total, shares)
    assert sum(counts) == total
    assert all(abs(count - total * share / sum(shares)) < 1 + 1e-6 for count, share in zip(counts, shares, strict=True))


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=5))
def test_interleaving_uses_every_turn_once(counts: list[int]) -> None:
    used = Counter(interleave(counts))
    assert [used[owner] for owner in range(len(counts))] == counts


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    samples=st.integers(1, 90),
    validation=st.integers(0, 30),
    clusters=st.integers(1, 4),
    batch_size=st.integers(1, 12),
    epochs=st.integers(1, 4),
    sync_interval=st.integers(1, 3),
)
def test_every_sample_of_every_epoch_is_done_exactly_once(
    seed: int, samples: int, validation: int, clusters: int, batch_size: int, epochs: int, sync_interval: int
) -> None:
    rng = random.Random(seed)
    survivor = rng.randrange(clusters)
    shares = tuple(rng.uniform(0.01, 1) for _ in range(clusters))
    leases = book(samples=samples, validation=validation, shares=shares, batch_size=batch_size, epochs=epochs, sync_interval=sync_interval)
    applied: Counter[tuple[bool, int, int]] = Counter()
    while not leases.at_end:
        for open_phase in (leases.open_training, leases.open_evaluation):
            open_phase()
            held: list[tuple[int, Lease]] = []
            while not leases.all_done:
                cluster = rng.randrange(clusters)
                action = rng.random()
                if action < 0.5:
                    held += [(cluster, lease) for lease in leases.request(cluster, rng.randrange(1, 4))[0]]
                elif action < 0.9 and held:
                    owner, lease = held.pop(rng.randrange(len(held)))
                    leases.done(owner, [lease.lease_id])
                    applied.update((lease.training, lease.epoch, sample) for sample in range(lease.start, lease.stop))
                elif action >= 0.95 and cluster != survivor:
                    leases.release(cluster)
                    held = [(owner, lease) for owner, lease in held if owner != cluster]
    assert set(applied.values()) == {1}
    training = {(epoch, sample) for kind, epoch, sample in applied if kind}
    assert training == {(epoch, sample) for epoch in range(epochs) for sample in range(samples)}
    assert leases.samples_done == samples * epochs
    assert leases.epochs_done == epochs


def trained(leases: LeaseBook, cluster: int) -> list[Lease]:
    """Take and report everything there is."""
    taken = drain(leases, cluster)
    leases.done(cluster, [lease.lease_id for lease in taken])
    return taken


def test_what_no_checkpoint_holds_is_leased_again_when_the_job_goes_back_and_is_in_the_report() -> None:
    leases = book(samples=12, epochs=2, sync_interval=1)
    leases.open_training()
    first = trained(leases, 0)
    leases.kept(leases.mark())
    leases.open_training()
    taken, _ = leases.request(0, 2)
    leases.done(0, [taken[0].lease_id])
    leases.go_back("the only node was lost")
    assert leases.samples_done == sum(lease.samples for lease in first)
    assert [(replayed.lease, replayed.cluster, replayed.reason) for replayed in leases.replayed] == [
        (lease, 0, "the only node was lost") for lease in taken
    ]
    again = trained(leases, 0)
    assert sorted((lease.start, lease.stop) for lease in again) == sorted((lease.start, lease.stop) for lease in first)
    assert leases.all_done and leases.at_end


def test_what_was_trained_while_a_checkpoint_was_still_being_written_is_not_in_it() -> None:
    leases = book(samples=12, epochs=3, sync_interval=1)
    leases.open_training()
    first = trained(leases, 0)
    mark = leases.mark()
    leases.open_training()
    second = trained(leases, 0)
    leases.kept(mark)
    leases.go_back("the only node was lost")
    assert [replayed.lease for replayed in leases.replayed] == second
    assert leases.samples_done == sum(lease.samples for lease in first)
    assert {lease.epoch for lease in trained(leases, 0)} == {second[0].epoch}


def test_clusters_that_come_and_go_share_what_is_left() -> None:
    leases = book(samples=40, shares=(0.5, 0.5))
    leases.open_training()
    mine, _ = leases.request(0, 2)
    lost, _ = leases.request(1, 1)
    leases.release(1)
    leases.set_clusters({0: 0.5, 7: 0.5})
    leases.done(0, [lease.lease_id for lease in mine])
    rest = [*drain(leases, 7), *drain(leases, 0)]
    spans = [(lease.start, lease.stop) for lease in (*mine, *rest)]
    assert len(spans) == len(set(spans))
    assert sum(stop - start for start, stop in spans) == 40
    assert (lost[0].start, lost[0].stop) in spans
    with pytest.raises(ProtocolError, match="cannot be leased to"):
        leases.set_clusters({0: 0.5, 1: 0.5})


def test_an_evaluation_that_is_given_up_can_be_opened_again() -> None:
    leases = book(samples=8, validation=6)
    leases.open_training()
    trained(leases, 0)
    leases.open_evaluation()
    leases.request(0, 1)
    leases.drop_evaluation()
    assert leases.all_done and not leases.replayed
    leases.open_evaluation()
    taken, drained = leases.request(0, 9)
    assert drained and sum(lease.samples for lease in taken) == 6


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_book_that_was_written_down_and_read_again_goes_on_as_if_nothing_had_been(seed: int) -> None:
    rng = random.Random(seed)
    samples = rng.randrange(5, 60)
    one, other = (book(samples=samples, shares=(0.3, 0.7), epochs=2, batch_size=4) for _ in range(2))
    one.open_training()
    alive, held = {0, 1}, list[tuple[int, Lease]]()
    for _ in range(rng.randrange(30)):
        cluster = rng.choice(sorted(alive))
        if rng.random() < 0.6:
            taken, _ = one.request(cluster, rng.randrange(1, 4))
            held += [(cluster, lease) for lease in taken]
        elif held:
            owner, lease = held.pop(rng.randrange(len(held)))
            one.done(owner, [lease.lease_id])
        elif len(alive) > 1 and rng.random() < 0.3:
            alive.discard(cluster)
            one.release(cluster)
    record = decode_record(LeaseRecord, json.loads(json.dumps(encode_record(one.record()))))
    other.restore(record)
    assert other.record() == one.record()
    for cluster in sorted(alive):
        assert other.request(cluster, 3) == one.request(cluster, 3)
    assert (other.samples_done, other.replayed, other.all_done) == (one.samples_done, one.replayed, one.all_done)


def test_towards_the_end_of_a_phase_clusters_get_fewer_leases_at_once_so_that_none_waits_for_another() -> None:
    leases = book(samples=400, shares=(0.5, 0.5), epochs=2, sync_interval=2)
    leases.open_training()
    assert leases.fair_number(16) == 16
    leases.request(0, 1)
    assert leases.fair_number(16) == 16
    for _ in range(5):
        leases.request(0, 16)
    wanted = []
    while not leases.request(0, leases.fair_number(16))[1]:
        wanted.append(leases.fair_number(16))
    assert wanted == sorted(wanted, reverse=True) or not wanted
    assert leases.fair_number(16) == 1
    alone = book(samples=40)
    alone.open_training()
    alone.request(0, 1)
    assert alone.fair_number(16) == 16


def test_a_cluster_is_busy_with_training_but_not_with_an_evaluation_that_will_be_done_again() -> None:
    leases = book(samples=8, validation=6)
    leases.open_training()
    taken = drain(leases, 0)
    assert leases.busy({0}) and not leases.busy({1})
    leases.done(0, [lease.lease_id for lease in taken])
    leases.open_evaluation()
    leases.request(0, 1)
    assert not leases.busy({0})
