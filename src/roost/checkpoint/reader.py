"""Finds, checks and loads checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from roost.checkpoint.manifest import MODEL_FILE, CheckpointManifest, check_size, read_checked, read_manifest
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
        try:
            tensors = load_tensors(read_checked(path, file))
        except (SafetensorError, ValueError) as error:
            raise CheckpointDamagedError(f"{path / file.name} cannot be read: {error}") from error
        if file.name == MODEL_FILE:
            model = tensors
        else:
            optimizer.update(tensors)
    if model is None:
        raise CheckpointDamagedError(f"{path} has no {MODEL_FILE}")
    return Checkpoint(model=model, optimizer=optimizer, manifest=manifest)


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
