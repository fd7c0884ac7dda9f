"""Checkpoints and tensor files that somebody may hand over to do harm: each kind must be refused, at once and without taking memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from roost.checkpoint.manifest import MANIFEST_FILE, MODEL_FILE, CheckpointContents
from roost.checkpoint.writer import CheckpointWriter
from roost.config import JobConfig, NamedArguments
from roost.types import TensorSpec

Header = dict[str, Any]
BYTES = {"F32": 4, "I64": 8, "BOOL": 1, "U8": 1}
INDEX_FILE = "model.safetensors.index.json"
SPECS = (
    TensorSpec(name="first.weight", dtype="float32", shape=(16, 6)),
    TensorSpec(name="first.bias", dtype="float32", shape=(16,)),
    TensorSpec(name="mask", dtype="bool", shape=(8,)),
)
"""Of the tensors in the sample checkpoint."""
MANY = 30_000
LARGE = 64 << 20


def sample_header() -> Header:
    """Return the header of a well-formed file with the tensors in SPECS."""
    header: Header = {}
    end = 0
    for spec in SPECS:
        start, end = end, end + spec.nbytes
        dtype = {"float32": "F32", "bool": "BOOL"}[spec.dtype]
        header[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    return header


def file_of(header: Header | bytes, data: bytes | None = None, length: int | None = None) -> bytes:
    """Return a file with this header, whatever it says; `length` is what it claims the header's length to be."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = bytes(sum(spec.nbytes for spec in SPECS)) if data is None else data
    return (len(text) if length is None else length).to_bytes(8, "little") + text + content


def with_entry(name: str, field: str, value: object) -> bytes:
    header = sample_header()
    header[name] = {**header[name], field: value}
    return file_of(header)


def sample_checkpoint(directory: Path, *, name: str = "sample") -> Path:
    """Write a well-formed checkpoint and return its directory."""
    tensors = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in SPECS}
    writer = CheckpointWriter(directory, keep=0, clock=lambda: 1.0)
    writer.add(name, 0, tensors, {"first.weight/step": torch.tensor(1.0)})
    config = JobConfig(job_id="job", optimizer=NamedArguments(name="SGD"), samples=1)
    return writer.finish(name, CheckpointContents(epoch=1, updates=1, tensors=SPECS, config=config))


def read_json(path: Path) -> Header:
    found: Header = json.loads(path.read_text())
    return found


def with_file(content: Callable[[], bytes]) -> Callable[[Path], Path]:
    """Return a maker of a checkpoint whose model file has other contents; its checksum is right."""

    def make(directory: Path) -> Path:
        path = sample_checkpoint(directory)
        data = content()
        (path / MODEL_FILE).write_bytes(data)
        record = {"name": MODEL_FILE, "nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        return change_manifest(path, lambda raw: raw.update(files=[record, *raw["files"][1:]]))

    return make


def change_manifest(path: Path, change: Callable[[Header], object]) -> Path:
    raw = read_json(path / MANIFEST_FILE)
    # Whoever makes such a file would make its checksum, too, or leave it out.
    raw.pop("sha256")
    change(raw)
    (path / MANIFEST_FILE).write_text(json.dumps(raw))
    return path


def with_manifest(change: Callable[[Header], object]) -> Callable[[Path], Path]:
    return lambda directory: change_manifest(sample_checkpoint(directory), change)


def with_manifest_text(text: Callable[[], bytes]) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        path = sample_checkpoint(directory)
        (path / MANIFEST_FILE).write_bytes(text())
        return path

    return make


def listing(name: str) -> Callable[[Path], Path]:
    """Return a maker of a checkpoint that lists a file of this name."""
    return with_manifest(lambda raw: raw["files"].append({"name": name, "nbytes": 1, "sha256": ""}))


def replaced_by(place: Callable[[Path], object], file: str = MODEL_FILE) -> Callable[[Path], Path]:
    """Return a maker of a checkpoint in which something else stands in a file's place."""

    def make(directory: Path) -> Path:
        path = sample_checkpoint(directory)
        (path / file).rename(directory / "outside")
        place(path / file)
        return path

    return make


def sparse(directory: Path) -> Path:
    """Return a checkpoint whose model file is a hole of 64 GB behind a small header."""
    path = sample_checkpoint(directory)
    start = file_of(sample_header(), b"")
    size = 64 << 30
    with (path / MODEL_FILE).open("wb") as stream:
        stream.write(start)
        stream.truncate(size)
    return change_manifest(path, lambda raw: raw["files"][0].update(nbytes=size))


def huge_tensor(directory: Path) -> Path:
    """Return a checkpoint whose model file is a hole of 64 GB, described truthfully, of a tensor that the manifest does not list."""
    path = sample_checkpoint(directory)
    size = 64 << 30
    start = file_of({"first.weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}, b"")
    with (path / MODEL_FILE).open("wb") as stream:
        stream.write(start)
        stream.truncate(len(start) + size)
    return change_manifest(path, lambda raw: raw["files"][0].update(nbytes=len(start) + size))


def many_tensors(count: int) -> bytes:
    header = {f"t{index}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for index in range(count)}
    return file_of({**header, **{f"z{name}": entry for name, entry in sample_header().items()}})


def not_asked_for() -> bytes:
    header = sample_header()
    end = sum(spec.nbytes for spec in SPECS)
    header["payload"] = {"dtype": "U8", "shape": [8], "data_offsets": [end, end + 8]}
    return file_of(header, bytes(end + 8))


def without(name: str) -> bytes:
    return file_of({key: value for key, value in sample_header().items() if key != name})


def wrong_bool() -> bytes:
    return file_of(sample_header(), b"\x00" * (sum(spec.nbytes for spec in SPECS) - 1) + b"\x07")


def overlapping() -> bytes:
    header = sample_header()
    header["first.bias"]["data_offsets"] = [0, 64]
    return file_of(header)


def with_gap() -> bytes:
    header = sample_header()
    end = sum(spec.nbytes for spec in SPECS)
    header["mask"]["data_offsets"] = [end, end + 8]
    return file_of(header, bytes(end + 8))


DUPLICATE = b'{"first.weight":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'

OF_TENSOR_FILES: dict[str, Callable[[], bytes]] = {
    "empty file": lambda: b"",
    "header length cut short": lambda: b"\x00\x00\x00",
    "header cut short": lambda: file_of(sample_header())[:40],
    "header longer than the file": lambda: file_of(sample_header(), length=10**6),
    "header length of 2 to the 63": lambda: file_of(sample_header(), length=2**63),
    "header length of minus one": lambda: file_of(sample_header(), length=2**64 - 1),
    "header length of zero": lambda: file_of(sample_header(), length=0),
    "header that is no JSON": lambda: file_of(b"\x80\x04\x95" * 10),
    "header that is a list": lambda: file_of(b"[]", b""),
    "header in UTF-16": lambda: file_of(json.dumps(sample_header()).encode("utf-16")),
    "header as deep as it is long": lambda: file_of(b"[" * (3 << 20)),
    "header of as many lists as fit": lambda: file_of(b"[" + b"[]," * (1 << 20) + b"[]]"),
    "header of 64 MB": lambda: file_of(b'{"a":"' + b" " * LARGE + b'"}'),
    "tensors without end": lambda: many_tensors(MANY),
    "metadata without end": lambda: file_of({"__metadata__": {f"k{index}": "v" for index in range(100_000)}, **sample_header()}),
    "metadata that is a list": lambda: file_of({"__metadata__": [1], **sample_header()}),
    "metadata with numbers": lambda: file_of({"__metadata__": {"a": 1}, **sample_header()}),
    "name given twice": lambda: file_of(DUPLICATE + json.dumps(sample_header()).encode()[1:]),
    "name with a newline": lambda: file_of({**sample_header(), "a\nb": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}),
    "name of half a surrogate pair": lambda: file_of({**sample_header(), "\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}),
    "name of a megabyte": lambda: file_of({**sample_header(), "a" * 10**6: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}),
    "unknown dtype": lambda: with_entry("first.bias", "dtype", "OBJECT"),
    "dtype that is no text": lambda: with_entry("first.bias", "dtype", ["F32"]),
    "dtype that does not fit the bytes": lambda: with_entry("first.bias", "dtype", "I64"),
    "shape that does not fit the bytes": lambda: with_entry("first.bias", "shape", [17]),
    "shape whose product wraps": lambda: with_entry("first.bias", "shape", [2**32, 2**32, 16]),
    "negative size": lambda: with_entry("first.bias", "shape", [-4, -4]),
    "size that is a boolean": lambda: with_entry("first.bias", "shape", [True, 16]),
    "size with a fraction": lambda: with_entry("first.bias", "shape", [16.0]),
    "size of 10 to the 400": lambda: with_entry("first.bias", "shape", [10**400]),
    "a million dimensions": lambda: with_entry("first.bias", "shape", [1] * 1_000_000),
    "offsets beyond the file": lambda: with_entry("first.bias", "data_offsets", [10**9, 10**9 + 64]),
    "offsets that decrease": lambda: with_entry("first.bias", "data_offsets", [448, 384]),
    "negative offsets": lambda: with_entry("first.bias", "data_offsets", [-64, 0]),
    "offsets that overlap": overlapping,
    "offsets with a gap": with_gap,
    "three offsets": lambda: with_entry("first.bias", "data_offsets", [384, 448, 448]),
    "field missing": lambda: file_of({**sample_header(), "first.bias": {"dtype": "F32", "shape": [16]}}),
    "field unknown": lambda: with_entry("first.bias", "code", "import os"),
    "bytes that nothing describes": lambda: file_of(sample_header()) + bytes(10**6),
    "tensor that nobody asked for": not_asked_for,
    "tensor missing": lambda: without("mask"),
    "bool that is neither true nor false": wrong_bool,
    "pickle": lambda: b"\x80\x04\x95\x1b\x00\x00\x00\x00\x00\x00\x00" + bytes(100),
    "zip file of torch.save": lambda: b"PK\x03\x04" + bytes(200),
}

OF_CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "manifest that lists a path upwards": listing("../outside.safetensors"),
    "manifest that lists an absolute path": listing("/etc/passwd"),
    "manifest that lists a name with a newline": listing("optimizer-0.safetensors\n"),
    "manifest that lists a name with a NUL": listing("model.safetensors\x00"),
    "manifest that lists a file twice": with_manifest(lambda raw: raw["files"].extend(raw["files"] * 100)),
    "manifest that lists a file that is not there": listing("optimizer-7.safetensors"),
    "manifest of negative size": with_manifest(lambda raw: raw["files"][0].update(nbytes=-1)),
    "manifest without the model": with_manifest(lambda raw: raw["files"].pop(0)),
    "manifest with one field more": with_manifest(lambda raw: raw.update(code="import os")),
    "manifest with one field less": with_manifest(lambda raw: raw.pop("contents")),
    "manifest of another format": with_manifest(lambda raw: raw.update(format_version=99)),
    "manifest of a format that is text": with_manifest(lambda raw: raw.update(format_version="1")),
    "manifest whose optimizer is no optimizer": with_manifest(lambda raw: raw["contents"]["config"]["optimizer"].update(name="os.system")),
    "manifest with NaN": with_manifest(lambda raw: raw.update(written_s=math.nan)),
    "manifest that is empty": with_manifest_text(lambda: b""),
    "manifest in UTF-16": with_manifest_text(lambda: '{"format_version": 1}'.encode("utf-16")),
    "manifest as deep as it is long": with_manifest_text(lambda: b"[" * (3 << 20)),
    "manifest of as many lists as fit": with_manifest_text(lambda: b"[" + b"[]," * (1 << 20) + b"[]]"),
    "manifest of 64 MB": with_manifest_text(lambda: b" " * LARGE + b"{}"),
    "manifest that is a link": replaced_by(lambda path: path.symlink_to(path.parent.parent / "outside"), MANIFEST_FILE),
    "model that is a link outside": replaced_by(lambda path: path.symlink_to(path.parent.parent / "outside")),
    "model that is a link to a device": replaced_by(lambda path: path.symlink_to("/dev/zero")),
    "model that is a link to itself": replaced_by(lambda path: path.symlink_to(path)),
    "model that is a pipe": replaced_by(os.mkfifo),
    "model that is a directory": replaced_by(lambda path: path.mkdir()),
    "model file that is a hole": sparse,
    "tensor that is a hole": huge_tensor,
    "no checkpoint at all": lambda directory: directory,
}


def with_index(files: object, *, text: Callable[[], bytes] | None = None) -> Callable[[Path], Path]:
    """Return a maker of a folder of shards with an index that says `files`, or that is `text`."""

    def make(directory: Path) -> Path:
        (directory / "outside.safetensors").write_bytes(file_of(sample_header()))
        folder = directory / "folder"
        folder.mkdir()
        (folder / "shard.safetensors").write_bytes(file_of(sample_header()))
        (folder / INDEX_FILE).write_bytes(text() if text is not None else json.dumps({"weight_map": files}).encode())
        return folder

    return make


def linked_shard(directory: Path) -> Path:
    folder = with_index(dict.fromkeys((spec.name for spec in SPECS), "shard.safetensors"))(directory)
    (folder / "shard.safetensors").unlink()
    (folder / "shard.safetensors").symlink_to(directory / "outside.safetensors")
    return folder


def every_tensor_in(name: str) -> dict[str, str]:
    return {spec.name: name for spec in SPECS}


OF_SHARDS: dict[str, Callable[[Path], Path]] = {
    "index with a path upwards": with_index(every_tensor_in("../outside.safetensors")),
    "index with an absolute path": with_index(every_tensor_in("/etc/passwd")),
    "index with a path in the name": with_index(every_tensor_in("folder/../../outside.safetensors")),
    "index with a NUL": with_index(every_tensor_in("shard.safetensors\x00")),
    "index that names a shard that is not there": with_index(every_tensor_in("other.safetensors")),
    "index that promises a tensor the shard lacks": with_index({**every_tensor_in("shard.safetensors"), "payload": "shard.safetensors"}),
    "index that lacks a tensor": with_index({"mask": "shard.safetensors"}),
    "index that is a list": with_index([]),
    "index that names no text": with_index({"mask": 1}),
    "index that is cut short": with_index(None, text=lambda: b'{"weight_map":'),
    "index as deep as it is long": with_index(None, text=lambda: b"[" * (3 << 20)),
    "index of as many lists as fit": with_index(None, text=lambda: b"[" + b"[]," * (20 << 20) + b"[]]"),
    "shard that is a link outside": linked_shard,
    "folder without a checkpoint": lambda directory: directory,
}
