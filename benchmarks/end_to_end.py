"""The whole system against one plain process, on this machine: `python -m benchmarks.end_to_end`.

Three agents (one thread each, real processes, gRPC with mutual TLS on loopback) form one cluster of three stages and train
the digits CNN (batch 64) and the small GPT (6 layers, width 256, sequence 128, vocabulary 256, batch 8). A plain loop on one
thread runs before and after each; its best rate counts. Memory of the nodes is declared so that no two of them hold the
model; nothing is slowed. CPU seconds are those of all of Roost's processes: coordinator, agents, and the requester.
Last, an agent that has joined and has nothing to do is watched for ten seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional

import roost
from benchmarks.models import SmallGPT, next_token_loss
from roost.demo.digits import DigitsCNN, load_digits
from roost.requester.pools import LocalPool
from roost.requester.run import RunMetrics
from roost.types import ModelProfile, NodeProfile, Plan


@dataclass(kw_only=True)
class Workload:
    """One model with its data."""

    name: str
    model: nn.Module
    loss: Any
    data: tuple[Tensor, Tensor]
    batch_size: int
    epochs: int
    memory: str


@dataclass(kw_only=True)
class CpuWatch:
    """An observer that notes samples, seconds and CPU seconds at every report of a run."""

    points: list[tuple[float, int, float]] = field(default_factory=list)
    plan: Plan | None = None

    def planned(self, plan: Plan, nodes: tuple[NodeProfile, ...], profile: ModelProfile) -> None:
        """Keep the plan."""
        self.plan = plan

    def updated(self, metrics: RunMetrics) -> None:
        """Note where the run is."""
        if metrics.state == "training" and metrics.samples > 0:
            self.points.append((time.perf_counter(), metrics.samples, cpu_seconds()))

    def rates(self) -> tuple[float, float]:
        """Return samples per second and per CPU second between the first and the last report of steady training."""
        first, last = self.points[len(self.points) // 5], self.points[-1]
        samples = last[1] - first[1]
        return samples / (last[0] - first[0]), samples / (last[2] - first[2])


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all its children."""
    total = 0.0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def plain_rates(work: Workload, seconds: float) -> tuple[float, float]:
    """Return samples per second and per CPU second of a plain loop on one thread."""
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-3)
    inputs, labels = work.data
    samples, begin, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - begin < seconds:
        for index in torch.randperm(len(labels)).split(work.batch_size):
            optimizer.zero_grad()
            work.loss(work.model(inputs[index]), labels[index]).backward()
            optimizer.step()
            samples += len(index)
            if time.perf_counter() - begin >= seconds:
                break
    return samples / (time.perf_counter() - begin), samples / (time.process_time() - cpu)


def roost_rates(work: Workload, directory: Path) -> tuple[CpuWatch, RunMetrics]:
    """Train on three nodes in one cluster; return what was noted."""
    job = roost.Job(
        model=work.model,
        loss=work.loss,
        data=work.data,
        optimizer_args={"lr": 1e-3},
        batch_size=work.batch_size,
        epochs=work.epochs,
        sync_interval=work.epochs,
        max_clusters=1,
        checkpoint_dir=str(directory),
    )
    watch = CpuWatch()
    pool = roost.local([{"memory": work.memory, "threads": 1} for _ in range(3)])
    run = roost.train(job, pool, observer=watch).wait()
    return watch, run.metrics()


def compare(work: Workload, *, repeats: int, seconds: float, directory: Path) -> dict[str, Any]:
    """Return plain and Roost rates, measured in turn."""
    plain, ours = [plain_rates(work, seconds)], []
    stages = []
    for _ in range(repeats):
        watch, _ = roost_rates(work, directory)
        ours.append(watch.rates())
        stages = [len(cluster.stages) for cluster in watch.plan.clusters] if watch.plan else []
        plain.append(plain_rates(work, seconds))
    rate, per_cpu = (statistics.median(column) for column in zip(*ours, strict=True))
    plain_rate, plain_per_cpu = (statistics.median(column) for column in zip(*plain, strict=True))
    return {
        "stages": stages,
        "samples_per_s": round(rate, 1),
        "samples_per_cpu_s": round(per_cpu, 2),
        "plain_samples_per_s": round(plain_rate, 1),
        "plain_samples_per_cpu_s": round(plain_per_cpu, 2),
        "rate_over_plain": round(rate / plain_rate, 3),
        "per_cpu_over_plain": round(per_cpu / plain_per_cpu, 3),
    }


def idle_cpu_share(seconds: float) -> float:
    """Return the fraction of a core that an agent without a job uses."""

    async def watch() -> float:
        pool = LocalPool([roost.NodeOptions(name="idle")])
        async with pool.enter(on_failure=lambda error: None):
            await asyncio.sleep(15)  # until it has measured itself and registered
            agent = next(process for process in psutil.Process().children() if "join" in process.cmdline())
            before = sum(agent.cpu_times()[:2])
            await asyncio.sleep(seconds)
            return (sum(agent.cpu_times()[:2]) - before) / seconds

    return asyncio.run(watch())


def workloads(scale: float) -> Iterator[Workload]:
    """Yield the digits CNN and the small GPT."""
    torch.manual_seed(0)
    training, _ = load_digits()
    yield Workload(
        name="digits_cnn",
        model=DigitsCNN(),
        loss=functional.cross_entropy,
        data=training,
        batch_size=64,
        epochs=max(4, int(60 * scale)),
        memory="4.9MB",
    )
    tokens = torch.randint(256, (256, 129))
    yield Workload(
        name="small_gpt",
        model=SmallGPT(),
        loss=next_token_loss,
        data=(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        batch_size=8,
        epochs=max(1, int(3 * scale)),
        memory="120MB",
    )


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="length of the Roost runs")
    options = parser.parse_args()
    result: dict[str, Any] = {"emulated": "memory of the nodes is declared; nothing is slowed"}
    with tempfile.TemporaryDirectory() as directory:
        for work in workloads(options.scale):
            result[work.name] = compare(work, repeats=options.repeats, seconds=5.0, directory=Path(directory))
            print(work.name, result[work.name], flush=True)
    result["idle_agent_core_share"] = round(idle_cpu_share(10.0), 4)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
