from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from roost.errors import CheckpointDamagedError, CheckpointMismatchError, InvalidConfigError
from roost.types import TensorSpec
from roost.weights import checkpoint_tensors
from roost.weights.checkpoint_tensors import INDEX_FILE, open_checkpoint

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4), "steps": torch.tensor(3)}
WANTED = {
    "a.weight": TensorSpec(name="a.weight", dtype="float32", shape=(2, 3)),
    "b.weight": TensorSpec(name="b.weight", dtype="float32", shape=(4,)),
    "steps": TensorSpec(name="steps", dtype="int64", shape=()),
}
FILES = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
FILES["steps"] = FILES["b.weight"]


def sharded(folder: Path) -> Path:
    for file in set(FILES.values()):
        save_file({name: TENSORS[name] for name in FILES if FILES[name] == file}, folder / file)
    write_index(folder, FILES)
    return folder


def write_index(folder: Path, files: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))


def test_every_layout_gives_the_same_tensors(tmp_path: Path) -> None:
    single, shards = tmp_path / "single", tmp_path / "shards"
    single.mkdir()
    shards.mkdir()
    save_file(TENSORS, single / "model.safetensors")
    for path in (single, single / "model.safetensors", sharded(shards)):
        found = open_checkpoint(path, WANTED)
        read = found.read(["steps", "a.weight", "b.weight"])
        assert list(read) == ["steps", "a.weight", "b.weight"]
        assert all(torch.equal(read[name], TENSORS[name]) for name in TENSORS)


def test_a_read_opens_just_the_shards_it_needs(tmp_path: Path) -> None:
    found = open_checkpoint(sharded(tmp_path), WANTED)
    (tmp_path / FILES["b.weight"]).unlink()
    assert torch.equal(found.read(["a.weight"])["a.weight"], TENSORS["a.weight"])
    with pytest.raises(CheckpointDamagedError, match="00002-of"):
        found.read(["b.weight"])


def test_a_tensor_that_was_read_outlives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    read = open_checkpoint(path, WANTED).read(["a.weight"])["a.weight"]
    with path.open("r+b") as file:
        file.seek(-40, os.SEEK_END)
        file.write(b"\xff" * 40)
    assert torch.equal(read, TENSORS["a.weight"])


def test_a_file_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    found = open_checkpoint(path, WANTED)
    save_file({**TENSORS, "a.weight": torch.ones(3, 2)}, path)
    with pytest.raises(CheckpointDamagedError, match="has changed"):
        found.read(["a.weight"])


def test_a_missing_and_an_unexpected_tensor_are_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    more = {**WANTED, "c": TensorSpec(name="c", dtype="float32", shape=(1,))}
    with pytest.raises(CheckpointMismatchError, match="no tensor 'c'"):
        open_checkpoint(tmp_path, more)
    fewer = {name: spec for name, spec in WANTED.items() if name != "steps"}
    with pytest.raises(CheckpointMismatchError, match="a tensor 'steps', which the model has not"):
        open_checkpoint(tmp_path, fewer)
    assert open_checkpoint(tmp_path, fewer, strict=False).names == tuple(fewer)


@pytest.mark.parametrize(
    ("dtype", "shape", "cast", "found"),
    [
        ("float32", (3, 2), True, r"\[2, 3\]"),
        ("float16", (2, 3), False, "float32"),
        ("int32", (2, 3), True, "int32"),
    ],
)
def test_another_shape_or_dtype_is_named(tmp_path: Path, dtype: str, shape: tuple[int, ...], cast: bool, found: str) -> None:
    wanted = {**WANTED, "a.weight": TensorSpec(name="a.weight", dtype=dtype, shape=shape)}
    with pytest.raises(CheckpointMismatchError, match=f"'a.weight'.*{found}"):
        open_checkpoint(sharded(tmp_path), wanted, cast=cast)


def test_a_tied_tensor_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    save_file({"head": torch.ones(2)}, tmp_path / "model.safetensors")
    wanted = {"embedding": TensorSpec(name="embedding", dtype="float32", shape=(2,))}
    found = open_checkpoint(tmp_path, wanted, aliases={"head": "embedding"})
    assert found.read(["embedding"])["embedding"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", ".safetensors", "model.bin", "a\\b.safetensors", ""]
)
def test_an_index_may_name_only_plain_files(tmp_path: Path, name: str) -> None:
    sharded(tmp_path)
    write_index(tmp_path, {**FILES, "steps": name})
    with pytest.raises(CheckpointDamagedError, match="plain names"):
        open_checkpoint(tmp_path, WANTED)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}',
        "[" * 200_000,
        '{"weight_map": {"a": NaN}}',
        "\udcff",
    ],
    ids=range(10),
)
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointDamagedError):
        open_checkpoint(tmp_path, WANTED)


def test_a_huge_index_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(tmp_path)
    monkeypatch.setattr(checkpoint_tensors, "MAX_INDEX_BYTES", 20)
    with pytest.raises(CheckpointDamagedError, match="larger than 20 bytes"):
        open_checkpoint(tmp_path, WANTED)


def test_an_index_that_lies_about_a_shard_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_index(tmp_path, {**FILES, "steps": FILES["a.weight"]})
    with pytest.raises(CheckpointDamagedError, match="no tensor 'steps'"):
        open_checkpoint(tmp_path, WANTED)
    write_index(tmp_path, {**FILES, "steps": "absent.safetensors"})
    with pytest.raises(CheckpointDamagedError, match="missing"):
        open_checkpoint(tmp_path, WANTED)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sharded(folder)
    outside = tmp_path / "outside.safetensors"
    (folder / FILES["a.weight"]).rename(outside)
    (folder / FILES["a.weight"]).symlink_to(outside)
    with pytest.raises(CheckpointDamagedError, match="outside"):
        open_checkpoint(folder, WANTED)


def test_the_links_of_a_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate([*sorted({path.name for path in sharded(snapshot).iterdir()})]):
        (snapshot / file).rename(blobs / str(number))
        (snapshot / file).symlink_to(Path("../../blobs") / str(number))
    assert torch.equal(open_checkpoint(snapshot, WANTED).read(["b.weight"])["b.weight"], TENSORS["b.weight"])


def header(raw: bytes, *, length: int | None = None, data: bytes = b"\0" * 24) -> bytes:
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def one(dtype: str = "F32", shape: object = (2, 3), offsets: object = (0, 24)) -> bytes:
    return json.dumps({"a.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        header(b"{}", length=2**63),
        header(b"{}", length=2**31),
        header(b"not json"),
        header(b"[" * 100_000),
        header(one(), data=b"\0" * 23),
        header(one(), data=b"\0" * 25),
        header(one(offsets=(0, 20))),
        header(one(offsets=(24, 0))),
        header(one(offsets=(-1, 24))),
        header(one(shape=(2**40, 2**40))),
        header(one(shape=(-2, -3))),
        header(one(shape="many")),
        header(one(dtype="O")),
        header(one(shape=(2, float("nan")))),
    ],
    ids=range(16),
)
def test_a_lying_or_truncated_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match="cannot be read"):
        open_checkpoint(path, {"a.weight": WANTED["a.weight"]})


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"no safetensors file and no folder"):
        open_checkpoint(tmp_path, WANTED)
