from __future__ import annotations

from dataclasses import replace

import pytest

from roost.config import JobConfig, NamedArguments
from roost.planning.staleness import chosen_correction
from roost.types import ClusterPlan, Plan, StagePlan


def plan(*versions: int) -> Plan:
    stages = tuple(
        StagePlan(
            cluster=0,
            index=index,
            node_id=f"n{index}",
            first_unit=index,
            last_unit=index + 1,
            start=index,
            stop=index + 1,
            max_in_flight=count,
            memory_needed_bytes=1,
            memory_available_bytes=1,
            compute_s=1.0,
            send_s=0.0,
            versions=count,
        )
        for index, count in enumerate(versions)
    )
    cluster = ClusterPlan(index=0, stages=stages, samples_per_s=1.0, share=1.0, bottleneck="compute")
    return Plan(clusters=(cluster,), segments=(), backups=(), samples_per_s=1.0, notes=())


def config(optimizer: str = "AdamW", schedule: NamedArguments | None = None, **arguments) -> JobConfig:
    named = NamedArguments(name=optimizer, arguments=tuple((arguments or {"lr": 0.001}).items()))
    return JobConfig(job_id="job", optimizer=named, schedule=schedule, samples=8, correction="auto")


def test_a_plan_with_stale_gradients_gets_nesterov():
    assert chosen_correction(config(), plan(3, 1)) == "nesterov"
    assert chosen_correction(config("Adam", lr=0.01, betas=(0.9, 0.99)), plan(3, 1)) == "nesterov"


def test_a_plan_without_staleness_keeps_the_optimizer_as_it_is():
    assert chosen_correction(config(), plan(1)) == "none"
    assert chosen_correction(replace(config(), mode="sync"), plan(3, 1)) == "none"


@pytest.mark.parametrize(
    "other",
    [
        config("SGD", lr=0.1),
        config("AdamW", lr=0.1, amsgrad=True),
        config("Adam", lr=0.1, betas=(0.5, 0.999)),
        config(schedule=NamedArguments(name="OneCycleLR", arguments=(("max_lr", 0.1), ("total_steps", 10)))),
    ],
)
def test_what_was_not_measured_is_left_alone(other):
    assert chosen_correction(other, plan(3, 1)) == "none"


def test_a_schedule_that_leaves_the_momentum_alone_does_not_stand_in_the_way():
    schedule = NamedArguments(name="OneCycleLR", arguments=(("max_lr", 0.1), ("total_steps", 10), ("cycle_momentum", False)))
    assert chosen_correction(config(schedule=schedule), plan(3, 1)) == "nesterov"


def test_a_correction_that_was_named_is_used():
    assert chosen_correction(replace(config(), correction="prediction"), plan(3, 1)) == "prediction"
