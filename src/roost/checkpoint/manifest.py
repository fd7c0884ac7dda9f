"""checkpoint.json: what a checkpoint holds, and the checksums of its files."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from roost.codec import decode_record, encode_record
from roost.config import JobConfig
from roost.errors import CheckpointDamagedError, CheckpointMismatchError, MalformedMessageError
from roost.types import Plan, TensorSpec

FORMAT_VERSION = 1
MANIFEST_FILE = "checkpoint.json"
MODEL_FILE = "model.safetensors"
_FILE_NAME = re.compile(r"^(model|optimizer--?[0-9]{1,9})\.safetensors$")


@dataclass(frozen=True, kw_only=True)
class CheckpointContents:
    """What the whole checkpoint must hold, as the requester knows it."""

    epoch: int
    """Epochs finished."""
    updates: int
    """Schedule steps taken so far."""
    tensors: tuple[TensorSpec, ...]
    """Every tensor of the model's state_dict, under its canonical name."""
    aliases: tuple[tuple[str, str], ...] = ()
    """(alias, canonical name) of tied tensors: an alias is in the state_dict too."""
    config: JobConfig
    plan: Plan | None = None
    """The plan it was trained with, for people."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint."""

    name: str
    nbytes: int
    sha256: str
    """Hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """The contents of checkpoint.json, which is written last."""

    format_version: int
    roost_version: str
    torch_version: str
    written_s: float
    """Unix time."""
    contents: CheckpointContents
    files: tuple[FileRecord, ...]


def manifest_bytes(manifest: CheckpointManifest) -> bytes:
    """Return the JSON text of `manifest`."""
    return json.dumps(encode_record(manifest), indent=1, allow_nan=False).encode()


def read_manifest(directory: Path) -> CheckpointManifest:
    """Return the manifest of the checkpoint in `directory`.

    Raises CheckpointDamagedError if it is missing or malformed, CheckpointMismatchError if another format wrote it.
    """
    path = directory / MANIFEST_FILE
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}") from error
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise CheckpointMismatchError(
            f"{path} has format {version}, this version of roost reads {FORMAT_VERSION}",
            hint="Resume with the version of roost that wrote it.",
        )
    try:
        manifest = decode_record(CheckpointManifest, raw)
    except MalformedMessageError as error:
        raise CheckpointDamagedError(f"{path} is malformed: {error.message}") from error
    assert isinstance(manifest, CheckpointManifest)
    for file in manifest.files:
        if not _FILE_NAME.match(file.name):
            raise CheckpointDamagedError(f"{path} lists {file.name!r}, which is not a file of a checkpoint")
    return manifest


def file_record(path: Path) -> FileRecord:
    """Return name, size and checksum of the file at `path`."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileRecord(name=path.name, nbytes=path.stat().st_size, sha256=digest)


def check_size(directory: Path, file: FileRecord) -> Path:
    """Return the path of `file`. Raises CheckpointDamagedError if it is missing or has another size."""
    path = directory / file.name
    try:
        nbytes = path.stat().st_size
    except OSError as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}") from error
    if nbytes != file.nbytes:
        raise CheckpointDamagedError(f"{path} has {nbytes} bytes instead of {file.nbytes}")
    return path


def read_checked(directory: Path, file: FileRecord) -> bytes:
    """Return the bytes of `file`. Raises CheckpointDamagedError if it is missing, cut short, or has another checksum."""
    path = check_size(directory, file)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}") from error
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise CheckpointDamagedError(f"{path} has the wrong checksum: it changed after it was written")
    return data
