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
    check_size,
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

    Raises CheckpointDamagedError naming the file that is missing, cut short or changed, and CheckpointMismatchError for
    another format.
    """
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
    if not root.is_dir():
        return []
    found: list[tuple[float, int, str, Path]] = []
    for path in root.iterdir():
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            manifest = read_manifest(path)
            for file in manifest.files:
                check_size(path, file)
        except CheckpointError as error:
            logger.warning("checkpoint_ignored path=%s reason=%s", path, error.message)
            continue
        found.append((manifest.written_s, manifest.contents.updates, path.name, path))
    return [entry[-1] for entry in sorted(found, reverse=True)]
