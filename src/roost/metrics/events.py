"""Events as JSON, one object a line."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

MAX_BYTES = 64 << 20


class JsonLines:
    """Appends events to a file, which is made at the first one.

    A file that would grow over `max_bytes` is renamed to the same name with '.1' added, in place of an older one, so at most
    about 2 * max_bytes are on disk.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives the Unix time that each event is stamped with."""
        self._path = path
        self._max_bytes = max_bytes
        self._clock = clock
        self._stream: IO[bytes] | None = None
        self._size = 0

    def write(self, event: str, **fields: Any) -> None:
        """Append {"time": ..., "event": ..., **fields} as one line and flush.

        Fields are JSON-ready values (dicts, lists, scalars); numbers that are not finite become null. Raises OSError.
        """
        record = {"time": self._clock(), "event": event, **_plain(fields)}
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        stream = self._opened()
        if self._size > 0 and self._size + len(line) > self._max_bytes:
            self.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            stream = self._opened()
        stream.write(line)
        stream.flush()
        self._size += len(line)

    def close(self) -> None:
        """Close the file; a later event opens it again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _opened(self) -> IO[bytes]:
        if self._stream is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self._path.open("ab")
            self._size = self._stream.tell()
        return self._stream


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
