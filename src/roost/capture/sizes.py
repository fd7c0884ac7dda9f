"""What the values of a graph take, found on shapes alone: nothing is computed and no memory is taken.

Every call is run once on meta tensors of its arguments' shapes; what it would allocate, inside composite operations too, is
counted. That is also the check that its arguments make sense: kernels are not run with shapes that their shape rules refuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roost.capture.arguments import DTYPE_NAMES, DTYPES, Argument, ValueRef, references, to_torch
from roost.capture.graph import Graph, GraphNode
from roost.capture.ops import CREATES_TENSORS, SCALAR_OPS
from roost.capture.safe_calls import callable_of
from roost.capture.shape_rules import RECURRENT_OPS, check_shapes, keeps_scores
from roost.capture.signatures import MAX_OUTPUTS, ValueKind, check_call, signature_of
from roost.config import format_bytes
from roost.errors import GraphFormatError

MAX_DISTINCT_CALLS = 2_000
"""Calls of different operations, shapes or numbers in one graph: real models repeat a few hundred. Bounds the time of a check."""
MAX_INNER_CALLS = 20_000
"""Calls that one composite operation may consist of."""
MAX_RESULT_DIMENSIONS = 64
"""What torch's kernels take."""
MAX_ELEMENTS = 2**40
"""Elements that a view may show; expanded tensors take no memory, but everything that reads them takes time."""
TOTAL_FACTOR = 4
"""How often the limit all memory that a stage's nodes ask for may add up to, if nothing were freed before the backward. A stage
that fits needs a good part of it at once, but not temporaries, and not what the backward has no use for."""
RECURRENT_STEPS = 2
"""Time steps that a recurrent layer is run for; all others take the same."""

_REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError, AttributeError, MemoryError)
"""What torch raises for arguments that make no sense."""


@dataclass(frozen=True, kw_only=True)
class GraphSizes:
    """What the values of a graph take for data of given shapes."""

    values: tuple[int, ...]
    """Bytes of every value, were it stored on its own; 0 for a number, and for a value that was not asked for."""
    made_bytes: int
    """Bytes of all memory that the nodes ask for, temporaries inside composite operations included."""
    largest_bytes: int
    """The largest piece of it."""


def check_sizes(graph: Graph, shapes: Sequence[tuple[int, ...]], limit_bytes: int, *, nodes: range | None = None) -> GraphSizes:
    """Return what `graph` takes for data inputs of these `shapes` (inputs, then labels).

    Raises GraphFormatError naming the node whose arguments make no sense, or whose result (or any piece of memory it needs on
    the way) is over `limit_bytes`; and if all nodes together ask for TOTAL_FACTOR times as much. With `nodes`, the positions of
    one stage, the limits hold for that stage only.
    """
    _check_data(graph, shapes)
    walk = _Walk(graph, limit_bytes)
    for number, (record, shape) in enumerate(zip(graph.data, shapes, strict=True)):
        walk.give_tensor(number, f"data input {record.name!r}", shape, DTYPES[record.dtype])
    limited = range(len(graph.nodes)) if nodes is None else nodes
    walk.give_records()
    walk.run(range(len(graph.nodes)), limited)
    return walk.sizes()


def check_stage_sizes(graph: Graph, positions: range, values: Mapping[int, Tensor], limit_bytes: int) -> GraphSizes:
    """Return what the nodes at `positions` take for received `values`, whose contents matter only where the graph has a number.

    Nodes whose arguments are not there are left out: nothing in this stage needs them. Raises as check_sizes does.
    """
    walk = _Walk(graph, limit_bytes)
    for number, value in values.items():
        if graph.kinds[number] is ValueKind.TENSOR:
            walk.give_tensor(number, f"value {number}", tuple(value.shape), value.dtype, tuple(value.stride()))
        else:
            walk.give_number(number, int(value) if graph.kinds[number] is ValueKind.INTEGER else float(value))
    walk.give_records()
    walk.run(positions, positions)
    return walk.sizes()


def data_shapes(graph: Graph, samples: int) -> tuple[tuple[int, ...], ...] | None:
    """Return the shapes of the data inputs for a batch of `samples`, or None if a dimension other than the first varies."""
    if any(size is None for record in graph.data for size in record.shape[1:]):
        return None
    return tuple((samples, *(size for size in record.shape[1:] if size is not None)) for record in graph.data)


def _check_data(graph: Graph, shapes: Sequence[tuple[int, ...]]) -> None:
    if len(shapes) != graph.data_inputs:
        raise GraphFormatError(f"graph {graph.name!r} has {graph.data_inputs} data inputs, {len(shapes)} shapes are given")
    for record, shape in zip(graph.data, shapes, strict=True):
        fits = len(shape) == len(record.shape) and all(
            known is None or known == size for known, size in zip(record.shape, shape, strict=True)
        )
        if not fits:
            raise GraphFormatError(f"data input {record.name!r} has shape {list(record.shape)}, {list(shape)} is given")


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """Shape, strides and dtype of values; there is one object for each, so that it can be compared by identity."""

    tensor: Tensor
    """On the meta device."""
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """What a call makes."""

    results: tuple[_Form | int | float, ...]
    made_bytes: int
    largest_bytes: int


class _Walk:
    """Goes through nodes in order and knows the form of every value it has met."""

    def __init__(self, graph: Graph, limit_bytes: int) -> None:
        self._graph = graph
        self._limit = limit_bytes
        self._known: dict[int, _Form | int | float] = {}
        self._forms: dict[tuple[Any, ...], _Form] = {}
        self._outcomes: dict[tuple[Any, ...], _Outcome] = {}
        self._made = 0
        self._largest = 0

    def sizes(self) -> GraphSizes:
        known = (self._known.get(value) for value in range(self._graph.values))
        values = tuple(form.nbytes if isinstance(form, _Form) else 0 for form in known)
        return GraphSizes(values=values, made_bytes=self._made, largest_bytes=self._largest)

    def give_number(self, number: int, value: float) -> None:
        self._known[number] = value

    def give_tensor(
        self, number: int, what: str, shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None
    ) -> None:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self._limit or any(size < 0 for size in shape):
            raise GraphFormatError(f"{what} of shape {list(shape)} takes {format_bytes(nbytes)}, over the limit of {self._limit_text()}")
        self._known[number] = self._form(shape, stride if stride is not None else _contiguous(shape), dtype)

    def give_records(self) -> None:
        """Tensors of the model: their sizes were planned for, and they are fetched one by one."""
        for index, record in enumerate(self._graph.tensors):
            form = self._form(record.shape, _contiguous(record.shape), DTYPES[record.dtype])
            self._known.setdefault(self._graph.data_inputs + index, form)

    def run(self, positions: Iterable[int], limited: range) -> None:
        for position in positions:
            node = self._graph.nodes[position]
            if not all(value in self._known for value in node.uses):
                continue
            try:
                outcome = self._outcome(node)
                if position in limited:
                    self._count(outcome)
            except GraphFormatError as error:
                place = f" of {node.label!r}" if node.label else ""
                raise GraphFormatError(f"node {position}{place}: {error.message}", hint=error.hint) from error
            self._known.update(zip(node.outputs, outcome.results, strict=True))
            if self._graph.loss in node.outputs:
                self._check_loss(self._known[self._graph.loss])

    def _count(self, outcome: _Outcome) -> None:
        self._made += outcome.made_bytes
        self._largest = max(self._largest, outcome.largest_bytes)
        if outcome.largest_bytes > self._limit:
            raise GraphFormatError(f"it takes {format_bytes(outcome.largest_bytes)}, over the limit of {self._limit_text()}")
        if self._made > TOTAL_FACTOR * self._limit:
            raise GraphFormatError(
                f"up to here the values take {format_bytes(self._made)}, over {TOTAL_FACTOR} times the limit of {self._limit_text()}"
            )

    def _limit_text(self) -> str:
        return format_bytes(self._limit)

    def _check_loss(self, form: _Form | int | float) -> None:
        if not isinstance(form, _Form) or form.tensor.dim() != 0 or not form.tensor.dtype.is_floating_point:
            raise GraphFormatError(f"graph {self._graph.name!r}: the loss is not one real number")

    def _outcome(self, node: GraphNode) -> _Outcome:
        key = (node.op, len(node.outputs), *map(self._key, node.args), *((name, self._key(value)) for name, value in node.kwargs))
        known = self._outcomes.get(key)
        if known is None:
            if len(self._outcomes) >= MAX_DISTINCT_CALLS:
                raise GraphFormatError(f"the graph has more than {MAX_DISTINCT_CALLS} calls that all differ")
            known = self._outcomes[key] = self._call(node)
        return known

    def _key(self, argument: Argument) -> Any:
        if isinstance(argument, ValueRef):
            known = self._known[argument.value]
            return known if isinstance(known, _Form) else (type(known), known)
        if isinstance(argument, tuple):
            return tuple(map(self._key, argument))
        return type(argument), argument

    def _call(self, node: GraphNode) -> _Outcome:
        args = tuple(map(self._with_numbers, node.args))
        kwargs = {name: self._with_numbers(value) for name, value in node.kwargs}
        # A number that is computed from sizes must obey what a literal one must.
        check_call(node.op, args, kwargs, lambda value: ValueKind.TENSOR)
        values, named = [self._concrete(item) for item in args], {name: self._concrete(item) for name, item in kwargs.items()}
        if node.op in SCALAR_OPS:
            return _Outcome(results=(callable_of(node.op)(*values),), made_bytes=0, largest_bytes=0)
        if node.op in CREATES_TENSORS:
            named["device"] = torch.device("meta")
        given = dict(zip((parameter.name for parameter in signature_of(node.op).parameters), values, strict=False)) | named
        watch = _Watch(given)
        steps = 1.0
        try:
            check_shapes(node.op, given)
            if node.op in RECURRENT_OPS:
                steps = _shorten(values, given)
            with torch.no_grad(), watch:
                returned = callable_of(node.op)(*values, **named)
        except _REFUSALS as error:
            reason = str(error).strip().splitlines()
            raise GraphFormatError(f"{node.op} refuses its arguments: {ascii(reason[0])[1:200] if reason else ''}") from error
        # Some shape rules resize what an operation writes to; its kernel would refuse.
        if watch.resized():
            raise GraphFormatError(f"{node.op} does not fit into what it writes to")
        if steps != 1:
            returned = (_lengthened(returned[0], given, steps), *returned[1:])
        return self._outcome_of(node, returned, watch, steps, keeps_scores(node.op, given))

    def _outcome_of(self, node: GraphNode, returned: Any, watch: _Watch, steps: float, keeps: bool) -> _Outcome:
        results = tuple(returned) if signature_of(node.op).unpack else (returned,)
        if len(results) != len(node.outputs):
            raise GraphFormatError(f"{node.op} makes {len(results)} results where the graph has {len(node.outputs)}")
        forms = tuple(self._form_of(item) for item in results)
        # A view counts as if it were stored: it is where it crosses to another stage, and so is its gradient.
        own = [form.nbytes for form in forms if isinstance(form, _Form)]
        made, largest = (watch.made_bytes, watch.largest_bytes) if keeps else (sum(own), 0)
        return _Outcome(results=forms, made_bytes=math.ceil(made * steps), largest_bytes=max(largest, *own, 0))

    def _with_numbers(self, argument: Argument) -> Argument:
        """Return `argument` with references to numbers replaced by the numbers."""
        if isinstance(argument, tuple):
            return tuple(map(self._with_numbers, argument))
        known = self._known[argument.value] if isinstance(argument, ValueRef) else None
        return known if isinstance(known, int | float) else argument

    def _concrete(self, argument: Argument) -> Any:
        if not any(True for _ in references(argument)):
            return to_torch(argument)
        if isinstance(argument, tuple):
            return [self._concrete(item) for item in argument]
        assert isinstance(argument, ValueRef)
        known = self._known[argument.value]
        assert isinstance(known, _Form)
        return known.tensor

    def _form_of(self, result: Any) -> _Form | int | float:
        if not isinstance(result, Tensor):
            return int(result)
        if result.dtype not in DTYPE_NAMES or result.dim() > MAX_RESULT_DIMENSIONS or math.prod(result.shape) > MAX_ELEMENTS:
            raise GraphFormatError(f"its result would be a {result.dtype} tensor of shape {list(result.shape)[:MAX_RESULT_DIMENSIONS]}")
        return self._form(tuple(result.shape), tuple(result.stride()), result.dtype)

    def _form(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> _Form:
        key = (shape, stride, dtype)
        if key not in self._forms:
            try:
                # A storage of its own: torch compares storages to refuse writes to memory that overlaps.
                tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            except _REFUSALS as error:
                raise GraphFormatError(f"a tensor of shape {list(shape)} is not possible") from error
            self._forms[key] = _Form(tensor=tensor, nbytes=math.prod(shape) * dtype.itemsize)
        return self._forms[key]


class _Watch(TorchDispatchMode):
    """Counts the memory that calls on meta tensors would take, and stops lists and loops that have no end."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.made_bytes = 0
        self.largest_bytes = 0
        self._calls = 0
        self._kept = [item for value in given.values() for item in _tensors(value)]
        """Alive, so that no storage's address is used twice."""
        self._given = [(item, tuple(item.shape)) for item in self._kept]
        self._storages = {item.untyped_storage()._cdata for item in self._kept}

    def resized(self) -> bool:
        """Return whether an argument has another shape than before the call."""
        return any(tuple(item.shape) != shape for item, shape in self._given)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self._calls += 1
        if self._calls > MAX_INNER_CALLS:
            raise GraphFormatError(f"it consists of more than {MAX_INNER_CALLS} operations")
        _check_pieces(str(func), args)
        returned = func(*args, **(kwargs or {}))
        for item in _tensors(returned):
            storage = item.untyped_storage()._cdata
            if storage not in self._storages:
                self._storages.add(storage)
                self._kept.append(item)
                nbytes = math.prod(item.shape) * item.dtype.itemsize
                self.made_bytes += nbytes
                self.largest_bytes = max(self.largest_bytes, nbytes)
        return returned


def _check_pieces(function: str, args: Sequence[Any]) -> None:
    """Raise GraphFormatError before a tensor falls into too many pieces: the list of them alone could fill the memory."""
    if function == "aten.unbind.int":
        pieces = args[0].size(args[1] if len(args) > 1 else 0)
    elif function in ("aten.split.Tensor", "aten.unsafe_split.Tensor"):
        pieces = -(-args[0].size(args[2] if len(args) > 2 else 0) // max(1, args[1]))
    else:
        return
    if pieces > MAX_OUTPUTS:
        raise GraphFormatError(f"it makes {pieces} pieces of a tensor, at most {MAX_OUTPUTS} are allowed")


def _tensors(item: Any) -> Iterable[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _tensors(part)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def _time_dimension(given: Mapping[str, Any]) -> int:
    return 1 if given["batch_first"] else 0


def _shorten(values: list[Any], given: Mapping[str, Any]) -> float:
    """Replace the input of a recurrent layer by its first steps; return how many times as many there are."""
    dimension = _time_dimension(given)
    length = values[0].size(dimension)
    if length <= RECURRENT_STEPS:
        return 1.0
    values[0] = values[0].narrow(dimension, 0, RECURRENT_STEPS)
    return float(length) / RECURRENT_STEPS


def _lengthened(output: Tensor, given: Mapping[str, Any], steps: float) -> Tensor:
    """Return the output of a recurrent layer with all its steps."""
    shape = list(output.shape)
    dimension = _time_dimension(given)
    shape[dimension] = round(shape[dimension] * steps)
    return torch.empty_strided(shape, output.stride(), dtype=output.dtype, device="meta")
