from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from roost.codec import encode_record
from roost.config import JobConfig, NamedArguments
from roost.errors import InvalidConfigError
from roost.requester.model_file import ModelFile
from roost.requester.plan_file import check_plan_fits, load_plan, save_plan
from roost.types import ClusterPlan, ModelProfile, Plan, SegmentPlan, StagePlan, TensorKind, TensorRecord, UnitProfile


def unit(index: int) -> UnitProfile:
    weight = TensorRecord(name=f"w{index}", dtype="float32", shape=(10,), kind=TensorKind.PARAMETER, trainable=True)
    cost = {"forward_s": 0.001, "backward_s": 0.002, "forward_flop": 1.0, "saved_bytes": 5, "crossing_bytes": 0}
    return UnitProfile(start=2 * index, stop=2 * index + 2, label=f"layers.{index}", tensors=(weight,), **cost)  # type: ignore[arg-type]


def model(units: int = 4) -> ModelProfile:
    made = tuple(unit(index) for index in range(units))
    return ModelProfile(name="net", micro_batch_size=4, reference_flop_per_s=1e9, units=made, input_bytes=7)


def stage(cluster: int, index: int, node: str, first: int, last: int) -> StagePlan:
    return StagePlan(
        cluster=cluster,
        index=index,
        node_id=node,
        first_unit=first,
        last_unit=last,
        start=2 * first,
        stop=2 * last,
        max_in_flight=1,
        memory_needed_bytes=1,
        memory_available_bytes=2,
        compute_s=0.1,
        send_s=0.0,
    )


def cluster(index: int, *stages: StagePlan) -> ClusterPlan:
    return ClusterPlan(index=index, stages=stages, share=0.5, samples_per_s=1.0, bottleneck="compute")


def segment(*tensors: str) -> SegmentPlan:
    return SegmentPlan(index=0, tensors=tensors, nbytes=40 * len(tensors), members=("a", "c"))


def test_a_plan_from_before_stages_could_recompute_still_loads(tmp_path: Path) -> None:
    raw = encode_record(PLAN)
    for one in raw["clusters"]:
        for part in one["stages"]:
            del part["recompute"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(raw))
    assert load_plan(path) == PLAN


PLAN = Plan(
    clusters=(cluster(0, stage(0, 0, "a", 0, 1), stage(0, 1, "b", 1, 4)), cluster(1, stage(1, 0, "c", 0, 4))),
    segments=(segment("w0"), segment("w1", "w2", "w3")),
    backups=("d",),
    samples_per_s=2.0,
    notes=("a note",),
)


def test_what_was_saved_is_loaded_and_fits_its_model(tmp_path: Path) -> None:
    save_plan(PLAN, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == PLAN
    check_plan_fits(PLAN, model(), tmp_path / "plan.json")


def with_stage(cluster: int, stage: int, **fields: object) -> str:
    raw: dict[str, Any] = encode_record(PLAN)
    raw["clusters"][cluster]["stages"][stage].update(fields)
    return json.dumps(raw)


def with_fields(**fields: object) -> str:
    return json.dumps({**encode_record(PLAN), **fields})


CONFIG = JobConfig(job_id="j", optimizer=NamedArguments(name="SGD"), samples=9, batch_size=4, micro_batch_size=4)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nodes: []", "Expecting value"),
        ("{}", "Plan: expected exactly the fields"),
        (json.dumps(encode_record(ModelFile(config=CONFIG, profile=model()))), "Plan: expected exactly the fields"),
        (with_fields(extra=1), "Plan: expected exactly the fields"),
        (with_fields(samples_per_s=float("inf")), "Plan.samples_per_s: 'inf' is not a valid float"),
        (with_fields(clusters=[]), "it has no clusters"),
        (with_fields(clusters=[encode_record(cluster(0))]), "cluster 0 has no stages"),
        (with_fields(clusters=[encode_record(PLAN.clusters[1])]), "the stages of cluster 0 are not numbered in their order"),
        (with_stage(0, 1, index=7), "the stages of cluster 0 are not numbered in their order"),
        (with_stage(1, 0, node_id="a"), "a has more than one stage"),
        (with_stage(1, 0, node_id="a\x1b[2J"), "node 'a\\x1b[2J' must be 1 to 64 letters"),
        (with_fields(backups=[""]), "node '' must be 1 to 64 letters"),
        (with_stage(0, 1, first_unit=2), "b has units 2 .. 4 where unit 1 comes next"),
        (with_stage(0, 0, last_unit=0), "a has units 0 .. 0 where unit 0 comes next"),
        (with_stage(0, 0, first_unit=-1), "a has units -1 .. 1 where unit 0 comes next"),
    ],
)
def test_what_is_no_plan_is_refused_with_its_place(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InvalidConfigError, match=re.escape(reason)) as caught:
        load_plan(path)
    assert f"{path} is not a plan: " in caught.value.message
    assert "--save-plan" in caught.value.hint


def replaced_unit(index: int, **fields: object) -> ModelProfile:
    profile = model()
    units = [dataclasses.replace(unit, **fields) if place == index else unit for place, unit in enumerate(profile.units)]  # type: ignore[arg-type]
    return dataclasses.replace(profile, units=tuple(units))


def tensor(name: str, size: int) -> tuple[TensorRecord, ...]:
    return (TensorRecord(name=name, dtype="float32", shape=(size,), kind=TensorKind.PARAMETER, trainable=True),)


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        (model(5), "cluster 0 has 4 units, the model 5"),
        (model(3), "cluster 0 has 4 units, the model 3"),
        (replaced_unit(3, stop=9), "the stage of b runs graph positions 2 .. 8, in the model these units are 2 .. 9"),
        (replaced_unit(2, tensors=tensor("other", 10)), "w2 is in the plan alone"),
        (replaced_unit(2, tensors=()), "w2 is in the plan alone"),
        (replaced_unit(2, tensors=tensor("w2", 10) + tensor("x", 1) + tensor("y", 1)), "x and 1 more are in the model alone"),
        (replaced_unit(2, tensors=tensor("w2", 11)), "its tensors have 160 bytes, those of the model 164"),
    ],
)
def test_a_plan_of_another_model_is_refused(profile: ModelProfile, reason: str) -> None:
    with pytest.raises(InvalidConfigError, match=re.escape(f"some/plan.json: the plan is not one of net: {reason}")) as caught:
        check_plan_fits(PLAN, profile, Path("some/plan.json"))
    assert "the script or profile of that job" in caught.value.hint
