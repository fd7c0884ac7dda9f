"""The asynchronous pipeline against its limits and against synchronous ones: `python -m benchmarks.pipeline`.

All runs are real processes on this machine, one thread each, interleaved with the plain loop they are compared with.

(a) Two stages on two pinned cores, the small GPT (6 layers, width 256, sequence 128), batch 32 in micro-batches of 8:
    `utilisation` is samples/s over twice those of a plain process, corrected for the balance of the cut. Two processes on two
    cores of one machine slow each other down (memory, clock), which no pipeline can undo: `machine_ceiling` is what two
    independent plain processes reach at once over twice one of them alone, `utilisation_of_ceiling` is relative to that.
(b) The same model, batch and micro-batches under torch.distributed.pipelining (1F1B and GPipe over gloo), cut at the block
    boundary nearest to Roost's cut: `vs_1f1b`, `vs_gpipe`. With three stages `cpu_efficiency`: samples per CPU second of all
    processes over the plain process's, and the same for 1F1B.
(c) Eight nodes with speeds 1:2:4 (emulated by sleeping), uplinks of 100 Mbit/s (a token bucket) and 20 ms of distance (what
    arrives is handed on later): `utilisation_of_bottleneck` is the fraction of the time that the busiest stage computes.
    Then the same nodes with `mode="sync"`, 1F1B with flush: `eight_nodes_sync`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

import roost
from benchmarks.end_to_end import cpu_seconds
from benchmarks.models import SmallGPT, next_token_loss
from roost.config import NodeOptions
from roost.requester.run import RunMetrics
from roost.types import ModelProfile, NodeProfile, Plan

BATCH, MICRO_BATCH, LENGTH = 32, 8, 128
TWO_NODES, THREE_NODES, EIGHT_NODES = "4GB", "4GB", "400MB"
"""Enough for the micro-batches in flight that keep every stage busy. A node that lends less than 3.6 GB keeps less of what it frees
(pipeline/allocator.py): with 300 MB the first two take 4% more CPU, which the system spends on clearing pages."""
SETTLE_S = 5.0
"""Seconds after the first update before anything is measured: the pipeline fills."""
START_S = 300.0
"""Links of eight nodes are measured one after the other: 56 of them, with 20 ms of distance, take a minute and a half."""
EMULATED = "(a), (b): nothing but the declared memory of nodes; (c): speed, uplink and distance of every node"


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one report of a run says."""

    seconds: float
    samples: int
    cpu_s: float
    compute_s: tuple[tuple[str, float], ...]
    """Per node the seconds it has computed."""


@dataclass(kw_only=True)
class Watch:
    """An observer that pins nodes to cores, notes every report, and tells when there is enough."""

    measure_s: float
    pinned: bool
    points: list[Point] = field(default_factory=list)
    enough: threading.Event = field(default_factory=threading.Event)
    plan: Plan | None = None
    profile: ModelProfile | None = None

    def planned(self, plan: Plan, nodes: tuple[NodeProfile, ...], profile: ModelProfile) -> None:
        """Keep the plan, and pin the processes of its nodes, in the order of stages."""
        self.plan, self.profile = plan, profile
        if self.pinned:
            order = [stage.node_id for stage in plan.stages]
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    name = next((word for word in process.cmdline() if word in order), None)
                    if name is not None:
                        pin(process, order.index(name) % (os.cpu_count() or 1))

    def updated(self, metrics: RunMetrics) -> None:
        """Note where the run is."""
        if metrics.state == "training" and metrics.samples > 0:
            compute = tuple((stage.node_id, stage.compute_s) for stage in metrics.stages)
            self.points.append(Point(seconds=time.perf_counter(), samples=metrics.samples, cpu_s=cpu_seconds(), compute_s=compute))
        over = bool(self.points) and self.points[-1].seconds - self.points[0].seconds >= SETTLE_S + self.measure_s
        if over or metrics.state in ("failed", "done"):
            self.enough.set()

    def steady(self) -> list[Point]:
        """Return the reports after the pipeline has filled."""
        return [point for point in self.points if point.seconds >= self.points[0].seconds + SETTLE_S]


def pin(process: psutil.Process, core: int) -> None:
    """Keep every thread of `process` on one core; threads it starts later stay there, too."""
    for thread in process.threads():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, {core})


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of 512 samples."""
    drawn = torch.randint(256, (512, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def plain_rates(seconds: float) -> tuple[float, float]:
    """Return samples per second and per CPU second of a plain loop on one thread, with the same micro-batches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, labels = tokens()
    samples, begin, cpu = 0, 0.0, 0.0
    for step in range(10**9):
        if step == 2:
            samples, begin, cpu = 0, time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        for first in range(0, BATCH, MICRO_BATCH):
            x, y = inputs[first : first + MICRO_BATCH], labels[first : first + MICRO_BATCH]
            (next_token_loss(model(x), y) * MICRO_BATCH / BATCH).backward()
        optimizer.step()
        samples += BATCH
        if step > 2 and time.perf_counter() - begin >= seconds:
            break
    return samples / (time.perf_counter() - begin), samples / (time.process_time() - cpu)


def plain_pair(seconds: float) -> tuple[float, float]:
    """Return samples per second, and per CPU second, of two plain loops at once, each on a core of its own."""
    command = [sys.executable, "-m", "benchmarks.pipeline", "--seconds", str(seconds), "--plain-on"]
    loops = [subprocess.Popen([*command, str(core)], stdout=subprocess.PIPE, text=True) for core in range(2)]
    found = [json.loads(loop.communicate(timeout=120 + 3 * seconds)[0].strip().splitlines()[-1]) for loop in loops]
    return sum(rate for rate, _ in found), statistics.mean(per_cpu for _, per_cpu in found)


def roost_run(nodes: Sequence[NodeOptions], model: torch.nn.Module, seconds: float, *, pinned: bool, mode: str = "async") -> Watch:
    """Train in one cluster of all nodes for some seconds and return what was noted."""
    watch = Watch(measure_s=seconds, pinned=pinned)
    with tempfile.TemporaryDirectory() as directory:
        job = roost.Job(
            model=model,
            loss=next_token_loss,
            data=tokens(),
            optimizer_args={"lr": 1e-3},
            batch_size=BATCH,
            micro_batch_size=MICRO_BATCH,
            mode=mode,
            epochs=100_000,
            sync_interval=100_000,
            max_clusters=1,
            checkpoint_dir=str(Path(directory) / "checkpoints"),
        )
        run = roost.train(job, roost.local(list(nodes)), observer=watch)
        watch.enough.wait(START_S + SETTLE_S + seconds)
        run.stop()
        run.wait()
    return watch


def rates(watch: Watch) -> tuple[float, float]:
    """Return samples per second and per CPU second in the steady state."""
    points = watch.steady()
    slope = statistics.linear_regression([point.seconds for point in points], [point.samples for point in points]).slope
    cpu = (points[-1].cpu_s - points[0].cpu_s) / (points[-1].seconds - points[0].seconds)
    return slope, slope / cpu


def stage_seconds(watch: Watch) -> list[float]:
    """Return what the units of each stage take on this machine, as they were measured before the run."""
    assert watch.plan is not None
    assert watch.profile is not None
    units = watch.profile.units
    per_update = BATCH / MICRO_BATCH
    return [
        sum(unit.forward_s + unit.backward_s + unit.update_s / per_update for unit in units[stage.first_unit : stage.last_unit])
        for stage in watch.plan.stages
    ]


def nearest_blocks(watch: Watch) -> list[int]:
    """Return how many blocks lie before each cut, to the nearest block."""
    assert watch.plan is not None
    assert watch.profile is not None
    blocks = len(SmallGPT().blocks)
    total = sum(unit.forward_s for unit in watch.profile.units)
    before = [sum(unit.forward_s for unit in watch.profile.units[: stage.first_unit]) for stage in watch.plan.stages[1:]]
    found = [min(blocks - 1, max(1, round(blocks * seconds / total))) for seconds in before]
    return sorted({min(blocks - 1, cut + index) if cut in found[:index] else cut for index, cut in enumerate(found)})


def torch_rates(schedule: str, cuts: Sequence[int], seconds: float) -> tuple[float, float]:
    """Return samples per second and per CPU second of torch.distributed.pipelining."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--cuts", ",".join(map(str, cuts)), "--port", str(port), "--schedule", schedule, "--seconds", str(seconds)]
    command = [
        sys.executable,
        "-m",
        "benchmarks.torch_pipeline",
        "--micro-batches",
        str(BATCH // MICRO_BATCH),
        "--batch",
        str(BATCH),
        *words,
    ]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        for rank in range(len(cuts) + 1)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"torch.distributed.pipelining failed: {[rank.returncode for rank in ranks]}")
    found = json.loads(outputs[0].strip().splitlines()[-1])
    return found["samples_per_s"], found["samples_per_cpu_s"]


def two_and_three_stages(repeats: int, seconds: float) -> dict[str, Any]:
    """Run (a) and (b), everything in turn."""
    plain, two, three, other = [plain_rates(seconds)], [], [], {"1f1b": [], "gpipe": [], "1f1b_three": []}  # type: ignore[var-annotated]
    balance, cuts, cuts_three = 0.0, [3], [2, 4]
    pairs = []
    for _ in range(repeats):
        pairs.append(plain_pair(seconds))
        watch = roost_run([NodeOptions(memory=TWO_NODES) for _ in range(2)], SmallGPT(), seconds, pinned=True)
        two.append(rates(watch))
        stages = stage_seconds(watch)
        balance, cuts = sum(stages) / (len(stages) * max(stages)), nearest_blocks(watch)
        for schedule in ("1f1b", "gpipe"):
            other[schedule].append(torch_rates(schedule, cuts, seconds))
        plain.append(plain_rates(seconds))
        watch = roost_run([NodeOptions(memory=THREE_NODES) for _ in range(3)], SmallGPT(), seconds, pinned=False)
        three.append(rates(watch))
        cuts_three = nearest_blocks(watch)
        other["1f1b_three"].append(torch_rates("1f1b", cuts_three, seconds))
        plain.append(plain_rates(seconds))
        print(f"plain {plain[-1]}, two stages {two[-1]} (balance {balance:.3f}), three {three[-1]}, torch {other}", flush=True)
    rate, per_cpu = (statistics.median(column) for column in zip(*plain, strict=True))
    pair_rate, pair_per_cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
    ours = statistics.median(found for found, _ in two)
    three_per_cpu = statistics.median(found for _, found in three)
    one_f = statistics.median(found for found, _ in other["1f1b"])
    return {
        "plain_samples_per_s": rate,
        "two_stages_samples_per_s": ours,
        "balance": balance,
        "utilisation": ours / (2 * rate * balance),
        "machine_ceiling": pair_rate / (2 * rate),
        "utilisation_of_ceiling": ours / (pair_rate * balance),
        "torch_cuts": cuts,
        "vs_1f1b": ours / one_f,
        "vs_gpipe": ours / statistics.median(found for found, _ in other["gpipe"]),
        "utilisation_1f1b": one_f / (2 * rate),
        "cpu_efficiency": three_per_cpu / per_cpu,
        "cpu_efficiency_of_ceiling": three_per_cpu / pair_per_cpu,
        "cpu_efficiency_1f1b": statistics.median(found for _, found in other["1f1b_three"]) / per_cpu,
        "three_stages_torch_cuts": cuts_three,
    }


def eight_nodes(seconds: float) -> dict[str, Any]:
    """Run (c), asynchronous and synchronous."""
    figures: dict[str, Any] = {}
    for key, mode in (("eight_nodes", "async"), ("eight_nodes_sync", "sync")):
        speeds = [0.05] * 4 + [0.1] * 2 + [0.2] * 2
        nodes = [NodeOptions(memory=EIGHT_NODES, relative_speed=speed, uplink_mbit=100, latency_ms=20) for speed in speeds]
        watch = roost_run(nodes, SmallGPT(layers=8), seconds, pinned=False, mode=mode)
        first, last = watch.steady()[0], watch.steady()[-1]
        before, elapsed = dict(first.compute_s), last.seconds - first.seconds
        busy = {node: (after - before[node]) / elapsed for node, after in last.compute_s}
        assert watch.plan is not None
        figures[key] = {
            "stages": len(watch.plan.stages),
            "in_flight": [stage.max_in_flight for stage in watch.plan.stages],
            "samples_per_s": rates(watch)[0],
            "predicted": watch.plan.samples_per_s,
            "busy": {node: round(share, 3) for node, share in sorted(busy.items())},
            "busiest": max(busy.values()),
        }
        print(f"{key}: {figures[key]}", flush=True)
    figures["utilisation_of_bottleneck"] = figures["eight_nodes"]["busiest"]
    figures["eight_nodes_vs_sync"] = figures["eight_nodes"]["samples_per_s"] / figures["eight_nodes_sync"]["samples_per_s"]
    return figures


def main() -> None:
    """Run the parts and print their figures; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--only", choices=("two", "eight"), help="(a) and (b), or (c)")
    parser.add_argument("--plain-on", type=int, help="only the plain loop, on that core")
    options = parser.parse_args()
    if options.plain_on is not None:
        os.sched_setaffinity(0, {options.plain_on})
        print(json.dumps(plain_rates(options.seconds)))
        return
    figures: dict[str, Any] = {"emulated": EMULATED}
    if options.only != "eight":
        figures |= two_and_three_stages(options.repeats, options.seconds)
    if options.only != "two":
        figures |= eight_nodes(2 * options.seconds)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
