from __future__ import annotations

import math
from typing import Any

import pytest

from roost.config import (
    AgentConfig,
    CoordinatorConfig,
    JobConfig,
    NamedArguments,
    NodeOptions,
    RobustMethod,
    TensorCodec,
    TransportConfig,
    check_identifier,
    format_bytes,
    parse_bytes,
)
from roost.errors import InvalidConfigError


def job(**changes: Any) -> JobConfig:
    fields: dict[str, Any] = {"job_id": "j", "optimizer": NamedArguments(name="SGD", arguments=(("lr", 0.1),)), "samples": 10}
    return JobConfig(**{**fields, **changes})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("job_id", "../x"),
        ("job_id", "name\n"),
        ("job_id", ""),
        ("optimizer", NamedArguments(name="LBFGS")),
        ("schedule", NamedArguments(name="LambdaLR")),
        ("batch_size", 0),
        ("micro_batch_size", 0),
        ("micro_batch_size", 33),
        ("epochs", 0),
        ("averaging_interval", -1),
        ("sync_interval", 0),
        ("samples", 0),
        ("validation_samples", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("min_clusters", 0),
        ("max_clusters", -1),
        ("max_in_flight", -1),
        ("start_epoch", 1),
        ("start_updates", -1),
    ],
)
def test_a_job_that_cannot_work_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfigError):
        job(**{field: value})


def test_robust_averaging_does_not_go_with_int8() -> None:
    with pytest.raises(InvalidConfigError, match="robust_averaging 'clipped' does not go with averaging_compression 'int8'"):
        job(robust_averaging=RobustMethod.CLIPPED, averaging_compression=TensorCodec.INT8)
    assert job(robust_averaging=RobustMethod.CLIPPED, averaging_compression=TensorCodec.FP16).averaging_copies == 4


def test_more_minimum_than_maximum_clusters_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="max_clusters"):
        job(min_clusters=3, max_clusters=2)


@pytest.mark.parametrize("arguments", [(("l r", 1.0),), (("lr", math.nan),), (("betas", (0.9, math.inf)),)])
def test_arguments_that_are_not_names_and_finite_numbers_are_refused(arguments: Any) -> None:
    with pytest.raises(InvalidConfigError):
        NamedArguments(name="SGD", arguments=arguments)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (TransportConfig, {"max_message_bytes": 0}),
        (TransportConfig, {"frame_bytes": 10}),
        (TransportConfig, {"call_s": math.inf}),
        (TransportConfig, {"uplink_bytes_per_s": -1.0}),
        (CoordinatorConfig, {"port": 65536}),
        (CoordinatorConfig, {"token_ttl_s": 0.0}),
        (CoordinatorConfig, {"heartbeat_s": 5.0, "lost_after_s": 4.0}),
        (AgentConfig, {"node_id": "a b"}),
        (AgentConfig, {"node_id": "a", "device": "tpu"}),
        (AgentConfig, {"node_id": "a", "relative_speed": 0.0}),
        (AgentConfig, {"node_id": "a", "relative_speed": 1.5}),
        (NodeOptions, {"memory": "lots"}),
        (NodeOptions, {"threads": 0}),
        (NodeOptions, {"uplink_mbit": -1.0}),
        (NodeOptions, {"downlink_mbit": 1e-6}),
        (AgentConfig, {"node_id": "a", "downlink_bytes_per_s": math.nan}),
    ],
)
def test_settings_that_cannot_work_are_refused(kind: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError):
        kind(**fields)


@pytest.mark.parametrize(
    ("text", "size"), [(5, 5), ("7", 7), ("64MB", 64_000_000), ("1.5 GiB", 3 * 2**29), ("2kb", 2000), (" 3 TB ", 3 * 10**12)]
)
def test_sizes_are_read_as_people_write_them(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "1e9", "5 XB", "1.2.3GB", -4])
def test_sizes_that_are_none_are_refused(text: int | str) -> None:
    with pytest.raises(InvalidConfigError):
        parse_bytes(text)


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (3e15, "3000.0 TB")])
def test_sizes_are_written_for_people(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize("name", ["node-1", "a", "A_b.c-9", "x" * 64])
def test_plain_names_are_taken(name: str) -> None:
    check_identifier(name, "node name")


@pytest.mark.parametrize("name", ["", "-a", ".a", "a/b", "a\n", "x" * 65, "ä"])
def test_names_that_could_be_paths_or_confuse_are_refused(name: str) -> None:
    with pytest.raises(InvalidConfigError, match="node name"):
        check_identifier(name, "node name")
