"""What the planner predicts against what real runs reach: `python -m benchmarks.prediction`.

Every run is real: a coordinator, one process per node, gRPC with mutual TLS on loopback. Slow nodes are emulated by pacing
their computation, links by limiting what each node may send, small memories by declaring them. The rate is measured in the
steady state: from some seconds after the first update until the run is stopped, inside one phase of training, so without
start-up, synchronisation points and evaluation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import roost
from benchmarks.models import SmallGPT, next_token_loss
from roost.config import NodeOptions
from roost.demo.digits import DigitsCNN
from roost.requester.run import RunMetrics
from roost.types import ModelProfile, NodeProfile, Plan

EMULATED = (
    "all runs are real processes on one machine; relative speed (pacing by sleeping), uplinks (a token bucket) and memory "
    "(declared) of every node are emulated"
)
SETTLE_S = 4.0
"""Seconds after the first update before the rate is measured: the pipeline fills."""
MEASURE_S = 12.0
START_S = 120.0
"""Deadline for a run to apply its first update."""
EPOCHS = 100_000
"""More than any run gets through: it is stopped."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its data."""

    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    data: Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: a workload, nodes, and how the job is set up."""

    name: str
    workload: str
    nodes: tuple[NodeOptions, ...]
    batch: int
    micro_batch: int
    optimizer: str = "AdamW"
    interval: int = 16
    clusters: int = 1


@dataclass(kw_only=True)
class Watch:
    """An observer that notes when how many samples were done, and tells when there is enough."""

    samples_per_epoch: int
    measure_s: float
    points: list[tuple[float, float]] = field(default_factory=list)
    enough: threading.Event = field(default_factory=threading.Event)

    def planned(self, plan: Plan, nodes: tuple[NodeProfile, ...], profile: ModelProfile) -> None:
        """Nothing to do: the run keeps the plan."""

    def updated(self, metrics: RunMetrics) -> None:
        """Note where the run is; after a failure nobody waits any longer."""
        if metrics.state == "training" and metrics.epochs_done > 0:
            self.points.append((metrics.elapsed_s, metrics.epochs_done * self.samples_per_epoch))
        if metrics.state in ("failed", "done") or (self.points and self._seconds() >= SETTLE_S + self.measure_s):
            self.enough.set()

    def _seconds(self) -> float:
        return self.points[-1][0] - self.points[0][0]

    def rate(self) -> float:
        """Return samples per second by least squares: single batches that end between two reports even out."""
        steady = [point for point in self.points if point[0] >= self.points[0][0] + SETTLE_S]
        return statistics.linear_regression([time for time, _ in steady], [samples for _, samples in steady]).slope


class MLP(nn.Module):
    """Fully connected layers: (N, 256) -> (N, 10)."""

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(256, width), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _tokens(length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (512, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _labelled(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2048, *shape), torch.randint(10, (2048,))


WORKLOADS = {
    "mlp": Workload(model=lambda: MLP(width=512, depth=8), loss=functional.cross_entropy, data=lambda: _labelled(256)),
    "cnn": Workload(model=DigitsCNN, loss=functional.cross_entropy, data=lambda: _labelled(1, 8, 8)),
    "gpt_small": Workload(model=lambda: SmallGPT(layers=4, width=128, heads=4, length=64), loss=next_token_loss, data=lambda: _tokens(64)),
    "gpt": Workload(model=SmallGPT, loss=next_token_loss, data=lambda: _tokens(128)),
}


def _node(speed: float, memory: str = "2GB", uplink: float = 0.0) -> NodeOptions:
    return NodeOptions(memory=memory, relative_speed=speed, uplink_mbit=uplink)


CASES = (
    Case(name="mlp, 1 node", workload="mlp", nodes=(_node(0.3),), batch=64, micro_batch=64),
    Case(name="gpt, 1 node, 4 micro-batches per batch", workload="gpt_small", nodes=(_node(0.3),), batch=16, micro_batch=4),
    Case(name="cnn, 2 nodes", workload="cnn", nodes=(_node(0.15, "5.2MB"), _node(0.1, "5.2MB")), batch=64, micro_batch=64),
    Case(
        name="mlp, 2 nodes, SGD, 4 micro-batches per batch",
        workload="mlp",
        nodes=(_node(0.2, "14MB"), _node(0.1, "14MB")),
        batch=128,
        micro_batch=32,
        optimizer="SGD",
    ),
    Case(
        name="gpt, 3 unequal nodes",
        workload="gpt_small",
        nodes=(_node(0.2, "14MB"), _node(0.1, "14MB"), _node(0.07, "14MB")),
        batch=16,
        micro_batch=4,
    ),
    Case(
        name="larger gpt, 4 unequal nodes",
        workload="gpt",
        nodes=(_node(0.2, "60MB"), _node(0.15, "60MB"), _node(0.1, "60MB"), _node(0.1, "60MB")),
        batch=4,
        micro_batch=2,
    ),
    Case(
        name="gpt, 2 nodes on 10 Mbit/s",
        workload="gpt_small",
        nodes=(_node(0.2, "16MB", 10), _node(0.2, "16MB", 10)),
        batch=16,
        micro_batch=4,
    ),
    Case(
        name="gpt, 3 nodes, one on 10 Mbit/s",
        workload="gpt_small",
        nodes=(_node(0.15, "14MB", 100), _node(0.15, "14MB", 10), _node(0.15, "14MB", 100)),
        batch=8,
        micro_batch=4,
    ),
    Case(
        name="mlp, 2 clusters of 1 node, averaging on 50 Mbit/s",
        workload="mlp",
        nodes=(_node(0.2, uplink=50), _node(0.1, uplink=50)),
        batch=64,
        micro_batch=64,
        clusters=2,
    ),
    Case(
        name="gpt, 2 clusters of 2 nodes, all links fast",
        workload="gpt_small",
        nodes=(_node(0.1, "24MB"), _node(0.1, "24MB"), _node(0.07, "24MB"), _node(0.07, "24MB")),
        batch=8,
        micro_batch=4,
        clusters=2,
    ),
    Case(
        name="gpt, 2 clusters of 2 nodes on 20 Mbit/s",
        workload="gpt_small",
        nodes=(_node(0.1, "24MB", 20), _node(0.1, "24MB", 20), _node(0.1, "24MB", 20), _node(0.1, "24MB", 20)),
        batch=16,
        micro_batch=4,
        interval=8,
        clusters=2,
    ),
    Case(
        name="cnn, 2 clusters of 5 unequal nodes",
        workload="cnn",
        nodes=(_node(0.1, "5.6MB"), _node(0.08, "5.2MB"), _node(0.06, "5.2MB"), _node(0.05, "5.2MB"), _node(0.04, "5.2MB")),
        batch=64,
        micro_batch=64,
        interval=8,
        clusters=2,
    ),
    Case(
        name="mlp, 5 nodes, SGD",
        workload="mlp",
        nodes=tuple(_node(speed, "7MB") for speed in (0.1, 0.08, 0.06, 0.05, 0.05)),
        batch=64,
        micro_batch=16,
        optimizer="SGD",
    ),
)


def run_case(case: Case, measure_s: float, directory: Path) -> tuple[dict[str, Any], roost.Run]:
    """Run one case; return its figures and the run, which has ended."""
    torch.manual_seed(0)
    work = WORKLOADS[case.workload]
    data = work.data()
    job = roost.Job(
        model=work.model(),
        loss=work.loss,
        data=data,
        optimizer=case.optimizer,
        optimizer_args={"lr": 1e-3},
        batch_size=case.batch,
        micro_batch_size=case.micro_batch,
        epochs=EPOCHS,
        sync_interval=EPOCHS,
        averaging_interval=case.interval,
        min_clusters=case.clusters,
        max_clusters=case.clusters,
        checkpoint_dir=str(directory),
    )
    watch = Watch(samples_per_epoch=len(data[1]), measure_s=measure_s)
    run = roost.train(job, roost.local(case.nodes), observer=watch)
    watch.enough.wait(START_S + SETTLE_S + measure_s)
    run.stop()
    run.wait()
    plan = run.plan
    assert plan is not None, "a run that has started has a plan"
    measured = watch.rate()
    return {
        "name": case.name,
        "stages": [len(cluster.stages) for cluster in plan.clusters],
        "predicted": round(plan.samples_per_s, 2),
        "measured": round(measured, 2),
        "error": round(abs(plan.samples_per_s / measured - 1), 4),
        "bottleneck": "; ".join(cluster.bottleneck for cluster in plan.clusters),
    }, run


def measure(cases: Sequence[Case] = CASES, measure_s: float = MEASURE_S) -> dict[str, Any]:
    """Run the cases one after the other and return all figures; each run is printed when it ends."""
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        for case in cases:
            figures, _ = run_case(case, measure_s, Path(directory))
            runs.append(figures)
            print(
                f"{figures['name']}: stages {figures['stages']}, predicted {figures['predicted']:g}, measured {figures['measured']:g} "
                f"samples/s, error {figures['error']:.1%}, bound by {figures['bottleneck']}",
                flush=True,
            )
    errors = sorted(figures["error"] for figures in runs)
    return {
        "runs": runs,
        "prediction_error_median": statistics.median(errors),
        "prediction_error_p90": quantile(errors, 0.9),
        "emulated": EMULATED,
    }


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Return the quantile of values in ascending order, linear between two of them."""
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return round(ordered[below] + (place - below) * (ordered[above] - ordered[below]), 4)


def main() -> None:
    """Run the cases and print their figures; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=MEASURE_S, help="measured part of each run")
    options = parser.parse_args()
    print(json.dumps(measure(measure_s=options.seconds)))


if __name__ == "__main__":
    main()
