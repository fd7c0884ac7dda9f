"""What benchmarks.convergence claims of its own machinery."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET

import pytest
import torch
from benchmarks.convergence import SYNC, Contest, Task, compare, picture_of, run_plan
from benchmarks.convergence_model import GptStage, Sizes
from benchmarks.convergence_pipeline import RunPlan, Training, validation_losses

SMALL = Sizes(stages=4, width=8, heads=1, context=8, micro_batch=2)
MICRO_BATCHES = 24


def small_plan(name: str, *, clusters: int = 1, seeds: tuple[int, ...] = (1, 2)) -> RunPlan:
    plan = run_plan(Task(name=name, rate=1e-2, micro_batches=MICRO_BATCHES, clusters=clusters, seeds=seeds, evaluations=2))
    return dataclasses.replace(plan, sizes=SMALL, config=dataclasses.replace(plan.config, averaging_interval=4), round_time=6)


@pytest.mark.parametrize("name", ["none", "prediction", "compensation", "nesterov", "rotation"])
def test_replicas_side_by_side_train_like_each_alone(name: str) -> None:
    together = Training(small_plan(name)).run()
    alone = [Training(small_plan(name, seeds=(seed,))).run().final[0] for seed in (1, 2)]
    assert together.final == pytest.approx(alone, rel=2e-4)
    assert together.final[0] != pytest.approx(together.final[1], rel=1e-3)


def test_delays_are_those_of_a_pipeline_without_flush_and_none_with() -> None:
    delays = Training(small_plan("none", seeds=(1,))).run().delays
    assert delays == pytest.approx([3, 2, 1, 0], abs=0.3)
    assert Training(small_plan(SYNC, seeds=(1,))).run().delays == [0, 0, 0, 0]


def test_a_run_gives_the_same_bits_twice() -> None:
    assert Training(small_plan("prediction", clusters=2)).run().points == Training(small_plan("prediction", clusters=2)).run().points


def test_several_micro_batches_per_update_shorten_the_delay() -> None:
    plan = run_plan(Task(name="none", rate=1e-2, micro_batches=26, clusters=2, seeds=(1,), evaluations=2, per_update=3))
    plan = dataclasses.replace(plan, sizes=SMALL)
    assert plan.micro_batches == 24
    delays = Training(plan).run().delays
    assert delays == pytest.approx([1, 2 / 3, 1 / 3, 0], abs=0.3)


def test_synchronous_training_equals_a_plain_loop() -> None:
    plan = small_plan(SYNC, seeds=(1,))
    programs = [GptStage(index, SMALL) for index in range(SMALL.stages)]
    weights = [{name: tensor.requires_grad_() for name, tensor in program.initial((1,)).items()} for program in programs]
    parameters = [tensor for tensors in weights for tensor in tensors.values()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, **plan.config.schedule.as_dict())  # type: ignore[union-attr]
    training = Training(plan)
    fed = []
    training._pipelines[0].stages[0].values_arrived = lambda header, values: fed.append(values)  # type: ignore[method-assign]
    for number in range(MICRO_BATCHES):
        training._pipelines[0]._inject(number)
    for values in fed:
        for program, tensors in zip(programs, weights, strict=True):
            values = program.run(values, tensors, training=True)
        optimizer.zero_grad()
        values[programs[-1].loss_value].backward()  # type: ignore[index]
        optimizer.step()
        schedule.step()
    expected = validation_losses(programs, weights, plan, 4)
    assert Training(plan).run().final == pytest.approx(expected, rel=1e-5)


def test_two_clusters_end_with_one_model() -> None:
    training = Training(small_plan("none", clusters=2))
    training.run()
    first, second = training._pipelines
    for one, other in zip(first.stages, second.stages, strict=True):
        for name, tensor in one.runner.state().items():
            torch.testing.assert_close(tensor, other.runner.state()[name])


def test_the_result_is_json_and_its_picture_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.convergence.Sizes", lambda: SMALL)
    contest = Contest(names=(SYNC, "none"), micro_batches=MICRO_BATCHES, rates=(1e-2,), seeds=(1,), evaluations=3, workers=1)
    result = json.loads(json.dumps(compare(contest, "none")))
    assert result["async_over_sync"] == max(result["over_sync"]["clusters_1"]["none"], result["over_sync"]["clusters_2"]["none"])
    assert result["over_sync"]["clusters_1"][SYNC] == 1.0
    assert len(result["curves"]["clusters_2"]["none"]) == 3
    picture = ET.fromstring(picture_of(result))
    assert picture.tag.endswith("svg")
    assert "2 clusters" in "".join(picture.itertext())
