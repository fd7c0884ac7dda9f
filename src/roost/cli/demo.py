"""`roost demo`: five local nodes of different declared memory and speed train the digits CNN."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from rich.console import Console
from torch.nn import functional

from roost.api import Job, train
from roost.checkpoint.reader import load
from roost.cli.display import RunDisplay, print_result
from roost.cli.lifetime import stop_on_sigterm
from roost.config import NodeOptions, require
from roost.demo.digits import DigitsCNN, accuracy, load_digits
from roost.protocol.batches import sample_order
from roost.requester.pools import local
from roost.requester.run import Run

BATCH = 64
LEARNING_RATE = 2e-3
BASELINE_S = 3.0
MODEL_LINE = "from roost.demo.digits import DigitsCNN\nmodel = DigitsCNN()"

NODES = (
    NodeOptions(name="desk", memory="5.6MB", relative_speed=0.36),
    NodeOptions(name="laptop", memory="4.7MB", relative_speed=0.3),
    NodeOptions(name="attic", memory="5.1MB", relative_speed=0.18),
    NodeOptions(name="kitchen", memory="4.5MB", relative_speed=0.15),
    NodeOptions(name="shed", memory="4.5MB", relative_speed=0.12),
)
"""Memory and speed are declared: emulated on one machine by pacing the computation.

No node holds the model alone (6.3 MB). Desk and laptop hold it together, and so do the other three; no other two clusters
have the memory. So every machine, however fast, makes the same clusters of two and three nodes.
"""


def run(*, epochs: int, directory: Path, json_output: bool) -> None:
    """Train, show, and check the checkpoint in plain PyTorch; with `json_output` the last line is one JSON object."""
    require(epochs > 0, f"epochs must be positive, not {epochs}")
    console = Console(highlight=False, stderr=json_output)
    started = time.monotonic()
    training, validation = load_digits()
    torch.manual_seed(0)
    model = DigitsCNN()
    console.print("measuring one plain process on one thread ...")
    single = single_process_rate(model, training)
    job = Job(
        model=model,
        loss=functional.cross_entropy,
        data=training,
        validation=validation,
        metric=accuracy,
        optimizer="AdamW",
        optimizer_args={"lr": LEARNING_RATE},
        batch_size=BATCH,
        epochs=epochs,
        averaging_interval=8,
        sync_interval=max(1, epochs // 4),
        min_clusters=2,
        max_clusters=2,
        name="digits",
        checkpoint_dir=str(directory),
    )
    console.print(f"starting a coordinator and {len(NODES)} agents with [bold]emulated[/] memory and speed ...", soft_wrap=True)
    display = RunDisplay(console)
    with stop_on_sigterm():
        try:
            finished = train(job, local(NODES), observer=display).wait()
        finally:
            display.close()
    print_result(console, finished, model_line=MODEL_LINE)
    console.print(f"\none plain process, one thread, unslowed: {single:.0f} samples/s")
    if json_output:
        print(json.dumps(_summary(finished, single, validation, time.monotonic() - started)), flush=True)


def single_process_rate(model: DigitsCNN, data: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return samples per second of a plain loop with the same model, batch size and optimizer, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    copy = DigitsCNN()
    copy.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(copy.parameters(), lr=LEARNING_RATE)
    images, labels = data
    samples, epoch, begin = 0, 0, time.perf_counter()
    while time.perf_counter() - begin < BASELINE_S:
        order = torch.tensor(sample_order(len(labels), epoch, seed=0))
        for index in order.split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(copy(images[index]), labels[index]).backward()
            optimizer.step()
            samples += len(index)
        epoch += 1
    seconds = time.perf_counter() - begin
    torch.set_num_threads(threads)
    return samples / seconds


def _summary(finished: Run, single: float, validation: tuple[torch.Tensor, torch.Tensor], seconds: float) -> dict[str, object]:
    metrics, plan, checkpoint = finished.metrics(), finished.plan, finished.checkpoint
    assert plan is not None and checkpoint is not None, "a finished run has both"
    model = DigitsCNN()
    model.load_state_dict(load(checkpoint).model)
    model.eval()
    with torch.no_grad():
        reloaded = float(accuracy(model(validation[0]), validation[1]))
    return {
        # Rounded to what float32 means of batches can tell apart: one sample of 360 is 0.0028.
        "accuracy": round(metrics.history[-1].metric or 0.0, 6),
        "accuracy_of_checkpoint_in_plain_pytorch": round(reloaded, 6),
        "nodes": len(NODES),
        "clusters": len(plan.clusters),
        "stages": [len(cluster.stages) for cluster in plan.clusters],
        "rings": len(plan.rings),
        "averaging_rounds": metrics.averaging_rounds,
        "samples_per_s": metrics.samples_per_s,
        "single_process_samples_per_s": single,
        "emulated": "memory and speed of all nodes are declared; computation is paced",
        "bytes_sent": metrics.bytes_sent,
        "staleness_max": metrics.staleness_max,
        "checkpoint": str(checkpoint),
        "seconds": seconds,
    }
