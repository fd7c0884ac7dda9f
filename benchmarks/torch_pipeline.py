"""One rank of torch.distributed.pipelining over gloo, for comparison: `python -m benchmarks.torch_pipeline`.

Trains the small GPT, cut at block boundaries, with the schedule asked for, and prints one JSON line on rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.models import SmallGPT, next_token_loss

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
LENGTH = 128
WARM_UP = 3


class Part(nn.Module):
    """Some consecutive blocks of a SmallGPT; the first part embeds, the last one predicts."""

    def __init__(self, model: SmallGPT, start: int, stop: int) -> None:
        super().__init__()
        self.tokens = model.tokens if start == 0 else None
        self.positions = model.positions if start == 0 else None
        self.blocks = nn.ModuleList(list(model.blocks)[start:stop])
        last = stop == len(model.blocks)
        self.norm = model.norm if last else None
        self.head = model.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def main() -> None:
    """Join the process group, train for some seconds, and print the rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--cuts", required=True, help="blocks before each cut, for example 3 or 2,4")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), required=True)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()
    cuts = [int(part) for part in options.cuts.split(",")]
    os.sched_setaffinity(0, {options.rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{options.port}",
        rank=options.rank,
        world_size=len(cuts) + 1,
        timeout=timedelta(seconds=120),
    )
    model = SmallGPT()
    bounds = [0, *cuts, len(model.blocks)]
    part = Part(model, bounds[options.rank], bounds[options.rank + 1])
    stage = PipelineStage(part, options.rank, len(cuts) + 1, torch.device("cpu"))
    schedule = SCHEDULES[options.schedule](stage, options.micro_batches, loss_fn=next_token_loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    rate, cpu = train(schedule, optimizer, first=options.rank == 0, last=options.rank == len(cuts), options=options)
    total = torch.tensor([cpu])
    dist.all_reduce(total)
    if options.rank == 0:
        print(json.dumps({"samples_per_s": rate, "samples_per_cpu_s": rate / float(total)}), flush=True)
    dist.destroy_process_group()


def train(
    schedule: object, optimizer: torch.optim.Optimizer, *, first: bool, last: bool, options: argparse.Namespace
) -> tuple[float, float]:
    """Return samples per second, and the CPU seconds of this process per second."""
    tokens = torch.randint(256, (options.batch, LENGTH + 1))
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    steps, begin, cpu = -WARM_UP, time.perf_counter(), time.process_time()
    go_on = torch.ones(1)
    while go_on.item():
        optimizer.zero_grad()
        arguments = (inputs,) if first else ()
        keywords = {"target": labels, "losses": []} if last else {}
        schedule.step(*arguments, **keywords)  # type: ignore[attr-defined]
        optimizer.step()
        steps += 1
        if steps == 0:
            begin, cpu = time.perf_counter(), time.process_time()
        # Rank 0 decides when it is over; every few steps, so that asking costs nothing.
        if steps % 4 == 0:
            go_on.fill_(steps <= 0 or time.perf_counter() - begin < options.seconds)
            dist.broadcast(go_on, 0)
    elapsed = time.perf_counter() - begin
    return steps * options.batch / elapsed, (time.process_time() - cpu) / elapsed


if __name__ == "__main__":
    main()
