from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from requester_kit import CLASSES, FEATURES, accuracy, job, perceptron, samples
from torch import Tensor, nn
from torch.nn import functional

import roost
from inproc_pool import InprocPool, node, nodes_for_stages
from roost.checkpoint.reader import load
from roost.errors import RoostError
from roost.requester.run import Run, RunMetrics
from roost.types import ModelProfile, NodeProfile, Plan

WAIT_S = 60.0


def one_node(tmp_path: Path) -> InprocPool:
    return InprocPool([node("only")], tmp_path)


class At:
    """An observer that does something once when a run's metrics are so."""

    def __init__(self, when: Callable[[RunMetrics], bool], act: Callable[[], object]) -> None:
        self._when = when
        self._act: Callable[[], object] | None = act

    def planned(self, plan: Plan, nodes: tuple[NodeProfile, ...], profile: ModelProfile) -> None:
        """Nothing."""

    def updated(self, metrics: RunMetrics) -> None:
        if self._act is not None and self._when(metrics):
            act, self._act = self._act, None
            act()


def test_a_finished_run_has_plan_metrics_history_and_a_model_that_loads(tmp_path: Path) -> None:
    training = job(tmp_path, epochs=3, validation=samples(10, seed=2), metric=accuracy)
    run = roost.train(training, one_node(tmp_path)).wait(WAIT_S)
    assert run.ended
    assert not run.stopped
    metrics = run.metrics()
    assert (metrics.samples, metrics.epochs_done, metrics.epochs) == (72, 3.0, 3)
    assert [result.epoch for result in metrics.history] == [1, 2, 3]
    assert run.plan is not None
    assert [stage.node_id for stage in run.plan.stages] == ["only"]
    model = perceptron()
    model.load_state_dict(run.state_dict(), strict=True)
    model.eval()
    with torch.no_grad():
        output = model(training.validation[0])
    last = metrics.history[-1]
    assert last.metric == pytest.approx(float(accuracy(output, training.validation[1])))
    assert last.validation_loss == pytest.approx(float(functional.cross_entropy(output, training.validation[1])), rel=1e-5)
    events = [json.loads(line) for line in (tmp_path / "checkpoints" / run.job_id / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("planned") == 1
    saved = [(event["event"], event["name"]) for event in events if event["event"].startswith("checkpoint_")]
    # Of the one between them it depends on how long the first takes.
    assert saved[0] == ("checkpoint_begun", "epoch-0001")
    assert saved[-2:] == [("checkpoint_begun", "epoch-0003"), ("checkpoint_complete", "epoch-0003")]
    assert events[-1]["state"] == "done"


def test_without_a_metric_there_is_none_in_the_history(tmp_path: Path) -> None:
    run = roost.train(job(tmp_path, validation=samples(10)), one_node(tmp_path)).wait(WAIT_S)
    assert [result.metric for result in run.metrics().history] == [None]
    assert run.metrics().history[0].validation_loss is not None


def test_the_model_of_the_job_is_not_changed_by_training(tmp_path: Path) -> None:
    training = job(tmp_path)
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    roost.train(training, one_node(tmp_path)).wait(WAIT_S)
    assert all(torch.equal(before[name], tensor) for name, tensor in training.model.state_dict().items())


def test_there_is_no_model_before_the_first_checkpoint(tmp_path: Path) -> None:
    run = roost.train(job(tmp_path, data=samples(400), batch_size=4), one_node(tmp_path))
    with pytest.raises(RoostError, match="no checkpoint yet"):
        run.state_dict()
    with pytest.raises(TimeoutError):
        run.wait(0.001)
    run.stop()
    run.wait(WAIT_S)


# ---------------------------------------------------------------- failures


def failure(run: Run) -> RoostError:
    with pytest.raises(RoostError) as caught:
        run.wait(WAIT_S)
    assert run.ended
    return caught.value


@pytest.mark.parametrize("cause", ["the data", "the learning rate"])
def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, cause: str) -> None:
    inputs, labels = samples()
    changes: dict[str, Any] = {"epochs": 30, "optimizer": "SGD", "optimizer_args": {"lr": 1e30}}
    if cause == "the data":
        inputs[20] = float("nan")
        changes = {"data": (inputs, labels), "epochs": 2}
    error = failure(roost.train(job(tmp_path, **changes), one_node(tmp_path)))
    assert error.code == "R601"
    assert "nan" in error.message or "inf" in error.message


@pytest.mark.parametrize("cause", ["the loss", "the metric"])
def test_an_evaluation_that_gives_no_number_ends_the_run(tmp_path: Path, cause: str) -> None:
    inputs, labels = samples(10)
    changes: dict[str, Any] = {"validation": (inputs, labels), "metric": not_a_number}
    if cause == "the loss":
        inputs[3] = float("nan")
        changes["metric"] = None
    error = failure(roost.train(job(tmp_path, **changes), one_node(tmp_path)))
    assert error.code == "R601"


def not_a_number(output: Tensor, label: Tensor) -> Tensor:
    right = (output.argmax(1) == label).float().mean()
    return (right - right) / (right - right)


class Breaking:
    """Its later samples are wrong in some way."""

    def __init__(self, last: Any) -> None:
        self._last = last

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        if index == 23:
            return self._last() if callable(self._last) else self._last
        return torch.zeros(FEATURES), 1


def unreadable() -> tuple[Tensor, int]:
    raise OSError("the file is damaged")


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (unreadable, "reading sample 23 raised OSError: the file is damaged"),
        ((torch.zeros(FEATURES + 1), 1), "cannot be stacked"),
        ((torch.zeros(FEATURES), 1.5), "float32"),
    ],
)
def test_data_that_turns_out_wrong_ends_the_run_with_the_reason(tmp_path: Path, last: Any, reason: str) -> None:
    error = failure(roost.train(job(tmp_path, data=Breaking(last)), one_node(tmp_path)))
    assert error.code == "R103"
    assert reason in error.message


def test_a_label_out_of_range_ends_the_run_with_the_operations_own_words(tmp_path: Path) -> None:
    error = failure(roost.train(job(tmp_path, data=Breaking((torch.zeros(FEATURES), CLASSES))), one_node(tmp_path)))
    assert error.code == "R603"
    assert f"Target {CLASSES} is out of bounds" in error.message


def long_job(tmp_path: Path, **changes: Any) -> roost.Job:
    return job(tmp_path, data=samples(64), batch_size=4, epochs=500, **changes)


def test_a_killed_node_that_is_missed_ends_the_run_with_its_name(tmp_path: Path) -> None:
    training = long_job(tmp_path, max_clusters=1)
    pool = InprocPool(nodes_for_stages(training, ["a", "b"]), tmp_path, rejoin_s=0.1, lost_after_s=3.0)
    observer = At(lambda metrics: metrics.samples > 0, lambda: pool.network.kill("b"))
    error = failure(roost.train(training, pool, observer=observer))
    assert error.code == "R602"
    assert "b went away" in error.message


def test_a_coordinator_that_is_gone_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roost.requester.run.HEARTBEAT_S", 0.01)
    monkeypatch.setattr("roost.requester.run.COORDINATOR_AWAY_S", 0.2)
    pool = one_node(tmp_path)
    observer = At(lambda metrics: metrics.samples > 0, lambda: pool.network.kill("coordinator"))
    error = failure(roost.train(long_job(tmp_path), pool, observer=observer))
    assert error.code == "R603"
    assert "the coordinator inproc:coordinator has not answered for" in error.message


def test_an_observer_that_raises_neither_hangs_nor_ends_the_run(tmp_path: Path) -> None:
    def broken() -> None:
        raise BrokenPipeError("nobody reads this")

    observer = At(lambda metrics: bool(metrics.history), broken)
    run = roost.train(job(tmp_path, epochs=2), one_node(tmp_path), observer=observer).wait(WAIT_S)
    assert run.metrics().epochs_done == 2


def test_an_observer_that_raises_at_the_end_does_not_hang_the_run(tmp_path: Path) -> None:
    def broken() -> None:
        raise BrokenPipeError("nobody reads this")

    observer = At(lambda metrics: metrics.state == "done", broken)
    run = roost.train(job(tmp_path), one_node(tmp_path), observer=observer).wait(WAIT_S)
    assert run.metrics().epochs_done == 1


# ---------------------------------------------------------------- stopping


def test_a_run_that_is_stopped_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    training = long_job(tmp_path)
    began = threading.Event()
    run = roost.train(training, one_node(tmp_path), observer=At(lambda metrics: metrics.samples > 0, began.set))
    assert began.wait(WAIT_S)
    run.stop()
    run.wait(WAIT_S)
    assert run.stopped
    assert run.checkpoint is not None
    assert run.checkpoint.name.startswith(("stopped-", "epoch-"))
    perceptron().load_state_dict(run.state_dict(), strict=True)
    assert run.metrics().epochs_done < 500
    run.stop()


def test_a_run_stopped_before_it_has_nodes_ends_and_says_so(tmp_path: Path) -> None:
    pool = InprocPool([], tmp_path)
    package = roost.api.prepare(job(tmp_path))
    run = Run(package, pool, observer=None, wait_s=WAIT_S)
    run.stop()
    with pytest.raises(RoostError, match="was stopped before it was planned"):
        run.start()
    assert run.ended


# ---------------------------------------------------------------- data shares


def test_two_unequal_clusters_consume_every_sample_once_per_epoch(tmp_path: Path) -> None:
    training = job(tmp_path, data=samples(101), batch_size=4, epochs=3, averaging_interval=4, min_clusters=2)
    pool = InprocPool([node("fast", flop_per_s=3e10), node("slow", flop_per_s=1e10)], tmp_path)
    run = roost.train(training, pool).wait(WAIT_S)
    assert run.plan is not None
    # Three times as fast, but for what messages cost, which is the same for both.
    shares = [cluster.share for cluster in run.plan.clusters]
    assert shares == pytest.approx([cluster.samples_per_s / run.plan.samples_per_s for cluster in run.plan.clusters])
    assert 0.6 < max(shares) <= 0.75
    metrics = run.metrics()
    assert metrics.samples == 3 * 101
    assert metrics.history[-1].samples == 3 * 101
    assert metrics.epochs_done == 3.0


# ---------------------------------------------------------------- resuming


def states(run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    assert run.checkpoint is not None
    checkpoint = load(run.checkpoint)
    return checkpoint.model, checkpoint.optimizer


def resumable(tmp_path: Path, **changes: Any) -> roost.Job:
    fields = {
        "model": nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES)),
        "data": samples(50),
        "micro_batch_size": 3,
        "schedule": "CosineAnnealingLR",
        "schedule_args": {"T_max": 28},
        "epochs": 4,
    }
    torch.manual_seed(11)
    return job(tmp_path, **{**fields, **changes})


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_resumed_run_ends_with_the_same_bits_as_one_that_was_not_interrupted(tmp_path: Path, optimizer: str) -> None:
    changes = {"optimizer": optimizer, "optimizer_args": {"lr": 0.01, "momentum": 0.9} if optimizer == "SGD" else {"lr": 0.01}}
    torch.manual_seed(0)
    model = resumable(tmp_path).model
    whole = roost.train(resumable(tmp_path, model=model, **changes), one_node(tmp_path)).wait(WAIT_S)
    half = roost.train(resumable(tmp_path, model=model, epochs=2, **changes), one_node(tmp_path)).wait(WAIT_S)
    assert half.checkpoint is not None
    rest = roost.train(resumable(tmp_path, **changes), one_node(tmp_path), resume=half.checkpoint).wait(WAIT_S)
    metrics = rest.metrics()
    assert (metrics.epochs_done, [result.epoch for result in metrics.history]) == (4.0, [3, 4])
    assert metrics.samples == 2 * 50
    for expected, found in zip(states(whole), states(rest), strict=True):
        assert found.keys() == expected.keys()
        assert len(found) > 0
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    assert rest.checkpoint is not None
    assert whole.checkpoint is not None
    contents = [load(path).manifest.contents for path in (whole.checkpoint, rest.checkpoint)]
    assert [(content.epoch, content.updates) for content in contents] == [(4, 28), (4, 28)]


def test_the_directory_of_a_run_resumes_from_its_newest_checkpoint(tmp_path: Path) -> None:
    first = roost.train(job(tmp_path, epochs=2), one_node(tmp_path)).wait(WAIT_S)
    assert first.checkpoint is not None
    run = roost.train(job(tmp_path, epochs=3), one_node(tmp_path), resume=str(first.checkpoint.parent)).wait(WAIT_S)
    assert [result.epoch for result in run.metrics().history] == [3]


def test_two_clusters_resume_where_they_stopped(tmp_path: Path) -> None:
    def pool() -> InprocPool:
        return InprocPool([node("a"), node("b")], tmp_path)

    fields: dict[str, Any] = {"data": samples(40), "batch_size": 4, "min_clusters": 2, "averaging_interval": 2}
    first = roost.train(job(tmp_path, epochs=1, **fields), pool()).wait(WAIT_S)
    run = roost.train(job(tmp_path, epochs=2, **fields), pool(), resume=first.checkpoint).wait(WAIT_S)
    assert run.metrics().samples == 40
    assert [result.epoch for result in run.metrics().history] == [2]
    assert run.checkpoint is not None
    assert load(run.checkpoint).manifest.contents.updates == 20


def test_checkpoints_that_do_not_fit_the_job_are_refused_before_anything_starts(tmp_path: Path) -> None:
    first = roost.train(job(tmp_path), one_node(tmp_path)).wait(WAIT_S)
    for changes, code, reason in (
        ({}, "R101", "the checkpoint has done 1 epochs, the job asks for 1"),
        ({"epochs": 2, "model": perceptron(width=17)}, "R702", r"tensor '0.weight' is float32 \[16, 6\] in the checkpoint"),
        ({"epochs": 2, "optimizer": "SGD"}, "R702", "the checkpoint has the state of AdamW, the job asks for SGD"),
    ):
        with pytest.raises(RoostError, match=reason) as caught:
            roost.train(job(tmp_path, **changes), one_node(tmp_path), resume=first.checkpoint)
        assert caught.value.code == code
    with pytest.raises(RoostError, match="there is no checkpoint in .*nowhere") as caught:
        roost.train(job(tmp_path), one_node(tmp_path), resume=tmp_path / "nowhere")
    assert caught.value.code == "R700"
