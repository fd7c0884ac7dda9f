"""Runs recorded operations that draw random numbers from a given generator state, and passes over those nobody asked for."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from roost.weights.tape import GeneratorMove, RecordedOp, TensorRef, elements_of, transformed
from roost.weights.twister import skip

_GLOBAL_GENERATOR = threading.Lock()
"""Held while an operation that takes no generator draws from torch's global one."""

_BY_VALUES = frozenset({"multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"})
"""Operations whose number of draws depends on what their tensors hold; of all others it depends on shapes."""

_UNIFORM = frozenset({"uniform_", "rand"})
_NORMAL = frozenset({"normal_", "randn"})

_SHORTEST_FILL = 16
"""Elements from which normal_ on contiguous memory makes pairs of uniform numbers into pairs of normal ones, 16 at a time."""


def run_random(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], state: Tensor) -> tuple[Any, Tensor]:
    """Return the results of `call` when it starts from the generator state `state`, and the state after it.

    torch's global generator is left as it was.
    """
    seeded = _with_generator(call)
    if seeded is not None:
        generator = torch.Generator()
        generator.set_state(state)
        return seeded(*args, **{**kwargs, "generator": generator}), generator.get_state()
    with _GLOBAL_GENERATOR:
        kept = torch.default_generator.get_state()
        torch.default_generator.set_state(state)
        try:
            return call(*args, **kwargs), torch.default_generator.get_state()
        finally:
            torch.default_generator.set_state(kept)


def _with_generator(call: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the form of `call` that takes a generator, None if there is none."""
    if not isinstance(call, OpOverload):
        return call
    if any(argument.name == "generator" for argument in call._schema.arguments):
        return call
    name = call._overloadname
    stem, _, tail = name.rpartition("_")
    candidates = ("generator",) if name == "default" else (f"{name}_generator", f"{stem}_generator_{tail}")
    packet = call.overloadpacket
    return next((getattr(packet, candidate) for candidate in candidates if candidate in packet.overloads()), None)


def depends_on_values(entry: RecordedOp) -> bool:
    """Return whether the number of draws of `entry` depends on what its tensors hold."""
    return isinstance(entry.call, OpOverload) and entry.call._schema.name.removeprefix("aten::") in _BY_VALUES


def fixed_draws(entry: RecordedOp) -> int | None:
    """Return how many 32-bit numbers `entry` draws; None if only running it can tell.

    uniform_ draws one per element, two for float64; normal_ on 16 or more contiguous elements the same, and makes the last 16
    again if their number is no multiple of 16 (for half precision, which goes through float32 in blocks, that is left to running).
    """
    if not isinstance(entry.call, OpOverload):
        return None
    name = entry.call._schema.name.removeprefix("aten::")
    if name not in _UNIFORM | _NORMAL or entry.kwargs.get("generator") is not None:
        return None
    ref = entry.args[0] if isinstance(entry.args[0], TensorRef) else entry.outputs[0][1]
    count, words = math.prod(ref.shape), 2 if ref.dtype is torch.float64 else 1
    if not ref.dtype.is_floating_point or any(isinstance(value, TensorRef) for value in entry.args[1:]):
        return None
    if name in _UNIFORM:
        return count * words
    if count < _SHORTEST_FILL or not _is_contiguous(ref):
        return None
    if count % _SHORTEST_FILL == 0:
        return count * words
    return (count + _SHORTEST_FILL) * words if ref.dtype in (torch.float32, torch.float64) else None


def _is_contiguous(ref: TensorRef) -> bool:
    expected = 1
    for size, stride in zip(reversed(ref.shape), reversed(ref.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def passed_over(entry: RecordedOp, state: Tensor) -> Tensor:
    """Return the generator's state after `entry`, whose draws do not depend on values, from the state before it.

    Runs it on scratch memory of the same layout unless the number of its draws is known.
    """
    draws = fixed_draws(entry)
    if draws is not None:
        return skip(state, draws)

    def blank(value: Any) -> Any:
        # Zeros are valid standard deviations and probabilities; whatever is drawn is thrown away.
        return value.scratch().zero_() if isinstance(value, TensorRef) else value

    args = tuple(transformed(value, blank) for value in entry.args)
    kwargs = {name: transformed(value, blank) for name, value in entry.kwargs.items()}
    return run_random(entry.call, args, kwargs, state)[1]


def refs_of(entry: RecordedOp) -> list[TensorRef]:
    """Return the tensors that `entry` takes."""
    return [value for value in elements_of(entry.args, tuple(entry.kwargs.values())) if isinstance(value, TensorRef)]


def elements(entry: RecordedOp | GeneratorMove) -> int:
    """Return the number of elements of the largest tensor that `entry` takes or makes."""
    if isinstance(entry, GeneratorMove):
        return 0
    refs = (*refs_of(entry), *(ref for _, ref in entry.outputs))
    return max((math.prod(ref.shape) for ref in refs), default=0)
