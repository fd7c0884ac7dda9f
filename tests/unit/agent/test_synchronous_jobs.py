"""Jobs in mode "sync" on several agents in one process equal one device that accumulates the same micro-batches."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from test_training import digits_job, images, trained
from torch import nn

import roost
from inproc_pool import InprocPool, node, nodes_for_stages

MICRO_BATCH = 4
ROOM = 1.4
"""Memory over the least that three nodes need: enough for several micro-batches in flight, not for two stages."""


def plain_loop(job: roost.Job) -> nn.Module:
    """Train as anyone would, in micro-batches, with the job's order of samples, its seeds for dropout, and clipping."""
    model = copy.deepcopy(job.model).train()
    optimizer = getattr(torch.optim, job.optimizer)(model.parameters(), **job.optimizer_args)
    inputs, labels = job.data
    batch_number, per_batch = 0, -(-job.batch_size // MICRO_BATCH)
    for epoch in range(job.epochs):
        for batch in torch.tensor(roost.sample_order(len(labels), epoch, job.seed)).split(job.batch_size):
            optimizer.zero_grad()
            for position, index in enumerate(batch.split(MICRO_BATCH)):
                torch.manual_seed(roost.micro_batch_seed(job.seed, 0, batch_number * per_batch + position))
                (job.loss(model(inputs[index]), labels[index]) * (len(index) / len(batch))).backward()
            if job.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
            optimizer.step()
            batch_number += 1
    return model


@pytest.mark.parametrize("clip_norm", [0.0, 0.3])
def test_three_stages_in_synchronous_mode_follow_one_device_over_many_updates(tmp_path: Path, clip_norm: float) -> None:
    job = digits_job(
        tmp_path,
        data=images(90),
        micro_batch_size=MICRO_BATCH,
        optimizer="SGD",
        optimizer_args={"lr": 0.05, "momentum": 0.9},
        mode="sync",
        clip_norm=clip_norm,
        max_clusters=1,
    )
    least = nodes_for_stages(job, ["a", "b", "c"])[0].memory_bytes
    run = trained(job, InprocPool([node(name, memory=int(least * ROOM)) for name in ("a", "b", "c")], tmp_path))
    assert run.plan is not None
    stages = run.plan.clusters[0].stages
    assert len(stages) == 3
    assert stages[0].max_in_flight > 1, [stage.max_in_flight for stage in stages]
    assert run.metrics().samples == 180
    expected, found = plain_loop(job).state_dict(), run.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
