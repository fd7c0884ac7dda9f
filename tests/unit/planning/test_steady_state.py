"""The cost model's claim about the steady state, checked by playing pipelines through."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from steady_state import SimulatedHop, SimulatedStage, simulate_steady_state

from roost.errors import InvalidConfigError


def stage(forward: float = 1.0, backward: float = 2.0, in_flight: int = 1, **fields: float) -> SimulatedStage:
    return SimulatedStage(forward_s=forward, backward_s=backward, in_flight=in_flight, **fields)


def hop(seconds: float = 0.0, latency: float = 0.0, *, back: float | None = None) -> SimulatedHop:
    """One byte that takes `seconds`, and `back` seconds back."""
    returning = seconds if back is None else back
    return SimulatedHop(
        nbytes=1.0,
        onward_bytes_per_s=1 / seconds if seconds else math.inf,
        onward_latency_s=latency,
        back_bytes_per_s=1 / returning if returning else math.inf,
        back_latency_s=latency,
    )


def test_one_stage_is_always_busy() -> None:
    reached = simulate_steady_state([stage()], [])
    assert reached.period_s == pytest.approx(3.0)
    assert reached.busy == pytest.approx((1.0,))


def test_equal_stages_without_a_network_need_one_micro_batch_each_in_flight() -> None:
    stages = [stage(in_flight=3 - index) for index in range(3)]
    reached = simulate_steady_state(stages, [hop(), hop()])
    assert reached.period_s == pytest.approx(3.0)
    assert reached.busy == pytest.approx((1.0, 1.0, 1.0), abs=0.02)


def test_one_micro_batch_in_flight_waits_for_the_whole_round_trip() -> None:
    reached = simulate_steady_state([stage(), stage()], [hop(0.5, 0.25)])
    assert reached.period_s == pytest.approx(3 + 3 + 2 * 0.75)
    assert reached.busy == pytest.approx((0.4, 0.4), abs=0.02)


def test_a_slow_flow_binds_in_either_direction() -> None:
    stages = [stage(in_flight=20), stage(in_flight=20)]
    assert simulate_steady_state(stages, [hop(4.0, back=0.5)]).period_s == pytest.approx(4.0)
    assert simulate_steady_state(stages, [hop(0.5, back=5.0)]).period_s == pytest.approx(5.0)


def test_values_and_gradients_share_the_line_of_a_middle_node() -> None:
    ends = stage(in_flight=20)
    up = [ends, stage(in_flight=20, up_bytes_per_s=0.5), ends]
    assert simulate_steady_state(up, [hop(1.0), hop(1.0)]).period_s == pytest.approx(4.0)
    down = [ends, stage(in_flight=20, down_bytes_per_s=0.4), ends]
    assert simulate_steady_state(down, [hop(1.0), hop(1.0)]).period_s == pytest.approx(5.0, rel=1e-3)


def test_an_update_is_paid_once_per_batch() -> None:
    reached = simulate_steady_state([stage(update_s=2.0)], [], micro_batches_per_batch=4)
    assert reached.period_s == pytest.approx(3.5)
    assert reached.busy == pytest.approx((1.0,))


def test_data_that_comes_in_slowly_binds() -> None:
    assert simulate_steady_state([stage(down_bytes_per_s=2.0)], [], input_bytes=10.0).period_s == pytest.approx(5.0)
    assert simulate_steady_state([stage(down_bytes_per_s=10.0)], [], input_bytes=10.0).period_s == pytest.approx(3.0)


def test_backward_first_keeps_a_burst_alive_and_taking_turns_dissolves_it() -> None:
    # The round trip is 7.7 s, so nine in flight are more than the first stage, busy for 1.08 s each, needs.
    stages, hops = [stage(0.36, 0.72, 9), stage(0.23, 0.47, 1)], [hop(0.0, 3.0)]
    assert simulate_steady_state(stages, hops).period_s == pytest.approx(1.08)
    assert simulate_steady_state(stages, hops, alternate=False).period_s > 1.2 * 1.08


def test_work_that_takes_no_time_ends_too() -> None:
    reached = simulate_steady_state([stage(0.0, 0.0), stage(0.0, 0.0)], [hop()])
    assert reached.period_s == 0.0
    assert reached.busy == (0.0, 0.0)


def test_jitter_costs_time_and_repeats_with_the_same_seed() -> None:
    stages, hops = [stage(1.0, 2.0, 3), stage(1.0, 2.0, 2), stage(1.0, 2.0, 1)], [hop(), hop()]
    periods = [simulate_steady_state(stages, hops, jitter=0.2, rng=random.Random(seed)).period_s for seed in (1, 1, 2)]
    assert periods[0] == periods[1] != periods[2]
    assert 3.05 < periods[0] < 4.0


@pytest.mark.parametrize(
    ("stages", "hops"),
    [([], []), ([stage()], [hop()]), ([stage(), stage()], []), ([stage(in_flight=0)], [])],
)
def test_what_cannot_run_is_refused(stages: Sequence[SimulatedStage], hops: Sequence[SimulatedHop]) -> None:
    with pytest.raises(InvalidConfigError, match="cannot simulate"):
        simulate_steady_state(stages, hops)


def test_jitter_without_a_source_of_random_numbers_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="random"):
        simulate_steady_state([stage()], [], jitter=0.1)


# ------------------------------------------------------------ the formulas of docs/planning.md, on random clusters

Times = tuple[list[tuple[float, float]], list[SimulatedHop]]


def random_cluster(rng: random.Random) -> Times:
    """Two to eight stages, from equal to very unequal, from no network at all to round trips of several periods."""
    spread, latency, load = (
        rng.choice([0.0, 0.05, 0.3, 0.8]),
        rng.choice([0.0, 0.001, 0.05, 0.3, 1.0, 3.0]),
        rng.choice([0.0, 0.01, 0.2, 0.5, 0.9]),
    )
    count = rng.randint(2, 8)
    computes = [math.exp(rng.gauss(0, spread)) for _ in range(count)]
    ratios = [rng.uniform(0.8, 3) for _ in range(count)]
    hops = [hop(load * rng.uniform(0.5, 1.2), latency * rng.uniform(0.3, 1.5)) for _ in range(count - 1)]
    return [(compute / (1 + ratio), compute * ratio / (1 + ratio)) for compute, ratio in zip(computes, ratios, strict=True)], hops


def there_and_back(step: SimulatedHop) -> float:
    return step.onward_latency_s + step.back_latency_s + step.nbytes / step.onward_bytes_per_s + step.nbytes / step.back_bytes_per_s


def least_period(computes: Sequence[float], hops: Sequence[SimulatedHop]) -> float:
    return max(*computes, *(1 / step.onward_bytes_per_s for step in hops), *(1 / step.back_bytes_per_s for step in hops))


def round_trips(computes: Sequence[float], hops: Sequence[SimulatedHop]) -> list[float]:
    trips = [computes[-1]]
    for compute, step in zip(reversed(computes[:-1]), reversed(hops), strict=True):
        trips.append(compute + there_and_back(step) + trips[-1])
    return trips[::-1]


def turn_taking_gaps(computes: Sequence[float], hops: Sequence[SimulatedHop], period: float) -> list[float]:
    """Return for every stage the least seconds from a forward's end to its backward's start, if both repeat every `period`.

    Modulo the period, the backward must not overlap the next forward: if it would, it waits for a place after it.
    """
    gaps = [0.0]
    for index in range(len(computes) - 2, -1, -1):
        gap = gaps[-1] + computes[index + 1] + there_and_back(hops[index])
        whole = math.floor(gap / period + 1e-9)
        if gap - whole * period > period - computes[index] + 1e-9 * period:
            gap = (whole + 1) * period
        gaps.append(gap)
    return gaps[::-1]


def slowdown(times: Times, in_flight: Sequence[int], period: float, *, alternate: bool, jitter: float = 0.0) -> float:
    stages = [stage(forward, backward, bound) for (forward, backward), bound in zip(times[0], in_flight, strict=True)]
    return simulate_steady_state(stages, times[1], alternate=alternate, jitter=jitter, rng=random.Random(0)).period_s / period


def slowdowns(headroom: float, *, alternate: bool, gaps: bool = False, jitter: float = 0.0) -> list[float]:
    """Return, sorted, the simulated periods of random clusters relative to the formula's, with the formula's micro-batches in flight."""
    rng, found = random.Random(7), []
    for _ in range(80):
        times = random_cluster(rng)
        computes = [forward + backward for forward, backward in times[0]]
        period = least_period(computes, times[1])
        spans = round_trips(computes, times[1])
        if gaps:
            spans = [gap + compute for gap, compute in zip(turn_taking_gaps(computes, times[1], period), computes, strict=True)]
        trips = [compute + headroom * (span - compute) for compute, span in zip(computes, spans, strict=True)]
        in_flight = [max(1, math.ceil(trip / period - 1e-6)) for trip in trips]
        found.append(slowdown(times, in_flight, period, alternate=alternate, jitter=jitter))
    return sorted(found)


def test_nothing_is_faster_than_the_formula() -> None:
    assert slowdowns(1.0, alternate=False)[0] > 1 - 1e-3
    assert slowdowns(2.0, alternate=True)[0] > 1 - 1e-3


def test_taking_turns_with_headroom_reaches_the_formula() -> None:
    plain, varied = slowdowns(1.25, alternate=True), slowdowns(1.25, alternate=True, jitter=0.1)
    assert plain[len(plain) * 9 // 10] < 1.02 and plain[-1] < 1.1
    assert varied[len(varied) * 9 // 10] < 1.05 and varied[-1] < 1.1
    assert slowdowns(1.5, alternate=True)[-1] < 1.02


def test_taking_turns_with_the_round_trip_in_whole_turns_reaches_the_formula_almost_always() -> None:
    found = slowdowns(1.0, alternate=True, gaps=True)
    assert found[len(found) * 9 // 10] < 1.02
    assert slowdowns(1.1, alternate=True, gaps=True)[-1] < 1.05


def test_backward_first_stays_further_behind_the_formula_than_taking_turns() -> None:
    behind, turns = slowdowns(1.25, alternate=False), slowdowns(1.25, alternate=True)
    assert behind[-1] > turns[-1] + 0.05
    assert sum(ratio > 1.02 for ratio in behind) > 3 * sum(ratio > 1.02 for ratio in turns)
