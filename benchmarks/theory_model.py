"""The engine's delays on a problem with known constants: what `benchmarks.theory` runs, and the terms of docs/theory.md.

A fixed smooth non-convex problem; C clusters, each a pipeline whose stages read their own old versions; averaging every few
updates, applied late as `w += average - snapshot`. The staleness is what `roost.protocol.pipeline_schedule` itself gives.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roost.protocol import pipeline_schedule as schedules
from roost.types import MicroBatch

Floats = NDArray[np.float64]

FORWARD, BACKWARD = 1.0, 2.0
"""Units of time of a micro-batch on every stage: the stages are balanced."""
INTERVAL = 16
"""Updates between two averaging rounds: the default of JobConfig."""
ROUND_DELAY = 4
"""Updates made while a round runs in the background."""
MEASURED = 512
"""Points of every run, evenly spaced, at which the full gradient is computed."""
DRAWS = 128
"""Updates whose rows are drawn at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Regression with the bounded loss r^2 / (1 + r^2): f(x) = mean over rows of loss(row . x - target). Not convex."""

    rows: Floats
    """(N, d); one of them, drawn at random, is the sample of an update."""
    targets: Floats
    """(N,)"""
    smoothness: float
    """L: the gradient of f is L-Lipschitz. |loss''| <= 2, so L = 2 x the largest eigenvalue of rows' rows / N."""
    gap: float
    """Delta >= f(0) - min f. The loss is not negative, so f(0) will do."""
    variance: float
    """sigma^2: the gradient of one row has at most this variance. |loss'| <= 3 sqrt(3) / 8, so 27/64 x mean |row|^2."""

    @property
    def difficulty(self) -> float:
        """L Delta / sigma^2: the theorem's unit of updates."""
        return self.smoothness * self.gap / self.variance

    def mean_square_gradient(self, points: Floats) -> Floats:
        """Return |grad f|^2, exactly, at points of shape (n, d); shape (n,)."""
        slopes = loss_slope(points @ self.rows.T - self.targets)
        gradients = slopes @ self.rows / len(self.rows)
        return np.einsum("nd,nd->n", gradients, gradients)

    def least_curvature(self, point: Floats) -> float:
        """Return the smallest eigenvalue of the Hessian of f at a point of shape (d,): negative where f is not convex."""
        squares = (self.rows @ point - self.targets) ** 2
        curvatures = (2 - 6 * squares) / (1 + squares) ** 3
        return float(np.linalg.eigvalsh((self.rows * curvatures[:, None]).T @ self.rows / len(self.rows))[0])


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Clusters of one pipeline each, and how late things are."""

    clusters: int
    staleness: tuple[tuple[int, ...], ...]
    """Per stage: for its 1st, 2nd, ... update, how many updates old the weights of the gradient are; the last value repeats."""
    interval: int = INTERVAL
    """Updates between two averaging rounds (tau)."""
    round_delay: int = ROUND_DELAY
    """Updates between a round's snapshot and the moment its result is added (D), less than `interval`."""

    @property
    def most_stale(self) -> int:
        """T: no gradient is older, on any stage."""
        return max(max(updates) for updates in self.staleness)

    @property
    def window(self) -> int:
        """H: most updates of a cluster that its weights contain and the last average they contain does not."""
        return self.interval + self.round_delay - 1 if self.clusters > 1 else 0

    @property
    def lateness(self) -> int:
        """(C - 1) H + T: what the second term of the theorem grows with."""
        return (self.clusters - 1) * self.window + self.most_stale


def loss_slope(residuals: Floats) -> Floats:
    """Return the derivative of r^2 / (1 + r^2), elementwise."""
    return 2 * residuals / (1 + residuals * residuals) ** 2


def make_problem(*, rows: int = 512, size: int = 64, start: float = 1.0, second: float = 0.2, noise: float = 0.2) -> Problem:
    """Return the fixed problem: most targets follow one vector, a fraction `second` of them another one.

    `start` is the norm of the first vector, so the distance of the starting point, 0, from it.
    """
    rng = np.random.default_rng(2401)
    basis, _ = np.linalg.qr(rng.standard_normal((rows, size)))
    turn, _ = np.linalg.qr(rng.standard_normal((size, size)))
    # Columns of known length, then turned: every stage's parameters matter to every sample, as in a pipeline.
    matrix = (basis * np.sqrt(rows * np.geomspace(1.0, 1 / 1.5, size))) @ turn
    vectors = rng.standard_normal((2, size))
    vectors *= np.array([[start], [2.5]]) / np.linalg.norm(vectors, axis=1, keepdims=True)
    follows = (rng.random(rows) < second).astype(int)
    targets = np.einsum("nd,nd->n", matrix, vectors[follows]) + noise * rng.standard_normal(rows)
    return Problem(
        rows=matrix,
        targets=targets,
        smoothness=2 * float(np.linalg.eigvalsh(matrix.T @ matrix / rows)[-1]),
        gap=float(np.mean(targets**2 / (1 + targets**2))),
        variance=27 / 64 * float(np.mean(np.sum(matrix**2, axis=1))),
    )


def step_size(problem: Problem, clusters: int, steps: int) -> float:
    """Return sqrt(2 Delta C / (L sigma^2 K)): docs/theory.md, theorem 2."""
    return math.sqrt(2 * problem.gap * clusters / (problem.smoothness * problem.variance * steps))


def steps_needed(problem: Problem, setting: Setting) -> float:
    """Return the least K that docs/theory.md asks for linear speed-up: the largest of its conditions (6) and (8)."""
    stale, window = setting.most_stale, setting.window
    most = max(32 * max(1, stale) ** 2, 72 * window * (window + stale), 2 * setting.lateness**2)
    return problem.difficulty * setting.clusters * most


def step_condition(problem: Problem, setting: Setting, steps: int) -> float:
    """Return how large the step size is against what conditions (3) and (4) of docs/theory.md allow: 1 is just allowed."""
    step = step_size(problem, setting.clusters, steps) * problem.smoothness
    stale, window = setting.most_stale, setting.window
    return step * max(4 * max(1, stale), 6 * math.sqrt(window * (window + stale)))


def proved_bound(problem: Problem, setting: Setting, steps: int) -> float:
    """Return (7) of docs/theory.md: what the mean of |grad f|^2 over a run cannot exceed if `step_condition` is at most 1."""
    first = 2 * math.sqrt(2 * problem.smoothness * problem.gap * problem.variance / (setting.clusters * steps))
    return first + 4 * problem.smoothness * problem.gap * setting.lateness / steps


# ------------------------------------------------------------ the engine's staleness


def engine_staleness(stages: int, *, hop: float = 0.0) -> tuple[tuple[int, ...], ...]:
    """Return the staleness of a balanced pipeline's updates, per stage, until it repeats: the engine's schedules, played.

    `hop` is the time a message takes from stage to stage. Every stage has just enough micro-batches in flight not to wait.
    """
    trip = math.ceil(2 * hop / (FORWARD + BACKWARD))
    in_flight = [schedules.bubble_free_in_flight(stage, stages) + trip * (stages - 1 - stage) for stage in range(stages)]
    return _Playing(in_flight, hop, updates=3 * in_flight[0] + 8).play()


class _Playing:
    """One PipelineSchedule per stage; messages and computations take their time."""

    def __init__(self, in_flight: Sequence[int], hop: float, *, updates: int) -> None:
        last = len(in_flight) - 1
        self._stages = [
            schedules.PipelineSchedule(
                stage,
                last + 1,
                frozenset({stage - 1 if stage else schedules.DATA}),
                frozenset({stage + 1} if stage < last else ()),
                most,
            )
            for stage, most in enumerate(in_flight)
        ]
        self._hop = hop
        self._updates = updates
        self._events: list[tuple[float, int, int, schedules.ScheduleEvent]] = []
        self._count = 0
        self._fed = 0
        self._staleness: list[list[int]] = [[] for _ in in_flight]

    def play(self) -> tuple[tuple[int, ...], ...]:
        """Return the staleness of all updates, per stage."""
        running: dict[int, schedules.Computation] = {}
        self._feed(0.0)
        while self._events:
            now, _, stage, event = heapq.heappop(self._events)
            if isinstance(event, schedules.ComputeFinished):
                self._deliver(now, stage, running.pop(stage))
            for computation in self._stages[stage].handle(event):
                running[stage] = computation
                self._begin(now, stage, computation)
        return tuple(tuple(values) for values in self._staleness)

    def _push(self, at: float, stage: int, event: schedules.ScheduleEvent) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, stage, event))

    def _feed(self, now: float) -> None:
        if self._fed < self._updates:
            number = self._fed
            micro_batch = MicroBatch(
                number=number, batch=number, position=0, count=1, samples=1, batch_samples=1, training=True, seed=0, lease=0
            )
            self._push(now, 0, schedules.ValuesArrived(micro_batch=micro_batch, source=schedules.DATA))
            self._fed += 1

    def _begin(self, now: float, stage: int, computation: schedules.Computation) -> None:
        takes = {schedules.RunForward: FORWARD, schedules.RunBackward: BACKWARD}.get(type(computation), 0.0)
        if isinstance(computation, schedules.RunUpdate):
            self._staleness[stage].extend(computation.staleness)
        self._push(now + takes, stage, schedules.ComputeFinished())

    def _deliver(self, now: float, stage: int, done: schedules.Computation) -> None:
        if isinstance(done, schedules.RunForward):
            if stage == 0:
                self._feed(now)
            if stage + 1 < len(self._stages):
                self._push(now + self._hop, stage + 1, schedules.ValuesArrived(micro_batch=done.micro_batch, source=stage))
        elif isinstance(done, schedules.RunBackward) and stage > 0:
            self._push(now + self._hop, stage - 1, schedules.GradientsArrived(number=done.micro_batch.number, source=stage))


# ------------------------------------------------------------ the simulation


class Simulation:
    """Runs of several lengths K and many seeds of one setting, side by side. Arrays are (lengths, seeds, clusters, d)."""

    def __init__(self, problem: Problem, setting: Setting, steps: Sequence[int], seeds: int) -> None:
        """Start at 0. `steps` are the lengths, in updates of each cluster; every run has the step size of its length."""
        self._problem = problem
        self._setting = setting
        self._steps = sorted(steps, reverse=True)
        self._rates = np.array([step_size(problem, setting.clusters, length) for length in self._steps])
        shape = (len(self._steps), seeds, setting.clusters, problem.rows.shape[1])
        self._rng = np.random.default_rng([setting.clusters, setting.most_stale, setting.interval, len(self._steps)])
        self._sums = np.zeros(shape[:2])
        self.weights = np.zeros(shape)
        self._correction = np.zeros(shape)
        self._versions = np.zeros((setting.most_stale + 1, *shape))
        self._read = np.zeros(shape)
        self._gradients = np.zeros(shape)
        edges = np.linspace(0, shape[3], len(setting.staleness) + 1).astype(int)
        self._blocks = [slice(first, stop) for first, stop in zip(edges[:-1], edges[1:], strict=True)]

    def run(self) -> Floats:
        """Return the mean over a run of |grad f|^2 at the average of the clusters: (lengths, seeds), shortest run first."""
        done = 0
        for alive in range(len(self._steps), 0, -1):
            self._keep(alive)
            while done < self._steps[alive - 1]:
                count = min(DRAWS, self._steps[alive - 1] - done)
                drawn = self._rng.integers(len(self._problem.rows), size=(count, *self.weights.shape[:3]))
                for rows in drawn:
                    self.update(done, rows)
                    done += 1
        return self._sums[::-1]

    def update(self, number: int, rows: NDArray[np.int64]) -> None:
        """Make update `number` (0 first) of every cluster; `rows` are the samples, (lengths, seeds, clusters)."""
        self._average(number)
        self._measure(number)
        self._versions[number % len(self._versions)] = self.weights
        for block, staleness in zip(self._blocks, self._setting.staleness, strict=True):
            seen = number - staleness[min(number, len(staleness) - 1)]
            self._read[..., block] = self._versions[seen % len(self._versions)][..., block]
        size = self.weights.shape[-1]
        # mode="clip" lets numpy write into the buffer directly; every index is in range.
        np.take(self._problem.rows, rows.reshape(-1), axis=0, out=self._gradients.reshape(-1, size), mode="clip")
        products = np.matmul(self._gradients.reshape(-1, 1, size), self._read.reshape(-1, size, 1)).reshape(rows.shape)
        slopes = loss_slope(products - self._problem.targets[rows]) * self._rates[:, None, None]
        self._gradients *= slopes[..., None]
        self.weights -= self._gradients

    def _average(self, number: int) -> None:
        setting = self._setting
        if setting.clusters == 1 or number < setting.interval:
            return
        if number % setting.interval == 0:
            np.subtract(self.weights.mean(axis=2, keepdims=True), self.weights, out=self._correction)
        if number % setting.interval == setting.round_delay:
            self.weights += self._correction

    def _measure(self, number: int) -> None:
        for run, length in enumerate(self._steps[: len(self.weights)]):
            stride = max(1, length // MEASURED)
            if number % stride == stride // 2:
                weight = 1 / len(range(stride // 2, length, stride))
                self._sums[run] += weight * self._problem.mean_square_gradient(self.weights[run].mean(axis=1))

    def _keep(self, alive: int) -> None:
        """Drop the runs that are over; the longest come first."""
        self._rates = self._rates[:alive]
        self._versions = np.ascontiguousarray(self._versions[:, :alive])
        self.weights, self._correction = self.weights[:alive], self._correction[:alive]
        self._read, self._gradients = self._read[:alive], self._gradients[:alive]


# ------------------------------------------------------------ clusters of unequal speed


def kept_samples(per_round: Sequence[int], weights: Sequence[float]) -> float:
    """Return the fraction of the samples that averaging makes use of, to leading order: docs/theory.md, unequal speeds.

    Cluster c makes `per_round[c]` updates between two averages and counts with `weights[c]`; the weights add up to 1.
    """
    step = sum(weight * count for weight, count in zip(weights, per_round, strict=True))
    noise = sum(weight**2 * count for weight, count in zip(weights, per_round, strict=True))
    return step**2 / (sum(per_round) * noise)


def noise_floor(problem: Problem, per_round: Sequence[int], weights: Sequence[float], *, progress: float, rounds: int, seeds: int) -> float:
    """Return the mean of |grad f|^2 at the averages of the last two thirds of `rounds`: what the noise keeps up.

    Clusters make unequally many updates per round, without any delay; `progress` is the step size times the mean updates of a round.
    """
    rng = np.random.default_rng([*per_round, rounds])
    counts, shares = np.array(per_round), np.array(weights)
    step = progress / float(shares @ counts)
    average = np.zeros((seeds, problem.rows.shape[1]))
    floors = []
    for number in range(rounds):
        local = np.repeat(average[:, None], len(counts), axis=1)
        for update in range(max(per_round)):
            drawn = rng.integers(len(problem.rows), size=(seeds, len(counts)))
            rows = problem.rows[drawn]
            slopes = loss_slope(np.einsum("scd,scd->sc", rows, local) - problem.targets[drawn])
            local -= step * (slopes * (counts > update))[..., None] * rows
        average = np.einsum("c,scd->sd", shares, local)
        if number >= rounds // 3:
            floors.append(float(problem.mean_square_gradient(average).mean()))
    return float(np.mean(floors))
