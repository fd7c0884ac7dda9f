"""The whole path in one process: what the pipeline and the rings compute, against plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import roost
from inproc_pool import InprocPool, node, nodes_for_stages
from roost.agent.stage_driver import StageDriver
from roost.demo.digits import DigitsCNN
from roost.requester.run import Run


def images(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(samples, 1, 8, 8, generator=generator), torch.randint(10, (samples,), generator=generator)


def plain_loop(model: nn.Module, job: roost.Job) -> nn.Module:
    """Train a copy of `model` as anyone would, with the job's order of samples and its seeds for dropout."""
    model = copy.deepcopy(model).train()
    optimizer = getattr(torch.optim, job.optimizer)(model.parameters(), **job.optimizer_args)
    schedule = getattr(torch.optim.lr_scheduler, job.schedule)(optimizer, **job.schedule_args) if job.schedule else None
    inputs, labels = job.data
    step = 0
    for epoch in range(job.epochs):
        order = torch.tensor(roost.sample_order(len(labels), epoch, job.seed))
        for index in order.split(job.batch_size):
            torch.manual_seed(roost.micro_batch_seed(job.seed, 0, step))
            optimizer.zero_grad()
            job.loss(model(inputs[index]), labels[index]).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
            step += 1
    return model


def digits_job(tmp_path: Path, **changes: object) -> roost.Job:
    torch.manual_seed(5)
    fields: dict[str, object] = {
        "model": DigitsCNN(),
        "loss": functional.cross_entropy,
        "data": images(90),
        "optimizer": "AdamW",
        "optimizer_args": {"lr": 1e-2},
        "batch_size": 16,
        "epochs": 2,
        "checkpoint_dir": str(tmp_path / "checkpoints"),
    }
    return roost.Job(**{**fields, **changes})  # type: ignore[arg-type]


def trained(job: roost.Job, pool: InprocPool) -> Run:
    return roost.train(job, pool).wait(120)


def test_one_node_trains_to_the_same_bits_as_a_plain_loop(tmp_path: Path) -> None:
    schedule = {"schedule": "CosineAnnealingLR", "schedule_args": {"T_max": 12}}
    job = digits_job(tmp_path, **schedule)
    run = trained(job, InprocPool([node("only")], tmp_path))
    expected = plain_loop(job.model, job).state_dict()
    found = run.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def three_small_nodes(tmp_path: Path, job: roost.Job) -> InprocPool:
    """Return a pool in which the model fits on three nodes together and on no two of them."""
    return InprocPool(nodes_for_stages(job, ["a", "b", "c"]), tmp_path)


def test_three_stages_with_one_micro_batch_in_flight_give_the_plain_loops_gradients(tmp_path: Path) -> None:
    # Plain SGD at rate 1 without momentum: the change of a parameter in the one update is minus its gradient.
    job = digits_job(
        tmp_path,
        data=images(16),
        optimizer="SGD",
        optimizer_args={"lr": 1.0},
        epochs=1,
        max_in_flight=1,
        max_clusters=1,
    )
    run = trained(job, three_small_nodes(tmp_path, job))
    assert run.plan is not None
    assert [len(cluster.stages) for cluster in run.plan.clusters] == [3]
    before = job.model.state_dict()
    expected, found = plain_loop(job.model, job).state_dict(), run.state_dict()
    for name, _ in job.model.named_parameters():
        gradient, reference = before[name] - found[name], before[name] - expected[name]
        error = (gradient - reference).norm() / reference.norm().clamp_min(1e-12)
        assert error <= 1e-6, f"{name}: {error}"


def test_three_stages_with_one_micro_batch_in_flight_follow_the_plain_loop_over_many_updates(tmp_path: Path) -> None:
    job = digits_job(tmp_path, optimizer="SGD", optimizer_args={"lr": 0.05, "momentum": 0.9}, max_in_flight=1, max_clusters=1)
    run = trained(job, three_small_nodes(tmp_path, job))
    expected, found = plain_loop(job.model, job).state_dict(), run.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def smooth_model() -> nn.Module:
    """Return a model in which a small error of a value makes a small error of every gradient: no ReLU, no maximum."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 10))


@pytest.mark.parametrize(("codec", "most"), [("fp16", 0.002), ("int8", 0.05)])
def test_three_stages_that_compress_what_they_send_follow_the_plain_loop_closely(tmp_path: Path, codec: str, most: float) -> None:
    changes: dict[str, Any] = {"optimizer": "SGD", "optimizer_args": {"lr": 0.05}, "max_in_flight": 1, "max_clusters": 1}
    job = digits_job(tmp_path, model=smooth_model(), activation_compression=codec, **changes)
    run = trained(job, three_small_nodes(tmp_path, job))
    before, expected, found = job.model.state_dict(), plain_loop(job.model, job).state_dict(), run.state_dict()
    error = sum(float((found[name] - expected[name]).norm() ** 2) for name, _ in job.model.named_parameters()) ** 0.5
    moved = sum(float((expected[name] - before[name]).norm() ** 2) for name, _ in job.model.named_parameters()) ** 0.5
    assert 0 < error < most * moved


@pytest.mark.parametrize("samples", [33, 47])
def test_ragged_batches_and_micro_batches_are_all_consumed(tmp_path: Path, samples: int) -> None:
    job = digits_job(tmp_path, data=images(samples), batch_size=16, micro_batch_size=5, max_clusters=1)
    run = trained(job, three_small_nodes(tmp_path, job))
    metrics = run.metrics()
    assert metrics.samples == 2 * samples
    assert metrics.epochs_done == 2


class WithUnusedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(64, 10)
        self.unused = nn.Linear(3, 3)
        self.tied = self.used

    def forward(self, pixels: Tensor) -> Tensor:
        return self.tied(pixels.flatten(1))


def test_parameters_the_model_never_uses_and_tied_names_are_in_the_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    job = digits_job(tmp_path, model=WithUnusedParameter(), epochs=1)
    run = trained(job, InprocPool([node("only")], tmp_path))
    expected, found = plain_loop(job.model, job).state_dict(), run.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "averaging",
    [
        {"averaging_interval": 2},
        {"averaging_interval": 2, "averaging_compression": "int8"},
        {"averaging_interval": 2, "averaging_compression": "fp16", "outer_optimizer": "nesterov"},
        {"averaging_interval": 0},
    ],
    ids=lambda fields: "-".join(str(value) for value in fields.values()),
)
def test_two_clusters_with_different_cuts_hold_the_same_model_after_the_final_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, averaging: dict[str, Any]
) -> None:
    job = digits_job(tmp_path, data=images(200), min_clusters=2, max_clusters=2, **averaging)
    alone = nodes_for_stages(job, ["a", "b", "c"])[0].memory_bytes
    nodes = [node(name, memory=int(alone * 1.2)) for name in ("a", "b", "c")]
    nodes += [node(name, memory=int(alone * 1.5), flop_per_s=2e10) for name in ("d", "e")]
    last_states: dict[str, dict[str, Tensor]] = {}
    drop = StageDriver.stop

    async def remember_and_stop(driver: StageDriver) -> None:
        last_states[driver.assignment.node_id] = {name: tensor.detach().clone() for name, tensor in driver.state().items()}
        await drop(driver)

    monkeypatch.setattr(StageDriver, "stop", remember_and_stop)
    run = trained(job, InprocPool(nodes, tmp_path))
    assert run.plan is not None
    cuts = [[stage.start for stage in cluster.stages] for cluster in run.plan.clusters]
    assert len(cuts) == 2, run.plan.notes
    assert cuts[0] != cuts[1]
    assert run.metrics().averaging_rounds >= (2 if job.averaging_interval else 1)
    replicas = []
    for cluster in run.plan.clusters:
        replicas.append({name: tensor for stage in cluster.stages for name, tensor in last_states[stage.node_id].items()})
    averaged = {name for segment in run.plan.segments for name in segment.tensors}
    assert averaged >= {name for name, _ in job.model.named_parameters()}
    for name in averaged:
        assert torch.equal(replicas[0][name], replicas[1][name]), name
        assert torch.equal(replicas[0][name], run.state_dict()[name]), name


def test_a_stage_whose_memory_is_short_recomputes_and_trains(tmp_path: Path) -> None:
    job = digits_job(tmp_path, max_clusters=1, epochs=8)
    run = trained(job, InprocPool(nodes_for_stages(job, ["a", "b"]), tmp_path))
    assert run.plan is not None
    assert [stage.recompute for stage in run.plan.stages] == [True, False]
    assert any("recomputed on" in note for note in run.plan.notes)
    losses = [result.train_loss for result in run.metrics().history]
    assert losses[-1] < losses[0]
    assert int(run.state_dict()["features.1.num_batches_tracked"]) == 8 * 6
