"""What an operation reads, changes and answers with, read from its schema."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from roost.errors import DeferredInitError
from roost.weights.tape import RecordedOp, Tape, TensorRef, elements_of, transformed

CPU = torch.device("cpu")
_LIBRARY_ROOTS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))

_OVERWRITING = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_"})
_OVERWRITING |= frozenset({"cauchy_", "geometric_"})
"""Operations that leave nothing of what their first argument held."""


def user_place() -> str:
    """Return ' at FILE:LINE: CODE' for the innermost frame that is neither torch's, Python's nor ours; empty if there is none."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_LIBRARY_ROOTS)]
    own = [frame for frame in frames if not frame.filename.startswith((sys.base_prefix, "<"))]
    return f" at {own[-1].filename}:{own[-1].lineno}: {(own[-1].line or '').strip()}" if own else ""


def is_random(func: OpOverload) -> bool:
    """Return whether the operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def is_factory(func: OpOverload) -> bool:
    """Return whether the operation makes tensors on a device that its caller names."""
    return any(argument.name == "device" for argument in func._schema.arguments)


def answers_by_values(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether the result is a Python number or has a shape that depends on what the tensors hold."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if func is torch.ops.aten.index.Tensor:
        return any(isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) for item in elements_of(args[1]))
    return torch.Tag.dynamic_output_shape in func.tags


def written_by(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that the operation changes."""
    written: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        written.extend(item for item in elements_of(value) if isinstance(item, Tensor))
    return written


def without_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords without torch's default generator. Raises DeferredInitError for any other one."""
    default = torch.default_generator._cdata  # type: ignore[attr-defined]
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator) and value._cdata != default:  # type: ignore[attr-defined]
            raise DeferredInitError(
                f"a torch.Generator of its own draws random numbers{user_place()}",
                hint="Draw from torch's default generator inside roost.deferred_init(); torch.manual_seed may be called there.",
            )
    return {name: value for name, value in kwargs.items() if name != "generator"}


def entry_of(
    tape: Tape, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[TensorRef], result: Any
) -> RecordedOp | None:
    """Return the record of one call that has run on the meta device, its new storages adopted by `tape`.

    `args` and `kwargs` hold TensorRefs. Returns None for a call that made nothing and changed nothing (a view). Raises
    DeferredInitError for a result that is not an ordinary tensor.
    """
    refs = [value for value in elements_of(args, tuple(kwargs.values())) if isinstance(value, TensorRef)]
    results = [(position, item) for position, item in enumerate(elements_of(result)) if isinstance(item, Tensor)]
    for _, item in results:
        if item.layout is not torch.strided or item.device.type != "meta":
            raise DeferredInitError(f"{func} makes a {item.layout} tensor on {item.device}, which cannot be recorded{user_place()}")
    outputs = []
    for position, item in results:
        if tape.number_of(item) is None:
            tape.adopt(item)
            ref = tape.ref(item)
            if ref is not None:
                outputs.append((position, ref))
    created = {ref.storage for _, ref in outputs}
    changed = {ref.storage for ref in written}
    if not created | changed:
        return None
    overwritten = _overwritten(tape, func, args, changed)
    others = {value.storage for value in elements_of(args[1:], tuple(kwargs.values())) if isinstance(value, TensorRef)}
    return RecordedOp(
        call=func,
        args=args,
        kwargs=_pinned(func, kwargs, refs, [item for _, item in results]),
        outputs=tuple(outputs),
        reads=frozenset(({ref.storage for ref in refs} - overwritten) | others),
        writes=frozenset(created | changed),
        replaces=frozenset(created | (overwritten - others)),
        random=is_random(func),
        float_default=_float_default(kwargs, refs, [item for _, item in results]),
    )


def _overwritten(tape: Tape, func: OpOverload, args: tuple[Any, ...], changed: set[int]) -> set[int]:
    first = args[0] if args else None
    if not isinstance(first, TensorRef) or func._schema.name.removeprefix("aten::") not in _OVERWRITING:
        return set()
    return {first.storage} & changed if tape.covers(first) else set()


def _pinned(func: OpOverload, kwargs: dict[str, Any], refs: list[TensorRef], results: list[Tensor]) -> dict[str, Any]:
    """Return the keywords as they are at replay: on the CPU, and of the dtype that was torch's default at the call."""
    pinned = {name: CPU if name == "device" and value is not None else value for name, value in kwargs.items()}
    takes_dtype = any(argument.name == "dtype" for argument in func._schema.arguments)
    if not refs and takes_dtype and pinned.get("dtype") is None:
        pinned["dtype"] = results[0].dtype
    return pinned


def _float_default(kwargs: dict[str, Any], refs: list[TensorRef], results: list[Tensor]) -> torch.dtype | None:
    """Return torch's default dtype if it decides what comes out: integers in, floating-point numbers out."""
    if not refs or kwargs.get("dtype") is not None or any(_is_inexact(ref.dtype) for ref in refs):
        return None
    return torch.get_default_dtype() if any(_is_inexact(item.dtype) for item in results) else None


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def constant_of(tape: Tape, value: Tensor) -> Tensor:
    """Return a meta tensor that stands for `value` on the tape, which keeps a copy. Raises DeferredInitError if it is not dense."""
    if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
        raise DeferredInitError(
            f"a {value.layout} tensor on {value.device} is mixed with recorded ones{user_place()}",
            hint="Use dense tensors on the CPU inside roost.deferred_init().",
        )
    kept = value.detach().clone()
    twin = torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype, device="meta")
    entry = entry_of(tape, torch.ops.aten.clone.default, (kept,), {}, [], twin)
    if entry is not None:
        tape.append(entry)
    return twin


def as_refs(value: Any, refs: dict[int, TensorRef]) -> Any:
    """Return an argument with the tensors in it replaced by their refs."""
    return transformed(value, lambda item: refs[id(item)] if isinstance(item, Tensor) else item)
