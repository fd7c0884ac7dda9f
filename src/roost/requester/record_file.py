"""A record in a file, as one line of JSON; decoded strictly, with errors that name the file and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from roost.codec import encode_record
from roost.errors import InvalidConfigError, MalformedMessageError

MAX_FILE_BYTES = 64 << 20

T = TypeVar("T")


def save_record(record: object, path: Path, *, what: str) -> None:
    """Write a dataclass record. `what` is its name for people; raises InvalidConfigError if the file cannot be written."""
    text = json.dumps(encode_record(record), separators=(",", ":"), allow_nan=False)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidConfigError(f"{path}: the {what} cannot be written: {error.strerror}") from error


def load_record(path: Path, decode: Callable[[object], T], *, what: str, hint: str) -> T:
    """Return what `decode` makes of the JSON in a file; it raises MalformedMessageError for what is no such record.

    Raises InvalidConfigError with `hint` if the file cannot be read, is too large, or is anything else.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidConfigError(f"{path}: the {what} cannot be read: {error.strerror}", hint=hint) from error
    if len(data) > MAX_FILE_BYTES:
        raise InvalidConfigError(f"{path}: a {what} has at most {MAX_FILE_BYTES} bytes", hint=hint)
    try:
        return decode(json.loads(data))
    except (ValueError, RecursionError, MalformedMessageError) as error:
        problem = error.message if isinstance(error, MalformedMessageError) else str(error)
        raise InvalidConfigError(f"{path} is not a {what}: {problem}", hint=hint) from error
