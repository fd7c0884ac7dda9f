"""The model of the engine's delays behind `benchmarks.theory`: its staleness, its constants, its updates, its measures."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from benchmarks.theory import Curve, equal_accuracy_steps, measure_curve, measure_speedup, run
from benchmarks.theory_drawing import Line, Mark, draw
from benchmarks.theory_model import (
    Floats,
    Problem,
    Setting,
    Simulation,
    engine_staleness,
    kept_samples,
    loss_slope,
    make_problem,
    noise_floor,
    proved_bound,
    step_condition,
    step_size,
    steps_needed,
)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(rows=96, size=12)


def gradient(problem: Problem, point: Floats) -> Floats:
    return loss_slope(problem.rows @ point - problem.targets) @ problem.rows / len(problem.rows)


# ------------------------------------------------------------ staleness


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_stage_sees_its_updates_as_late_as_stages_follow_it(stages: int) -> None:
    for stage, updates in enumerate(engine_staleness(stages)):
        assert list(updates) == [min(number, stages - 1 - stage) for number in range(len(updates))]


def test_longer_links_make_earlier_stages_staler() -> None:
    far = [updates[-1] for updates in engine_staleness(4, hop=6.0)]
    assert far == [15, 10, 5, 0], "four more micro-batches are on their way per link that follows"


# ------------------------------------------------------------ constants


def test_gradient_is_the_derivative_of_the_loss(problem: Problem) -> None:
    point, step = np.random.default_rng(1).standard_normal(12), 1e-6

    def loss(at: Floats) -> float:
        squares = (problem.rows @ at - problem.targets) ** 2
        return float(np.mean(squares / (1 + squares)))

    slopes = [(loss(point + step * axis) - loss(point - step * axis)) / (2 * step) for axis in np.eye(12)]
    assert gradient(problem, point) == pytest.approx(slopes, abs=1e-8)
    assert problem.mean_square_gradient(point[None])[0] == pytest.approx(np.sum(np.square(slopes)))
    assert loss(np.zeros(12)) == pytest.approx(problem.gap)


def test_known_constants_bound_curvature_and_variance_everywhere(problem: Problem) -> None:
    rng = np.random.default_rng(2)
    for scale in (0.1, 1.0, 5.0):
        point, other = scale * rng.standard_normal((2, 12))
        apart = np.linalg.norm(gradient(problem, point) - gradient(problem, other)) / np.linalg.norm(point - other)
        assert apart <= problem.smoothness
        single = loss_slope(problem.rows @ point - problem.targets)[:, None] * problem.rows
        assert np.mean(np.sum((single - gradient(problem, point)) ** 2, axis=1)) <= problem.variance


def test_benchmark_problem_is_not_convex() -> None:
    full = make_problem()
    assert full.least_curvature(np.zeros(64)) < -0.05


# ------------------------------------------------------------ updates


def plain_run(problem: Problem, setting: Setting, rows: Floats, steps: int) -> tuple[Floats, Floats]:
    """Return (versions, updates), both (steps, clusters, d), of one run, written down as docs/theory.md says it."""
    size = problem.rows.shape[1]
    edges = np.linspace(0, size, len(setting.staleness) + 1).astype(int)
    weights = np.zeros((setting.clusters, size))
    versions, updates = np.zeros((steps, *weights.shape)), np.zeros((steps, *weights.shape))
    snapshot = weights.copy()
    for number in range(steps):
        if number and number % setting.interval == 0:
            snapshot = weights.copy()
        if number >= setting.interval and number % setting.interval == setting.round_delay:
            weights = weights + (snapshot.mean(axis=0) - snapshot)
        versions[number] = weights
        for cluster in range(setting.clusters):
            point = np.zeros(size)
            for stage, staleness in enumerate(setting.staleness):
                part = slice(edges[stage], edges[stage + 1])
                point[part] = versions[number - staleness[min(number, len(staleness) - 1)], cluster, part]
            row = int(rows[number, cluster])
            slope = loss_slope(np.array(problem.rows[row] @ point - problem.targets[row]))
            updates[number, cluster] = step_size(problem, setting.clusters, steps) * slope * problem.rows[row]
        weights = weights - updates[number]
    return versions, updates


@pytest.mark.parametrize("clusters,delay", [(1, 2), (3, 2), (3, 0)])
def test_simulation_does_what_the_model_says(problem: Problem, clusters: int, delay: int) -> None:
    setting = Setting(clusters=clusters, staleness=engine_staleness(3), interval=5, round_delay=delay)
    steps = 33
    drawn = np.random.default_rng(3).integers(96, size=(steps, 2, clusters))
    simulation = Simulation(problem, setting, [steps], seeds=2)
    for number in range(steps):
        simulation.update(number, drawn[number][None])
    for seed in range(2):
        versions, updates = plain_run(problem, setting, drawn[:, seed], steps)
        assert simulation.weights[0, seed] == pytest.approx(versions[-1] - updates[-1], abs=1e-12)


def test_late_averages_neither_lose_nor_repeat_an_update(problem: Problem) -> None:
    setting = Setting(clusters=3, staleness=engine_staleness(3), interval=5, round_delay=3)
    rows = np.random.default_rng(4).integers(96, size=(48, 3))
    versions, updates = plain_run(problem, setting, rows, 48)
    virtual = -np.cumsum(updates.mean(axis=1), axis=0)
    assert versions[1:].mean(axis=1) == pytest.approx(virtual[:-1], abs=1e-12)
    # Right after a result is added, clusters differ by what they did since its snapshot and no more.
    since = updates[15:18].sum(axis=0)
    assert versions[18] + since == pytest.approx(np.tile(virtual[14], (3, 1)), abs=1e-12)


def test_one_cluster_without_delay_is_plain_sgd(problem: Problem) -> None:
    setting = Setting(clusters=1, staleness=((0,),))
    simulation = Simulation(problem, setting, [20], seeds=1)
    point, rows = np.zeros(12), np.random.default_rng(5).integers(96, size=20)
    for number, row in enumerate(rows):
        simulation.update(number, np.array([[[row]]]))
        residual = problem.rows[row] @ point - problem.targets[row]
        point = point - step_size(problem, 1, 20) * 2 * residual / (1 + residual**2) ** 2 * problem.rows[row]
    assert simulation.weights[0, 0, 0] == pytest.approx(point, abs=1e-12)


def test_runs_of_several_lengths_come_back_shortest_first(problem: Problem) -> None:
    setting = Setting(clusters=2, staleness=engine_staleness(2), interval=4, round_delay=1)
    curve = measure_curve(problem, setting, [64, 1024], seeds=4)
    assert curve.steps == (64, 1024)
    assert curve.errors.shape == (2, 4)
    start = problem.mean_square_gradient(np.zeros((1, 12)))[0]
    assert curve.errors[1].mean() < curve.errors[0].mean() < 2 * start


def test_runs_stay_below_the_proved_bound(problem: Problem) -> None:
    setting = Setting(clusters=2, staleness=engine_staleness(3), interval=3, round_delay=1)
    steps = int(steps_needed(problem, setting)) + 1
    curve = measure_curve(problem, setting, [steps, 4 * steps], seeds=8)
    for length, error in zip(curve.steps, curve.errors.mean(axis=1), strict=True):
        assert step_condition(problem, setting, length) <= 1
        assert error < proved_bound(problem, setting, length)


# ------------------------------------------------------------ conditions and measures


def test_conditions_on_steps_and_on_the_step_size_agree(problem: Problem) -> None:
    for clusters, interval in [(1, 16), (2, 4), (4, 32)]:
        setting = Setting(clusters=clusters, staleness=engine_staleness(4), interval=interval)
        needed = int(steps_needed(problem, setting)) + 1
        assert step_condition(problem, setting, needed) <= 1
        stale, window = setting.most_stale, setting.window
        from_step = problem.difficulty * clusters * max(32 * stale**2, 72 * window * (window + stale))
        assert step_condition(problem, setting, int(from_step) + 1) == pytest.approx(1, rel=0.05)


def test_one_cluster_has_no_averages_to_wait_for() -> None:
    alone = Setting(clusters=1, staleness=engine_staleness(4))
    assert (alone.window, alone.lateness) == (0, 3)
    assert Setting(clusters=8, staleness=engine_staleness(4)).window == 19


def test_equal_weights_use_every_sample_of_unequal_clusters(problem: Problem) -> None:
    assert kept_samples([4, 8, 16], [1 / 3] * 3) == pytest.approx(1)
    assert kept_samples([4, 8, 16], [1 / 7, 2 / 7, 4 / 7]) == pytest.approx(21**2 / (7 * 73))
    weighted, equal = (
        noise_floor(problem, [1, 8], weights, progress=0.02, rounds=600, seeds=16) for weights in ([1 / 9, 8 / 9], [1 / 2, 1 / 2])
    )
    calculated = kept_samples([1, 8], [1 / 2, 1 / 2]) / kept_samples([1, 8], [1 / 9, 8 / 9])
    assert weighted / equal == pytest.approx(calculated, rel=0.1)


def power_law(clusters: int, steps: tuple[int, ...]) -> Curve:
    errors = np.array([[1 / np.sqrt(clusters * length)] * 3 for length in steps])
    return Curve(setting=Setting(clusters=clusters, staleness=((0,),)), steps=steps, errors=errors)


def test_slope_and_speedup_of_a_power_law_are_exact(problem: Problem) -> None:
    baseline = power_law(1, (64, 512, 4096))
    slope, spread = baseline.slope()
    assert slope == pytest.approx(-0.5)
    assert spread == pytest.approx(0, abs=1e-12)
    speedup = measure_speedup(problem, baseline, power_law(4, (100, 600)), 600, "clusters")
    assert speedup.per_cluster == pytest.approx(1.0)
    assert speedup.standard_error == pytest.approx(0, abs=1e-12)


def test_accuracies_out_of_range_count_as_the_nearest_run() -> None:
    baseline = power_law(1, (64, 512))
    assert equal_accuracy_steps(baseline, 1.0, np.arange(3)) == pytest.approx(64)
    assert equal_accuracy_steps(baseline, 1e-9, np.arange(3)) == pytest.approx(512)


def test_drawing_is_well_formed() -> None:
    line = Line(name="C = 1", marks=(Mark(x=10, y=0.1, filled=True), Mark(x=1000, y=0.01, filled=True)))
    stop = Line(name="more clusters", marks=(Mark(x=0.5, y=1.0, filled=True), Mark(x=50, y=0.1, filled=False)))
    root = ElementTree.fromstring(draw([line], [(10, 1), (1000, 0.1)], [stop]))
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == 4


def test_short_run_of_the_benchmark_reports_both_figures() -> None:
    report, drawing = run(longest=4096, seeds=2)
    assert isinstance(report["slope"], float)
    assert isinstance(report["speedup_per_cluster"], float)
    ElementTree.fromstring(drawing)
