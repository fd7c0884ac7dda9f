"""The steady state of one cluster's asynchronous pipeline, played through event by event: checks the cost model's claim about it.

The cost model (docs/planning.md) says how long each micro-batch needs every node and every link; this module says what
comes of it when they wait for each other: each stage computes one thing at a time, never with more than its micro-batches in
flight (arXiv 2401.01728, section on asynchronous model parallelism), and the flows of a node share its line. It finds the
waiting that formulas for means leave out.

Which of two waiting computations a stage takes matters. Backward first keeps bursts alive: a burst of forwards comes back as
a queue of backwards, all of them run, then the next burst goes out, and a stage can starve with all of its micro-batches
further down. Taking turns dissolves bursts, with the same micro-batches in flight.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from roost.errors import InvalidConfigError

MEASURED_MICRO_BATCHES = 240
"""Micro-batches over which the period is measured, after the warm-up."""
WARM_UP_ROUND_TRIPS = 3
"""The warm-up lasts until stage 0 has filled its in-flight micro-batches so many times."""
MOST_WARM_UP = 1000
"""Micro-batches after which measuring starts in any case."""


@dataclass(frozen=True, kw_only=True)
class SimulatedStage:
    """What one stage does with every micro-batch."""

    forward_s: float
    backward_s: float
    in_flight: int
    """Micro-batches that may have started forward here and not finished backward (StagePlan.max_in_flight)."""
    update_s: float = 0.0
    """Seconds of an optimizer step: one per batch, before anything else."""
    up_bytes_per_s: float = math.inf
    """What the node can send to all others together."""
    down_bytes_per_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class SimulatedHop:
    """The two flows between a stage and the next one: values onward, gradients back."""

    nbytes: float
    """Bytes of one micro-batch, in each direction."""
    onward_bytes_per_s: float
    onward_latency_s: float
    back_bytes_per_s: float
    back_latency_s: float


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """What a pipeline reaches once it is full."""

    period_s: float
    """Mean seconds between two micro-batches."""
    busy: tuple[float, ...]
    """Per stage: the fraction of the time that it computes."""


def simulate_steady_state(
    stages: Sequence[SimulatedStage],
    hops: Sequence[SimulatedHop],
    *,
    micro_batches_per_batch: int = 1,
    input_bytes: float = 0.0,
    alternate: bool = True,
    measured: int = MEASURED_MICRO_BATCHES,
    jitter: float = 0.0,
    rng: random.Random | None = None,
) -> SteadyState:
    """Return the period and the busy fractions of a pipeline that never runs out of data.

    `hops[k]` joins `stages[k]` and `stages[k + 1]`. If a forward and a backward both could run, the backward does, unless
    `alternate` and the last computation was a backward. `input_bytes` of data per micro-batch come in over the downlink of stage
    0, up to two batches ahead. With `jitter`, every computation and transfer takes its time multiplied by a log-normal
    factor of mean 1 and that standard deviation (of its logarithm), drawn from `rng`; without it the result is exact for
    the given times. Raises InvalidConfigError if the numbers of stages and hops do not match or nothing could run.
    """
    if len(hops) != len(stages) - 1 or min((stage.in_flight for stage in stages), default=0) < 1 or measured < 4:
        raise InvalidConfigError(f"cannot simulate {len(stages)} stages with {len(hops)} hops over {measured} micro-batches")
    if jitter > 0 and rng is None:
        raise InvalidConfigError("jitter needs a source of random numbers", hint="Pass rng=random.Random(seed).")
    warm_up = min(MOST_WARM_UP, WARM_UP_ROUND_TRIPS * (stages[0].in_flight + len(stages)))
    play = _Play(stages, hops, micro_batches_per_batch, input_bytes, alternate, jitter, rng)
    play.run(warm_up)
    started, busy_before = play.now, play.busy_s()
    finished = play.run(measured)
    elapsed = play.now - started
    busy = (later - before for later, before in zip(play.busy_s(), busy_before, strict=True))
    return SteadyState(
        period_s=_mean_step(finished),
        busy=tuple(min(1.0, seconds / elapsed) if elapsed > 0 else 0.0 for seconds in busy),
    )


def _mean_step(times: Sequence[float]) -> float:
    """Return the mean step between `times`, by their first and last quarters: micro-batches may come in bursts."""
    quarter = len(times) // 4
    return (math.fsum(times[-quarter:]) - math.fsum(times[:quarter])) / (quarter * (len(times) - quarter))


# Kinds of events; of those at the same instant, arrivals come before ends, so that a stage chooses knowing both.
_REACH, _ARRIVE, _END = 0, 1, 2
_FORWARD, _BACKWARD, _UPDATE = 0, 1, 2
_INPUT = -1
"""The channel of the data; channel 2k carries values from stage k to k+1, channel 2k+1 gradients from k+1 to k."""

_Event = tuple[float, int, int, int, float]
"""Time, kind, order of creation, stage (of an end) or channel, and the time before which a transfer cannot be complete."""


class _Play:
    """One run. Micro-batches keep their order on every channel and stage, so counting them says which one is meant."""

    def __init__(
        self,
        stages: Sequence[SimulatedStage],
        hops: Sequence[SimulatedHop],
        micro_batches_per_batch: int,
        input_bytes: float,
        alternate: bool,
        jitter: float,
        rng: random.Random | None,
    ) -> None:
        count = len(stages)
        self.now = 0.0
        self._last = count - 1
        self._seconds = [(stage.forward_s, stage.backward_s, stage.update_s) for stage in stages]
        self._in_flight_limit = [stage.in_flight for stage in stages]
        self._per_batch = micro_batches_per_batch
        self._alternate = alternate
        self._forward_next = [False] * count  # the last computation was a backward, so a forward takes its turn
        self._jitter = jitter
        self._rng = rng
        # Per channel: seconds on the sender's line, on the link, on the receiver's line, and of latency.
        self._channels = [times for k, hop in enumerate(hops) for times in _channels(hop, stages[k], stages[k + 1])]
        self._input_s = input_bytes / stages[0].down_bytes_per_s
        self._link_free = [0.0] * len(self._channels)
        self._up_free = [0.0] * count
        self._down_free = [0.0] * count
        self._values = [0] * count  # arrived; micro-batches of which the forward may run
        self._gradients = [0] * count  # arrived; micro-batches of which the backward may run
        self._forwards = [0] * count  # started
        self._backwards = [0] * count  # finished
        self._updates_due = [False] * count
        self._inputs = 0  # micro-batches of data that were asked for
        self._running = [-1] * count
        self._since = [0.0] * count
        self._busy = [0.0] * count
        self._created = 0
        self._events: list[_Event] = []

    def busy_s(self) -> list[float]:
        """Return the seconds that each stage has computed so far."""
        current = zip(self._busy, self._running, self._since, strict=True)
        return [busy + (self.now - since if running >= 0 else 0.0) for busy, running, since in current]

    def run(self, micro_batches: int) -> list[float]:
        """Play on until `micro_batches` more have finished at stage 0; return when each did."""
        finished: list[float] = []
        events = self._events
        self._fetch()
        while len(finished) < micro_batches:
            self.now, kind, _, place, complete = heapq.heappop(events)
            if kind == _END:
                if place == 0 and self._running[0] == _BACKWARD:
                    finished.append(self.now)
                self._end(place)
            elif kind == _REACH:
                self._receive(place, complete)
            else:
                self._arrive(place)
        return finished

    # ------------------------------------------------------------ transfers

    def _push(self, time: float, kind: int, place: int, complete: float = 0.0) -> None:
        self._created += 1
        heapq.heappush(self._events, (time, kind, self._created, place, complete))

    def _varied(self, seconds: float) -> float:
        if self._rng is None or not self._jitter or not seconds:
            return seconds
        return seconds * self._rng.lognormvariate(-self._jitter * self._jitter / 2, self._jitter)

    def _fetch(self) -> None:
        """Ask for data until two batches are on their way or waiting."""
        while self._inputs - self._forwards[0] < 2 * self._per_batch:
            self._inputs += 1
            start = max(self.now, self._down_free[0])
            self._down_free[0] = start + self._varied(self._input_s)
            self._push(self._down_free[0], _ARRIVE, _INPUT)

    def _send(self, channel: int, sender: int) -> None:
        """Put one micro-batch on a channel: it waits for the node's line, then flows, as fast as line and link let it."""
        up_s, link_s, down_s, latency_s = self._channels[channel]
        start = max(self.now, self._up_free[sender])
        self._up_free[sender] = start + up_s
        begin = max(start, self._link_free[channel])
        complete = max(begin + self._varied(link_s), self._up_free[sender])
        self._link_free[channel] = complete
        if down_s:
            self._push(begin + latency_s, _REACH, channel, complete + latency_s)
        else:
            self._push(complete + latency_s, _ARRIVE, channel)

    def _receive(self, channel: int, complete: float) -> None:
        """The first byte is there: it takes its turn on the receiver's line."""
        receiver = (channel >> 1) + 1 - (channel & 1)
        start = max(self.now, self._down_free[receiver])
        self._down_free[receiver] = start + self._channels[channel][2]
        self._push(max(self._down_free[receiver], complete), _ARRIVE, channel)

    def _arrive(self, channel: int) -> None:
        if channel & 1 and channel != _INPUT:
            receiver = channel >> 1
            self._gradients[receiver] += 1
        else:
            receiver = 0 if channel == _INPUT else (channel >> 1) + 1
            self._values[receiver] += 1
        if self._running[receiver] < 0:
            self._start(receiver)

    # ------------------------------------------------------------ computing

    def _start(self, stage: int) -> None:
        """Start what is due at an idle stage: an update before anything else."""
        forwards, backwards = self._forwards[stage], self._backwards[stage]
        backward = self._gradients[stage] > backwards
        forward = self._values[stage] > forwards and forwards - backwards < self._in_flight_limit[stage]
        if self._updates_due[stage]:
            what = _UPDATE
        elif backward and not (forward and self._forward_next[stage]):
            what = _BACKWARD
            self._forward_next[stage] = self._alternate
        elif forward:
            what = _FORWARD
            self._forward_next[stage] = False
            self._forwards[stage] += 1
            if stage == 0:
                self._fetch()
        else:
            return
        self._running[stage] = what
        self._since[stage] = self.now
        self._push(self.now + self._varied(self._seconds[stage][what]), _END, stage)

    def _end(self, stage: int) -> None:
        what, self._running[stage] = self._running[stage], -1
        self._busy[stage] += self.now - self._since[stage]
        if what == _FORWARD:
            if stage < self._last:
                self._send(2 * stage, stage)
            else:
                self._gradients[stage] += 1
        elif what == _BACKWARD:
            self._backwards[stage] += 1
            self._updates_due[stage] = self._seconds[stage][_UPDATE] > 0 and self._backwards[stage] % self._per_batch == 0
            if stage > 0:
                self._send(2 * stage - 1, stage)
        else:
            self._updates_due[stage] = False
        self._start(stage)


def _channels(hop: SimulatedHop, before: SimulatedStage, after: SimulatedStage) -> tuple[tuple[float, float, float, float], ...]:
    """Return the times of the two channels of `hop`: onward, back."""
    size = hop.nbytes
    return (
        (size / before.up_bytes_per_s, size / hop.onward_bytes_per_s, size / after.down_bytes_per_s, hop.onward_latency_s),
        (size / after.up_bytes_per_s, size / hop.back_bytes_per_s, size / before.down_bytes_per_s, hop.back_latency_s),
    )
