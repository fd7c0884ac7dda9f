"""Builds a model without its weights: every tensor is recorded, and can be made later, alone, as an eager build would have made it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from roost.errors import DeferredInitError, MissingWeightsError
from roost.weights.modes import recording
from roost.weights.operations import user_place
from roost.weights.recorder import Recorder
from roost.weights.replay import Replay
from roost.weights.tape import Tape, TensorRef

_BLOCK = threading.Lock()
"""Held by the one block that records: torch's global generator belongs to it."""


@dataclass(frozen=True, kw_only=True)
class _AtExit:
    """A module's parameters when its block ended."""

    replay: Replay
    versions: dict[str, int]
    """How often each meta parameter had been changed in place."""


_ORIGINS: WeakKeyDictionary[nn.Module, _AtExit] = WeakKeyDictionary()
"""Where the parameters of a module come from. A tape lives as long as any module that was built with it."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where one tensor comes from."""

    replay: Replay
    ref: TensorRef


@contextmanager
def deferred_init(seed: int | None = None) -> Iterator[None]:
    """Build models inside without memory for their parameters, which stay on the meta device.

    Roost makes each parameter when a node asks for it, with the bits that the same code gives outside the block after
    `torch.manual_seed(seed)`; None: from the state that torch's CPU generator has on entry. Buffers, and tensors that modules
    keep as attributes, are made when the block ends. Torch's CPU generator is left as it was on entry, and must not be used by
    other threads meanwhile. Raises DeferredInitError, naming the line, for what cannot be recorded.
    """
    if not _BLOCK.acquire(blocking=False):
        raise DeferredInitError(f"roost.deferred_init() is entered inside another block{user_place()}", hint="Use one block at a time.")
    modules: WeakSet[nn.Module] = WeakSet()
    try:
        start = torch.default_generator.get_state() if seed is None else torch.Generator().manual_seed(seed).get_state()
        replay = Replay(Tape(start=start))
        with recording(Recorder(replay.tape, replay)), _registrations(modules):
            yield
    finally:
        _BLOCK.release()
    built = _unique(part for module in list(modules) for part in module.modules())
    _make_real(built, replay)
    for module in built:
        versions = {name: item._version for name, item in module._parameters.items() if item is not None and _is_meta(item)}
        _ORIGINS[module] = _AtExit(replay=replay, versions=versions)


def origin_of(tensor: Tensor) -> Origin | None:
    """Return where a meta tensor comes from; None if no deferred block that is still in use made it."""
    for replay in {id(known.replay): known.replay for known in list(_ORIGINS.values())}.values():
        ref = replay.tape.ref(tensor)
        if ref is not None:
            return Origin(replay=replay, ref=ref)
    return None


def check_unchanged(model: nn.Module) -> None:
    """Raise MissingWeightsError, naming it, if a parameter on the meta device was changed after its deferred block had ended."""
    for path, module in model.named_modules():
        known = _ORIGINS.get(module)
        for name, item in module._parameters.items():
            if known is None or item is None or not _is_meta(item):
                continue
            full = f"{path}.{name}" if path else name
            if known.replay.tape.number_of(item) is None and name in known.versions and origin_of(item) is None:
                raise MissingWeightsError(f"parameter {full!r} was converted or replaced after roost.deferred_init()", hint=_INSIDE)
            if known.replay.tape.number_of(item) is not None and item._version != known.versions.get(name, item._version):
                raise MissingWeightsError(f"parameter {full!r} was changed in place after roost.deferred_init()", hint=_INSIDE)


_INSIDE = "Do it inside the block: after it, the parameter is on the meta device and holds nothing that could be changed."


@contextmanager
def _registrations(modules: WeakSet[nn.Module]) -> Iterator[None]:
    """Add every module that gets a parameter, a buffer or a part in this thread to `modules`."""
    thread = threading.get_ident()

    def note(module: nn.Module, name: str, value: object) -> None:
        if threading.get_ident() == thread:
            modules.add(module)
            if isinstance(value, nn.Module):
                modules.add(value)

    with ExitStack() as stack:
        for register in (
            register_module_parameter_registration_hook,
            register_module_buffer_registration_hook,
            register_module_module_registration_hook,
        ):
            stack.callback(register(note).remove)
        yield


def _make_real(modules: list[nn.Module], replay: Replay) -> None:
    """Replace the recorded buffers and plain tensor attributes of `modules` by real ones; one that is shared stays shared.

    Attributes that share memory with a parameter, or were computed from one, stay as they are: modules make them anew.
    """
    tape = replay.tape
    parameters = {tape.number_of(item) for module in modules for item in module._parameters.values() if item is not None}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in modules:
        for slots in (module._buffers, module.__dict__):
            for name, item in slots.items():
                if not isinstance(item, Tensor) or tape.number_of(item) is None:
                    continue
                shares = tape.number_of(item) in parameters
                if shares and slots is module._buffers:
                    raise DeferredInitError(f"buffer {name!r} shares its memory with a parameter", hint="Register a clone as the buffer.")
                if not shares and item.grad_fn is None:
                    places.append((slots, name, item))
    recorded = {id(item): item for _, _, item in places}
    refs = [ref for ref in map(tape.ref, recorded.values()) if ref is not None]
    made = dict(zip(recorded, replay.tensors(refs), strict=True))
    for slots, name, item in places:
        real = made[id(item)]
        real.__dict__.update(item.__dict__)
        slots[name] = real.requires_grad_(item.requires_grad)


def _is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def _unique(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for module in modules}.values())
