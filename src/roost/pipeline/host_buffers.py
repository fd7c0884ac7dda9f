"""Tensors between a stage's device and host memory, which is all that the wire carries.

On cuda they go through pinned memory, on streams of their own: the copies run while kernels do, and the thread that computes waits
for none of them. torch keeps freed pinned blocks and does not give one out again before the copies on it are done. On the cpu
nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class HostTensors:
    """Tensors in host memory, whose bytes may still be on their way."""

    tensors: tuple[Tensor, ...]
    wait: Callable[[], None] | None
    """Returns when the bytes are there, and may block until then; None: they are there."""


class HostBuffers(Protocol):
    """Moves tensors between host memory and one device."""

    def to_host(self, tensors: Sequence[Tensor]) -> HostTensors:
        """Return the tensors in host memory, in the order that they have in memory; they must not change until they have arrived."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device, ready for what is computed there next; it must not change in host memory meanwhile."""


class PlainHostBuffers:
    """Copies at once, and not at all where the device is the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_host(self, tensors: Sequence[Tensor]) -> HostTensors:
        return HostTensors(tensors=tuple(tensor.detach().cpu() for tensor in tensors), wait=None)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)


class CopyStreams(Protocol):
    """What is used of torch.cuda."""

    def Stream(self, device: Any = None) -> Any: ...

    def Event(self, *, blocking: bool) -> Any: ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...

    def current_stream(self, device: Any = None) -> Any: ...


def pinned_like(tensor: Tensor) -> Tensor:
    """Return an uninitialised tensor in pinned host memory, of the shape, dtype and order of `tensor`."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


class PinnedHostBuffers:
    """Copies through pinned memory on one stream per direction. For the one thread that computes on the device."""

    def __init__(self, device: torch.device, streams: CopyStreams, pinned: Callable[[Tensor], Tensor]) -> None:
        """`streams` is torch.cuda, `pinned` gives pinned memory like a tensor (`pinned_like`)."""
        self._device = device
        self._streams = streams
        self._pinned = pinned
        self._out: Any = None
        self._in: Any = None

    def to_host(self, tensors: Sequence[Tensor]) -> HostTensors:
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return HostTensors(tensors=tuple(tensor.detach() for tensor in tensors), wait=None)
        self._out = self._out or self._streams.Stream(device=self._device)
        # What is computed now must be done before it is copied; what is computed next need not wait for the copy.
        self._out.wait_stream(self._streams.current_stream(self._device))
        found = []
        with self._streams.stream(self._out):
            for tensor in tensors:
                found.append(self._pinned(tensor).copy_(tensor.detach(), non_blocking=True))
                if tensor.device.type != "cpu":
                    # So that its memory is not given out again before it has been read here.
                    tensor.record_stream(self._out)
            # Blocking, so that whoever waits for it sleeps.
            arrived = self._streams.Event(blocking=True)
            arrived.record(self._out)
        return HostTensors(tensors=tuple(found), wait=arrived.synchronize)

    def to_device(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == self._device.type:
            return tensor
        self._in = self._in or self._streams.Stream(device=self._device)
        computing = self._streams.current_stream(self._device)
        source = self._pinned(tensor).copy_(tensor)
        with self._streams.stream(self._in):
            moved = source.to(self._device, non_blocking=True)
        computing.wait_stream(self._in)
        moved.record_stream(computing)
        return moved


def host_buffers(device: torch.device | str) -> HostBuffers:
    """Return what moves tensors between host memory and `device`; nothing is allocated before the first copy."""
    place = torch.device(device)
    if place.type == "cuda":
        return PinnedHostBuffers(place, torch.cuda, pinned_like)
    return PlainHostBuffers(place)
