"""Copies between a device and host memory. There is no GPU here: streams and the device's tensors write down what is asked of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from roost.pipeline.host_buffers import PinnedHostBuffers, PlainHostBuffers, host_buffers

CUDA = torch.device("cuda")


class Recorded:
    """Streams, events and tensors of a device that is not there; `log` is what happened, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "compute"
        self._streams = 0

    def Stream(self, device: Any = None) -> FakeStream:
        self._streams += 1
        return FakeStream(self, f"copy{self._streams}")

    def Event(self, *, blocking: bool) -> FakeEvent:
        assert blocking, "whoever waits must sleep"
        return FakeEvent(self)

    def current_stream(self, device: Any = None) -> FakeStream:
        return FakeStream(self, self.current)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def pinned(self, tensor: Any) -> FakeTensor:
        return FakeTensor(self, f"pinned {tensor.name}", "cpu")


class FakeStream:
    def __init__(self, owner: Recorded, name: str) -> None:
        self._owner, self.name = owner, name

    def wait_stream(self, other: FakeStream) -> None:
        self._owner.log.append(f"{self.name} waits for {other.name}")


class FakeEvent:
    def __init__(self, owner: Recorded) -> None:
        self._owner, self._stream = owner, ""

    def record(self, stream: FakeStream) -> None:
        self._stream = stream.name
        self._owner.log.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        self._owner.log.append(f"host waits for {self._stream}")


class FakeTensor:
    def __init__(self, owner: Recorded, name: str, device: str) -> None:
        self._owner, self.name = owner, name
        self.device = torch.device(device)

    def detach(self) -> FakeTensor:
        return self

    def copy_(self, source: FakeTensor, *, non_blocking: bool = False) -> FakeTensor:
        self._owner.log.append(f"{source.name} -> {self.name} on {self._owner.current if non_blocking else 'host'}")
        return self

    def to(self, device: torch.device, *, non_blocking: bool) -> FakeTensor:
        assert non_blocking
        self._owner.log.append(f"{self.name} -> device on {self._owner.current}")
        return FakeTensor(self._owner, "moved", device.type)

    def record_stream(self, stream: FakeStream) -> None:
        self._owner.log.append(f"{self.name} is used on {stream.name}")


def pinned_buffers() -> tuple[Recorded, PinnedHostBuffers]:
    recorded = Recorded()
    return recorded, PinnedHostBuffers(CUDA, recorded, recorded.pinned)  # type: ignore[arg-type]


def test_on_the_cpu_nothing_is_copied() -> None:
    tensor = torch.rand(3, requires_grad=True)
    buffers = host_buffers("cpu")
    assert buffers.to_device(tensor) is tensor
    found = buffers.to_host([tensor])
    assert found.wait is None
    assert found.tensors[0].data_ptr() == tensor.data_ptr()
    assert not found.tensors[0].requires_grad


def test_each_kind_of_device_gets_its_way_of_copying_and_none_is_touched_before_the_first_copy() -> None:
    assert isinstance(host_buffers("cuda"), PinnedHostBuffers)
    assert isinstance(host_buffers("mps"), PlainHostBuffers)
    assert isinstance(host_buffers("cpu"), PlainHostBuffers)


def test_values_leave_the_device_on_a_stream_of_their_own_after_what_made_them() -> None:
    recorded, buffers = pinned_buffers()
    found = buffers.to_host([FakeTensor(recorded, "a", "cuda"), FakeTensor(recorded, "b", "cuda")])  # type: ignore[list-item]
    assert recorded.log == [
        "copy1 waits for compute",
        "a -> pinned a on copy1",
        "a is used on copy1",
        "b -> pinned b on copy1",
        "b is used on copy1",
        "event on copy1",
    ]
    assert [tensor.name for tensor in found.tensors] == ["pinned a", "pinned b"]  # type: ignore[attr-defined]
    recorded.log.clear()
    assert found.wait is not None
    found.wait()
    assert recorded.log == ["host waits for copy1"]


def test_the_stream_that_copies_out_is_made_once() -> None:
    recorded, buffers = pinned_buffers()
    for name in "ab":
        buffers.to_host([FakeTensor(recorded, name, "cuda")])  # type: ignore[list-item]
    assert [line for line in recorded.log if "event" in line] == ["event on copy1"] * 2


def test_what_is_in_host_memory_already_is_not_waited_for() -> None:
    recorded, buffers = pinned_buffers()
    tensor = torch.rand(2)
    found = buffers.to_host([tensor])
    assert found.wait is None
    assert found.tensors[0].data_ptr() == tensor.data_ptr()
    assert recorded.log == []


def test_values_reach_the_device_through_pinned_memory_before_what_is_computed_next() -> None:
    recorded, buffers = pinned_buffers()
    moved = buffers.to_device(FakeTensor(recorded, "a", "cpu"))  # type: ignore[arg-type]
    assert moved.device.type == "cuda"
    assert recorded.log == [
        "a -> pinned a on host",
        "pinned a -> device on copy1",
        "compute waits for copy1",
        "moved is used on compute",
    ]


def test_what_is_on_the_device_already_stays() -> None:
    recorded, buffers = pinned_buffers()
    tensor: Any = FakeTensor(recorded, "a", "cuda")
    assert buffers.to_device(tensor) is tensor
    assert recorded.log == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_values_come_back_as_they_went() -> None:
    buffers = host_buffers("cuda")
    tensor = torch.rand(64, 1024).t()
    moved = buffers.to_device(tensor)
    assert moved.device.type == "cuda"
    assert moved.stride() == tensor.stride()
    found = buffers.to_host([moved + 1])
    assert found.wait is not None
    found.wait()
    assert found.tensors[0].is_pinned()
    assert torch.equal(found.tensors[0], tensor + 1)
