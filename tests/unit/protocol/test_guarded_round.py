"""One member of a guarded ring, and guarded rings under every interleaving; the plain mean stands in for a robust one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_harness import Ring, carry_out_orders_amid_requests, give_up_and_meet_again, lose_a_member

from roost.config import TensorCodec
from roost.errors import ProtocolError
from roost.protocol.averaging_events import (
    PLAIN,
    AbandonRound,
    ApplyAverage,
    AverageApplied,
    ChunkArrived,
    ChunkRefused,
    CombineChunk,
    DeadlinePassed,
    OpenReceived,
    RoundTerms,
    SendChunk,
    SendOpen,
    SnapshotTaken,
    StartRequested,
    StoreChunk,
    TakeSnapshot,
)
from roost.protocol.averaging_round import ordered_round
from roost.protocol.guarded_round import GuardedMember

SIZES = st.integers(3, 6)
SEEDS = st.integers(0, 2**32)
PIECES = st.integers(1, 3)
NAMES = ("a", "b", "c")


def member_a(*, pieces: int = 1) -> GuardedMember:
    """Return the member at position 0 of three; in round 1 it owns chunk 1, b chunk 2 and c chunk 0."""
    return GuardedMember(0, NAMES, "a", 10.0, pieces=pieces)


def values(step: int, *, piece: int = 0, number: int = 1, weight: float = 3.0, now: float = 0.0) -> ChunkArrived:
    """Return the values of the source of step 0 (c) or 1 (b) for the chunk that a owns."""
    return ChunkArrived(round=number, step=step, chunk=number % 3, weight=weight, now=now, piece=piece)


def mean(step: int, *, piece: int = 0, number: int = 1, now: float = 0.0) -> ChunkArrived:
    """Return the mean of the source of step 2 (c) or 3 (b)."""
    return ChunkArrived(round=number, step=step, chunk=((2 if step == 2 else 1) + number) % 3, weight=3.0, now=now, piece=piece)


def started(*, pieces: int = 1) -> GuardedMember:
    member = member_a(pieces=pieces)
    member.handle(StartRequested(now=0.0))
    member.handle(SnapshotTaken(round=1, weight=2.0, now=0.0))
    return member


def test_a_member_sends_each_owner_its_own_values_then_everybody_the_mean_of_its_chunk() -> None:
    member = member_a()
    assert [type(out) for out in member.handle(StartRequested(now=0.0))] == [SendOpen, SendOpen, TakeSnapshot]
    assert member.handle(SnapshotTaken(round=1, weight=2.0, now=0.0)) == [
        SendChunk(peer="b", round=1, step=0, chunk=2, weight=2.0),
        SendChunk(peer="c", round=1, step=1, chunk=0, weight=2.0),
    ]
    assert member.handle(values(0)) == []
    assert member.handle(values(1, weight=4.0)) == [
        CombineChunk(round=1, chunk=1),
        SendChunk(peer="b", round=1, step=2, chunk=1, weight=2.0),
        SendChunk(peer="c", round=1, step=3, chunk=1, weight=2.0),
    ]
    assert member.handle(mean(3)) == [StoreChunk(round=1, step=3, chunk=2)]
    assert member.handle(mean(2)) == [StoreChunk(round=1, step=2, chunk=0), ApplyAverage(round=1, total_weight=9.0)]
    assert member.handle(AverageApplied(round=1, now=0.0)) == []
    assert member.finished == 1


def test_every_step_has_one_source() -> None:
    assert [member_a().source(step) for step in range(4)] == ["c", "b", "c", "b"]


def test_a_chunk_has_another_owner_in_every_round() -> None:
    first = [member_a().handle(values(0, number=number)) for number in (1, 2, 3)]
    assert first == [[TakeSnapshot(round=number)] for number in (1, 2, 3)]
    with pytest.raises(ProtocolError, match="brought chunk 1, not 2"):
        member_a().handle(ChunkArrived(round=2, step=0, chunk=1, weight=1.0, now=0.0))


def test_a_mean_waits_until_the_same_piece_of_the_own_chunk_is_complete() -> None:
    member = started(pieces=2)
    assert member.handle(mean(2)) == []
    assert member.handle(mean(2, piece=1)) == []
    member.handle(values(0))
    out = member.handle(values(1))
    assert [type(item) for item in out] == [CombineChunk, SendChunk, SendChunk, StoreChunk]
    assert out[-1] == StoreChunk(round=1, step=2, chunk=0, piece=0)


def test_pieces_are_combined_in_their_order_while_others_are_on_their_way() -> None:
    member = started(pieces=2)
    member.handle(values(0))
    member.handle(values(0, piece=1))
    assert member.handle(values(1))[0] == CombineChunk(round=1, chunk=1, piece=0)
    assert member.handle(values(1, piece=1))[0] == CombineChunk(round=1, chunk=1, piece=1)


def test_a_claim_of_samples_that_cannot_be_does_not_end_the_round() -> None:
    member = GuardedMember(0, (*NAMES, "d"), "a", 10.0)
    member.handle(StartRequested(now=0.0))
    member.handle(SnapshotTaken(round=1, weight=2.0, now=0.0))
    for step, weight in ((0, -1.0), (1, 1e30)):
        assert member.handle(ChunkArrived(round=1, step=step, chunk=1, weight=weight, now=0.0)) == []
    assert member.handle(ChunkArrived(round=1, step=2, chunk=1, weight=3.0, now=0.0))[0] == CombineChunk(round=1, chunk=1)


def test_a_round_without_any_samples_is_abandoned() -> None:
    member = member_a()
    member.handle(StartRequested(now=0.0))
    member.handle(SnapshotTaken(round=1, weight=0.0, now=0.0))
    member.handle(values(0, weight=0.0))
    assert member.handle(values(1, weight=0.0)) == [AbandonRound(round=1, reason="no member has consumed samples since the last round")]


def test_a_background_round_waits_until_enough_members_have_consumed_samples_and_an_ordered_one_does_not() -> None:
    for order in (0, 1):
        member = member_a()
        member.handle(StartRequested(now=0.0, order=order))
        number = ordered_round(1) if order else 1
        member.handle(SnapshotTaken(round=number, weight=9.0, now=0.0))
        member.handle(values(0, number=number, weight=5.0))
        out = member.handle(values(1, number=number, weight=1e-6))
        if order:
            assert isinstance(out[0], CombineChunk)
        else:
            assert out == [AbandonRound(round=1, reason="2 of 3 members have consumed samples since the last round, 3 must have")]


def test_the_reason_of_an_abandoned_round_names_the_members_that_were_waited_for() -> None:
    member = started()
    member.handle(values(0))
    member.handle(mean(2, now=4.0))
    assert member.handle(DeadlinePassed(now=10.0)) == []
    assert member.handle(DeadlinePassed(now=14.0)) == [
        AbandonRound(round=1, reason="not all has arrived from b within 10 s"),
    ]


def test_a_chunk_of_a_later_round_shows_that_its_sender_has_left_this_one() -> None:
    member = started()
    out = member.handle(values(1, number=2, now=1.0))
    assert out == [AbandonRound(round=1, reason="b has left it for round 2"), TakeSnapshot(round=2)]


def test_a_chunk_of_the_next_round_is_kept_if_its_sender_has_sent_all_of_this_one() -> None:
    member = started()
    for event in (values(0), values(1), mean(3)):
        member.handle(event)
    assert member.handle(values(1, number=2)) == []
    assert member.handle(mean(2))[-1] == ApplyAverage(round=1, total_weight=8.0)
    assert member.handle(AverageApplied(round=1, now=0.0)) == [TakeSnapshot(round=2)]


def test_a_guarded_round_is_given_up_when_a_mean_is_refused() -> None:
    member = started()
    for event in (values(0), values(1), mean(3)):
        member.handle(event)
    assert member.handle(ChunkRefused(round=1, reason="not believed", now=0.0)) == [AbandonRound(round=1, reason="not believed")]


def test_a_member_that_missed_a_guarded_round_asks_for_one_of_the_values_themselves() -> None:
    member = GuardedMember(0, NAMES, "a", 10.0, differences=True)
    late = OpenReceived(round=4, now=0.0, terms=RoundTerms(base=3, codec=TensorCodec.NONE))
    assert member.handle(late)[-1] == TakeSnapshot(round=5, terms=PLAIN)


@settings(max_examples=60, deadline=None)
@given(size=SIZES, seed=SEEDS, pieces=PIECES, differences=st.booleans(), data=st.data())
def test_after_a_guarded_round_all_members_hold_the_same_mean(
    size: int, seed: int, pieces: int, differences: bool, data: st.DataObject
) -> None:
    ring = Ring(size, seed, pieces=pieces, differences=differences, guarded=True)
    wanted = ring.mean()
    for name in sorted(data.draw(st.sets(st.sampled_from(ring.names), min_size=1))):
        ring.start(name)
    ring.settle()
    for shell in ring.shells.values():
        assert shell.applied == [1]
        assert shell.values == wanted
        assert shell.member.idle and not shell.buffers


@settings(max_examples=40, deadline=None)
@given(size=SIZES, seed=SEEDS, pieces=PIECES, differences=st.booleans())
def test_an_order_is_carried_out_whatever_guarded_background_rounds_run(size: int, seed: int, pieces: int, differences: bool) -> None:
    ring = Ring(size, seed, pieces=pieces, differences=differences, guarded=True)
    carry_out_orders_amid_requests(ring)


@settings(max_examples=60, deadline=None)
@given(size=SIZES, seed=SEEDS, pieces=PIECES, differences=st.booleans(), steps=st.integers(0, 60))
def test_members_that_give_a_guarded_round_up_meet_again(size: int, seed: int, pieces: int, differences: bool, steps: int) -> None:
    ring = Ring(size, seed, deadline_s=10.0, pieces=pieces, differences=differences, guarded=True)
    give_up_and_meet_again(ring, steps)


@settings(max_examples=30, deadline=None)
@given(size=SIZES, seed=SEEDS, pieces=PIECES, steps=st.integers(0, 40))
def test_the_death_of_a_member_of_a_guarded_ring_leaves_the_others_idle(size: int, seed: int, pieces: int, steps: int) -> None:
    ring = Ring(size, seed, deadline_s=10.0, pieces=pieces, guarded=True)
    lose_a_member(ring, steps)
