"""How long training stands still for a checkpoint: `python -m benchmarks.checkpoints`.

Two nodes of this machine with *emulated* uplinks of 20 Mbit/s (a token bucket) train a perceptron of 5 million parameters; its checkpoint
has 60 MB with AdamW's state. At all synchronisation points but the last, nodes copy their parts to their disks and upload
them while training goes on; at the last, training waits for the upload, as it did at every one before. Both are taken from the same run,
`--runs` times: the seconds between the reports in which the job began to save and went on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import roost
from roost.config import NodeOptions
from roost.messages import JobState
from roost.requester.run import RunMetrics
from roost.types import ModelProfile, NodeProfile, Plan

WIDTH, LAYERS, CLASSES = 1024, 5, 10
SAMPLES, BATCH, EPOCHS = 1_536, 32, 2
UPLINK_MBIT = 20.0
EMULATED = "the uplinks of both nodes"


class StillWatch:
    """An observer that notes how long each checkpoint kept the job in the state "saving"."""

    def __init__(self) -> None:
        self._since: float | None = None
        self.still_s: list[float] = []

    def planned(self, plan: Plan, nodes: tuple[NodeProfile, ...], profile: ModelProfile) -> None:
        """Nothing."""

    def updated(self, metrics: RunMetrics) -> None:
        """Note when the job begins to save, and when it goes on."""
        now = time.monotonic()
        if metrics.state is JobState.SAVING and self._since is None:
            self._since = now
        elif metrics.state is not JobState.SAVING and self._since is not None:
            self.still_s.append(now - self._since)
            self._since = None


def measured(directory: Path) -> tuple[list[float], float, int]:
    """Return the seconds of every checkpoint of a run, the last one waited for; its samples per second; the bytes of its checkpoint."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    job = roost.Job(
        model=nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES)),
        loss=functional.cross_entropy,
        data=(torch.randn(SAMPLES, WIDTH), torch.randint(CLASSES, (SAMPLES,))),
        batch_size=BATCH,
        epochs=EPOCHS,
        optimizer_args={"lr": 1e-4},
        max_clusters=1,
        checkpoint_dir=str(directory),
    )
    watch = StillWatch()
    run = roost.train(job, roost.local([NodeOptions(name=name, uplink_mbit=UPLINK_MBIT) for name in ("attic", "barn")]), observer=watch)
    run.wait()
    assert run.checkpoint is not None
    size = sum(path.stat().st_size for path in run.checkpoint.rglob("*") if path.is_file())
    return watch.still_s, run.metrics().samples / run.metrics().elapsed_s, size


def main() -> None:
    """Run it, and print the figures; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    beside: list[float] = []
    waited: list[float] = []
    figures: dict[str, Any] = {"emulated": EMULATED}
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as directory:
            still_s, rate, size = measured(Path(directory))
        beside += still_s[:-1]
        waited.append(still_s[-1])
        figures["checkpoint_mb"] = size / 1e6
        print(f"stood still {still_s} s, {rate:.0f} samples/s", flush=True)
    figures["still_s_beside_training"] = statistics.median(beside)
    figures["still_s_waited_for"] = statistics.median(waited)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
