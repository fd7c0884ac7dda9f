"""checkpoint.json: what a checkpoint holds, and the checksums of its files."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.codec import decode_record, encode_record
from roost.config import JobConfig
from roost.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError, MalformedMessageError
from roost.types import Plan, TensorSpec

FORMAT_VERSION = 1
MANIFEST_FILE = "checkpoint.json"
MODEL_FILE = "model.safetensors"
MAX_MANIFEST_BYTES = 4 << 20
"""Some ten thousand tensors. What JSON says in a byte can take Python 30 bytes to hold."""
_FILE_NAME = re.compile(r"(model|optimizer--?[0-9]{1,9}(-[0-9]{1,6})?)\.safetensors")
_CHECKSUM = "sha256"
"""The field of checkpoint.json that vouches for the others; checkpoints made before there was one lack it."""


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
    """Return the JSON text of `manifest`. Raises CheckpointError if it is longer than read_manifest takes."""
    raw = encode_record(manifest)
    raw[_CHECKSUM] = _checksum(raw)
    data = json.dumps(raw, indent=1, allow_nan=False).encode()
    if len(data) > MAX_MANIFEST_BYTES:
        # Without the spaces a long list of tensors takes a third of the room.
        data = json.dumps(raw, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MAX_MANIFEST_BYTES:
        count = len(manifest.contents.tensors)
        raise CheckpointError(f"the list of {count} tensors is too long for {MANIFEST_FILE}", hint="Merge small tensors of the model.")
    return data


def read_manifest(directory: Path) -> CheckpointManifest:
    """Return the manifest of the checkpoint in `directory`.

    Raises CheckpointDamagedError if it is missing or malformed, CheckpointMismatchError if another format wrote it.
    """
    path = directory / MANIFEST_FILE
    if regular_size(path) > MAX_MANIFEST_BYTES:
        raise CheckpointDamagedError(f"{path} is over the limit of {MAX_MANIFEST_BYTES} bytes")
    try:
        raw = parse_json(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {shown(error)}") from error
    checksum = raw.pop(_CHECKSUM, None) if isinstance(raw, dict) else None
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
    names: set[str] = set()
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name) or file.name in names:
            raise CheckpointDamagedError(f"{path} lists {file.name[:80]!r}, which is not a file of a checkpoint or is listed twice")
        names.add(file.name)
    if checksum is not None and checksum != _checksum(raw):
        raise CheckpointDamagedError(f"{path} has the wrong checksum: it changed after it was written")
    return manifest


def _checksum(raw: dict[str, Any]) -> str:
    """Return the SHA-256, hexadecimal, of what the fields say, however they are laid out."""
    return hashlib.sha256(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file of that name belongs to a checkpoint."""
    return name == MANIFEST_FILE or _FILE_NAME.fullmatch(name) is not None


def parse_json(data: bytes) -> Any:
    """Return what JSON in UTF-8 says. Raises ValueError or RecursionError for anything else, and for a field given twice."""
    return json.loads(data.decode(), object_pairs_hook=_unique_fields, parse_constant=_refuse_constant)


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is given twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed")


def shown(what: object, length: int = 120) -> str:
    """Return the start of `what` as text that any terminal can show."""
    return ascii(str(what))[1:-1][:length]


def regular_size(path: Path) -> int:
    """Return the bytes of a file. Raises CheckpointDamagedError unless it is an ordinary file: a link could lead anywhere."""
    try:
        status = path.lstat()
    except (OSError, ValueError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointDamagedError(f"{path} is not an ordinary file", hint="Copy the file itself into the checkpoint's directory.")
    return status.st_size


def check_file(directory: Path, file: FileRecord) -> None:
    """Raise CheckpointDamagedError if `file` is missing, cut short, or has another checksum; its bytes are never all in memory."""
    path = check_size(directory, file)
    try:
        found = file_record(path)
    except OSError as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}") from error
    if found.sha256 != file.sha256:
        raise CheckpointDamagedError(f"{path} has the wrong checksum: it changed after it was written")


def file_record(path: Path) -> FileRecord:
    """Return name, size and checksum of the file at `path`."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileRecord(name=path.name, nbytes=path.stat().st_size, sha256=digest)


def check_size(directory: Path, file: FileRecord) -> Path:
    """Return the path of `file`. Raises CheckpointDamagedError if it is missing or has another size."""
    path = directory / file.name
    nbytes = regular_size(path)
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
