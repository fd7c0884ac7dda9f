"""Records as JSON, strictly. Standard library only.

Decoding checks the type of every field against its annotation: no unknown field, no missing field, no number that is not
finite; nothing is looked up by a name from outside but the declared messages.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types as python_types
import typing
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import Any

from roost.errors import MalformedMessageError, RoostError
from roost.messages import Message

MAX_STRING = 1 << 16
"""Characters of one string."""
MAX_ITEMS = 1 << 20
"""Items of one list."""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed")


# A coordinator reads and writes thousands of messages a second: what is the same for all of them is made once.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


@cache
def _message_types() -> dict[str, type[Message]]:
    return {kind.__name__: kind for kind in Message.__subclasses__()}


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the names of the fields of a dataclass, None for any other type."""
    return tuple(item.name for item in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


def encode(message: Message) -> bytes:
    """Return the JSON of `message`: {"type": ..., "body": ...}. Raises ValueError for a number that is not finite."""
    body = {"type": type(message).__name__, "body": _to_json(message)}
    return _ENCODER.encode(body).encode()


_PLAIN = frozenset({str, int, float, bool, type(None)})


def _to_json(value: Any) -> Any:
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    names = _field_names(kind)
    if names is None:
        return value
    return {name: _to_json(getattr(value, name)) for name in names}


def decode(data: bytes) -> Message:
    """Return the message in `data`. Raises MalformedMessageError for anything that is not exactly one."""
    try:
        raw = _DECODER.decode(data.decode(json.detect_encoding(data), "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError(f"a message is not JSON: {error}") from error
    if not isinstance(raw, dict) or raw.keys() != {"type", "body"}:
        raise MalformedMessageError("a message must have exactly a type and a body")
    kind = _message_types().get(raw["type"]) if isinstance(raw["type"], str) else None
    if kind is None:
        raise MalformedMessageError(f"unknown message type {str(raw['type'])[:80]!r}")
    message = decode_record(kind, raw["body"])
    assert isinstance(message, Message)
    return message


def decode_record(kind: type, raw: object) -> Any:
    """Return a record of dataclass `kind` from parsed JSON. Raises MalformedMessageError."""
    try:
        return _decoder(kind)(raw, kind.__name__)
    except MalformedMessageError:
        raise
    except (RoostError, RecursionError, OverflowError) as error:
        what = error.message if isinstance(error, RoostError) else str(error)
        raise MalformedMessageError(f"{kind.__name__}: {what}") from error


def encode_record(record: Any) -> Any:
    """Return a dataclass record as JSON-ready dicts, lists and scalars."""
    return _to_json(record)


Decoder = Callable[[object, str], Any]


@cache
def _decoder(annotation: Any) -> Decoder:
    """Return a function that checks a parsed JSON value against a type annotation and converts it."""
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _dataclass_decoder(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, python_types.UnionType):
        return _union_decoder(arguments)
    if origin is tuple:
        return _tuple_decoder(arguments)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return _enum_decoder(annotation)
    return _scalar_decoder(annotation)


def _dataclass_decoder(kind: type) -> Decoder:
    hints = typing.get_type_hints(kind)
    parts = [(item.name, f".{item.name}", _decoder(hints[item.name])) for item in dataclasses.fields(kind)]
    expected = {name for name, _, _ in parts}

    def decode_dataclass(raw: object, path: str) -> Any:
        if not isinstance(raw, dict) or raw.keys() != expected:
            raise MalformedMessageError(f"{path}: expected exactly the fields {sorted(expected)}")
        return kind(**{name: part(raw[name], path + suffix) for name, suffix, part in parts})

    return decode_dataclass


def _tuple_decoder(arguments: tuple[Any, ...]) -> Decoder:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        item = _decoder(arguments[0])

        def decode_items(raw: object, path: str) -> tuple[Any, ...]:
            if not isinstance(raw, list) or len(raw) > MAX_ITEMS:
                raise MalformedMessageError(f"{path}: expected a list of at most {MAX_ITEMS} items")
            return tuple(item(value, path) for value in raw)

        return decode_items
    parts = [_decoder(argument) for argument in arguments]

    def decode_fixed(raw: object, path: str) -> tuple[Any, ...]:
        if not isinstance(raw, list) or len(raw) != len(parts):
            raise MalformedMessageError(f"{path}: expected a list of {len(parts)} items")
        return tuple(part(value, path) for part, value in zip(parts, raw, strict=True))

    return decode_fixed


def _union_decoder(arguments: tuple[Any, ...]) -> Decoder:
    options = [_decoder(argument) for argument in arguments]
    nullable = type(None) in arguments

    def decode_union(raw: object, path: str) -> Any:
        if raw is None and nullable:
            return None
        reason: MalformedMessageError | None = None
        for option in options:
            try:
                return option(raw, path)
            except MalformedMessageError as error:
                reason = error
        assert reason is not None
        raise reason

    return decode_union


def _enum_decoder(kind: type[StrEnum]) -> Decoder:
    members = {member.value: member for member in kind}

    def decode_enum(raw: object, path: str) -> StrEnum:
        if not isinstance(raw, str) or raw not in members:
            raise MalformedMessageError(f"{path}: expected one of {sorted(members)}")
        return members[raw]

    return decode_enum


def _is_text(raw: str) -> bool:
    """Return whether a string can be written as UTF-8: JSON's escapes can spell half a surrogate pair, which nothing can print."""
    try:
        raw.encode()
    except UnicodeEncodeError:
        return False
    return True


def _scalar_decoder(annotation: Any) -> Decoder:
    def decode_scalar(raw: object, path: str) -> Any:
        if annotation is float and type(raw) in (int, float):
            number = float(typing.cast(float, raw))
            if math.isfinite(number):
                return number
        elif annotation is str and isinstance(raw, str):
            if len(raw) <= MAX_STRING and (raw.isascii() or _is_text(raw)):
                return raw
        elif annotation is int and type(raw) is int:
            if -(2**63) <= raw < 2**63:
                return raw
        elif annotation is bool and isinstance(raw, bool):
            return raw
        elif annotation in (None, type(None)) and raw is None:
            return None
        wanted = getattr(annotation, "__name__", str(annotation))
        raise MalformedMessageError(f"{path}: {str(raw)[:40]!r} is not a valid {wanted}")

    return decode_scalar
