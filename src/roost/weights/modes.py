"""Shows a Recorder every call and every operation of one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from roost.weights.operations import CPU
from roost.weights.recorder import META, Recorder

_DATA_OF = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__})
_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_DEVICE_ANSWERS = {_getter("device"): CPU, _getter("is_meta"): False, _getter("is_cpu"): True}
"""A recorded tensor says what it will be: torch's and other people's initialisers pass meta tensors over."""


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Show `recorder` what this thread builds inside. Torch's CPU generator is as before afterwards."""
    original = torch.nn.init._no_grad_trunc_normal_
    with recorder.generator_marked():
        torch.nn.init._no_grad_trunc_normal_ = recorder.truncated_normal(original)
        try:
            with _OperationsMode(recorder), _CallsMode(recorder):
                yield
        finally:
            torch.nn.init._no_grad_trunc_normal_ = original


class _OperationsMode(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self._recorder.paused:
            return func(*args, **(kwargs or {}))
        # Inside, tensors must say where they are.
        with torch._C.DisableTorchFunction():
            return self._recorder.operation(func, args, dict(kwargs or {}))


class _CallsMode(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if self._recorder.paused or not args:
            return func(*args, **named)
        if func in _FROM_DATA and isinstance(args[0], (list, tuple)):
            return func(self._recorder.real(args[0]), *args[1:], **named)
        if not self._recorder.is_recorded(args[0]):
            return func(*args, **named)
        if func in _DEVICE_ANSWERS:
            return _DEVICE_ANSWERS[func]
        if func in _DATA_OF:
            return func(self._recorder.real(args[0]), *args[1:], **named)
        if func is Tensor.cpu:
            return args[0]
        if func is Tensor.to:
            # On the CPU a tensor moved to the CPU is the same tensor.
            return func(*(_moved(value) for value in args), **{name: _moved(value) for name, value in named.items()})
        return func(*args, **named)


def _moved(value: Any) -> Any:
    names_cpu = isinstance(value, (str, torch.device)) and torch.device(value).type == "cpu"
    return META if names_cpu else value
