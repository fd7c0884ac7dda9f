"""What clusters make of an average: take it, or step towards it with momentum.

DiLoCo (Douillard et al., arXiv 2311.08105): the difference between the last common weights and the average of what the
clusters have made of them is taken for a gradient, and SGD with Nesterov momentum (Sutskever et al. 2013, as in torch.optim.SGD)
steps along it. All members of a ring do the same arithmetic on the same bits, so they stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_BLOCK = 1 << 20
"""Elements that are worked on at a time: temporaries stay small."""


class OuterStep:
    """Nesterov momentum over the differences of a segment's averages; its memory is one float per element."""

    def __init__(self, *, learning_rate: float, momentum: float) -> None:
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._velocity: Tensor | None = None

    def reset(self) -> None:
        """Forget the momentum: what members have of it may differ."""
        self._velocity = None

    def apply(self, base: Tensor, difference: Tensor, stepped: Iterable[slice]) -> None:
        """Change `base`, (n,), in place by what `difference` = average - base, (n,), says.

        In the slices `stepped` (the parameters) with g = -difference: v = momentum * v + g; base -= learning_rate * (g + momentum * v).
        What lies outside them (running statistics) becomes the average.
        """
        if self._velocity is None:
            self._velocity = torch.zeros_like(base)
        done = 0
        for where in stepped:
            base[done : where.start].add_(difference[done : where.start])
            for begin in range(where.start, where.stop, _BLOCK):
                block = slice(begin, min(begin + _BLOCK, where.stop))
                self._step(base[block], difference[block], self._velocity[block])
            done = where.stop
        base[done:].add_(difference[done:])

    def _step(self, base: Tensor, difference: Tensor, velocity: Tensor) -> None:
        # One rounding per operation, never a fused one: machines with and without fused multiply-add must agree.
        velocity.mul_(self._momentum).sub_(difference)
        change = velocity * self._momentum
        change.sub_(difference).mul_(self._learning_rate)
        base.sub_(change)
