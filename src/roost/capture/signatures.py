"""Checks a call of an allowed operation against its schema: how many arguments, which keywords, which kinds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch

from roost.capture.arguments import DTYPES, MEMORY_FORMATS, Argument, DtypeName, MemoryFormatName, ValueRef
from roost.capture.ops import HIDDEN_WRITES, MAY_RETURN_INPUT, SCALAR_OPS, SIZE_OP, resolve
from roost.errors import GraphFormatError

MAX_OUTPUTS = 4096
MAX_LIST = 4096
MAX_LITERAL_ELEMENTS = 2**40
MAX_INTEGER = 2**40
"""Most that a size, a position or a count may be."""
MAX_WINDOW = 2**20
"""Most that a number which says how a window slides over its input may be: products of two such numbers and a size fit in 64 bits."""

_MODES = frozenset({"none", "tanh", "floor", "trunc", "same", "valid", "constant", "reflect", "replicate", "circular"})
_WORDS = _MODES | {"ij", "xy", "sum", "mean", "prod", "amax", "amin", "left", "right"}
_EQUATION = re.compile(r"[A-Za-z.,> -]{1,128}")
_WINDOW_PARAMETERS = frozenset(
    {
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "output_padding",
        "groups",
        "num_groups",
        "num_layers",
        "upscale_factor",
        "downscale_factor",
        "scale_factors",
    }
)
_ANY_INTEGER = frozenset({("aten.slice.Tensor", "start"), ("aten.slice.Tensor", "end")}) | frozenset(
    (f"aten.{name}.default", "ignore_index") for name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
)
"""Arguments that are compared only, or cut to the size of a dimension."""
_COUNTING = ("aten.arange.", "aten.linspace.")
"""Operations whose numbers decide how many elements they make."""
PAD_OP = "aten.pad.default"
_NEVER_GIVEN = frozenset({"Device", "Layout", "Generator"})


class ValueKind(Enum):
    """What a value of the graph is at run time."""

    TENSOR = "tensor"
    INTEGER = "integer"
    REAL = "real"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One argument of an operation's schema."""

    name: str
    type_name: str
    """As the schema writes it, for example 'List[Optional[Tensor]]'."""
    keyword_only: bool
    required: bool
    written: bool
    """True if the operation changes this argument in place."""
    viewed: bool
    """True if a result may share this argument's memory."""
    limit: int | None = None
    """Most that a number in it may be, whatever its sign; None where any number will do."""


@dataclass(frozen=True, kw_only=True)
class OpSignature:
    """What Roost needs of an operation's schema."""

    op: str
    parameters: tuple[Parameter, ...]
    outputs: int | None
    """Results of a call; None for a list whose length the call decides."""
    unpack: bool
    """True if a call returns a tuple or list of tensors."""


@cache
def signature_of(op: str) -> OpSignature:
    """Return the signature of an allowed operation. Raises GraphFormatError for any other name."""
    function = resolve(op)
    if op in SCALAR_OPS:
        sides = tuple(
            Parameter(name=name, type_name="number", keyword_only=False, required=True, written=False, viewed=False)
            for name in ("left", "right")
        )
        return OpSignature(op=op, parameters=sides, outputs=1, unpack=False)
    assert isinstance(function, torch._ops.OpOverload)
    schema = function._schema
    hidden = HIDDEN_WRITES.get(op, ())
    parameters = tuple(
        Parameter(
            name=item.name,
            type_name=str(item.real_type),
            keyword_only=item.kwarg_only,
            required=not item.has_default_value(),
            written=position in hidden or (item.alias_info is not None and item.alias_info.is_write),
            viewed=item.alias_info is not None or (position == 0 and op in MAY_RETURN_INPUT),
            limit=_limit(op, item.name, str(item.real_type)),
        )
        for position, item in enumerate(schema.arguments)
    )
    returns = [str(item.real_type) for item in schema.returns]
    is_list = returns == ["List[Tensor]"]
    return OpSignature(op=op, parameters=parameters, outputs=None if is_list else len(returns), unpack=is_list or len(returns) > 1)


def _limit(op: str, name: str, type_name: str) -> int | None:
    if (op, name) in _ANY_INTEGER:
        return None
    if name in _WINDOW_PARAMETERS:
        return MAX_WINDOW
    if name in ("chunks", "sections"):
        return MAX_OUTPUTS
    counts = "int" in type_name or (op.startswith(_COUNTING) and type_name in ("number", "float"))
    return MAX_INTEGER if counts else None


def bind(op: str, args: Sequence[Argument], kwargs: Mapping[str, Argument]) -> tuple[tuple[Parameter, Argument], ...]:
    """Return each given argument with its parameter. Raises GraphFormatError on a wrong arity or keyword."""
    signature = signature_of(op)
    positional = [parameter for parameter in signature.parameters if not parameter.keyword_only]
    if len(args) > len(positional):
        raise GraphFormatError(f"{op}: {len(args)} positional arguments, at most {len(positional)} are allowed")
    bound = list(zip(positional, args, strict=False))
    given = {parameter.name for parameter, _ in bound}
    by_name = {parameter.name: parameter for parameter in signature.parameters}
    for name, value in kwargs.items():
        if name not in by_name:
            raise GraphFormatError(f"{op}: unknown keyword {name[:40]!r}")
        if name in given:
            raise GraphFormatError(f"{op}: argument {name!r} is given twice")
        given.add(name)
        bound.append((by_name[name], value))
    missing = [parameter.name for parameter in signature.parameters if parameter.required and parameter.name not in given]
    if missing:
        raise GraphFormatError(f"{op}: argument {missing[0]!r} is missing")
    return tuple(bound)


def check_call(op: str, args: Sequence[Argument], kwargs: Mapping[str, Argument], kind_of: Callable[[int], ValueKind]) -> None:
    """Raise GraphFormatError unless the call fits the operation's schema; `kind_of` tells what each value is."""
    bound = bind(op, args, kwargs)
    for parameter, value in bound:
        if not _fits(op, parameter.type_name, value, kind_of) or (parameter.written and not isinstance(value, ValueRef | None)):
            raise GraphFormatError(f"{op}: argument {parameter.name!r} must be {parameter.type_name}, not {_shown(value)}")
        if parameter.limit is not None and not _within(value, parameter.limit):
            raise GraphFormatError(f"{op}: argument {parameter.name!r} is {_shown(value)}, at most {parameter.limit} is allowed")
    if op == PAD_OP:
        _check_padding({parameter.name: value for parameter, value in bound})


def _shown(value: Argument) -> str:
    """Return the start of `value` as text that any terminal can show."""
    return ascii(value)[:60]


def _within(value: Argument, limit: int) -> bool:
    """Return whether every number in an argument is at most `limit`, whatever its sign."""
    if isinstance(value, tuple):
        return all(_within(item, limit) for item in value)
    return type(value) not in (int, float) or (isinstance(value, int | float) and -limit <= value <= limit)


def _check_padding(given: Mapping[str, Argument]) -> None:
    """Raise GraphFormatError for padding by less than nothing, except with constants: torch would read outside the tensor."""
    sizes = given["pad"] if isinstance(given["pad"], tuple) else (given["pad"],)
    if given.get("mode", "constant") != "constant" and any(isinstance(size, int) and size < 0 for size in sizes):
        raise GraphFormatError(f"{PAD_OP}: argument 'pad' must not be negative with mode {_shown(given['mode'])}")


def result_kind(op: str, args: Sequence[Argument], kind_of: Callable[[int], ValueKind]) -> ValueKind:
    """Return what the results of a call are."""
    if op == SIZE_OP:
        return ValueKind.INTEGER
    if op not in SCALAR_OPS:
        return ValueKind.TENSOR
    integers = all(type(item) is int or (isinstance(item, ValueRef) and kind_of(item.value) is ValueKind.INTEGER) for item in args)
    return ValueKind.INTEGER if integers and op != "scalar.truediv" else ValueKind.REAL


def _fits(op: str, type_name: str, value: Argument, kind_of: Callable[[int], ValueKind]) -> bool:
    if type_name.startswith("Optional["):
        inner = type_name[len("Optional[") : -1]
        return value is None or (inner not in _NEVER_GIVEN and _fits(op, inner, value, kind_of))
    if type_name.startswith("List["):
        inner = type_name[len("List[") : -1]
        if type(value) is int and inner == "int":
            return True
        if not isinstance(value, tuple) or len(value) > MAX_LIST or not _bounded_product(value):
            return False
        if inner in ("Tensor", "Optional[Tensor]"):
            return all(_is_tensor(item, kind_of) or (item is None and inner != "Tensor") for item in value)
        return all(_fits(op, inner, item, kind_of) for item in value)
    if isinstance(value, ValueRef):
        return _kind_fits(type_name, kind_of(value.value), op)
    return _literal_fits(op, type_name, value)


def _is_tensor(value: Argument, kind_of: Callable[[int], ValueKind]) -> bool:
    return isinstance(value, ValueRef) and kind_of(value.value) is ValueKind.TENSOR


def _kind_fits(type_name: str, kind: ValueKind, op: str) -> bool:
    if kind is ValueKind.TENSOR:
        return type_name == "Tensor"
    if type_name in ("number", "float"):
        return True
    if type_name == "Tensor":
        return op != SIZE_OP
    return type_name == "int" and kind is ValueKind.INTEGER


def _literal_fits(op: str, type_name: str, value: Argument) -> bool:
    number = type(value) in (int, float)
    if type_name == "bool":
        return isinstance(value, bool)
    if type_name == "int":
        return type(value) is int
    if type_name == "float":
        return number
    # An operation such as add.Tensor takes a plain number for its second tensor.
    if type_name in ("number", "Tensor"):
        return op != SIZE_OP and (number or isinstance(value, bool))
    if type_name == "str":
        return isinstance(value, str) and (value in _WORDS or (op == "aten.einsum.default" and _EQUATION.fullmatch(value) is not None))
    if type_name == "ScalarType":
        return isinstance(value, DtypeName) and value.name in DTYPES
    if type_name == "MemoryFormat":
        return isinstance(value, MemoryFormatName) and value.name in MEMORY_FORMATS
    return False


def _bounded_product(values: tuple[Argument, ...]) -> bool:
    sizes = [abs(item) for item in values if type(item) is int and item != 0]
    return math.prod(sizes[:64]) <= MAX_LITERAL_ELEMENTS if len(sizes) <= 64 else all(size < 2**31 for size in sizes)
