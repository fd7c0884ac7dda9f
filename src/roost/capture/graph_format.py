"""Writes a graph as JSON and reads it back, refusing anything that is not exactly a graph."""

from __future__ import annotations

import json
import math
from typing import Any

from roost.capture.arguments import Argument, DtypeName, MemoryFormatName, ValueRef
from roost.capture.graph import FORMAT_VERSION, MAX_DEPTH, MAX_NODES, MAX_TENSORS, DataRecord, Graph, GraphNode
from roost.capture.signatures import MAX_LIST
from roost.errors import GraphFormatError, InvalidConfigError
from roost.types import TensorKind, TensorRecord

MAX_GRAPH_BYTES = 2 << 20
"""Five times the largest graph of a real model. What JSON says in a byte can take Python 30 bytes and a third of a microsecond to hold."""

_GRAPH_FIELDS = frozenset({"format", "torch", "name", "data", "inputs", "tensors", "nodes", "loss", "metric"})


def to_bytes(graph: Graph) -> bytes:
    """Return `graph` as UTF-8 JSON. The same graph gives the same bytes."""
    raw = {
        "format": FORMAT_VERSION,
        "torch": graph.torch_version,
        "name": graph.name,
        "data": [[item.name, item.dtype, list(item.shape)] for item in graph.data],
        "inputs": graph.inputs,
        "tensors": [[item.name, item.dtype, list(item.shape), item.kind.value, item.trainable] for item in graph.tensors],
        "nodes": [
            [
                node.op,
                [_argument_to_json(item) for item in node.args],
                {name: _argument_to_json(item) for name, item in node.kwargs},
                list(node.outputs),
                node.label,
            ]
            for node in graph.nodes
        ],
        "loss": graph.loss,
        "metric": graph.metric,
    }
    return json.dumps(raw, separators=(",", ":"), allow_nan=False).encode()


def from_bytes(data: bytes) -> Graph:
    """Return the graph in `data`. Raises GraphFormatError for anything that is not a well-formed graph of this version."""
    if len(data) > MAX_GRAPH_BYTES:
        raise GraphFormatError(f"a graph of {len(data)} bytes is over the limit of {MAX_GRAPH_BYTES}")
    try:
        # Decoded here: given bytes, json would also take UTF-16, UTF-32 and half surrogate pairs.
        raw = json.loads(data.decode(), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise GraphFormatError(f"the graph is not JSON: {_shown(str(error), 120)}") from error
    if not isinstance(raw, dict) or "format" not in raw:
        raise GraphFormatError("the graph has no format version")
    if type(raw["format"]) is not int or raw["format"] != FORMAT_VERSION:
        raise GraphFormatError(f"the graph has format {_shown(raw['format'])}, this version of roost reads {FORMAT_VERSION}")
    if raw.keys() != _GRAPH_FIELDS:
        raise GraphFormatError(f"the graph must have exactly the fields {sorted(_GRAPH_FIELDS)}")
    return Graph(
        name=_string(raw["name"], "name"),
        torch_version=_string(raw["torch"], "torch"),
        data=tuple(_data_from_json(item) for item in _list(raw["data"], "data")),
        inputs=_integer(raw["inputs"], "inputs"),
        tensors=tuple(_tensor_from_json(item) for item in _list(raw["tensors"], "tensors", MAX_TENSORS)),
        nodes=tuple(_node_from_json(item) for item in _list(raw["nodes"], "nodes", MAX_NODES)),
        loss=_integer(raw["loss"], "loss"),
        metric=None if raw["metric"] is None else _integer(raw["metric"], "metric"),
    )


def _argument_to_json(argument: Argument) -> Any:
    if isinstance(argument, ValueRef):
        return {"value": argument.value}
    if isinstance(argument, DtypeName):
        return {"dtype": argument.name}
    if isinstance(argument, MemoryFormatName):
        return {"memory_format": argument.name}
    if isinstance(argument, tuple):
        return [_argument_to_json(item) for item in argument]
    if isinstance(argument, float) and math.isinf(argument):
        return {"infinity": 1 if argument > 0 else -1}
    return argument


def _argument_from_json(raw: Any, depth: int = MAX_DEPTH) -> Argument:
    if isinstance(raw, list):
        if depth == 0 or len(raw) > MAX_LIST:
            raise GraphFormatError("an argument is nested too deeply or too long")
        return tuple(_argument_from_json(item, depth - 1) for item in raw)
    if isinstance(raw, dict):
        return _tagged_from_json(raw)
    if isinstance(raw, float) and not math.isfinite(raw):
        raise GraphFormatError("a number is out of range")
    if raw is None or isinstance(raw, bool | int | float | str):
        return raw
    raise GraphFormatError(f"an argument is a {type(raw).__name__}")


def _tagged_from_json(raw: dict[str, Any]) -> Argument:
    if len(raw) != 1:
        raise GraphFormatError("a tagged argument must have exactly one field")
    tag, content = next(iter(raw.items()))
    if tag == "value":
        return ValueRef(_integer(content, "value"))
    if tag == "dtype":
        return DtypeName(_string(content, "dtype"))
    if tag == "memory_format":
        return MemoryFormatName(_string(content, "memory_format"))
    if tag == "infinity" and type(content) is int and content in (1, -1):
        return math.inf * content
    raise GraphFormatError(f"unknown tagged argument {tag[:40]!r}")


def _data_from_json(raw: Any) -> DataRecord:
    fields = _list(raw, "data input")
    if len(fields) != 3:
        raise GraphFormatError("a data input must be [name, dtype, shape]")
    sizes = _list(fields[2], "shape of a data input")
    shape = tuple(None if size is None else _integer(size, "size of a data input") for size in sizes)
    return DataRecord(name=_string(fields[0], "name of a data input"), dtype=_string(fields[1], "dtype of a data input"), shape=shape)


def _tensor_from_json(raw: Any) -> TensorRecord:
    fields = _list(raw, "tensor")
    if len(fields) != 5 or not isinstance(fields[4], bool):
        raise GraphFormatError("a tensor must be [name, dtype, shape, kind, trainable]")
    kinds = {kind.value: kind for kind in TensorKind}
    kind = kinds.get(_string(fields[3], "tensor kind"))
    if kind is None:
        raise GraphFormatError(f"a tensor's kind must be one of {sorted(kinds)}")
    name, dtype = _string(fields[0], "tensor name"), _string(fields[1], "tensor dtype")
    shape = tuple(_integer(size, "tensor size") for size in _list(fields[2], "tensor shape"))
    try:
        return TensorRecord(name=name, dtype=dtype, shape=shape, kind=kind, trainable=fields[4])
    except InvalidConfigError as error:
        raise GraphFormatError(error.message) from error


def _node_from_json(raw: Any) -> GraphNode:
    fields = _list(raw, "node")
    if len(fields) != 5 or not isinstance(fields[2], dict):
        raise GraphFormatError("a node must be [operation, arguments, keywords, results, label]")
    return GraphNode(
        op=_string(fields[0], "operation"),
        args=tuple(_argument_from_json(item) for item in _list(fields[1], "arguments")),
        kwargs=tuple((name, _argument_from_json(item)) for name, item in fields[2].items()),
        outputs=tuple(_integer(number, "result") for number in _list(fields[3], "results")),
        label=_string(fields[4], "label"),
    )


def _shown(raw: Any, length: int = 40) -> str:
    """Return the start of `raw` as text that any terminal can show and any message can carry."""
    return (ascii(raw)[1:-1] if isinstance(raw, str) else ascii(raw))[:length]


def _string(raw: Any, what: str) -> str:
    if not isinstance(raw, str):
        raise GraphFormatError(f"{what} must be text, not {type(raw).__name__}")
    return raw


def _integer(raw: Any, what: str) -> int:
    if type(raw) is not int or not -(2**63) <= raw < 2**63:
        raise GraphFormatError(f"{what} must be an integer of 64 bits, not {_shown(raw)}")
    return raw


def _list(raw: Any, what: str, most: int = MAX_LIST) -> list[Any]:
    if not isinstance(raw, list):
        raise GraphFormatError(f"{what} must be a list, not {type(raw).__name__}")
    if len(raw) > most:
        raise GraphFormatError(f"{what}: {len(raw)} items, at most {most} are allowed")
    return raw


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is given twice")
    return found
