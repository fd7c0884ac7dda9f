"""Random numbers of a forward, so that any cut of a model draws what one process would.

Stage 0 seeds the generator with the micro-batch's seed; the generator's state travels from stage to stage. The process's
own generator is put back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor

_STAGE_STRIDE = 1_000_003
"""Separates the seeds of two stages on devices whose generator state does not travel."""


class ForwardRandomness:
    """Sets the default generators for a forward and keeps the state to pass on."""

    def __init__(self, *, stage: int, draws: bool, carries: bool, device: torch.device) -> None:
        """`draws`: this stage draws random numbers; `carries`: a later one does."""
        self._stage = stage
        self._draws = draws
        self._carries = carries
        self._device = device
        self.after: Tensor | None = None
        """The generator's state after the last forward, (bytes,) uint8 in host memory; None unless a later stage draws."""

    @contextmanager
    def forward(self, seed: int, state: Tensor | None) -> Iterator[None]:
        """Run a forward with the generator at `state`, or freshly seeded if there is none; sets `after`."""
        self.after = None
        if not self._draws:
            # Nothing is drawn here: the state goes through as it came.
            if self._carries:
                self.after = state if state is not None else Generator().manual_seed(seed).get_state()
            yield
            return
        generator = torch.default_generator
        kept = generator.get_state()
        try:
            if state is None:
                generator.manual_seed(seed)
            else:
                generator.set_state(state)
            with self._device_seeded(seed):
                yield
            if self._carries:
                self.after = generator.get_state()
        finally:
            generator.set_state(kept)

    @contextmanager
    def _device_seeded(self, seed: int) -> Iterator[None]:
        """On an accelerator masks come from its own generator, whose state means nothing to other kinds of devices:
        each stage seeds it from the micro-batch and its own position, so that a run can still be repeated."""
        if self._device.type == "cpu":
            yield
            return
        module = torch.get_device_module(self._device)
        kept = module.get_rng_state()
        try:
            module.manual_seed((seed + _STAGE_STRIDE * self._stage) % 2**63)
            yield
        finally:
            module.set_rng_state(kept)
