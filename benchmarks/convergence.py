"""Staleness corrections against synchronous training: `python -m benchmarks.convergence`.

A character GPT of eight blocks is trained on Python's own help topics as a pipeline of eight stages, one block each, with one
micro-batch per update (`--per-update`): the largest delay there is, 7 updates at the first stage. Every correction, and synchronous
training (1F1B with flush), sees the same samples in the same order, three seeds each, with AdamW, a warm-up and a cosine to zero. The
learning rate of each is the best of `--rates`, by the median validation loss of runs of SEARCH_SHARE of the length (and with the schedule
that belongs to it); by default it is the one that such a search found. With two clusters each sees half of the samples, and stages
average every 16 updates in the background, one
round lasting eight updates; rates are those found with one cluster. The baseline there is synchronous training in two clusters.

The stages are real (StageRunner), and so is what decides their order (PipelineSchedule); all run in one process under an exact clock.
The network is left out: it moves values and changes none of them; when they arrive decides the order alone, which the clock gives.

`async_over_sync`: median validation loss of the default correction over that of synchronous training, the worse of one and two
clusters. `--quick` is a check that all of it runs, in two minutes. Curves go to docs/benchmarks/convergence.svg.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence_model import Sizes
from benchmarks.convergence_picture import Line, Panel, draw
from benchmarks.convergence_pipeline import BACKWARD, FORWARD, Curve, RunPlan, Training
from roost.config import JobConfig, NamedArguments
from roost.pipeline.allocator import keep_freed_memory

SEEDS = (1, 2, 3)
RATES = (1e-3, 3e-3, 1e-2)
SEARCH_SHARE = 0.125
MICRO_BATCHES = 20_160
"""Per seed."""
DEFAULT_RATES = (3e-3,)
"""The best of RATES for synchronous training and for the default correction, in runs of 6,720 micro-batches."""
EVALUATIONS = 24
ROUND_UPDATES = 8
WARM_UP = 0.05
SYNC = "synchronous"
CORRECTIONS = (
    "none",
    "rate_by_delay",
    "rate_warmup",
    "nesterov",
    "prediction",
    "compensation",
    "rotation",
    f"{SYNC} with nesterov",
    f"{SYNC} with rotation",
)
"""The last two make another optimizer of the job's: so synchronous training is run with that, too."""
PICTURE = Path(__file__).parent.parent / "docs" / "benchmarks" / "convergence.svg"


@dataclass(frozen=True, kw_only=True)
class Contest:
    """What is compared, and for how long."""

    names: tuple[str, ...]
    """Corrections, SYNC for synchronous training, 'SYNC with X' for that with the optimizer that correction X makes."""
    micro_batches: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    evaluations: int
    workers: int
    """Processes that train."""
    per_update: int = 1


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run of all seeds."""

    name: str
    rate: float
    micro_batches: int
    clusters: int
    seeds: tuple[int, ...]
    evaluations: int
    per_update: int = 1
    """Micro-batches per batch; runs are cut to whole updates of two clusters."""


def run_plan(task: Task) -> RunPlan:
    """Return the job, the model's sizes and the clock of a task."""
    name, rate = task.name, task.rate
    micro_batches = task.micro_batches - task.micro_batches % (2 * task.per_update)
    batch = Sizes().micro_batch * task.per_update
    sizes = Sizes()
    synchronous, _, correction = name.partition(" with ")
    if synchronous != SYNC:
        correction = name
    schedule = (("max_lr", rate), ("total_steps", micro_batches // task.per_update), ("pct_start", WARM_UP), ("cycle_momentum", False))
    config = JobConfig(
        job_id="convergence",
        optimizer=NamedArguments(name="AdamW", arguments=(("lr", rate),)),
        schedule=NamedArguments(name="OneCycleLR", arguments=schedule),
        batch_size=batch,
        micro_batch_size=sizes.micro_batch,
        samples=micro_batches * sizes.micro_batch,
        mode="sync" if synchronous == SYNC else "async",
        correction=correction or "none",
    )
    return RunPlan(
        config=config,
        sizes=sizes,
        seeds=task.seeds,
        clusters=task.clusters,
        micro_batches=micro_batches,
        per_update=task.per_update,
        evaluations=task.evaluations,
        round_time=ROUND_UPDATES * task.per_update * (FORWARD + BACKWARD),
    )


def train(task: Task) -> Curve:
    """Return the curve of one run, and say how it ended."""
    begin = time.perf_counter()
    curve = Training(run_plan(task)).run()
    losses = " ".join(f"{loss:.4f}" for loss in curve.final)
    what = f"{task.name}, clusters {task.clusters}, rate {task.rate:g}, {task.micro_batches} micro-batches"
    print(f"{what}: {losses} ({time.perf_counter() - begin:.0f} s)", flush=True)
    return curve


def train_all(tasks: Sequence[Task], workers: int) -> list[Curve]:
    """Return the curve of every task, computed by that many processes of one thread each; 1: by this process."""
    if workers == 1:
        return [train(task) for task in tasks]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=prepare_process) as pool:
        return list(pool.map(train, tasks))


def prepare_process() -> None:
    """Let this process compute with one thread and keep freed memory, as an agent does."""
    torch.set_num_threads(1)
    keep_freed_memory()


def best_rates(contest: Contest) -> dict[str, float]:
    """Return for every name the learning rate of the grid with the lowest median loss in short runs."""
    if len(contest.rates) == 1:
        return dict.fromkeys(contest.names, contest.rates[0])
    length = int(contest.micro_batches * SEARCH_SHARE)
    tasks = [
        Task(
            name=name,
            rate=rate,
            micro_batches=length,
            clusters=1,
            seeds=contest.seeds,
            evaluations=1,
            per_update=contest.per_update,
        )
        for name in contest.names
        for rate in contest.rates
    ]
    found = {(task.name, task.rate): _median(curve) for task, curve in zip(tasks, train_all(tasks, contest.workers), strict=True)}
    return {name: min(contest.rates, key=lambda rate: found[name, rate]) for name in contest.names}


def compare(contest: Contest, default: str) -> dict[str, Any]:
    """Return what every run gave and `async_over_sync`."""
    rates = best_rates(contest)
    in_two = tuple(dict.fromkeys((SYNC, "none", default)))
    tasks = [
        Task(
            name=name,
            rate=rates[name],
            micro_batches=contest.micro_batches,
            clusters=clusters,
            seeds=contest.seeds,
            evaluations=contest.evaluations,
            per_update=contest.per_update,
        )
        for clusters, names in ((1, contest.names), (2, in_two))
        for name in names
    ]
    curves: dict[str, dict[str, Curve]] = {"clusters_1": {}, "clusters_2": {}}
    for task, curve in zip(tasks, train_all(tasks, contest.workers), strict=True):
        curves[f"clusters_{task.clusters}"][task.name] = curve
    over = {key: {name: _median(curve) / _median(found[SYNC]) for name, curve in found.items()} for key, found in curves.items()}
    return {
        "benchmark": "convergence",
        "async_over_sync": round(max(found[default] for found in over.values()), 4),
        "default": default,
        "micro_batches_per_update": contest.per_update,
        "micro_batches_per_run": contest.micro_batches * len(contest.seeds),
        "seeds": list(contest.seeds),
        "rates": rates,
        "over_sync": {key: {name: round(value, 4) for name, value in found.items()} for key, found in over.items()},
        "loss": {key: {name: [round(x, 4) for x in curve.final] for name, curve in found.items()} for key, found in curves.items()},
        "delays": [round(delay, 2) for delay in curves["clusters_1"]["none"].delays],
        "curves": {key: {name: _median_points(curve) for name, curve in found.items()} for key, found in curves.items()},
    }


def _median(curve: Curve) -> float:
    return statistics.median(curve.final)


def _median_points(curve: Curve) -> list[tuple[int, float]]:
    return [(applied, round(statistics.median(losses), 4)) for applied, losses in curve.points]


def picture_of(result: dict[str, Any]) -> str:
    """Return the SVG of all curves of a result: a panel per number of clusters."""
    panels = [
        Panel(
            title=f"{key[-1]} cluster{'s' if key[-1] != '1' else ''}",
            lines=tuple(Line(name=name, points=tuple((x, y) for x, y in points), bold=name == SYNC) for name, points in found.items()),
        )
        for key, found in result["curves"].items()
    ]
    return draw(
        f"Validation loss while training: eight stages, micro-batches per update: {result['micro_batches_per_update']}",
        f"Character GPT on Python's help topics; median of {len(result['seeds'])} seeds; learning rate of each the best of a common grid",
        panels,
        ("micro-batches per seed", "nats per character"),
    )


def main() -> None:
    """Run the contest and print the result as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="check that it runs: two minutes, figures mean nothing")
    parser.add_argument("--micro-batches", type=int, default=MICRO_BATCHES, help="per seed")
    parser.add_argument("--corrections", nargs="*", default=["none", "nesterov"], help=f"of {', '.join(CORRECTIONS)}; joined ones with '+'")
    parser.add_argument("--rates", nargs="*", type=float, default=list(DEFAULT_RATES), help=f"to find all: {' '.join(map(str, RATES))}")
    parser.add_argument("--default", default="nesterov", help="the correction that async_over_sync is about")
    parser.add_argument("--per-update", type=int, default=1, help="micro-batches per update: more make the delay smaller")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    prepare_process()
    names = tuple(dict.fromkeys((SYNC, *options.corrections, options.default)))
    contest = Contest(
        names=names,
        micro_batches=240 if options.quick else options.micro_batches,
        rates=(3e-3,) if options.quick else tuple(options.rates),
        seeds=SEEDS,
        evaluations=2 if options.quick else EVALUATIONS,
        workers=options.workers,
        per_update=options.per_update,
    )
    result = compare(contest, options.default)
    if not options.quick:
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        options.picture.write_text(picture_of(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
