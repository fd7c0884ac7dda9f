"""Rate and linear speed-up of the asynchronous engine on a problem with known constants: `python -m benchmarks.theory`.

SGD under the engine's delays (`theory_model.py`), with the step size of the theorem in docs/theory.md, whose assumptions hold
and whose conditions are computed, not fitted. Shown: the slope of log(mean |grad f|^2) against log K, the updates that one
device without any delay needs to be as accurate as C clusters, and where that stops. Nothing is timed: an update counts as
one unit of time on every cluster, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.theory_drawing import Line, Mark, draw
from benchmarks.theory_model import (
    Floats,
    Problem,
    Setting,
    Simulation,
    engine_staleness,
    kept_samples,
    make_problem,
    noise_floor,
    proved_bound,
    step_condition,
    steps_needed,
)

DRAWING = Path(__file__).parent.parent / "docs" / "benchmarks" / "theory.svg"
EMULATED = (
    "a numerical model of the engine's delays, without processes or network: every cluster does one update per unit of time; "
    "staleness from the engine's own schedule, played with forwards of 1 and backwards of 2 units on every stage"
)
STAGES = 4
CLUSTERS = (1, 2, 4, 8)
SHORTEST = 2048
"""Updates of the shortest run that is fitted: one device's error does not fall yet in much shorter ones."""
BASELINE_SHORTEST = 512
"""Of one device, for comparing accuracies: what is less accurate counts as if it were as accurate as that."""
LONGEST, SEEDS = 262_144, 32
QUICK_LONGEST, QUICK_SEEDS = 131_072, 4
LINKS = (0, 4, 20, 40, 84, 170, 340)
"""Micro-batches that are on their way between two stages, both directions together."""
UNEQUAL = (4, 8, 16)
"""Updates between two averages of clusters of speeds 1 : 2 : 4."""
UNEQUAL_PROGRESS, UNEQUAL_ROUNDS = 0.02, 1200
RESAMPLES = 200
"""Of the seeds, for standard errors."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Errors, the means of |grad f|^2 over whole runs, of one setting."""

    setting: Setting
    steps: tuple[int, ...]
    """Updates of each cluster, ascending."""
    errors: Floats
    """(lengths, seeds)"""

    def slope(self) -> tuple[float, float]:
        """Return the least-squares slope of log(mean error) against log K, and the standard deviation of the single seeds' slopes."""
        logs = np.log(np.array(self.steps))
        single = np.polyfit(logs, np.log(self.errors), 1)[0]
        return float(np.polyfit(logs, np.log(self.errors.mean(axis=1)), 1)[0]), float(single.std(ddof=1))


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """Updates that one device needs to be as accurate, over the updates of each cluster."""

    name: str
    """What is varied."""
    clusters: int
    steps: int
    most_stale: int
    interval: int
    per_cluster: float
    """Speed-up over C."""
    standard_error: float
    """Of `per_cluster`, over resampled seeds."""
    steps_over_needed: float
    """K over what the theorem's conditions ask; they hold from 1 on."""
    step_condition: float
    """The step size over what conditions (3) and (4) allow; they hold up to 1."""

    @property
    def holds(self) -> bool:
        """True if linear speed-up is proved here."""
        return self.steps_over_needed >= 1


def measure_curve(problem: Problem, setting: Setting, steps: Sequence[int], seeds: int) -> Curve:
    """Return the errors of runs of `steps` updates."""
    return Curve(setting=setting, steps=tuple(sorted(steps)), errors=Simulation(problem, setting, steps, seeds).run())


def equal_accuracy_steps(baseline: Curve, error: float, seeds: NDArray[np.int64]) -> float:
    """Return the updates after which `baseline`, averaged over `seeds`, has this error: log-log interpolation between its runs.

    An error beyond the shortest or the longest run counts as that run's: the result is then too favourable for the former, and
    too low for the latter.
    """
    logs = np.log(baseline.errors[:, seeds].mean(axis=1))[::-1]
    return float(np.exp(np.interp(math.log(error), logs, np.log(np.array(baseline.steps))[::-1])))


def measure_speedup(problem: Problem, baseline: Curve, curve: Curve, steps: int, name: str) -> Speedup:
    """Return the speed-up of the run of `steps` updates over `baseline`, one device without any delay."""
    errors, setting = curve.errors[curve.steps.index(steps)], curve.setting

    def per_cluster(seeds: NDArray[np.int64], others: NDArray[np.int64]) -> float:
        return equal_accuracy_steps(baseline, float(errors[others].mean()), seeds) / (steps * setting.clusters)

    rng, every = np.random.default_rng(0), np.arange(errors.size)
    resampled = [per_cluster(*rng.integers(errors.size, size=(2, errors.size))) for _ in range(RESAMPLES)]
    return Speedup(
        name=name,
        clusters=setting.clusters,
        steps=steps,
        most_stale=setting.most_stale,
        interval=setting.interval,
        per_cluster=per_cluster(every, every),
        standard_error=float(np.std(resampled)),
        steps_over_needed=steps / steps_needed(problem, setting),
        step_condition=step_condition(problem, setting, steps),
    )


def speedups_of_curves(problem: Problem, baseline: Curve, curves: Sequence[Curve]) -> list[Speedup]:
    """Return the speed-up of every run of which the baseline has one of as many updates in all."""
    return [
        measure_speedup(problem, baseline, curve, steps, "clusters and updates")
        for curve in curves
        for steps in curve.steps
        if steps * curve.setting.clusters <= baseline.steps[-1]
    ]


def where_it_stops(problem: Problem, baseline: Curve, updates: int, seeds: int) -> list[Speedup]:
    """Return speed-ups far beyond the conditions: `updates` in all, one of staleness, clusters and interval growing."""
    usual = engine_staleness(STAGES)
    settings = [("longer links", Setting(clusters=8, staleness=engine_staleness(STAGES, hop=1.5 * trip))) for trip in LINKS]
    settings += [("more clusters", Setting(clusters=clusters, staleness=usual)) for clusters in (8, 16, 32, 64, 128, 256, 512)]
    settings += [
        ("rarer averaging", Setting(clusters=8, staleness=usual, interval=interval, round_delay=interval // 4))
        for interval in (16, 64, 256, 1024, 4096)
    ]
    found = []
    for name, setting in settings:
        steps = updates // setting.clusters
        found.append(measure_speedup(problem, baseline, measure_curve(problem, setting, [steps], seeds), steps, name))
    return found


def unequal_speeds(problem: Problem, seeds: int) -> dict[str, float]:
    """Return the noise that weights by samples keep up over that of equal weights, at the same progress: calculated and measured."""
    equal = [1 / len(UNEQUAL)] * len(UNEQUAL)
    by_samples = [count / sum(UNEQUAL) for count in UNEQUAL]
    floors = [
        noise_floor(problem, UNEQUAL, weights, progress=UNEQUAL_PROGRESS, rounds=UNEQUAL_ROUNDS, seeds=seeds)
        for weights in (by_samples, equal)
    ]
    calculated = kept_samples(UNEQUAL, equal) / kept_samples(UNEQUAL, by_samples)
    return {"calculated": calculated, "measured": floors[0] / floors[1]}


# ------------------------------------------------------------ the benchmark


def run(*, longest: int, seeds: int) -> tuple[dict[str, object], str]:
    """Return the figures, for JSON, and the drawing, an SVG text."""
    started = time.perf_counter()
    problem, usual = make_problem(), engine_staleness(STAGES)
    device = Setting(clusters=1, staleness=((0,),) * STAGES)
    baseline = measure_curve(problem, device, _doubling(BASELINE_SHORTEST, longest), seeds)
    curves = [
        measure_curve(problem, Setting(clusters=clusters, staleness=usual), _doubling(SHORTEST, longest), seeds) for clusters in CLUSTERS
    ]
    speedups = speedups_of_curves(problem, baseline, curves)
    stops = where_it_stops(problem, baseline, longest // 2, seeds)
    proved = [speedup for speedup in [*speedups, *stops] if speedup.holds]
    slopes = {curve.setting.clusters: curve.slope() for curve in curves}
    report: dict[str, object] = {
        "benchmark": "theory",
        "emulated": EMULATED,
        "problem": {
            "smoothness": problem.smoothness,
            "gap": problem.gap,
            "variance": problem.variance,
            "difficulty": problem.difficulty,
            "least_curvature_at_start": problem.least_curvature(np.zeros(problem.rows.shape[1])),
        },
        "seeds": seeds,
        "staleness": [updates[-1] for updates in usual],
        "interval": curves[0].setting.interval,
        "round_delay": curves[0].setting.round_delay,
        "steps": list(curves[0].steps),
        "one_device": {"steps": list(baseline.steps), "errors": [float(error) for error in baseline.errors.mean(axis=1)]},
        "errors": {str(curve.setting.clusters): [float(error) for error in curve.errors.mean(axis=1)] for curve in curves},
        "slopes": {str(clusters): {"slope": slope, "spread": spread} for clusters, (slope, spread) in slopes.items()},
        "least_bound_over_error": _least_bound_over_error(problem, curves),
        "speedups": [{**asdict(speedup), "holds": speedup.holds} for speedup in speedups],
        "stops": [{**asdict(speedup), "holds": speedup.holds} for speedup in stops],
        "noise_of_weights_by_samples": unequal_speeds(problem, seeds),
        "slope": max(slope for slope, _ in slopes.values()),
        "most_clusters_proved": max(speedup.clusters for speedup in proved),
        "speedup_per_cluster": min(speedup.per_cluster for speedup in proved),
        "seconds": time.perf_counter() - started,
    }
    return report, _drawing(problem, baseline, curves, stops)


def _doubling(first: int, last: int) -> list[int]:
    return [first << power for power in range((last // first).bit_length())]


def _least_bound_over_error(problem: Problem, curves: Sequence[Curve]) -> float:
    """Return the proved bound over the measured error, the least of all runs for which it is proved."""
    return min(
        proved_bound(problem, curve.setting, steps) / float(error)
        for curve in curves
        for steps, error in zip(curve.steps, curve.errors.mean(axis=1), strict=True)
        if step_condition(problem, curve.setting, steps) <= 1
    )


def _drawing(problem: Problem, baseline: Curve, curves: Sequence[Curve], stops: Sequence[Speedup]) -> str:
    lines = [_line("one device, no delay", baseline)]
    lines += [_line(f"C = {curve.setting.clusters}", curve) for curve in curves]
    longest = curves[0].steps[-1]
    bound = [(float(steps), proved_bound(problem, curves[0].setting, steps)) for steps in (curves[0].steps[0], longest)]
    names = list(dict.fromkeys(stop.name for stop in stops))
    marks = [
        Line(
            name=name,
            marks=tuple(Mark(x=stop.step_condition, y=stop.per_cluster, filled=stop.holds) for stop in stops if stop.name == name),
        )
        for name in names
    ]
    return draw(lines, bound, marks)


def _line(name: str, curve: Curve) -> Line:
    points = zip(curve.steps, curve.errors.mean(axis=1), strict=True)
    return Line(name=name, marks=tuple(Mark(x=float(steps), y=float(error), filled=True) for steps, error in points))


def _print(slopes: object, speedups: Sequence[dict[str, object]]) -> None:
    columns = {"name": 22, "clusters": 10, "steps": 9, "most_stale": 12, "interval": 10, "per_cluster": 13, "standard_error": 16}
    columns |= {"steps_over_needed": 19, "step_condition": 16, "holds": 7}
    print("".join(f"{name:>{width}}" for name, width in columns.items()))
    for one in speedups:
        cells = {name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in one.items()}
        print("".join(f"{cells[name]:>{width}}" for name, width in columns.items()))
    print(f"slopes: {slopes}")


def main() -> None:
    """Run the benchmark, write the drawing, print the table and, last, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter runs and fewer seeds; the drawing is left as it is")
    quick = parser.parse_args().quick
    report, drawing = run(longest=QUICK_LONGEST if quick else LONGEST, seeds=QUICK_SEEDS if quick else SEEDS)
    if not quick:
        DRAWING.parent.mkdir(parents=True, exist_ok=True)
        DRAWING.write_text(drawing)
    print(f"emulated: {EMULATED}")
    speedups, stops = report["speedups"], report["stops"]
    assert isinstance(speedups, list) and isinstance(stops, list)
    _print(report["slopes"], [*speedups, *stops])
    print(json.dumps(report))


if __name__ == "__main__":
    main()
