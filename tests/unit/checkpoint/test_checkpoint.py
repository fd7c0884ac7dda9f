from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

from roost.checkpoint.manifest import CheckpointContents, read_manifest
from roost.checkpoint.reader import latest, load
from roost.checkpoint.writer import CheckpointWriter
from roost.config import JobConfig, NamedArguments
from roost.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError, InvalidConfigError
from roost.types import TensorSpec

CONFIG = JobConfig(
    job_id="job",
    optimizer=NamedArguments(name="AdamW", arguments=(("lr", 0.001), ("betas", (0.9, 0.99)), ("foreach", None), ("amsgrad", True))),
    schedule=NamedArguments(name="StepLR", arguments=(("step_size", 3),)),
    samples=100,
)


class Tied(nn.Module):
    """A model with tied weights and all kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    tensors = dict(Tied().state_dict())
    del tensors["head.weight"]
    return tensors


def contents(tensors: dict[str, torch.Tensor], **changes) -> CheckpointContents:
    specs = tuple(TensorSpec(name=name, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape)) for name, t in tensors.items())
    fields = {"epoch": 2, "updates": 50, "tensors": specs, "aliases": (("head.weight", "embedding.weight"),), "config": CONFIG}
    return CheckpointContents(**{**fields, **changes})


def writer(root: Path, keep: int = 0) -> CheckpointWriter:
    ticks = count(1)
    return CheckpointWriter(root, keep, clock=lambda: float(next(ticks)))


def write(target: CheckpointWriter, name: str, seed: int = 0) -> Path:
    tensors = state(seed)
    embedding = {"embedding.weight": tensors["embedding.weight"], "scratch": torch.ones(2)}
    rest = {key: tensor for key, tensor in tensors.items() if key != "embedding.weight"}
    target.add(name, 0, embedding, {"embedding.weight/exp_avg": torch.full((5, 4), 0.5), "embedding.weight/step": torch.tensor(7.0)})
    target.add(name, 1, rest, {})
    return target.finish(name, contents(tensors))


def test_a_checkpoint_loads_strictly_into_the_model_with_tied_names(tmp_path):
    path = write(writer(tmp_path), "epoch-2")
    checkpoint = load(path)
    Tied().load_state_dict(checkpoint.model, strict=True)
    for name, tensor in state().items():
        assert torch.equal(checkpoint.model[name], tensor)
        assert checkpoint.model[name].dtype == tensor.dtype
    assert torch.equal(checkpoint.model["head.weight"], state()["embedding.weight"])
    assert checkpoint.optimizer.keys() == {"embedding.weight/exp_avg", "embedding.weight/step"}
    assert checkpoint.optimizer["embedding.weight/step"].shape == ()
    assert checkpoint.manifest.contents == contents(state())
    assert checkpoint.manifest.contents.config == CONFIG


def test_the_directory_holds_exactly_the_documented_files(tmp_path):
    path = write(writer(tmp_path), "epoch-2")
    assert sorted(file.name for file in path.iterdir()) == ["checkpoint.json", "model.safetensors", "optimizer-0.safetensors"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["epoch-2"]


def test_a_tensor_that_nobody_uploaded_is_named(tmp_path):
    target = writer(tmp_path)
    tensors = state()
    target.add("a", 0, {name: t for name, t in tensors.items() if name != "norm.weight"}, {})
    with pytest.raises(CheckpointError, match="lacks tensor 'norm.weight'"):
        target.finish("a", contents(tensors))
    assert latest(tmp_path) is None
    target.add("a", 1, {"norm.weight": tensors["norm.weight"]}, {})
    assert target.finish("a", contents(tensors)) == latest(tmp_path)


def test_an_uploaded_tensor_of_another_shape_is_named(tmp_path):
    target = writer(tmp_path)
    target.add("a", 0, {**state(), "mask": torch.ones(3)}, {})
    with pytest.raises(CheckpointMismatchError, match="'mask' is float32 .3., the model says bfloat16 .2."):
        target.finish("a", contents(state()))


def test_a_half_written_checkpoint_never_looks_complete(tmp_path):
    target = writer(tmp_path)
    first = write(target, "one")
    target.add("two", 0, state(), {"mask/exp_avg": torch.ones(2)})
    assert latest(tmp_path) == first
    (tmp_path / "three").mkdir()
    assert latest(tmp_path) == first


def test_parts_of_an_interrupted_run_do_not_mix_with_new_ones(tmp_path):
    writer(tmp_path).add("a", 5, state(1), {"mask/exp_avg": torch.ones(2)})
    path = write(writer(tmp_path), "a")
    assert not (path / "optimizer-5.safetensors").exists()
    assert torch.equal(load(path).model["mask"], state()["mask"])


def test_discarded_parts_leave_nothing_behind(tmp_path):
    target = writer(tmp_path)
    target.add("a", 0, state(), {"mask/exp_avg": torch.ones(2)})
    target.discard("a")
    target.discard("a")
    assert list(tmp_path.iterdir()) == []


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    target = writer(tmp_path, keep=2)
    paths = [write(target, name) for name in ("c", "b", "a")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert latest(tmp_path) == paths[-1]


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path):
    target = writer(tmp_path)
    write(target, "a", seed=1)
    path = write(target, "a", seed=2)
    assert torch.equal(load(path).model["embedding.weight"], state(2)["embedding.weight"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_root_that_does_not_exist_has_no_checkpoint(tmp_path):
    assert latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("name", ["../evil", ".hidden", "", "a/b"])
def test_a_name_that_is_no_plain_name_is_refused(tmp_path, name):
    with pytest.raises(InvalidConfigError):
        writer(tmp_path).add(name, 0, {}, {})


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer-0.safetensors"])
def test_a_changed_byte_is_found_and_its_file_named(tmp_path, file):
    path = write(writer(tmp_path), "a")
    data = bytearray((path / file).read_bytes())
    data[-1] ^= 1
    (path / file).write_bytes(data)
    with pytest.raises(CheckpointDamagedError, match=f"{file} has the wrong checksum"):
        load(path)


def test_a_file_cut_short_or_missing_is_named_and_an_older_checkpoint_is_the_latest(tmp_path):
    target = writer(tmp_path)
    old, new = write(target, "old"), write(target, "new")
    file = new / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointDamagedError, match="model.safetensors has .* bytes instead of"):
        load(new)
    assert latest(tmp_path) == old
    file.unlink()
    with pytest.raises(CheckpointDamagedError, match="model.safetensors cannot be read"):
        load(new)


def edit_manifest(path: Path, **changes) -> None:
    raw = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**raw, **changes}))


def test_a_manifest_that_points_outside_is_refused(tmp_path):
    path = write(writer(tmp_path), "a")
    edit_manifest(path, files=[{"name": "../model.safetensors", "nbytes": 1, "sha256": ""}])
    with pytest.raises(CheckpointDamagedError, match="not a file of a checkpoint"):
        load(path)


def test_a_manifest_of_another_format_asks_for_the_version_that_wrote_it(tmp_path):
    path = write(writer(tmp_path), "a")
    edit_manifest(path, format_version=99)
    with pytest.raises(CheckpointMismatchError, match="format 99"):
        read_manifest(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format_version": 1}'])
def test_a_malformed_manifest_is_damage(tmp_path, text):
    path = write(writer(tmp_path), "a")
    (path / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointDamagedError, match="checkpoint.json"):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda specs: specs[1:], "has a tensor 'norm.weight', which the model has not"),
        (lambda specs: [*specs, TensorSpec(name="new", dtype="float32", shape=())], "no tensor 'new'"),
        (lambda specs: [TensorSpec(name="norm.weight", dtype="float32", shape=(9,)), *specs[1:]], r"'norm.weight' is float32 \[4\]"),
    ],
)
def test_another_model_is_refused_naming_the_first_tensor_that_differs(tmp_path, change, message):
    checkpoint = load(write(writer(tmp_path), "a"))
    specs = [spec for spec in checkpoint.manifest.contents.tensors if spec.name != "embedding.weight"]
    checkpoint.check_model([*specs, TensorSpec(name="head.weight", dtype="float32", shape=(5, 4))])
    checkpoint.check_model(checkpoint.manifest.contents.tensors)
    specs.sort(key=lambda spec: spec.name != "norm.weight")
    with pytest.raises(CheckpointMismatchError, match=message):
        checkpoint.check_model(change(specs))
