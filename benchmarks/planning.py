"""How good the planner is: `python -m benchmarks.planning` (about 15 minutes on one core; `--quick` for one).

- The planner against the true optimum on random pools of 2 to 7 nodes. Both get the same profile, measured from a real model:
  whole up to FULL_NODES nodes, beyond that with neighbouring units merged, so that the optimum can be found. The planner's
  plan is judged by a second implementation of docs/planning.md, which must also agree with what the planner predicts.
- The planner against the paper's genetic algorithm on pools of 20 to 100 nodes, both judged by that same cost model.
- The seconds that a plan takes, from the start of a fresh process on one core.
- What is predicted against what real runs reach (benchmarks.prediction), unless `--no-runs`.

`--explain N` prints the planner's plan and the optimum of the N-th small pool. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.planning_brute_force import Optimum, find_optimum
from benchmarks.planning_costs import PageCosts, page_costs
from benchmarks.planning_genetic import BaselinePlan, genetic_plans
from benchmarks.planning_pools import Scenario, make_scenario
from benchmarks.planning_profiles import MODELS, load_profile, merge_units
from roost.errors import PlanningError
from roost.planning.planner import make_plan
from roost.types import ClusterPlan, ModelProfile, Plan

SMALL_POOLS, LARGE_POOLS = 200, 50
QUICK_SMALL_POOLS, QUICK_LARGE_POOLS = 24, 4
SMALLEST, LARGEST_SMALL = 2, 7
"""Nodes of a pool whose optimum is searched for."""
LARGE_NODES = (20, 100)
TIMED_NODES = (100, 1000)
FULL_NODES = 4
"""Up to so many nodes the optimum is found for all units of the profile."""
MERGED_UNITS = 20
LARGE_SEED = 10_000
AGREEMENT = 1e-6
"""Relative difference up to which planner and judge predict the same."""
NO_GAP = 1e-9


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a plan is worth by the second implementation of the cost model, and what that does not agree with."""

    value: float
    samples_per_s: float
    problems: tuple[str, ...]


def small_scenario(number: int, profiles: dict[str, ModelProfile]) -> Scenario:
    """Return the `number`-th pool that is compared with the optimum."""
    profile = profiles[MODELS[number % len(MODELS)]]
    nodes = SMALLEST + number // len(MODELS) % (LARGEST_SMALL - SMALLEST + 1)
    return make_scenario(profile if nodes <= FULL_NODES else merge_units(profile, MERGED_UNITS), nodes, number)


def large_scenario(number: int, count: int, profiles: dict[str, ModelProfile]) -> Scenario:
    """Return the `number`-th of `count` pools that are compared with the genetic algorithm."""
    low, high = LARGE_NODES
    nodes = low + round((high - low) * number / max(1, count - 1))
    return make_scenario(profiles[MODELS[number % len(MODELS)]], nodes, LARGE_SEED + number)


def plan_for(scenario: Scenario) -> Plan | None:
    """Return the planner's plan, or None if it says that there is none."""
    try:
        return make_plan(scenario.profile, scenario.nodes, scenario.links, scenario.config, random.Random(0), options=scenario.options)
    except PlanningError:
        return None


def judge(plan: Plan | None, costs: PageCosts) -> Judgement:
    """Return what `plan` is worth; one that breaks a rule is worth nothing."""
    if plan is None:
        return Judgement(value=0.0, samples_per_s=0.0, problems=())
    place = {name: index for index, name in enumerate(costs.names)}
    used = [stage.node_id for stage in plan.stages]
    problems = [] if len(set(used)) == len(used) else ["a node has two stages"]
    value, rates = 0.0, []
    for cluster in plan.clusters:
        found = _judge_cluster(cluster, costs, place, len(plan.clusters))
        value += found.value
        rates.append(found.samples_per_s)
        problems += found.problems
    if min(rates) < costs.slowest_cluster * max(rates) * (1 - AGREEMENT):
        problems.append("a cluster is too slow to be formed")
    if abs(sum(rates) - plan.samples_per_s) > AGREEMENT * plan.samples_per_s:
        problems.append(f"the plan predicts {plan.samples_per_s:.9g} samples/s, the page {sum(rates):.9g}")
    return Judgement(value=value, samples_per_s=sum(rates), problems=tuple(problems))


def _judge_cluster(cluster: ClusterPlan, costs: PageCosts, place: dict[str, int], clusters: int) -> Judgement:
    order, cuts = layout(cluster, place)
    whole = cuts[0] == 0 and cuts[-1] == costs.units and all(a < b for a, b in zip(cuts, cuts[1:], strict=False))
    if not whole or any(a.last_unit != b.first_unit for a, b in zip(cluster.stages, cluster.stages[1:], strict=False)):
        return Judgement(value=0.0, samples_per_s=0.0, problems=(f"cluster {cluster.index} does not hold the model once",))
    again = np.asarray([[stage.recompute for stage in cluster.stages]])
    reached = costs.evaluate_with(np.asarray([order]), np.asarray([cuts]), clusters, again)
    value, rate = float(reached.value[0]), float(reached.samples_per_s[0])
    problems = []
    for k, stage in enumerate(cluster.stages):
        needed = float(costs.memory_needed(cuts[k], cuts[k + 1], stage.max_in_flight, clusters > 1, stage.recompute))
        if needed > costs.memory[order[k]]:
            problems.append(f"{stage.node_id} needs {needed:.0f} bytes and lends {costs.memory[order[k]]:.0f}")
            value = rate = 0.0
        if abs(stage.memory_needed_bytes - needed) > 1 + AGREEMENT * needed:
            problems.append(f"{stage.node_id}: {stage.memory_needed_bytes} bytes, by the page {needed:.0f}")
        if stage.max_in_flight < reached.in_flight[0, k]:
            problems.append(f"{stage.node_id}: {stage.max_in_flight} in flight do not hide its round trip")
        if costs.in_flight_bound and stage.max_in_flight > costs.in_flight_bound:
            problems.append(f"{stage.node_id}: {stage.max_in_flight} in flight, allowed {costs.in_flight_bound}")
    if abs(cluster.samples_per_s - rate) > AGREEMENT * cluster.samples_per_s:
        problems.append(f"cluster {cluster.index}: {cluster.samples_per_s:.9g} samples/s, by the page {rate:.9g}")
    return Judgement(value=value, samples_per_s=rate, problems=tuple(problems))


def layout(cluster: ClusterPlan, place: dict[str, int]) -> tuple[list[int], list[int]]:
    """Return the nodes of a planned cluster as indices, and its cuts."""
    return [place[stage.node_id] for stage in cluster.stages], [0, *(stage.last_unit for stage in cluster.stages)]


def costs_of(scenario: Scenario) -> PageCosts:
    return page_costs(scenario.profile, scenario.nodes, scenario.links, scenario.config, scenario.options)


# ------------------------------------------------------------ against the optimum


def gap_between(found: float, optimum: float) -> float:
    """Return 1 - found / optimum; 0 for less than rounding, or if there is no plan at all."""
    if optimum == 0.0:
        return 0.0
    gap = 1 - found / optimum
    return 0.0 if abs(gap) < NO_GAP else gap


def against_optimum(count: int, profiles: dict[str, ModelProfile]) -> dict[str, object]:
    """Compare `count` small pools; every gap and every disagreement is printed."""
    gaps, infeasible, unlike, disagreements, started = [], 0, 0, 0, time.perf_counter()
    planning_s = 0.0
    for number in range(count):
        scenario = small_scenario(number, profiles)
        costs = costs_of(scenario)
        begin = time.perf_counter()
        plan = plan_for(scenario)
        planning_s += time.perf_counter() - begin
        judged = judge(plan, costs)
        optimum = find_optimum(costs, 0.0 if judged.problems else judged.value)
        gap = gap_between(judged.value, optimum.value)
        infeasible += optimum.value == 0.0
        unlike += (plan is None) != (optimum.value == 0.0)
        disagreements += bool(judged.problems)
        gaps.append(gap)
        if gap or judged.problems:
            print(
                f"pool {number} ({scenario.profile.name}, {len(scenario.nodes)} nodes): gap {gap:.3%} {'; '.join(judged.problems)}",
                flush=True,
            )
        if (number + 1) % 20 == 0:
            print(f"{number + 1} small pools in {time.perf_counter() - started:.0f} s, largest gap {max(gaps):.3%}", flush=True)
    return {
        "pools": count,
        "gap_to_optimum_median": statistics.median(gaps),
        "gap_to_optimum_max": max(gaps),
        "gap_to_optimum_mean": statistics.fmean(gaps),
        "pools_with_gap": sum(gap > 0 for gap in gaps),
        "infeasible_pools": infeasible,
        "infeasible_disagreements": unlike,
        "disagreements": disagreements,
        "planning_s_mean": planning_s / count,
    }


# ------------------------------------------------------------ against the genetic algorithm


def against_genetic(count: int, profiles: dict[str, ModelProfile]) -> dict[str, object]:
    """Compare `count` large pools; those where the genetic algorithm has no feasible plan are counted apart."""
    ratios, paper, values, seconds = [], [], [], []
    infeasible = paper_infeasible = disagreements = 0
    for number in range(count):
        scenario = large_scenario(number, count, profiles)
        costs = costs_of(scenario)
        begin = time.perf_counter()
        plan = plan_for(scenario)
        seconds.append(time.perf_counter() - begin)
        ours = judge(plan, costs)
        disagreements += bool(ours.problems)
        baseline, by_rule = genetic_plans(costs, np.random.default_rng(number))
        infeasible += not baseline.clusters
        paper_infeasible += not by_rule.clusters
        if baseline.clusters:
            ratios.append(ours.samples_per_s / baseline.samples_per_s)
            values.append(ours.value / baseline.value)
        if by_rule.clusters:
            paper.append(ours.samples_per_s / by_rule.samples_per_s)
        print(_line(number, scenario, plan, ours, baseline, by_rule, seconds[-1]), flush=True)
    return {
        "vs_genetic": statistics.median(ratios),
        "vs_genetic_min": min(ratios),
        "vs_genetic_max": max(ratios),
        "vs_genetic_value": statistics.median(values),
        "vs_genetic_paper_division": statistics.median(paper) if paper else None,
        "genetic_pools": count,
        "genetic_infeasible": infeasible,
        "genetic_paper_division_infeasible": paper_infeasible,
        "genetic_disagreements": disagreements,
        "genetic_pools_planning_s_max": max(seconds),
    }


def _line(
    number: int, scenario: Scenario, plan: Plan | None, ours: Judgement, baseline: BaselinePlan, by_rule: BaselinePlan, seconds: float
) -> str:
    clusters = len(plan.clusters) if plan is not None else 0
    theirs = f"{baseline.samples_per_s:.3g} in {len(baseline.clusters)} clusters (by the paper's division {by_rule.samples_per_s:.3g})"
    problems = f" {'; '.join(ours.problems[:3])}" if ours.problems else ""
    return (
        f"large pool {number} ({scenario.profile.name}, {len(scenario.nodes)} nodes): {ours.samples_per_s:.3g} samples/s in {clusters} "
        f"clusters after {seconds:.2f} s, genetic {theirs}{problems}"
    )


# ------------------------------------------------------------ seconds


def timings(sizes: Sequence[int]) -> dict[str, object]:
    """Return the worst seconds over the models, each in a fresh process on one core."""
    figures: dict[str, object] = {}
    for nodes in sizes:
        found = [_time_plan(name, nodes) for name in MODELS]
        figures[f"seconds_{nodes}_nodes"] = max(wall for wall, _ in found)
        figures[f"cpu_seconds_{nodes}_nodes"] = max(cpu for _, cpu in found)
    return figures


def _time_plan(name: str, nodes: int) -> tuple[float, float]:
    """Return wall and CPU seconds of a process that plans once, less those that made the pool."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    core = max(os.sched_getaffinity(0))
    before, begin = _children_cpu_s(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planning_timing", name, str(nodes), str(nodes)],
        env={**os.environ, **threads},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        stdout=subprocess.PIPE,
        timeout=600,
        check=True,
    )
    wall, cpu = time.perf_counter() - begin, _children_cpu_s() - before
    child = json.loads(done.stdout)
    wall, cpu = wall - child["excluded_s"], cpu - child["excluded_cpu_s"]
    print(f"{nodes} nodes, {name}: {wall:.2f} s ({cpu:.2f} s of CPU), {child['clusters']} clusters", flush=True)
    return wall, cpu


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# ------------------------------------------------------------ explanation


def explain(number: int, profiles: dict[str, ModelProfile]) -> None:
    """Print the `number`-th small pool, the planner's plan for it, and the optimum."""
    scenario = small_scenario(number, profiles)
    costs = costs_of(scenario)
    job, options = scenario.config, scenario.options
    print(
        f"pool {number}: {scenario.profile.name}, {costs.units} units, {costs.m} micro-batches of {costs.b} per batch, {job.optimizer.name}"
    )
    print(f"averaging every {job.averaging_interval} updates, max_in_flight {job.max_in_flight}, headroom {options.headroom}")
    for index, node in enumerate(scenario.nodes):
        rates = ", ".join(f"{rate * 8e-6:.0f}" for rate in costs.r[index] if np.isfinite(rate))
        speed = node.flop_per_s / scenario.profile.reference_flop_per_s
        machine = f"{node.memory_bytes / 1e9:.3f} GB, speed {speed:.3f}, reliability {node.reliability:.3f}"
        print(f"  {node.node_id}: {machine}, to others {rates} Mbit/s")
    plan = plan_for(scenario)
    judged = judge(plan, costs)
    optimum = find_optimum(costs)
    print(f"planner: value {judged.value:.9g}, {judged.samples_per_s:.9g} samples/s {'; '.join(judged.problems)}")
    place = {name: index for index, name in enumerate(costs.names)}
    for cluster in plan.clusters if plan is not None else ():
        order, cuts = layout(cluster, place)
        _print_cluster(costs, order, cuts, len(plan.clusters) if plan is not None else 0)
    _print_optimum(costs, optimum)
    print(f"gap {gap_between(judged.value, optimum.value):.6%}")


def _print_optimum(costs: PageCosts, optimum: Optimum) -> None:
    print(f"optimum: value {optimum.value:.9g}, {sum(cluster.samples_per_s for cluster in optimum.clusters):.9g} samples/s")
    for cluster in optimum.clusters:
        _print_cluster(costs, cluster.nodes, cluster.cuts, len(optimum.clusters))


def _print_cluster(costs: PageCosts, order: Sequence[int], cuts: Sequence[int], clusters: int) -> None:
    reached = costs.evaluate(np.asarray([order]), np.asarray([cuts]), clusters)
    flight = reached.in_flight[0].tolist()
    figures = f"T {reached.period_s[0]:.9g} s, {reached.samples_per_s[0]:.9g} samples/s, value {reached.value[0]:.9g}, in flight {flight}"
    print(f"  nodes {list(order)} cuts {list(cuts)}: {figures}")


def main() -> None:
    """Run the parts and print their figures; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, help=f"small pools ({SMALL_POOLS})")
    parser.add_argument("--large-pools", type=int, help=f"pools against the genetic algorithm ({LARGE_POOLS})")
    parser.add_argument("--quick", action="store_true", help="few pools, no runs")
    parser.add_argument("--no-runs", action="store_true", help="without real training runs")
    parser.add_argument("--explain", type=int, metavar="N", help="print one small pool, its plan and its optimum")
    options = parser.parse_args()
    profiles = {name: load_profile(name) for name in MODELS}
    if options.explain is not None:
        explain(options.explain, profiles)
        return
    small = options.pools or (QUICK_SMALL_POOLS if options.quick else SMALL_POOLS)
    large = options.large_pools or (QUICK_LARGE_POOLS if options.quick else LARGE_POOLS)
    figures = against_optimum(small, profiles) | against_genetic(large, profiles) | timings(TIMED_NODES)
    if not options.no_runs and not options.quick:
        from benchmarks.prediction import measure

        figures |= measure()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
