"""How leases become micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roost.protocol.batches import micro_batch_seed, micro_batches, sample_order
from roost.types import Lease


def lease(samples: int, *, training: bool = True) -> Lease:
    return Lease(lease_id=7, training=training, epoch=0, start=100, stop=100 + samples)


@given(samples=st.integers(1, 200), batch_size=st.integers(1, 40), data=st.data())
def test_micro_batches_cover_the_lease_once_and_add_up(samples: int, batch_size: int, data: st.DataObject) -> None:
    micro_batch_size = data.draw(st.integers(1, batch_size))
    cut, next_number, next_batch = micro_batches(
        lease(samples), batch_size=batch_size, micro_batch_size=micro_batch_size, next_number=5, next_batch=3, seed=1
    )
    assert [offset for _, start, stop in cut for offset in range(start, stop)] == list(range(samples))
    assert [header.number for header, _, _ in cut] == list(range(5, next_number))
    assert next_batch == 3 + -(-samples // batch_size)
    for batch in range(3, next_batch):
        members = [header for header, _, _ in cut if header.batch == batch]
        assert [header.position for header in members] == list(range(members[0].count))
        assert {header.batch_samples for header in members} == {sum(header.samples for header in members)}


def test_ragged_batches_keep_what_is_left() -> None:
    cut, _, _ = micro_batches(lease(11), batch_size=8, micro_batch_size=3, next_number=0, next_batch=0, seed=0)
    assert [(header.batch, header.position, header.count, header.samples, header.batch_samples) for header, _, _ in cut] == [
        (0, 0, 3, 3, 8),
        (0, 1, 3, 3, 8),
        (0, 2, 3, 2, 8),
        (1, 0, 1, 3, 3),
    ]


def test_evaluation_micro_batches_stand_alone_and_leave_the_batch_counter() -> None:
    cut, next_number, next_batch = micro_batches(
        lease(5, training=False), batch_size=8, micro_batch_size=2, next_number=9, next_batch=4, seed=0
    )
    assert [(h.batch, h.position, h.count, h.samples, h.batch_samples, h.training) for h, _, _ in cut] == [
        (-1, 0, 1, 2, 2, False),
        (-1, 0, 1, 2, 2, False),
        (-1, 0, 1, 1, 1, False),
    ]
    assert (next_number, next_batch) == (12, 4)


def test_seeds_do_not_depend_on_evaluation_in_between() -> None:
    cut, _, _ = micro_batches(lease(4), batch_size=2, micro_batch_size=1, next_number=50, next_batch=3, seed=11, cluster=2)
    assert [header.seed for header, _, _ in cut] == [micro_batch_seed(11, 2, number) for number in (6, 7, 8, 9)]


def test_seeds_differ_and_fit_in_63_bits() -> None:
    seeds = {micro_batch_seed(seed, cluster, number) for seed in range(5) for cluster in range(5) for number in range(20)}
    assert len(seeds) == 500
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_and_orders_are_the_same_on_every_machine() -> None:
    assert micro_batch_seed(0, 0, 0) == 4392385465886052192
    assert sample_order(8, 0, 0) == [6, 5, 4, 7, 3, 1, 0, 2]


@given(samples=st.integers(1, 100), epoch=st.integers(0, 5), seed=st.integers(0, 2**63 - 1))
def test_an_epoch_visits_every_sample_once(samples: int, epoch: int, seed: int) -> None:
    order = sample_order(samples, epoch, seed)
    assert sorted(order) == list(range(samples))
    assert order == sample_order(samples, epoch, seed)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    assert len({tuple(sample_order(50, epoch, seed)) for epoch in range(3) for seed in range(3)}) == 9
