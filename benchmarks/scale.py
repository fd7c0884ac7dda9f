"""How far one coordinator reaches: pools of 1,000 and 10,000 emulated nodes that come and go, around the real coordinator.

`python -m benchmarks.scale` prints one JSON object as its last line. Real: the coordinator with its SQLite database on the disk, the
planner and the re-planner, membership and leases, and the encoding of every message. Emulated: nodes (they answer, lease and report at
the rates that the plan predicts, and fetch state at the rates of their links), the requester, the network (20 ms each way), and time: it
jumps from event to event, and for the coordinator a second passes for each CPU second that it uses, so that one that is asked too much
falls behind. gRPC and TLS are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.planning_pools import Scenario, make_scenario
from benchmarks.planning_profiles import load_profile
from benchmarks.scale_churn import Churn
from benchmarks.scale_clock import COORDINATOR, REAL_PROCESS
from benchmarks.scale_nodes import Doing
from benchmarks.scale_pool import EmulatedPool
from roost.messages import JobState

MODEL = "resnet50"
SPARE = 1.5
"""So many nodes, relative to those that are there at a time, ever take part."""
SAMPLES, EPOCHS = 1_281_167, 90
"""ImageNet, as ResNet-50 is trained on it."""
SEED = 1
LOOK_S = 1.0
STARTED = (JobState.TRAINING, JobState.REPAIRING)
START_S = 3600.0
"""Of virtual time, for a job to be planned and built."""


def scenario_of(present: int) -> Scenario:
    """Return a pool of home machines with the links that were measured."""
    found = make_scenario(load_profile(MODEL), int(SPARE * present), SEED)
    return replace(found, config=replace(found.config, samples=SAMPLES, epochs=EPOCHS))


async def play(pool: EmulatedPool, *, present: int, job: bool, minutes: float, budget_s: float) -> dict[str, Any]:
    """Run a pool for some minutes of virtual time after its job has begun, or until it has taken `budget_s` CPU seconds; return figures."""
    began, process = REAL_PROCESS(), psutil.Process()
    rss_before = process.memory_info().rss
    tasks = [pool.loop.create_task(pool.coordinate(), context=COORDINATOR.copy())]
    pool.begin()
    await asyncio.sleep(2 * pool.heartbeat_s + 2)
    if job:
        tasks.append(pool.loop.create_task(pool.submit(wait_nodes=present // 2)))
    while job and not (pool.job is not None and pool.job.state in STARTED and pool.job.keeper.built):
        await asyncio.sleep(LOOK_S)
        if pool.error or REAL_PROCESS() - began > budget_s or pool.now > START_S:
            break
    start = {"job_began_after_s": pool.now, "coordinator_cpu_s": pool.loop.cpu_s, "planning_s": pool.loop.thread_s, "error": pool.error}
    if job and (pool.job is None or not pool.job.keeper.built):
        figures: dict[str, Any] = {"began": False}
    else:
        figures = await _measure(pool, minutes=minutes, until=began + budget_s)
    broke = next((repr(task.exception()) for task in tasks if task.done() and not task.cancelled()), "")
    figures |= {
        "broke": broke,
        "start": start,
        "rss_mb": (process.memory_info().rss - rss_before) / 1e6,
        "cpu_s_of_the_run": REAL_PROCESS() - began,
    }
    return figures


async def _measure(pool: EmulatedPool, *, minutes: float, until: float) -> dict[str, Any]:
    pool.settle()
    pool.spent.clear()
    pool.messages.clear()
    pool.nbytes.clear()
    pool.replans.clear()
    cpu, threads, virtual = pool.loop.cpu_s, pool.loop.thread_s, pool.now
    pool.loop.late_s = 0.0
    pool.begin_churn()
    # What is waited for is CPU time, which no event tells of.
    while pool.now < virtual + 60 * minutes and until > REAL_PROCESS():  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    pool.settle()
    passed = (pool.now - virtual) / 60
    node_minutes = sum(pool.spent.values()) / 60
    in_job = pool.spent[Doing.TRAINING] + pool.spent[Doing.STOPPED]
    times = {kind: [seconds for known, seconds in pool.replans if known == kind] for kind in ("repair", "improve")}
    job = pool.job
    return {
        "began": True,
        "virtual_minutes": passed,
        "present": node_minutes / passed,
        "departures": pool.departures,
        "stages_lost": pool.lost_stages,
        "coordinator_cpu_s_per_minute": (pool.loop.cpu_s - cpu) / passed,
        "planning_s_per_minute": (pool.loop.thread_s - threads) / passed,
        "late_s_max": pool.loop.late_s,
        "messages_per_node_minute": sum(pool.messages.values()) / node_minutes,
        "bytes_per_node_minute": sum(pool.nbytes.values()) / node_minutes,
        "most_messages": dict(pool.messages.most_common(6)),
        "most_mb": {kind: nbytes / 1e6 for kind, nbytes in pool.nbytes.most_common(4)},
        "replan_s": {kind: _spread(seconds) for kind, seconds in times.items()},
        "repair_s": _spread(pool.repairs),
        "stages_lost_and_not_repaired": pool.lost_stages - len(pool.repairs),
        "training_of_nodes_with_a_stage": pool.spent[Doing.TRAINING] / in_job if in_job else None,
        "training_of_all_nodes": pool.spent[Doing.TRAINING] / (60 * node_minutes),
        "clusters": len(job.keeper.numbers) if job is not None else 0,
        "nodes_of_the_plan": len(job.plan.stages) if job is not None and job.plan is not None else 0,
        "job": str(job.state) if job is not None else "",
        "job_error": job.error.message if job is not None and job.error is not None else "",
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"count": 0}
    return {"count": len(seconds), "median": statistics.median(seconds), "max": max(seconds)}


def case(present: int, *, job: bool, minutes: float, heartbeat_s: float, longer: float, budget_s: float) -> dict[str, Any]:
    """Return the figures of one pool."""
    churn = Churn(present, longer=longer, rng=random.Random(SEED))
    with tempfile.TemporaryDirectory(prefix="roost-scale-") as directory, contextlib.ExitStack() as stack:
        pool = EmulatedPool(
            scenario_of(present), present=present, churn=churn, heartbeat_s=heartbeat_s, directory=Path(directory), seed=SEED
        )
        for patch in pool.patches():
            stack.enter_context(patch)
        try:
            figures = pool.loop.run_until_complete(play(pool, present=present, job=job, minutes=minutes, budget_s=budget_s))
        finally:
            pool.close()
    return {"nodes": present, "with_job": job, "heartbeat_s": heartbeat_s, "mean_session_s": churn.mean_s, **figures}


def rounded(value: Any) -> Any:
    """Return figures with four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list) else value


def main() -> None:
    """Run every case and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="100 nodes with a job and 1,000 without, a few minutes of virtual time")
    parser.add_argument("--nodes", type=int, nargs="*", default=None, help="pools without a job")
    parser.add_argument("--jobs", type=int, nargs="*", default=None, help="pools whose job takes all nodes")
    parser.add_argument("--minutes", type=float, default=10.0, help="of virtual time, at most")
    parser.add_argument("--heartbeat", type=float, default=0.5, help="seconds between two heartbeats of a node")
    parser.add_argument("--longer", type=float, default=1.0, help="sessions are so many times longer than published")
    parser.add_argument("--budget", type=float, default=900.0, help="CPU seconds for each pool, at most")
    options = parser.parse_args()
    logging.getLogger("roost").setLevel(logging.CRITICAL)
    idle = options.nodes if options.nodes is not None else ([1000] if options.quick else [1000, 10_000])
    jobs = options.jobs if options.jobs is not None else ([100] if options.quick else [100, 300, 1000])
    minutes = min(options.minutes, 2.0) if options.quick else options.minutes
    cases = []
    for present, job in [*((count, False) for count in idle), *((count, True) for count in jobs)]:
        found = case(
            present,
            job=job,
            minutes=minutes,
            heartbeat_s=options.heartbeat,
            longer=options.longer,
            budget_s=min(options.budget, 60.0) if options.quick else options.budget,
        )
        cases.append(rounded(found))
        print(json.dumps(cases[-1]), flush=True)
    print(json.dumps({"benchmark": "scale", "model": MODEL, "churn": "Weibull 0.38, 42.4 min (BitTorrent)", "cases": cases}))


if __name__ == "__main__":
    main()
