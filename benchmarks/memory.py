"""A model that no single node could train, under caps that the kernel enforces: `python -m benchmarks.memory`.

Each node of a local pool is put in a memory control group (cgroup v1; Linux, root) as soon as the plan is made, with what it
declared to lend as the group's limit: what the process took before, Python and torch, stays outside. A node that took more would
be killed and the run would fail. `state_over_cap` is the model's training state (weights, gradients, optimizer) over the largest
cap, `peak_over_cap` the worst node's peak over its cap, `prediction_error` the worst difference between peak and plan.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional

import roost
from roost.config import NodeOptions, parse_bytes
from roost.requester.run import RunMetrics
from roost.types import ModelProfile, NodeProfile, Plan

GROUPS = Path("/sys/fs/cgroup/memory")
STATE_PER_PARAMETER = 4
"""Weight, gradient and two moments of AdamW."""
WIDTH, DEPTH = 2048, 30
MEMORY = ("640MB", "560MB", "480MB", "400MB", "400MB", "320MB")
START_S = 180.0


class Wide(nn.Module):
    """Fully connected layers with residuals: (N, WIDTH) -> (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + functional.relu(layer(x))
        return self.head(x)


@dataclass(kw_only=True)
class CappedNodes:
    """An observer that puts every node into a control group of its own once the plan is made."""

    caps: dict[str, int]
    root: Path
    seconds: float
    plan: Plan | None = None
    groups: dict[str, Path] = field(default_factory=dict)
    begun: float | None = None
    enough: threading.Event = field(default_factory=threading.Event)

    def planned(self, plan: Plan, nodes: tuple[NodeProfile, ...], profile: ModelProfile) -> None:
        """Cap every process that is a node."""
        self.plan = plan
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                name = next((word for word in process.cmdline() if word in self.caps), None)
                if name is not None:
                    self._cap(name, process)

    def _cap(self, name: str, process: psutil.Process) -> None:
        group = self.root / name
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(self.caps[name]))
        (group / "cgroup.procs").write_text(str(process.pid))
        self.groups[name] = group

    def updated(self, metrics: RunMetrics) -> None:
        """Tell when it has trained long enough."""
        if metrics.state == "training" and metrics.samples > 0:
            self.begun = metrics.elapsed_s if self.begun is None else self.begun
            if metrics.elapsed_s - self.begun >= self.seconds:
                self.enough.set()
        if metrics.state in ("failed", "done"):
            self.enough.set()

    def peaks(self) -> dict[str, int]:
        """Return the most that each node has taken since it was capped, in bytes."""
        return {name: int((group / "memory.max_usage_in_bytes").read_text()) for name, group in self.groups.items()}


@contextlib.contextmanager
def control_groups() -> Iterator[Path]:
    """Make a place for control groups and remove it at the end. Exits if this machine has none that may be used."""
    root = GROUPS / "roost-benchmark"
    try:
        root.mkdir()
    except OSError as error:
        raise SystemExit(f"memory control groups (cgroup v1, as root) are needed: {error}") from error
    try:
        yield root
    finally:
        for group in (*root.glob("*/"), root):
            with contextlib.suppress(OSError):
                group.rmdir()


def measure(memory: Sequence[str], seconds: float) -> dict[str, Any]:
    """Train under caps and return the figures."""
    torch.manual_seed(0)
    model = Wide()
    state = STATE_PER_PARAMETER * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    names = [f"capped-{index}" for index in range(len(memory))]
    data = torch.randn(512, WIDTH), torch.randint(10, (512,))
    with control_groups() as root, tempfile.TemporaryDirectory() as directory:
        watch = CappedNodes(caps={name: parse_bytes(size) for name, size in zip(names, memory, strict=True)}, root=root, seconds=seconds)
        job = roost.Job(
            model=model,
            loss=functional.cross_entropy,
            data=data,
            optimizer_args={"lr": 1e-3},
            batch_size=32,
            micro_batch_size=8,
            epochs=100_000,
            sync_interval=100_000,
            checkpoint_dir=str(Path(directory) / "checkpoints"),
        )
        pool = roost.local([NodeOptions(name=name, memory=size) for name, size in zip(names, memory, strict=True)])
        run = roost.train(job, pool, observer=watch)
        watch.enough.wait(START_S + seconds)
        peaks = watch.peaks()
        samples = run.metrics().samples
        run.stop()
        run.wait()
    assert watch.plan is not None
    rows = [
        {"node": stage.node_id, "cap": watch.caps[stage.node_id], "predicted": stage.memory_needed_bytes, "peak": peaks[stage.node_id]}
        for stage in watch.plan.stages
    ]
    for row in rows:
        print(row, flush=True)
    return {
        "nodes": rows,
        "samples": samples,
        "state_over_cap": state / max(watch.caps.values()),
        "peak_over_cap": max(row["peak"] / row["cap"] for row in rows),
        "prediction_error": max(abs(row["peak"] - row["predicted"]) / row["predicted"] for row in rows),
    }


def main() -> None:
    """Run it and print the figures; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of training")
    options = parser.parse_args()
    print(json.dumps(measure(MEMORY, options.seconds)))


if __name__ == "__main__":
    main()
