"""The graph: model, loss and metric as frozen records, checked when they are made.

Values are numbered: first the data inputs (model inputs, then labels), then the tensors of the model, then the results of
the nodes in order. A node may use only values before its own. Nothing in a graph is code.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

import torch

from roost.capture.arguments import DTYPES, Argument, DtypeName, MemoryFormatName, ValueRef, references
from roost.capture.ops import INTEGER_OUTPUTS, NO_GRADIENT
from roost.capture.signatures import MAX_LIST, MAX_OUTPUTS, ValueKind, check_call, result_kind, signature_of
from roost.errors import GraphFormatError, InvalidConfigError
from roost.types import TensorKind, TensorRecord, TensorSpec

FORMAT_VERSION = 2
MAX_NODES = 25_000
MAX_VALUES = 1_000_000
MAX_INPUTS = 1024
MAX_TENSORS = 100_000
MAX_NAME = 512
MAX_NAME_PARTS = 32
MAX_LABEL = 200
MAX_DEPTH = 4

_MODULE_ATTRIBUTES = frozenset(dir(torch.nn.Module()))
"""What every module has: no tensor can be called so."""
_NAME_PART = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+", re.ASCII)


def running_torch_version() -> str:
    """Return the version of the installed torch without its build suffix, for example '2.13.0'."""
    return str(torch.__version__).split("+")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphNode:
    """One operation: a call by name, and the numbers of the values it makes."""

    op: str
    """For example 'aten.conv2d.default'."""
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[int, ...]
    """One number per result; an in-place operation makes a new number for the same memory."""
    label: str
    """Module path it came from; display text only."""

    @property
    def uses(self) -> tuple[int, ...]:
        """Numbers of the values it uses, in order, with repetitions."""
        return tuple(number for item in (*self.args, *(value for _, value in self.kwargs)) for number in references(item))


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRecord:
    """What one data input of a graph looks like in every batch."""

    name: str
    """The keyword the model takes it by, or 'input_0', 'label_0' and so on; for people to read."""
    dtype: str
    shape: tuple[int | None, ...]
    """None for a dimension that varies from batch to batch; the first is the samples and always varies."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A model with its loss and metric. Raises GraphFormatError on construction if anything is malformed."""

    name: str
    torch_version: str
    data: tuple[DataRecord, ...]
    """The data inputs: values 0 .. len(data) - 1. First those of the model, then the labels, which the loss and the metric get."""
    inputs: int
    """How many of them are inputs of the model."""
    tensors: tuple[TensorRecord, ...]
    """Parameters and buffers, in the order of first use; they are the next values."""
    nodes: tuple[GraphNode, ...]
    loss: int
    """Number of the value that is the loss."""
    metric: int | None
    """Number of the value that is the metric, if there is one."""

    def __post_init__(self) -> None:
        _check_header(self)
        _check_data(self)
        _check_tensors(self.tensors)
        _check_nodes(self)
        for what, value in (("loss", self.loss), ("metric", self.metric)):
            if value is not None and not (self.first_result <= value < self.values and self.kinds[value] is ValueKind.TENSOR):
                raise GraphFormatError(f"graph {self.name!r}: the {what} is not the result of a node")
        _check_loss(self)

    @property
    def data_inputs(self) -> int:
        """How many data inputs there are: model inputs and labels."""
        return len(self.data)

    @property
    def labels(self) -> int:
        """How many of the data inputs are labels."""
        return len(self.data) - self.inputs

    @property
    def first_result(self) -> int:
        """Number of the first value that a node makes."""
        return self.data_inputs + len(self.tensors)

    @property
    def values(self) -> int:
        """How many values there are."""
        return self.nodes[-1].outputs[-1] + 1

    def tensor_of(self, value: int) -> TensorRecord | None:
        """Return the tensor of the model that `value` is, or None."""
        position = value - self.data_inputs
        return self.tensors[position] if 0 <= position < len(self.tensors) else None

    @cached_property
    def kinds(self) -> tuple[ValueKind, ...]:
        """What each value is."""
        kinds = [ValueKind.TENSOR] * self.first_result
        for node in self.nodes:
            kind = result_kind(node.op, node.args, kinds.__getitem__)
            kinds.extend(kind for _ in node.outputs)
        return tuple(kinds)

    @cached_property
    def producers(self) -> tuple[int, ...]:
        """For each value the position of the node that makes it; -1 for data inputs and tensors."""
        positions = [-1] * self.first_result
        for position, node in enumerate(self.nodes):
            positions.extend(position for _ in node.outputs)
        return tuple(positions)


def _check_header(graph: Graph) -> None:
    if not 0 < len(graph.name) <= MAX_LABEL or not graph.name.isprintable():
        raise GraphFormatError(f"the graph's name must be 1 to {MAX_LABEL} printable characters")
    if graph.torch_version != running_torch_version():
        here = running_torch_version()
        raise GraphFormatError(f"graph {graph.name!r} was captured with torch {graph.torch_version[:40]!r}, this machine has {here}")
    if graph.inputs < 1 or graph.labels < 0 or graph.data_inputs > MAX_INPUTS:
        counts = f"{graph.inputs} model inputs of {graph.data_inputs} data inputs"
        raise GraphFormatError(f"graph {graph.name!r}: {counts}; at least one, at most {MAX_INPUTS} together")
    if not 0 < len(graph.nodes) <= MAX_NODES:
        raise GraphFormatError(f"graph {graph.name!r}: {len(graph.nodes)} nodes, 1 to {MAX_NODES} are allowed")


def _check_data(graph: Graph) -> None:
    names: set[str] = set()
    for record in graph.data:
        if not 0 < len(record.name) <= MAX_LABEL or not record.name.isprintable() or record.name in names:
            raise GraphFormatError(f"data input {record.name[:80]!r}: names must be different and 1 to {MAX_LABEL} printable characters")
        names.add(record.name)
        if not record.shape or record.shape[0] is not None:
            raise GraphFormatError(f"data input {record.name!r}: the first dimension is the samples, whose number varies")
        try:
            TensorSpec(name=record.name, dtype=record.dtype, shape=tuple(1 if size is None else size for size in record.shape))
        except InvalidConfigError as error:
            raise GraphFormatError(error.message) from error


def check_tensor_name(name: str) -> None:
    """Raise GraphFormatError unless `name` is identifiers or digits joined by dots, none of them an attribute of nn.Module."""
    parts = name.split(".") if len(name) <= MAX_NAME else []
    if not 0 < len(parts) <= MAX_NAME_PARTS or not all(_NAME_PART.fullmatch(part) for part in parts):
        raise GraphFormatError(f"tensor name {name[:80]!r} must be identifiers or digits joined by dots")
    taken = next((part for part in parts if part in _MODULE_ATTRIBUTES), None)
    if taken is not None:
        raise GraphFormatError(f"tensor name {name[:80]!r}: {taken!r} is an attribute of every module")


def _check_tensors(tensors: tuple[TensorRecord, ...]) -> None:
    if len(tensors) > MAX_TENSORS:
        raise GraphFormatError(f"{len(tensors)} tensors, at most {MAX_TENSORS} are allowed")
    names: set[str] = set()
    for tensor in tensors:
        check_tensor_name(tensor.name)
        if tensor.name in names:
            raise GraphFormatError(f"two tensors are called {tensor.name!r}")
        names.add(tensor.name)
        try:
            tensor.spec  # noqa: B018 - making the spec checks dtype and shape
        except InvalidConfigError as error:
            raise GraphFormatError(error.message) from error
        if tensor.trainable and not (tensor.kind is TensorKind.PARAMETER and DTYPES[tensor.dtype].is_floating_point):
            raise GraphFormatError(f"tensor {tensor.name!r} cannot be trained: it is a {tensor.kind.value} of dtype {tensor.dtype}")
    for name in names:
        parent = name.rpartition(".")[0]
        while parent:
            if parent in names:
                raise GraphFormatError(f"tensor {name!r} lies inside tensor {parent!r}")
            parent = parent.rpartition(".")[0]


def _check_nodes(graph: Graph) -> None:
    kinds = [ValueKind.TENSOR] * graph.first_result
    for position, node in enumerate(graph.nodes):
        try:
            _check_node(node, kinds)
        except GraphFormatError as error:
            raise GraphFormatError(f"node {position}: {error.message}") from error
        kind = result_kind(node.op, node.args, kinds.__getitem__)
        kinds.extend(kind for _ in node.outputs)
        if len(kinds) > MAX_VALUES:
            raise GraphFormatError(f"graph {graph.name!r} has more than {MAX_VALUES} values")


def _check_loss(graph: Graph) -> None:
    node = graph.nodes[graph.producers[graph.loss]]
    if node.op in NO_GRADIENT or graph.loss - node.outputs[0] in INTEGER_OUTPUTS.get(node.op, ()):
        raise GraphFormatError(f"graph {graph.name!r}: no gradient can flow from the loss, a result of {node.op}")


def _check_node(node: GraphNode, kinds: list[ValueKind]) -> None:
    signature = signature_of(node.op)
    if len(node.label) > MAX_LABEL or not node.label.isprintable():
        raise GraphFormatError(f"{node.op}: the label must be at most {MAX_LABEL} printable characters")
    if len({name for name, _ in node.kwargs}) != len(node.kwargs):
        raise GraphFormatError(f"{node.op}: a keyword is given twice")
    for argument in (*node.args, *(value for _, value in node.kwargs)):
        _check_argument(argument, len(kinds), MAX_DEPTH)
    check_call(node.op, node.args, dict(node.kwargs), kinds.__getitem__)
    expected = signature.outputs
    if not 0 < len(node.outputs) <= MAX_OUTPUTS or (expected is not None and len(node.outputs) != expected):
        raise GraphFormatError(f"{node.op}: {len(node.outputs)} results, expected {expected or 'at least one'}")
    if node.outputs != tuple(range(len(kinds), len(kinds) + len(node.outputs))):
        raise GraphFormatError(f"{node.op}: its results must be numbered from {len(kinds)}")


def _check_argument(argument: Argument, values: int, depth: int) -> None:
    if isinstance(argument, tuple):
        if depth == 0 or len(argument) > MAX_LIST:
            raise GraphFormatError("an argument is nested too deeply or too long")
        for item in argument:
            _check_argument(item, values, depth - 1)
    elif isinstance(argument, ValueRef):
        if type(argument.value) is not int or not 0 <= argument.value < values:
            raise GraphFormatError(f"value {str(argument.value)[:20]} is used before it is made")
    elif type(argument) is int:
        if not -(2**63) <= argument < 2**63:
            raise GraphFormatError("an integer does not fit in 64 bits")
    elif isinstance(argument, float):
        if math.isnan(argument):
            raise GraphFormatError("a number is NaN")
    elif not (argument is None or isinstance(argument, bool | str | DtypeName | MemoryFormatName)):
        raise GraphFormatError(f"an argument is a {type(argument).__name__}")
