from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roost.checkpoint.manifest import CheckpointContents
from roost.checkpoint.reader import load
from roost.checkpoint.writer import MAX_OPEN, CheckpointWriter
from roost.config import JobConfig, NamedArguments
from roost.errors import CheckpointError
from roost.types import TensorSpec

CONFIG = JobConfig(job_id="job", optimizer=NamedArguments(name="SGD", arguments=()), samples=10)
CONTENTS = CheckpointContents(
    epoch=1,
    updates=1,
    tensors=(TensorSpec(name="a", dtype="float32", shape=(2,)), TensorSpec(name="b", dtype="float32", shape=(2,))),
    config=CONFIG,
)


def tensor(value: float) -> torch.Tensor:
    return torch.full((2,), float(value))


def partials(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.endswith(".partial"))


def test_an_abandoned_attempt_gives_nothing_to_the_next(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=0)
    writer.add("e", 0, {"a": tensor(1)}, {"a/step": tensor(1)})
    writer.add("e", 1, {"b": tensor(1)}, {"b/step": tensor(1)})
    writer.add("e", 0, {"a": tensor(2)}, {"a/step": tensor(2)}, attempt=1)
    with pytest.raises(CheckpointError, match="lacks tensor 'b'"):
        writer.finish("e", CONTENTS, attempt=1)
    writer.add("e", 7, {"b": tensor(2)}, {}, attempt=1)
    checkpoint = load(writer.finish("e", CONTENTS, attempt=1))
    assert checkpoint.model["b"].tolist() == [2.0, 2.0]
    assert checkpoint.optimizer.keys() == {"a/step"}
    assert checkpoint.optimizer["a/step"].tolist() == [2.0, 2.0]
    assert partials(tmp_path) == []


def test_a_late_part_of_an_abandoned_attempt_does_not_reach_the_one_that_is_written(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=0)
    writer.add("e", 0, {"a": tensor(2), "b": tensor(2)}, {"a/step": tensor(2)}, attempt=1)
    writer.add("e", 0, {"a": tensor(1), "b": tensor(1)}, {"a/step": tensor(1)}, attempt=0)
    assert load(writer.finish("e", CONTENTS, attempt=1)).model["a"].tolist() == [2.0, 2.0]
    with pytest.raises(CheckpointError, match="attempt 0 of checkpoint 'e' was given up"):
        writer.add("e", 0, {"a": tensor(1)}, {})


def test_a_segment_may_come_in_parts_and_a_part_that_comes_again_replaces_the_first(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=0)
    writer.add("e", 4, {"a": tensor(1)}, {"a/m": tensor(1)}, part=0)
    writer.add("e", 4, {"b": tensor(9)}, {"a/v": tensor(9)}, part=1)
    writer.add("e", 4, {"b": tensor(2)}, {"a/v": tensor(2)}, part=1)
    path = writer.finish("e", CONTENTS)
    assert sorted(file.name for file in path.iterdir()) == [
        "checkpoint.json",
        "model.safetensors",
        "optimizer-4-1.safetensors",
        "optimizer-4.safetensors",
    ]
    found = load(path)
    assert {name: value.tolist() for name, value in found.optimizer.items()} == {"a/m": [1.0, 1.0], "a/v": [2.0, 2.0]}
    assert found.model["b"].tolist() == [2.0, 2.0]


def test_attempts_that_are_never_finished_do_not_pile_up(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=0)
    for number in range(MAX_OPEN + 3):
        writer.add(f"e{number}", 0, {}, {"a/m": tensor(1)})
    assert len(partials(tmp_path)) == MAX_OPEN
    writer.add("last", 0, {"a": tensor(1), "b": tensor(1)}, {})
    writer.finish("last", CONTENTS)
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_what_a_process_that_died_left_behind_is_removed(tmp_path):
    CheckpointWriter(tmp_path, keep=0).add("e1", 0, {}, {"a/m": tensor(1)})
    CheckpointWriter(tmp_path, keep=0).add("e2", 0, {}, {"a/m": tensor(1)})
    assert partials(tmp_path) == [".e2.0.partial"]
