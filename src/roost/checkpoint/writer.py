"""Writes checkpoints: parts in any order, then a directory that appears at once, complete.

A checkpoint grows in a hidden directory. Its files are flushed to the disk, the manifest last, before one rename gives the
directory its name, so a crash at any moment leaves no half-written checkpoint under a name that looks complete.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from roost import __version__
from roost.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    MODEL_FILE,
    CheckpointContents,
    CheckpointManifest,
    FileRecord,
    file_record,
    manifest_bytes,
)
from roost.checkpoint.reader import completed
from roost.config import check_identifier
from roost.errors import CheckpointError, CheckpointMismatchError

logger = logging.getLogger(__name__)

WRITABLE_HINT = "Choose a directory that can be written (Job.checkpoint_dir)."
MAX_OPEN = 3
"""Attempts that may be growing at a time; of more, the one that has waited longest for a part is given up."""
_PARTIAL = ".partial"

Attempt = tuple[str, int]
"""The name of a checkpoint, and which attempt to write it: a node may be lost in the middle of one."""


@dataclass(kw_only=True, slots=True)
class _Parts:
    """What has arrived for one attempt."""

    directory: Path
    model: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)


class CheckpointWriter:
    """Assembles checkpoints under a root directory and keeps the newest ones."""

    def __init__(self, root: Path, keep: int, clock: Callable[[], float] = time.time) -> None:
        """`keep`: complete checkpoints that stay, 0 for all; `clock` gives Unix time."""
        self._root = root
        self._keep = keep
        self._clock = clock
        self._open: dict[Attempt, _Parts] = {}
        self._finished: dict[str, int] = {}

    def add(
        self,
        name: str,
        segment: int,
        tensors: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        *,
        attempt: int = 0,
        part: int = 0,
    ) -> None:
        """Take a part of checkpoint `name`: model tensors by name, and optimizer state as 'PARAMETER/KEY'.

        A segment may come in several parts, numbered from 0; a part that comes again replaces the first. Parts of different attempts
        never mix. Model tensors are held, not copied, until finish(); optimizer state is written now. Raises CheckpointError
        if it cannot be written, or if a later attempt has been finished.
        """
        parts = self._parts(name, attempt)
        parts.model.update({key: tensor.detach() for key, tensor in tensors.items()})
        file_name = f"optimizer-{segment}-{part}.safetensors" if part else f"optimizer-{segment}.safetensors"
        parts.files.pop(file_name, None)
        if optimizer:
            parts.files[file_name] = _save(parts.directory / file_name, optimizer)

    def finish(self, name: str, contents: CheckpointContents, *, attempt: int = 0) -> Path:
        """Write checkpoint `name` from the parts of `attempt` and return its directory.

        Older checkpoints beyond `keep` are deleted, parts of other attempts forgotten. Uploaded tensors that are not listed in `contents`
        (buffers that are not in the state_dict) are left out. Raises CheckpointError naming a tensor that nobody uploaded,
        CheckpointMismatchError naming one of another shape or dtype.
        """
        parts = self._parts(name, attempt)
        model = _assemble(name, parts.model, contents)
        files = [_save(parts.directory / MODEL_FILE, model), *parts.files.values()]
        manifest = CheckpointManifest(
            format_version=FORMAT_VERSION,
            roost_version=__version__,
            torch_version=torch.__version__,
            written_s=self._clock(),
            contents=contents,
            files=tuple(files),
        )
        try:
            _write_synced(parts.directory / MANIFEST_FILE, manifest_bytes(manifest))
            target = self._publish(name, parts.directory)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {name!r} cannot be written: {error}", hint="Free disk space and check permissions."
            ) from error
        self._finished[name] = attempt
        del self._open[name, attempt]
        # Whatever else was begun was begun before: a job writes one checkpoint at a time.
        for other in list(self._open):
            self._give_up(other)
        logger.info("checkpoint_written path=%s epoch=%d updates=%d", target, contents.epoch, contents.updates)
        self._prune(target)
        return target

    def path_of(self, name: str) -> Path:
        """Return where checkpoint `name` is once it is written. Raises InvalidConfigError if that can be no name."""
        check_identifier(name, "checkpoint name")
        return self._root / name

    def discard(self, name: str) -> None:
        """Forget the parts of checkpoint `name`, of every attempt, and delete their files; does nothing if there are none."""
        for key in [key for key in self._open if key[0] == name]:
            self._give_up(key)

    def _give_up(self, key: Attempt) -> None:
        shutil.rmtree(self._open.pop(key).directory, ignore_errors=True)
        logger.info("checkpoint_attempt_given_up name=%s attempt=%d", *key)

    def _parts(self, name: str, attempt: int) -> _Parts:
        """Return the parts of an attempt, which becomes the one that was heard of last; an attempt that is new starts with none."""
        if attempt < self._finished.get(name, 0):
            raise CheckpointError(
                f"attempt {attempt} of checkpoint {name!r} was given up: a later one is written", hint="Upload to the newest attempt."
            )
        parts = self._open.pop((name, attempt), None) or self._begin(name, attempt)
        self._open[name, attempt] = parts
        while len(self._open) > MAX_OPEN:
            self._give_up(next(iter(self._open)))
        return parts

    def _begin(self, name: str, attempt: int) -> _Parts:
        check_identifier(name, "checkpoint name")
        directory = self._root / f".{name}.{attempt}{_PARTIAL}"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            # Parts of a run that was interrupted must not mix with these.
            ours = {parts.directory for parts in self._open.values()}
            for left in self._root.glob(f".*{_PARTIAL}"):
                if left not in ours:
                    shutil.rmtree(left, ignore_errors=True)
            directory.mkdir()
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be made: {error}", hint=WRITABLE_HINT) from error
        return _Parts(directory=directory)

    def _publish(self, name: str, directory: Path) -> Path:
        """Rename a complete directory to its name; one that has the name already makes room."""
        target = self._root / name
        replaced = self._root / f".{name}.replaced"
        _sync_directory(directory)
        shutil.rmtree(replaced, ignore_errors=True)
        if target.exists():
            target.rename(replaced)
        directory.rename(target)
        _sync_directory(self._root)
        shutil.rmtree(replaced, ignore_errors=True)
        return target

    def _prune(self, newest: Path) -> None:
        if self._keep <= 0:
            return
        for path in completed(self._root)[self._keep :]:
            if path != newest:
                shutil.rmtree(path, ignore_errors=True)
                logger.info("checkpoint_deleted path=%s", path)


def check_writable(root: Path) -> None:
    """Make the directory `root` if there is none. Raises CheckpointError if files cannot be made in it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be written to {root}: {error}", hint=WRITABLE_HINT) from error


def _assemble(name: str, uploaded: Mapping[str, Tensor], contents: CheckpointContents) -> dict[str, Tensor]:
    """Return the whole model under all its names."""
    model: dict[str, Tensor] = {}
    for spec in contents.tensors:
        tensor = uploaded.get(spec.name)
        if tensor is None:
            raise CheckpointError(
                f"checkpoint {name!r} lacks tensor {spec.name!r}: no node uploaded it",
                hint="A stage failed to upload its part: read the logs of the nodes, and use the checkpoint before it.",
            )
        found = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if found != (spec.dtype, spec.shape):
            raise CheckpointMismatchError(
                f"checkpoint {name!r}: tensor {spec.name!r} is {found[0]} {list(found[1])}, the model says {spec.dtype} {list(spec.shape)}"
            )
        model[spec.name] = tensor
    for alias, canonical in contents.aliases:
        if canonical not in model:
            raise CheckpointError(f"checkpoint {name!r}: {alias!r} is tied to {canonical!r}, which is not in the model")
        model[alias] = model[canonical].clone()  # the file format refuses names that share memory
    return model


def _save(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write tensors to `path`, through to the disk, and return the file's record."""
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        return file_record(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}", hint="Free disk space and check permissions.") from error


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the system lets directories be opened."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
