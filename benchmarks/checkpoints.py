"""How long training stands still for a checkpoint: `python -m benchmarks.checkpoints`.

Two nodes of this machine with *emulated* uplinks of 20 Mbit/s (a token bucket) and *declared* memory, too little for either alone, train a
perceptron of 21 MB, a stage each. At all synchronisation points but the last, nodes copy their parts to their disks and upload them while
training goes on; at the last, training waits for the upload, as it did at every one before. Both are taken from the same run, in turn,
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
SAMPLES, BATCH, EPOCHS = 6_144, 32, 3
UPLINK_MBIT = 20.0
MEMORY = "36MB"
EMULATED = "the uplinks of both nodes; their memory is declared"


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


def saving_s(directory: Path) -> list[float]:
    """Return from the events of a run how long every checkpoint took from its beginning until it was complete."""
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    begun = {event["attempt"]: event["time"] for event in events if event["event"] == "checkpoint_begun"}
    return [event["time"] - begun[event["attempt"]] for event in events if event["event"] == "checkpoint_complete"]


def measured(directory: Path) -> tuple[list[float], list[float], float, int]:
    """Return of a run how long training stood still for every checkpoint, the last one waited for, and how long each took to be complete;
    its samples per second; the bytes of its checkpoint."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    job = roost.Job(
        model=nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES)),
        loss=functional.cross_entropy,
        data=(torch.randn(SAMPLES, WIDTH), torch.randint(CLASSES, (SAMPLES,))),
        batch_size=BATCH,
        epochs=EPOCHS,
        optimizer="SGD",
        optimizer_args={"lr": 1e-4},
        max_clusters=1,
        checkpoint_dir=str(directory),
    )
    watch = StillWatch()
    nodes = [NodeOptions(name=name, memory=MEMORY, uplink_mbit=UPLINK_MBIT) for name in ("attic", "barn")]
    run = roost.train(job, roost.local(nodes), observer=watch)
    run.wait()
    assert run.checkpoint is not None
    took_s = saving_s(run.checkpoint.parent)
    assert len(took_s) == len(watch.still_s) == EPOCHS, f"not every checkpoint was complete before the next: {watch.still_s}, {took_s}"
    size = sum(path.stat().st_size for path in run.checkpoint.rglob("*") if path.is_file())
    return watch.still_s, took_s, run.metrics().samples_per_s, size


def main() -> None:
    """Run it, and print the figures; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2)
    options = parser.parse_args()
    beside: list[float] = []
    waited: list[float] = []
    uploaded: list[float] = []
    figures: dict[str, Any] = {"emulated": EMULATED}
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as directory:
            still_s, took_s, rate, size = measured(Path(directory))
        beside += still_s[:-1]
        uploaded += took_s[:-1]
        waited.append(still_s[-1])
        figures["checkpoint_mb"] = size / 1e6
        stood, took = (", ".join(f"{seconds:.2f}" for seconds in each) for each in (still_s, took_s))
        print(f"stood still {stood} s; complete after {took} s; {rate:.0f} samples/s", flush=True)
    figures["still_s_beside_training"] = statistics.median(beside)
    figures["complete_s_beside_training"] = statistics.median(uploaded)
    figures["still_s_waited_for"] = statistics.median(waited)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
