"""Measures how fast this machine computes, so that the planner can size stages to nodes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor
from torch.nn import functional

_MATMUL_SIZE = {"cpu": 512}
_MATMUL_SIZE_ACCELERATOR = 4096
_IMAGES = {"cpu": 4}
_IMAGES_ACCELERATOR = 256
_CHANNELS = 64
_KERNEL = 3
_IMAGE_SIZE = 56
"""A 3x3 convolution of 64 channels at 56 x 56: the shape of ResNet's first blocks."""
_MIN_RUNS = 3

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class ComputeSpeed:
    """Probe results, float32."""

    matmul_flop_per_s: float
    convolution_flop_per_s: float
    flop_per_s: float
    """Geometric mean of the two."""


def measure(threads: int, device: torch.device | str = "cpu", budget_s: float = 1.0) -> ComputeSpeed:
    """Return the speed of `device` with that many CPU threads: median of the float32 runs that fit in `budget_s`.

    The process's number of threads is put back afterwards. A slow machine takes longer: at least 3 runs of each kind.
    """
    place = torch.device(device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            clock = _clock(threads, place)
            matmul = _matmul_speed(place, budget_s / 2, clock)
            convolution = _convolution_speed(place, budget_s / 2, clock)
    finally:
        torch.set_num_threads(before)
    return ComputeSpeed(matmul_flop_per_s=matmul, convolution_flop_per_s=convolution, flop_per_s=math.sqrt(matmul * convolution))


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


def _matmul_speed(device: torch.device, budget_s: float, clock: Clock) -> float:
    size = _MATMUL_SIZE.get(device.type, _MATMUL_SIZE_ACCELERATOR)
    left = torch.full((size, size), 0.5, device=device)
    right = torch.full((size, size), 0.5, device=device)
    return 2.0 * size**3 / _median_seconds(lambda: left @ right, device, budget_s, clock)


def _convolution_speed(device: torch.device, budget_s: float, clock: Clock) -> float:
    images = torch.full((_IMAGES.get(device.type, _IMAGES_ACCELERATOR), _CHANNELS, _IMAGE_SIZE, _IMAGE_SIZE), 0.5, device=device)
    weight = torch.full((_CHANNELS, _CHANNELS, _KERNEL, _KERNEL), 0.5, device=device)
    flop = 2.0 * images.numel() * _CHANNELS * _KERNEL**2
    return flop / _median_seconds(lambda: functional.conv2d(images, weight, padding=1), device, budget_s, clock)


def _median_seconds(run: Callable[[], Tensor], device: torch.device, budget_s: float, clock: Clock) -> float:
    run()  # the first run pays for loading kernels and faulting memory in
    _wait(device)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _MIN_RUNS or time.perf_counter() - begin < budget_s:
        started = clock()
        run()
        _wait(device)
        times.append(clock() - started)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
