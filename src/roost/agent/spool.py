"""State of a stage that waits to be uploaded, on the node's disk: it takes no memory that training needs."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from roost.pipeline.tensor_bytes import from_buffer, spec_of, to_buffer
from roost.types import TensorSpec

ALIGNMENT = 64
"""Bytes: every tensor begins at a multiple, so that it can be used where it lies."""


@dataclass(frozen=True, kw_only=True)
class _Spooled:
    segment: int
    optimizer: bool
    spec: TensorSpec
    start: int


class Spool:
    """Copies of tensors in a file without a name: it is gone with the process, however that ends."""

    def __init__(self, directory: str) -> None:
        """The file is in `directory`; empty: where the system has its temporary files. Raises OSError."""
        # Closed by `close`, or with the last reference: what reads it may run longer than any block here.
        self._file = tempfile.TemporaryFile(prefix="roost-", dir=Path(directory) if directory else None)  # noqa: SIM115
        self._places: list[_Spooled] = []
        self._end = 0
        self._map: mmap.mmap | None = None

    def add(self, segment: int, tensors: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Write copies of model tensors and optimizer state by name. Raises OSError if the disk does not take them."""
        for is_state, group in ((False, tensors), (True, optimizer)):
            for name, tensor in group.items():
                gap = -self._end % ALIGNMENT
                self._file.write(bytes(gap))
                start = self._end + gap
                self._file.write(to_buffer(tensor))
                self._places.append(_Spooled(segment=segment, optimizer=is_state, spec=spec_of(name, tensor), start=start))
                self._end = start + tensor.nbytes
        # Now, and not when nobody can do anything about it any more.
        self._file.flush()

    def segments(self) -> Iterator[tuple[int, dict[str, Tensor], dict[str, Tensor]]]:
        """Yield what was added, by segment: tensors whose memory is the file. They must not be changed, nor used after `close`."""
        if self._map is None and self._end:
            # Shared with the file, not private: the system takes the memory back when it wants to.
            self._map = mmap.mmap(self._file.fileno(), self._end)
        for segment in dict.fromkeys(place.segment for place in self._places):
            tensors, optimizer = ({place.spec.name: self._tensor(place) for place in self._of(segment, kind)} for kind in (False, True))
            yield segment, tensors, optimizer

    def _of(self, segment: int, optimizer: bool) -> Iterator[_Spooled]:
        return (place for place in self._places if (place.segment, place.optimizer) == (segment, optimizer))

    def _tensor(self, place: _Spooled) -> Tensor:
        memory = memoryview(self._map)[place.start : place.start + place.spec.nbytes] if self._map is not None else memoryview(b"")
        return from_buffer(place.spec, memory)

    def forget_pages(self) -> None:
        """Let go of the memory through which the file was read so far."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Delete the file, once nobody uses a tensor of it any more."""
        self._map = None
        self._file.close()
