"""Initial weights from safetensors: one file, or a folder of shards with the index that Hugging Face writes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from roost.errors import CheckpointDamagedError, CheckpointMismatchError, InvalidConfigError, MissingWeightsError
from roost.types import SAFETENSORS_DTYPES, TensorSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 8 * 2**20
"""Eighty thousand tensors. What JSON says in a byte can take Python 30 bytes to hold."""
MAX_INDEX_LISTS = 64
"""Lists and objects in an index: it is a table of texts, with some notes beside it."""
MAX_SHARDS = 10_000

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where one tensor of the model is."""

    spec: TensorSpec
    """As the model has it."""
    path: Path
    stored_name: str
    stored_dtype: str


class CheckpointTensors:
    """Tensors in safetensors files; a read opens the files it needs and copies just the tensors asked for."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple(self._stored)

    def spec(self, name: str) -> TensorSpec:
        """Return dtype and shape of one tensor as the model has it. Raises MissingWeightsError for an unknown name."""
        return self._entry(name).spec

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors named. Raises CheckpointDamagedError for a file that is gone or was changed since it was opened."""
        wanted = {name: self._entry(name) for name in names}
        found: dict[str, Tensor] = {}
        for path in dict.fromkeys(entry.path for entry in wanted.values()):
            found.update(_read_file(path, {name: entry for name, entry in wanted.items() if entry.path == path}))
        return {name: found[name] for name in wanted}

    def _entry(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise MissingWeightsError(f"the checkpoint is not asked for a tensor {name!r}")
        return self._stored[name]


def open_checkpoint(
    path: Path, wanted: Mapping[str, TensorSpec], *, aliases: Mapping[str, str] | None = None, cast: bool = False, strict: bool = True
) -> CheckpointTensors:
    """Return the tensors `wanted` from `path`: a safetensors file, or a folder with model.safetensors or its index and shards.

    `aliases` has the further names of tied tensors with their first names; the checkpoint may have any of them. With `cast`, a
    tensor may be stored as another floating-point dtype than the model's, and is converted when it is read. With `strict`, the
    checkpoint may have no tensor that the model has not. Reads headers only. Raises CheckpointMismatchError naming the first tensor
    that is missing, unexpected or of another shape or dtype, CheckpointDamagedError for files that are not what they claim, and
    InvalidConfigError if there is no checkpoint.
    """
    held = _listing(path)
    headers: dict[Path, dict[str, tuple[str, tuple[int, ...]]]] = {file: _header(file) for file in dict.fromkeys(held.values())}
    for name, file in held.items():
        if name not in headers[file]:
            raise CheckpointDamagedError(f"{file} has no tensor {name!r}, which the index of {path} says it has")
    names_of: dict[str, list[str]] = {name: [name] for name in wanted}
    for alias, first in (aliases or {}).items():
        if first in names_of:
            names_of[first].append(alias)
    stored: dict[str, StoredTensor] = {}
    for name, spec in wanted.items():
        stored_name = next((candidate for candidate in names_of[name] if candidate in held), None)
        if stored_name is None:
            raise CheckpointMismatchError(f"{path} has no tensor {name!r}, which the model has", hint=_OTHER_MODEL)
        dtype, shape = headers[held[stored_name]][stored_name]
        _check(path, spec, dtype, shape, cast=cast)
        stored[name] = StoredTensor(spec=spec, path=held[stored_name], stored_name=stored_name, stored_dtype=dtype)
    accepted = {candidate for candidates in names_of.values() for candidate in candidates}
    unexpected = next((name for name in held if name not in accepted), None)
    if strict and unexpected is not None:
        raise CheckpointMismatchError(f"{path} has a tensor {unexpected!r}, which the model has not", hint=_OTHER_MODEL)
    return CheckpointTensors(stored)


_OTHER_MODEL = "Give the checkpoint of this very model: names, shapes and dtypes must be the ones of its state_dict."


def _check(path: Path, spec: TensorSpec, dtype: str, shape: tuple[int, ...], *, cast: bool) -> None:
    if shape != spec.shape:
        raise CheckpointMismatchError(
            f"tensor {spec.name!r} is {list(shape)} in {path} and {list(spec.shape)} in the model", hint=_OTHER_MODEL
        )
    known = SAFETENSORS_DTYPES.get(dtype, dtype)
    if known == spec.dtype:
        return
    if not (known in _FLOATS and spec.dtype in _FLOATS):
        raise CheckpointMismatchError(f"tensor {spec.name!r} is {known} in {path} and {spec.dtype} in the model", hint=_OTHER_MODEL)
    if not cast:
        raise CheckpointMismatchError(
            f"tensor {spec.name!r} is {known} in {path} and {spec.dtype} in the model",
            hint=f"Build the model in {known}, or allow the conversion with Job(weights_cast=True).",
        )


def _listing(path: Path) -> dict[str, Path]:
    """Return the file of every tensor of the checkpoint, by its name there."""
    if path.is_file():
        return dict.fromkeys(_header(path), path)
    if (path / INDEX_FILE).is_file():
        return _indexed(path)
    single = path / SINGLE_FILE
    if single.is_file():
        _check_inside(single, path)
        return dict.fromkeys(_header(single), single)
    raise InvalidConfigError(f"{path} is no safetensors file and no folder with {SINGLE_FILE} or {INDEX_FILE}")


def _indexed(folder: Path) -> dict[str, Path]:
    index = folder / INDEX_FILE
    _check_inside(index, folder)
    with index.open("rb") as file:
        raw = file.read(MAX_INDEX_BYTES + 1)
    if len(raw) > MAX_INDEX_BYTES:
        raise CheckpointDamagedError(f"{index} is larger than {MAX_INDEX_BYTES} bytes")
    if raw.count(b"[") + raw.count(b"{") > MAX_INDEX_LISTS:
        raise CheckpointDamagedError(f"{index} is no table of texts: it has more than {MAX_INDEX_LISTS} lists and objects")
    try:
        content = json.loads(raw, object_pairs_hook=_without_duplicates)
    # Text that is nested too deep ends as a RecursionError.
    except (ValueError, RecursionError) as error:
        raise CheckpointDamagedError(f"{index} is not JSON: {error}") from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointDamagedError(f"{index} has no 'weight_map' of tensor names to file names")
    shards: dict[str, Path] = {}
    for name in sorted(set(files.values())):
        if len(shards) == MAX_SHARDS:
            raise CheckpointDamagedError(f"{index} names more than {MAX_SHARDS} files")
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointDamagedError(f"{index} names the file {name[:200]!r}; only plain names that end in .safetensors are read")
        _check_inside(folder / name, folder)
        shards[name] = folder / name
    return {tensor: shards[file] for tensor, file in files.items()}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _check_inside(file: Path, folder: Path) -> None:
    """Raise CheckpointDamagedError if `file` is a link out of `folder`.

    The Hugging Face cache links the files of a snapshot to the blobs of the same model, which may be read.
    """
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    try:
        target = file.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointDamagedError(f"{file} is missing or cannot be read") from error
    if not any(target.is_relative_to(root) for root in allowed):
        raise CheckpointDamagedError(f"{file} is a link to {target}, outside the checkpoint")


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return safetensors dtype and shape of every tensor of a file, from its header."""
    try:
        with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (str(part.get_dtype()), tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}") from error


def _read_file(path: Path, wanted: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    try:
        with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            for name, entry in wanted.items():
                # The file is mapped into memory: a copy stays what it is when the file changes.
                tensor = file.get_tensor(entry.stored_name).clone()
                stored = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                if stored != (SAFETENSORS_DTYPES.get(entry.stored_dtype), entry.spec.shape):
                    raise CheckpointDamagedError(f"tensor {name!r} of {path} has changed since the job was started")
                found[name] = tensor.to(getattr(torch, entry.spec.dtype))
    except (SafetensorError, OSError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}") from error
    return found
