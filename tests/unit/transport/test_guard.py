from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roost.config import TransportConfig
from roost.errors import MessageTooLargeError, PeerUnreachableError
from roost.transport.guard import BURST_S, LOG_BURST, Guard, RateLimit

CONFIG = TransportConfig(max_message_bytes=1000, max_header_bytes=24, peer_streams=2, peer_calls=3)


@settings(deadline=None, max_examples=50)
@given(gaps=st.lists(st.floats(0, 3), min_size=1, max_size=200), rate=st.sampled_from([1.0, 10.0, 8000.0]))
def test_over_any_time_no_more_than_the_rate_and_the_burst_pass(gaps: list[float], rate: float) -> None:
    limit = RateLimit(rate, 2 * rate)
    now, passed = 100.0, []
    for gap in gaps:
        now += gap
        # Whoever has to wait sends the next one after that.
        now += limit.take(now)
        passed.append(now)
    for first, start in enumerate(passed):
        for last in range(first, len(passed)):
            assert last - first + 1 <= rate * (passed[last] - start) + 2 * rate + 1 + 1e-6


def test_a_peer_within_its_rate_never_waits() -> None:
    limit = RateLimit(10.0, 20.0)
    assert all(limit.take(second / 10) == 0.0 for second in range(1000))


def test_a_peer_that_was_quiet_may_use_its_burst_and_then_waits_for_each() -> None:
    limit = RateLimit(10.0, BURST_S * 10.0)
    assert [limit.take(5.0) for _ in range(20)] == [0.0] * 20
    assert limit.take(5.0) == pytest.approx(0.1)
    assert limit.take(5.0) == pytest.approx(0.2)


def test_streams_and_calls_of_a_peer_are_counted_while_they_are_open() -> None:
    peer = Guard(CONFIG).of("evil")
    with peer.stream(), peer.stream(), pytest.raises(PeerUnreachableError, match="evil has 2 streams open here"), peer.stream():
        raise AssertionError("a third stream was let in")
    with peer.call(), peer.call(), peer.call(), pytest.raises(PeerUnreachableError, match="evil has 3 calls open here"), peer.call():
        raise AssertionError("a fourth call was let in")
    with peer.call():
        pass


def test_bytes_of_a_peer_count_until_they_are_dealt_with_and_peers_do_not_share() -> None:
    guard = Guard(CONFIG)
    evil, honest = guard.of("evil"), guard.of("honest")
    evil.hold(2048)
    with pytest.raises(MessageTooLargeError, match="evil has 2048 bytes under way to here, and 2048 are the limit"):
        evil.hold(1)
    honest.hold(2048)
    evil.release(2048)
    evil.hold(2048)


def test_refusals_of_one_peer_are_logged_once_a_second_after_a_burst() -> None:
    peer = Guard(CONFIG).of("evil")
    assert sum(peer.may_log(50.0) for _ in range(100)) == LOG_BURST
    assert sum(peer.may_log(50.0 + tenth / 10) for tenth in range(100)) == 9
