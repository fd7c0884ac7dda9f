"""The header of a safetensors file, read strictly before anything trusts it.

A file is: 8 bytes with the length of the header (little-endian), the header as a JSON object, the bytes of all tensors one after
another. For each tensor the header has its dtype, its shape, and where its bytes begin and end after the header.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from roost.checkpoint.manifest import parse_json, regular_size, shown
from roost.errors import CheckpointDamagedError, InvalidConfigError
from roost.types import SAFETENSORS_DTYPES, TensorSpec

MAX_HEADER_BYTES = 4 << 20
"""Some forty thousand tensors. What JSON says in a byte can take Python 30 bytes to hold."""
MAX_TENSOR_NAME = 1024
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_MAX_METADATA = 1024
"""Pairs of text that a writer may leave in the header; nothing here reads them."""


def read_header(path: Path) -> tuple[dict[str, TensorSpec], bytes]:
    """Return what the tensors in the file at `path` look like, by name, and the bytes that say so (length included).

    Raises CheckpointDamagedError unless the header describes exactly the bytes that follow it: no gap, no overlap, nothing left.
    """
    nbytes = regular_size(path)
    try:
        with path.open("rb") as stream:
            start = stream.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            if len(start) < _LENGTH_BYTES or length > min(MAX_HEADER_BYTES, nbytes - _LENGTH_BYTES):
                raise CheckpointDamagedError(f"{path} has no header of at most {MAX_HEADER_BYTES} bytes: it would have {length}")
            header = stream.read(length)
        raw = parse_json(header)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {shown(error)}") from error
    if not isinstance(raw, dict):
        raise CheckpointDamagedError(f"{path}: the header is no object")
    return _specs(path, raw, nbytes - _LENGTH_BYTES - length), start + header


def _specs(path: Path, raw: dict[str, Any], data_bytes: int) -> dict[str, TensorSpec]:
    metadata = raw.pop(_METADATA, {})
    if not isinstance(metadata, dict) or len(metadata) > _MAX_METADATA or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointDamagedError(f"{path}: the header's {_METADATA} is not text by name")
    found: dict[str, TensorSpec] = {}
    places: list[tuple[int, int]] = []
    for name, entry in raw.items():
        if not 0 < len(name) <= MAX_TENSOR_NAME or not name.isprintable():
            raise CheckpointDamagedError(f"{path}: {shown(name, 80)!r} cannot be the name of a tensor")
        try:
            found[name], place = _entry(name, entry)
        except (InvalidConfigError, ValueError) as error:
            what = error.message if isinstance(error, InvalidConfigError) else str(error)
            raise CheckpointDamagedError(f"{path}: tensor {name[:80]!r}: {shown(what)}") from error
        places.append(place)
    # Tensors without elements begin and end at one place.
    end = 0
    for start, stop in sorted(places):
        if start != end:
            raise CheckpointDamagedError(f"{path}: the tensors' bytes overlap or leave a gap at {min(start, end)}")
        end = stop
    if end != data_bytes:
        raise CheckpointDamagedError(f"{path}: the header describes {end} bytes of tensors, the file has {data_bytes}")
    return found


def _entry(name: str, raw: Any) -> tuple[TensorSpec, tuple[int, int]]:
    """Return a tensor's spec and where its bytes begin and end. Raises ValueError, InvalidConfigError."""
    if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("its entry must have exactly dtype, shape and data_offsets")
    dtype = SAFETENSORS_DTYPES.get(raw["dtype"]) if isinstance(raw["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"its dtype must be one of {', '.join(SAFETENSORS_DTYPES)}")
    shape, offsets = _sizes(raw["shape"]), _sizes(raw["data_offsets"])
    spec = TensorSpec(name=name, dtype=dtype, shape=shape)
    if len(offsets) != 2 or offsets[1] - offsets[0] != spec.nbytes:
        raise ValueError(f"{math.prod(shape)} elements of {dtype} do not take the bytes that its offsets say")
    return spec, (offsets[0], offsets[1])


def _sizes(raw: Any) -> tuple[int, ...]:
    if not isinstance(raw, list) or not all(type(size) is int and 0 <= size < 2**63 for size in raw):
        raise ValueError("its shape and its offsets must be lists of sizes")
    return tuple(raw)
