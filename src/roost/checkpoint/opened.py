"""A checkpoint on disk whose tensors are read when they are asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from roost.checkpoint.manifest import MODEL_FILE, check_file, read_manifest
from roost.checkpoint.tensor_file import read_header
from roost.errors import CheckpointDamagedError


class OpenedCheckpoint:
    """Made by `open_files`. May be used by several threads at once."""

    def __init__(self, model: Mapping[str, Path], optimizer: Mapping[str, Path]) -> None:
        """Where each tensor of the model, and each of the optimizer state ('PARAMETER/KEY'), is."""
        self._model = model
        self._optimizer = optimizer

    @property
    def names(self) -> Collection[str]:
        """Return the names of the model's tensors."""
        return self._model.keys()

    def model(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors of the model. Raises CheckpointDamagedError for one that is not there or cannot be read any more."""
        missing = [name for name in names if name not in self._model]
        if missing:
            raise CheckpointDamagedError(f"the checkpoint has no tensor {missing[0]!r}")
        return _read({name: self._model[name] for name in names})

    def optimizer(self, parameters: Collection[str]) -> dict[str, Tensor]:
        """Return the optimizer state there is of these parameters, as 'PARAMETER/KEY'. Raises CheckpointDamagedError."""
        return _read({key: path for key, path in self._optimizer.items() if key.rpartition("/")[0] in parameters})


def open_files(path: Path) -> OpenedCheckpoint:
    """Return the checkpoint in directory `path`, after comparing every checksum.

    Raises CheckpointDamagedError for a file that is missing, cut short or changed, CheckpointMismatchError for another format.
    """
    model: dict[str, Path] = {}
    optimizer: dict[str, Path] = {}
    for file in read_manifest(path).files:
        check_file(path, file)
        specs, _ = read_header(path / file.name)
        (model if file.name == MODEL_FILE else optimizer).update(dict.fromkeys(specs, path / file.name))
    return OpenedCheckpoint(model, optimizer)


def _read(places: Mapping[str, Path]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in dict.fromkeys(places.values()):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                found.update({name: file.get_tensor(name).clone() for name, place in places.items() if place == path})
        except (OSError, SafetensorError) as error:
            raise CheckpointDamagedError(f"{path} cannot be read: {error}") from error
    return {name: found[name] for name in places}
