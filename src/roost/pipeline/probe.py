"""Measures how fast this machine computes, so that the planner can size stages to nodes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch.nn import functional

from roost.pipeline.precision import computing

_MATMUL_SIZE = {"float32": 512, "bf16": 256}
_MATMUL_SIZE_ACCELERATOR = 4096
_IMAGE_SIZE = {"float32": 56, "bf16": 28}
"""On a CPU less is computed in bfloat16: one without instructions for it takes tens of times as long as in float32."""
_IMAGE_SIZE_ACCELERATOR = 56
_IMAGES_ACCELERATOR = 256
_CHANNELS = 64
_KERNEL = 3
"""A 3x3 convolution of 64 channels at 56 x 56: the shape of ResNet's first blocks."""
_MIN_RUNS = 3
_MOST_STRETCHED = 3.0
"""On a busy machine measuring takes at most so many times its budget."""
_UPDATED_PARAMETERS = 8
_UPDATED_ELEMENTS = 1 << 18
"""The optimizer step that is timed: 8 parameters of 1 MB."""
_CACHE_BYTES = 64 << 20
"""Written before each step: in training a forward and a backward have been in the caches since the last one."""

UPDATE_TENSORS = 3 + 2
"""Tensors of a parameter's size that count for a step of AdamW: parameter, gradient, new parameter, and two of state."""

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class ComputeSpeed:
    """Probe results, for one precision."""

    matmul_flop_per_s: float
    convolution_flop_per_s: float
    flop_per_s: float
    """Geometric mean of the two."""


def measure(threads: int, device: torch.device | str = "cpu", budget_s: float = 1.0, precision: str = "float32") -> ComputeSpeed:
    """Return the speed of `device` with that many CPU threads in `precision`: the fastest of the runs that fit in `budget_s`.

    `precision` is one of roost.config.PRECISIONS, and one that the device can compute in (`can_compute`).
    The fastest, since speeds are compared between machines, and what disturbs a run says nothing about the machine.
    The process's number of threads is put back afterwards. A slow machine takes longer: at least 3 runs of each kind.
    """
    place = torch.device(device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad(), computing(precision, place):
            clock = _clock(threads, place)
            multiply, multiplications = _matmul(place, precision)
            convolve, convolutions = _convolution(place, precision)
            # In turn, so that both see the machine at the same moments.
            times = _times((multiply, convolve), place, budget_s, clock)
            matmul, convolution = multiplications / min(times[0]), convolutions / min(times[1])
    finally:
        torch.set_num_threads(before)
    return ComputeSpeed(matmul_flop_per_s=matmul, convolution_flop_per_s=convolution, flop_per_s=math.sqrt(matmul * convolution))


def update_bytes_per_s(threads: int, device: torch.device | str = "cpu", budget_s: float = 0.25) -> float:
    """Return the bytes per second of an AdamW step on float32 parameters: of parameter, gradient, new parameter and state.

    That counts 3 + 2 tensors of the parameters' size, whatever the step really touches. Median of the steps that fit in
    `budget_s`; the process's number of threads is put back afterwards.
    """
    place = torch.device(device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            sets = [_UpdatedTensors(place) for _ in range(_UPDATED_PARAMETERS)]
            other = torch.zeros(_CACHE_BYTES // 4, device=place)

            def update_all() -> None:
                for tensors in sets:
                    tensors.update()

            (times,) = _times((update_all,), place, budget_s, _clock(threads, place), before_each=lambda: other.add_(1))
    finally:
        torch.set_num_threads(before)
    return UPDATE_TENSORS * sum(tensors.parameter.nbytes for tensors in sets) / statistics.median(times)


class _UpdatedTensors:
    """A parameter with gradient and state, and the operations of torch's AdamW on them, one after the other.

    Not torch.optim itself: the first optimizer of a process imports torch's compiler, which takes seconds.
    """

    def __init__(self, device: torch.device) -> None:
        self.parameter, self._gradient, self._mean, self._square = (
            torch.full((_UPDATED_ELEMENTS,), value, device=device) for value in (0.5, 0.1, 0.1, 0.01)
        )

    def update(self) -> None:
        self.parameter.mul_(0.999)
        self._mean.lerp_(self._gradient, 0.1)
        self._square.mul_(0.999).addcmul_(self._gradient, self._gradient, value=0.001)
        self.parameter.addcdiv_(self._mean, (self._square.sqrt() / 0.9).add_(1e-8), value=-0.001)


def _clock(threads: int, device: torch.device) -> Clock:
    """Return the clock to measure with: one CPU thread counts its own time, so that a neighbour's burst does not look like a slow PC."""
    return time.thread_time if threads == 1 and device.type == "cpu" else time.perf_counter


def free_memory_bytes(device: torch.device | str = "cpu") -> int:
    """Return the bytes that can be allocated on `device` now without swapping."""
    place = torch.device(device)
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[0])
    if place.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return int(psutil.virtual_memory().available)


def _matmul(device: torch.device, precision: str) -> tuple[Callable[[], object], float]:
    """Return a matrix multiplication and its operations."""
    size = _MATMUL_SIZE[precision] if device.type == "cpu" else _MATMUL_SIZE_ACCELERATOR
    left = torch.full((size, size), 0.5, device=device)
    right = torch.full((size, size), 0.5, device=device)
    return lambda: left @ right, 2.0 * size**3


def _convolution(device: torch.device, precision: str) -> tuple[Callable[[], object], float]:
    """Return a convolution and its operations."""
    count, size = (1, _IMAGE_SIZE[precision]) if device.type == "cpu" else (_IMAGES_ACCELERATOR, _IMAGE_SIZE_ACCELERATOR)
    images = torch.full((count, _CHANNELS, size, size), 0.5, device=device)
    weight = torch.full((_CHANNELS, _CHANNELS, _KERNEL, _KERNEL), 0.5, device=device)
    return lambda: functional.conv2d(images, weight, padding=1), 2.0 * images.numel() * _CHANNELS * _KERNEL**2


def _times(
    runs: Sequence[Callable[[], object]],
    device: torch.device,
    budget_s: float,
    clock: Clock,
    before_each: Callable[[], object] | None = None,
) -> list[list[float]]:
    """Return the seconds of each run, in turn, as often as they fit in `budget_s` of the clock.

    It is the clock's budget so that neighbours make it take longer, and not measure less.
    """
    times: list[list[float]] = [[] for _ in runs]
    begin, deadline = clock(), time.perf_counter() + _MOST_STRETCHED * budget_s
    while len(times[0]) < _MIN_RUNS + 1 or (clock() - begin < budget_s and time.perf_counter() < deadline):
        for run, found in zip(runs, times, strict=True):
            if before_each is not None:
                before_each()
            started = clock()
            run()
            _wait(device)
            found.append(clock() - started)
    # The first run pays for loading kernels and faulting memory in.
    return [found[1:] for found in times]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
