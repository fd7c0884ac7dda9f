from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from roost.checkpoint.manifest import CheckpointContents
from roost.checkpoint.reader import load, load_from, load_newest
from roost.checkpoint.writer import CheckpointWriter
from roost.config import JobConfig, NamedArguments
from roost.errors import CheckpointDamagedError, CheckpointError
from roost.types import TensorSpec

CONFIG = JobConfig(job_id="job", optimizer=NamedArguments(name="SGD", arguments=()), samples=10)
MODEL, STATE, MANIFEST = "model.safetensors", "optimizer-0.safetensors", "checkpoint.json"


def contents(epoch: int) -> CheckpointContents:
    spec = TensorSpec(name="weight", dtype="float32", shape=(64,))
    return CheckpointContents(epoch=epoch, updates=epoch, tensors=(spec,), config=CONFIG)


def run_of(root: Path, checkpoints: int = 3) -> list[Path]:
    """Write checkpoints e1, e2, ... whose weights are their epoch, and return their directories."""
    ticks = count(1)
    writer = CheckpointWriter(root, keep=0, clock=lambda: float(next(ticks)))
    paths = []
    for epoch in range(1, checkpoints + 1):
        writer.add(f"e{epoch}", 0, {"weight": torch.full((64,), float(epoch))}, {"weight/step": torch.tensor(float(epoch))})
        paths.append(writer.finish(f"e{epoch}", contents(epoch)))
    (root / "events.jsonl").write_text("{}\n")
    return paths


def flip(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[-2] ^= 4
        (path / name).write_bytes(data)

    return damage


def cut_short(name: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size // 2)


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def another_epoch(path: Path) -> None:
    raw = json.loads((path / MANIFEST).read_text())
    raw["contents"]["epoch"] += 1
    (path / MANIFEST).write_text(json.dumps(raw))


def another_format(path: Path) -> None:
    raw = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**raw, "format_version": 99}))


def a_directory_instead(path: Path) -> None:
    (path / MANIFEST).unlink()
    (path / MANIFEST).mkdir()


DAMAGES = {
    "a bit of the model": flip(MODEL),
    "a bit of the optimizer": flip(STATE),
    "model cut short": cut_short(MODEL),
    "optimizer cut short": cut_short(STATE),
    "manifest cut short": cut_short(MANIFEST),
    "model missing": remove(MODEL),
    "optimizer missing": remove(STATE),
    "manifest missing": remove(MANIFEST),
    "everything missing": empty,
    "a number in the manifest": another_epoch,
    "manifest of another format": another_format,
    "a directory in the manifest's place": a_directory_instead,
    "a manifest that is no text": lambda path: (path / MANIFEST).write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_newest_checkpoint_is_damaged_so_it_is_named_and_the_one_before_is_used(tmp_path, caplog, damage):
    paths = run_of(tmp_path)
    damage(paths[-1])
    with caplog.at_level(logging.WARNING):
        checkpoint = load_from(tmp_path)
    assert checkpoint.model["weight"].tolist() == [2.0] * 64
    assert checkpoint.optimizer["weight/step"].item() == 2.0
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    assert warnings[0].startswith(f"checkpoint_damaged path={paths[-1]} reason=")
    assert warnings[1] == f"checkpoint_before_it_used path={paths[-2]} damaged=1"


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_if_every_checkpoint_is_damaged_the_error_names_them_all(tmp_path, damage):
    for path in run_of(tmp_path):
        damage(path)
    with pytest.raises(CheckpointDamagedError) as caught:
        load_from(tmp_path)
    assert all(f"\n    {name}: " in caught.value.message for name in ("e1", "e2", "e3"))


def test_an_intact_run_is_resumed_from_its_newest_checkpoint_without_a_warning(tmp_path, caplog):
    run_of(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load_newest(tmp_path).manifest.contents.epoch == 3
    assert not caplog.records


def test_an_older_damaged_checkpoint_does_not_matter(tmp_path, caplog):
    flip(MODEL)(run_of(tmp_path)[0])
    with caplog.at_level(logging.WARNING):
        assert load_newest(tmp_path).manifest.contents.epoch == 3
    assert not caplog.records


@pytest.mark.parametrize("damage", [flip(MODEL), cut_short(STATE), remove(MODEL)])
def test_a_damaged_checkpoint_that_is_named_exactly_is_refused_with_the_one_before_it(tmp_path, damage):
    paths = run_of(tmp_path)
    damage(paths[1])
    with pytest.raises(CheckpointDamagedError) as caught:
        load_from(paths[1])
    assert caught.value.hint == f"Use {paths[0]}, which is whole."


def test_the_hint_passes_over_a_damaged_checkpoint_before_the_damaged_one(tmp_path):
    paths = run_of(tmp_path)
    flip(MODEL)(paths[2])
    flip(MODEL)(paths[1])
    with pytest.raises(CheckpointDamagedError) as caught:
        load(paths[2])
    assert caught.value.hint == f"Use {paths[0]}, which is whole."


def test_if_nothing_beside_it_is_whole_the_hint_says_so(tmp_path):
    paths = run_of(tmp_path, checkpoints=1)
    flip(MODEL)(paths[0])
    with pytest.raises(CheckpointDamagedError) as caught:
        load(paths[0])
    assert caught.value.hint.startswith("No other checkpoint beside it is whole")


@pytest.mark.parametrize("place", ["nowhere", "run/events.jsonl", "."])
def test_a_place_without_checkpoints_is_not_called_damaged(tmp_path, place):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text("{}\n")
    with pytest.raises(CheckpointError, match="there is no checkpoint in") as caught:
        load_from(tmp_path / place)
    assert not isinstance(caught.value, CheckpointDamagedError)


def test_a_checkpoint_made_before_manifests_had_a_checksum_still_loads(tmp_path):
    path = run_of(tmp_path)[-1]
    raw = json.loads((path / MANIFEST).read_text())
    del raw["sha256"]
    (path / MANIFEST).write_text(json.dumps(raw))
    assert load(path).manifest.contents.epoch == 3
