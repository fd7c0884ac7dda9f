"""Finds, checks and loads checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from roost.checkpoint.manifest import (
    MANIFEST_FILE,
    MODEL_FILE,
    CheckpointContents,
    CheckpointManifest,
    FileRecord,
    check_file,
    check_size,
    is_checkpoint_file,
    read_checked,
    read_manifest,
)
from roost.checkpoint.tensor_file import read_header
from roost.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from roost.types import TensorSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A checkpoint in memory."""

    model: dict[str, Tensor]
    """The whole model by its state_dict names, aliases of tied tensors included."""
    optimizer: dict[str, Tensor]
    """Optimizer state of all parameters as 'PARAMETER/KEY'."""
    manifest: CheckpointManifest

    def check_model(self, specs: Iterable[TensorSpec]) -> None:
        """Raise CheckpointMismatchError, naming the first tensor that differs, unless `specs` are this model's tensors.

        `specs` are those of the model's state_dict; of tied tensors one name is enough.
        """
        wanted = {spec.name: spec for spec in specs}
        for spec in wanted.values():
            tensor = self.model.get(spec.name)
            if tensor is None:
                raise CheckpointMismatchError(f"the checkpoint has no tensor {spec.name!r}, which the model has")
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            if (dtype, shape) != (spec.dtype, spec.shape):
                raise CheckpointMismatchError(
                    f"tensor {spec.name!r} is {dtype} {list(shape)} in the checkpoint and {spec.dtype} {list(spec.shape)} in the model"
                )
        tied = {name for pair in self.manifest.contents.aliases for name in pair}
        for name in self.model:
            if name not in wanted and name not in tied:
                raise CheckpointMismatchError(f"the checkpoint has a tensor {name!r}, which the model has not")


def load(path: Path) -> Checkpoint:
    """Return the checkpoint in directory `path`, after comparing every checksum.

    Raises CheckpointDamagedError naming the file that is missing, cut short or changed, and the checkpoint before it that is
    whole; CheckpointMismatchError for another format.
    """
    try:
        return _load(path)
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(error.message, hint=_hint_beside(path)) from error


def load_from(path: Path) -> Checkpoint:
    """Return the checkpoint in directory `path`, or the newest whole one of the run whose directory it is. Raises CheckpointError."""
    try:
        is_one = path.is_dir() and any(is_checkpoint_file(entry.name) for entry in path.iterdir())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", hint="Check the permissions of the directory.") from error
    return load(path) if is_one else load_newest(path)


def load_newest(root: Path) -> Checkpoint:
    """Return the newest checkpoint under `root` that is whole; each newer one that is damaged is named in a warning.

    Raises CheckpointDamagedError, which names them all, if there are only damaged ones, and CheckpointError if there are none.
    """
    damaged: list[str] = []
    for path in _candidates(root):
        try:
            checkpoint = _load(path)
        except CheckpointError as error:
            logger.warning("checkpoint_damaged path=%s reason=%s", path, error.message)
            damaged.append(f"{path.name}: {error.message}")
            continue
        if damaged:
            logger.warning("checkpoint_before_it_used path=%s damaged=%d", path, len(damaged))
        return checkpoint
    if damaged:
        listed = "".join(f"\n    {line}" for line in damaged)
        raise CheckpointDamagedError(
            f"every checkpoint in {root} is damaged:{listed}", hint="Restore one of them from a copy, or start without resume=."
        )
    raise CheckpointError(f"there is no checkpoint in {root}", hint="Give the directory of a run or of one of its checkpoints.")


def _load(path: Path) -> Checkpoint:
    manifest = read_manifest(path)
    model: dict[str, Tensor] | None = None
    optimizer: dict[str, Tensor] = {}
    for file in manifest.files:
        tensors = _load_file(path, file, manifest.contents if file.name == MODEL_FILE else None)
        if file.name == MODEL_FILE:
            model = tensors
        else:
            optimizer.update(tensors)
    if model is None:
        raise CheckpointDamagedError(f"{path} has no {MODEL_FILE}")
    return Checkpoint(model=model, optimizer=optimizer, manifest=manifest)


def _hint_beside(path: Path) -> str:
    """Return what to do about the damaged checkpoint `path`: use the newest whole one before it, else the newest beside it."""
    path = path.absolute()
    try:
        others = _candidates(path.parent)
    except CheckpointError:
        others = []
    place = others.index(path) if path in others else -1
    for other in (*others[place + 1 :], *others[: max(place, 0)]):
        if _is_whole(other):
            return f"Use {other}, which is whole."
    return "No other checkpoint beside it is whole: restore it from a copy, or start without resume=."


def _is_whole(path: Path) -> bool:
    """Return whether the manifest of a checkpoint can be read and the checksums of all its files are right."""
    try:
        for file in read_manifest(path).files:
            check_file(path, file)
    except CheckpointError:
        return False
    return True


def _load_file(directory: Path, file: FileRecord, contents: CheckpointContents | None) -> dict[str, Tensor]:
    """Return the tensors in a file. Before its data are read, its header must describe them, and be of `contents`, if given."""
    path = check_size(directory, file)
    specs, header = read_header(path)
    if contents is not None:
        _check_contents(path, specs, contents)
    data = read_checked(directory, file)
    if not data.startswith(header):
        raise CheckpointDamagedError(f"{path} changed while it was read")
    try:
        tensors = load_tensors(data)
    except (SafetensorError, ValueError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise CheckpointDamagedError(f"{path}: tensor {name!r} has a bool that is neither 0 nor 1")
    return tensors


def _check_contents(path: Path, specs: Mapping[str, TensorSpec], contents: CheckpointContents) -> None:
    """Raise CheckpointDamagedError unless the file has exactly the tensors that the manifest lists."""
    listed = {spec.name: spec for spec in contents.tensors}
    for alias, canonical in contents.aliases:
        if canonical in listed:
            listed[alias] = replace(listed[canonical], name=alias)
    for name in sorted(listed.keys() | specs.keys()):
        if specs.get(name) != listed.get(name):
            raise CheckpointDamagedError(f"{path} does not have the tensor {name[:80]!r} that {MANIFEST_FILE} lists, or has another one")


def latest(root: Path) -> Path | None:
    """Return the directory of the newest complete checkpoint under `root`, or None. Checksums are compared on loading."""
    found = completed(root)
    return found[0] if found else None


def completed(root: Path) -> list[Path]:
    """Return the directories of complete checkpoints under `root`, newest first; damaged ones are left out."""
    found: list[Path] = []
    for path in _candidates(root):
        try:
            for file in read_manifest(path).files:
                check_size(path, file)
        except CheckpointError as error:
            logger.warning("checkpoint_ignored path=%s reason=%s", path, error.message)
            continue
        found.append(path)
    return found


def _candidates(root: Path) -> list[Path]:
    """Return the directories under `root` that are, or were, checkpoints, newest first. Raises CheckpointError."""
    try:
        paths = [path for path in root.iterdir() if not path.name.startswith(".") and path.is_dir()] if root.is_dir() else []
        return sorted((path for path in paths if _looks_like_one(path)), key=_age, reverse=True)
    except OSError as error:
        raise CheckpointError(f"{root} cannot be read: {error}", hint="Check the permissions of the directory.") from error


def _looks_like_one(path: Path) -> bool:
    """Return whether a directory holds files of a checkpoint, or nothing at all: then it may have lost them."""
    try:
        names = [entry.name for entry in path.iterdir()]
    except OSError:
        return True
    return not names or any(is_checkpoint_file(name) for name in names)


def _age(path: Path) -> tuple[float, int, str]:
    """Return what sorts checkpoints by age; of one whose manifest cannot be read, the time its directory last changed."""
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return path.stat().st_mtime, 0, path.name
    return manifest.written_s, manifest.contents.updates, path.name
