"""One member of one ring, and rings of members under every interleaving."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_harness import Ring, carry_out_orders_amid_requests, give_up_and_meet_again, lose_a_member

from roost.config import TensorCodec
from roost.errors import IllegalTransitionError, ProtocolError
from roost.protocol.averaging_round import (
    PLAIN,
    AbandonRound,
    AddChunk,
    ApplyAverage,
    AverageApplied,
    ChunkArrived,
    ChunkRefused,
    DeadlinePassed,
    OpenReceived,
    RingMember,
    RoundTerms,
    ScaleChunk,
    SendChunk,
    SendOpen,
    SnapshotTaken,
    StartRequested,
    StoreChunk,
    TakeSnapshot,
    ordered_round,
)

SIZES = st.integers(2, 6)
SEEDS = st.integers(0, 2**32)
PIECES = st.integers(1, 3)


def pair(me: str = "a") -> RingMember:
    return RingMember(0, ("a", "b"), me, 10.0)


def chunk(step: int, index: int, *, number: int = 1, weight: float = 3.0, now: float = 0.0) -> ChunkArrived:
    return ChunkArrived(round=number, step=step, chunk=index, weight=weight, now=now)


def test_two_members_take_two_steps() -> None:
    member = pair()
    assert member.handle(StartRequested(now=0.0)) == [SendOpen(peer="b", round=1), TakeSnapshot(round=1)]
    assert member.handle(SnapshotTaken(round=1, weight=2.0, now=0.0)) == [SendChunk(peer="b", round=1, step=0, chunk=0, weight=2.0)]
    assert member.handle(chunk(0, 1)) == [
        AddChunk(round=1, step=0, chunk=1),
        ScaleChunk(chunk=1, total_weight=5.0),
        SendChunk(peer="b", round=1, step=1, chunk=1, weight=5.0),
    ]
    assert member.handle(chunk(1, 0, weight=5.0)) == [StoreChunk(round=1, step=1, chunk=0), ApplyAverage(round=1, total_weight=5.0)]
    assert member.handle(AverageApplied(round=1, now=0.0)) == []
    assert member.idle
    assert member.finished == 1


def test_a_member_joins_when_it_hears_an_open() -> None:
    assert pair().handle(OpenReceived(round=1, now=0.0)) == [TakeSnapshot(round=1)]


def test_a_member_joins_when_a_chunk_arrives_and_uses_it_after_its_snapshot() -> None:
    member = pair()
    assert member.handle(chunk(0, 1)) == [TakeSnapshot(round=1)]
    out = member.handle(SnapshotTaken(round=1, weight=2.0, now=0.0))
    assert [type(instruction) for instruction in out] == [SendChunk, AddChunk, ScaleChunk, SendChunk]


def test_a_late_open_of_a_finished_round_is_ignored() -> None:
    ring = Ring(2, 0)
    ring.start("node-0")
    ring.settle()
    assert ring.shells["node-1"].member.handle(OpenReceived(round=1, now=0.0)) == []
    assert ring.shells["node-1"].member.idle


def test_an_open_of_the_next_round_is_remembered_until_this_one_is_finished() -> None:
    member = pair()
    member.handle(chunk(0, 1))
    member.handle(SnapshotTaken(round=1, weight=1.0, now=0.0))
    member.handle(chunk(1, 0))
    assert member.handle(OpenReceived(round=2, now=0.0)) == []
    assert member.handle(AverageApplied(round=1, now=0.0)) == [TakeSnapshot(round=2)]


def test_a_chunk_of_the_next_round_is_kept_while_the_average_is_applied() -> None:
    member = pair()
    member.handle(chunk(0, 1))
    member.handle(SnapshotTaken(round=1, weight=1.0, now=0.0))
    member.handle(chunk(1, 0))
    assert member.handle(chunk(0, 1, number=2)) == []
    assert member.wants(2)
    assert member.handle(AverageApplied(round=1, now=0.0)) == [TakeSnapshot(round=2)]


def test_a_request_during_a_round_starts_another_afterwards() -> None:
    member = pair()
    member.handle(OpenReceived(round=1, now=0.0))
    member.handle(SnapshotTaken(round=1, weight=1.0, now=0.0))
    member.handle(chunk(0, 1))
    assert member.handle(StartRequested(now=0.0)) == []
    member.handle(chunk(1, 0))
    assert member.handle(AverageApplied(round=1, now=0.0)) == [SendOpen(peer="b", round=2), TakeSnapshot(round=2)]


def test_the_deadline_abandons_the_round_and_numbers_go_on() -> None:
    member = pair()
    member.handle(StartRequested(now=5.0))
    assert member.deadline == 15.0
    assert member.handle(DeadlinePassed(now=14.0)) == []
    out = member.handle(DeadlinePassed(now=15.0))
    assert out == [AbandonRound(round=1, reason="no snapshot was taken within 10 s")]
    assert member.idle
    assert member.deadline is None
    assert member.handle(chunk(0, 1)) == []
    assert member.handle(SnapshotTaken(round=1, weight=1.0, now=15.0)) == []
    assert member.handle(StartRequested(now=16.0)) == [SendOpen(peer="b", round=2), TakeSnapshot(round=2)]


def test_the_reason_of_an_abandoned_round_names_the_silent_peer() -> None:
    member = pair()
    member.handle(StartRequested(now=0.0))
    member.handle(SnapshotTaken(round=1, weight=1.0, now=0.0))
    (gone,) = member.handle(DeadlinePassed(now=10.0))
    assert gone == AbandonRound(round=1, reason="nothing arrived from b for step 0 within 10 s")


def test_a_member_jumps_to_the_round_of_a_peer_that_is_ahead() -> None:
    member = pair()
    assert member.handle(OpenReceived(round=4, now=0.0)) == [TakeSnapshot(round=4)]
    assert member.round == 4


def test_a_chunk_of_a_later_round_shows_that_the_peer_has_left_this_one() -> None:
    member = pair()
    member.handle(StartRequested(now=0.0))
    member.handle(SnapshotTaken(round=1, weight=1.0, now=0.0))
    out = member.handle(chunk(0, 1, number=2, now=1.0))
    assert out == [AbandonRound(round=1, reason="b has left it for round 2"), TakeSnapshot(round=2)]
    assert member.handle(SnapshotTaken(round=1, weight=1.0, now=1.0)) == []


def test_a_round_whose_deadline_passed_before_it_could_be_joined_is_skipped() -> None:
    member = pair()
    member.handle(OpenReceived(round=1, now=0.0))
    member.handle(SnapshotTaken(round=1, weight=1.0, now=0.0))
    member.handle(chunk(0, 1))
    member.handle(chunk(1, 0))
    member.handle(OpenReceived(round=2, now=1.0))
    assert member.handle(AverageApplied(round=1, now=11.0)) == []
    assert member.idle
    assert member.handle(StartRequested(now=12.0))[-1] == TakeSnapshot(round=3)


def test_an_ordered_round_has_the_number_of_its_order() -> None:
    member = pair()
    assert member.handle(StartRequested(now=0.0, order=1))[-1] == TakeSnapshot(round=ordered_round(1))


def test_an_order_that_was_carried_out_already_changes_nothing() -> None:
    ring = Ring(2, 1)
    ring.start("node-0", order=1)
    ring.settle()
    member = ring.shells["node-1"].member
    assert member.finished == ordered_round(1)
    assert member.handle(StartRequested(now=0.0, order=1)) == []
    assert member.idle


def test_an_order_during_its_own_round_adds_no_other_round() -> None:
    ring = Ring(3, 1)
    for name in ring.names:
        ring.start(name, order=1)
    ring.settle()
    assert all(shell.applied == [ordered_round(1)] for shell in ring.shells.values())


def test_an_order_after_an_abandoned_try_is_carried_out_under_the_next_number() -> None:
    member = pair()
    member.handle(StartRequested(now=0.0, order=1))
    member.handle(DeadlinePassed(now=10.0))
    assert member.handle(StartRequested(now=11.0, order=1))[-1] == TakeSnapshot(round=ordered_round(1) + 1)


def test_a_round_without_any_samples_is_abandoned_by_all() -> None:
    ring = Ring(3, 2)
    before = [list(shell.values) for shell in ring.shells.values()]
    for shell in ring.shells.values():
        shell.weight = 0
    ring.start("node-1")
    ring.settle()
    assert [list(shell.values) for shell in ring.shells.values()] == before
    assert all(shell.abandoned[0].reason.startswith("no member has consumed") for shell in ring.shells.values())
    assert all(shell.member.idle for shell in ring.shells.values())


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (chunk(2, 0), "step 2 of round 1 is not one of 0..1"),
        (chunk(0, 0), "brought chunk 0, not 1"),
        (chunk(0, 1, weight=float("nan")), "the weight of step 0 of round 1 is nan"),
        (SnapshotTaken(round=1, weight=-1.0, now=0.0), "the weight of the snapshot of round 1 is -1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(event: ChunkArrived | SnapshotTaken, words: str) -> None:
    member = pair()
    member.handle(StartRequested(now=0.0))
    with pytest.raises(ProtocolError, match=words):
        member.handle(event)


def test_a_chunk_that_arrives_twice_is_refused() -> None:
    member = pair()
    member.handle(chunk(0, 1))
    with pytest.raises(ProtocolError, match="step 0 of round 1 arrived twice"):
        member.handle(chunk(0, 1))


def test_applying_without_an_average_is_illegal() -> None:
    with pytest.raises(IllegalTransitionError):
        pair().handle(AverageApplied(round=1, now=0.0))


@settings(max_examples=80, deadline=None)
@given(size=SIZES, seed=SEEDS, pieces=PIECES, differences=st.booleans(), data=st.data())
def test_after_a_round_all_members_hold_the_exact_weighted_mean(
    size: int, seed: int, pieces: int, differences: bool, data: st.DataObject
) -> None:
    ring = Ring(size, seed, pieces=pieces, differences=differences)
    mean = ring.mean()
    starters = data.draw(st.sets(st.sampled_from(ring.names), min_size=1))
    for name in sorted(starters):
        ring.start(name)
    ring.settle()
    for shell in ring.shells.values():
        assert shell.applied == [1]
        assert shell.values == mean
        assert shell.member.idle
        assert not shell.buffers


@settings(max_examples=60, deadline=None)
@given(size=SIZES, seed=SEEDS, pieces=PIECES, differences=st.booleans(), requests=st.integers(1, 8))
def test_rounds_requested_at_any_moment_are_finished_by_all(size: int, seed: int, pieces: int, differences: bool, requests: int) -> None:
    ring = Ring(size, seed, pieces=pieces, differences=differences)
    while requests:
        if ring.rng.random() < 0.2:
            ring.start(ring.rng.choice(ring.names))
            requests -= 1
        ring.step()
    ring.settle()
    finished = {tuple(shell.applied) for shell in ring.shells.values()}
    assert len(finished) == 1
    (rounds,) = finished
    assert rounds == tuple(range(1, len(rounds) + 1))
    assert len({tuple(shell.values) for shell in ring.shells.values()}) == 1


@settings(max_examples=60, deadline=None)
@given(size=SIZES, seed=SEEDS, pieces=PIECES, differences=st.booleans())
def test_an_order_gives_all_members_the_exact_mean_whatever_background_rounds_run(
    size: int, seed: int, pieces: int, differences: bool
) -> None:
    ring = Ring(size, seed, pieces=pieces, differences=differences)
    carry_out_orders_amid_requests(ring)


@settings(max_examples=80, deadline=None)
@given(size=SIZES, seed=SEEDS, pieces=PIECES, differences=st.booleans(), steps=st.integers(0, 40))
def test_members_that_give_up_meet_again_in_the_next_round(size: int, seed: int, pieces: int, differences: bool, steps: int) -> None:
    ring = Ring(size, seed, deadline_s=10.0, pieces=pieces, differences=differences)
    give_up_and_meet_again(ring, steps)


@settings(max_examples=30, deadline=None)
@given(size=SIZES, seed=SEEDS, pieces=PIECES, differences=st.booleans(), steps=st.integers(0, 30))
def test_the_death_of_a_member_leaves_the_others_idle_with_their_own_weights(
    size: int, seed: int, pieces: int, differences: bool, steps: int
) -> None:
    ring = Ring(size, seed, deadline_s=10.0, pieces=pieces, differences=differences)
    lose_a_member(ring, steps)


def test_a_piece_is_passed_on_while_the_next_one_is_on_its_way() -> None:
    member = RingMember(0, ("a", "b", "c"), "a", 10.0, pieces=2)
    member.handle(StartRequested(now=0.0))
    first = member.handle(SnapshotTaken(round=1, weight=1.0, now=0.0))
    assert [(send.step, send.piece) for send in first if isinstance(send, SendChunk)] == [(0, 0), (0, 1)]
    out = member.handle(ChunkArrived(round=1, step=0, chunk=2, weight=1.0, now=0.0, piece=0))
    assert out == [
        AddChunk(round=1, step=0, chunk=2, piece=0),
        SendChunk(peer="b", round=1, step=1, chunk=2, weight=2.0, piece=0),
    ]


def test_a_round_that_moves_is_not_late() -> None:
    member = RingMember(0, ("a", "b"), "a", 10.0, pieces=2)
    member.handle(StartRequested(now=0.0))
    member.handle(SnapshotTaken(round=1, weight=1.0, now=0.0))
    member.handle(ChunkArrived(round=1, step=0, chunk=1, weight=1.0, now=9.0, piece=0))
    assert member.deadline == 19.0
    assert member.handle(DeadlinePassed(now=10.0)) == []


def test_pieces_of_a_step_that_contradict_each_other_are_refused() -> None:
    member = RingMember(0, ("a", "b"), "a", 10.0, pieces=2)
    member.handle(ChunkArrived(round=1, step=0, chunk=1, weight=1.0, now=0.0, piece=0))
    with pytest.raises(ProtocolError, match="contradict each other"):
        member.handle(ChunkArrived(round=1, step=0, chunk=1, weight=2.0, now=0.0, piece=1))
    with pytest.raises(ProtocolError, match="piece 2 of step 0 of round 1 is not one of 0..1"):
        member.handle(ChunkArrived(round=1, step=0, chunk=1, weight=1.0, now=0.0, piece=2))


def test_background_rounds_average_differences_to_the_last_mean_and_ordered_ones_are_not_encoded() -> None:
    member = RingMember(0, ("a", "b"), "a", 10.0, codec=TensorCodec.FP16, differences=True)
    assert member.handle(StartRequested(now=0.0))[-1] == TakeSnapshot(round=1, terms=RoundTerms(base=0, codec=TensorCodec.FP16))
    member.handle(DeadlinePassed(now=10.0))
    order = member.handle(StartRequested(now=11.0, order=1))[-1]
    assert order == TakeSnapshot(round=ordered_round(1), terms=RoundTerms(base=0, codec=TensorCodec.NONE))


def test_a_member_that_missed_a_round_asks_for_one_of_the_values_themselves() -> None:
    member = RingMember(0, ("a", "b"), "a", 10.0, codec=TensorCodec.INT8, differences=True)
    late = OpenReceived(round=4, now=0.0, terms=RoundTerms(base=3, codec=TensorCodec.INT8))
    assert member.handle(late) == [SendOpen(peer="b", round=5, terms=PLAIN), TakeSnapshot(round=5, terms=PLAIN)]


def test_a_member_leaves_a_round_whose_chunks_are_differences_to_another_mean() -> None:
    member = RingMember(0, ("a", "b"), "a", 10.0, codec=TensorCodec.INT8, differences=True)
    member.handle(StartRequested(now=0.0))
    other = ChunkArrived(round=1, step=0, chunk=1, weight=1.0, now=0.0)
    gone, *rest = member.handle(other)
    assert isinstance(gone, AbandonRound)
    assert rest == [SendOpen(peer="b", round=2, terms=PLAIN), TakeSnapshot(round=2, terms=PLAIN)]


def test_a_round_is_given_up_when_what_arrived_is_refused_even_after_the_last_piece() -> None:
    member = pair()
    member.handle(chunk(0, 1))
    member.handle(SnapshotTaken(round=1, weight=1.0, now=0.0))
    member.handle(chunk(1, 0))
    assert member.handle(ChunkRefused(round=1, reason="a value is not finite", now=0.0)) == [
        AbandonRound(round=1, reason="a value is not finite")
    ]
    assert member.idle
    assert member.handle(ChunkRefused(round=1, reason="again", now=0.0)) == []


@settings(max_examples=60, deadline=None)
@given(size=SIZES, seed=SEEDS, steps=st.integers(0, 60))
def test_members_whose_bases_differ_come_together_again(size: int, seed: int, steps: int) -> None:
    ring = Ring(size, seed, deadline_s=10.0, pieces=2, differences=True)
    ring.start(ring.names[0])
    for _ in range(steps):
        ring.step()
    # Some give a round up that others may finish: their bases differ from then on.
    ring.now = 10.0
    for name in ring.rng.sample(ring.names, ring.rng.randrange(1, size + 1)):
        ring.give(name, DeadlinePassed(now=ring.now))
    ring.settle()
    ring.now = 25.0
    for name in ring.names:
        ring.give(name, DeadlinePassed(now=ring.now))
    ring.settle()
    for _ in range(2):
        ring.start(ring.rng.choice(ring.names))
        ring.settle()
    assert len({tuple(shell.values) for shell in ring.shells.values()}) == 1
    assert len({tuple(shell.base) for shell in ring.shells.values()}) == 1
    assert len({shell.member.finished for shell in ring.shells.values()}) == 1
