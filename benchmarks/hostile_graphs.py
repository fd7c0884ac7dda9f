"""Graphs that somebody may send to do harm: each kind must be refused, at once and without taking memory."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

from roost.capture.graph import FORMAT_VERSION, MAX_NODES, running_torch_version
from roost.capture.graph_format import MAX_GRAPH_BYTES

Raw = dict[str, Any]
BATCH = 8
SHAPES = ((BATCH, 6), (BATCH,))
"""Of the data inputs of the sample graph."""
FIRST_FREE = 14
"""Number of the first value that a further node of the sample graph makes."""
LARGE = 2**20
INPUT, WEIGHT = {"value": 0}, {"value": 2}


def sample_graph() -> Raw:
    """Return a well-formed graph as JSON says it: two layers with dropout between them, a loss and a metric."""
    return {
        "format": FORMAT_VERSION,
        "torch": running_torch_version(),
        "name": "sample",
        "data": [["input_0", "float32", [None, 6]], ["label_0", "int64", [None]]],
        "inputs": 1,
        "tensors": [
            ["first.weight", "float32", [16, 6], "parameter", True],
            ["first.bias", "float32", [16], "parameter", True],
            ["second.weight", "float32", [4, 16], "parameter", True],
        ],
        "nodes": [
            ["aten.linear.default", [INPUT, WEIGHT, {"value": 3}], {}, [5], "first"],
            ["aten.relu_.default", [{"value": 5}], {}, [6], ""],
            ["aten.dropout.default", [{"value": 6}, 0.1, True], {}, [7], ""],
            ["aten.linear.default", [{"value": 7}, {"value": 4}], {}, [8], "second"],
            ["aten.cross_entropy_loss.default", [{"value": 8}, {"value": 1}], {}, [9], "loss"],
            ["aten.argmax.default", [{"value": 8}, -1], {}, [10], "metric"],
            ["aten.eq.Tensor", [{"value": 10}, {"value": 1}], {}, [11], "metric"],
            ["aten.to.dtype", [{"value": 11}, {"dtype": "float32"}], {}, [12], "metric"],
            ["aten.mean.default", [{"value": 12}], {}, [13], "metric"],
        ],
        "loss": 9,
        "metric": 13,
    }


def as_bytes(raw: object) -> bytes:
    """Return JSON text as a stranger would write it: NaN and the like included."""
    return json.dumps(raw, separators=(",", ":")).encode()


def changed(change: Callable[[Raw], object]) -> bytes:
    """Return the sample graph after `change`."""
    raw = sample_graph()
    change(raw)
    return as_bytes(raw)


def setting(field: str, value: object) -> bytes:
    return changed(lambda raw: raw.__setitem__(field, value))


def in_node(position: int, part: int, value: object) -> bytes:
    return changed(lambda raw: raw["nodes"][position].__setitem__(part, value))


def in_tensor(part: int, value: object) -> bytes:
    return changed(lambda raw: raw["tensors"][0].__setitem__(part, value))


def in_data(part: int, value: object) -> bytes:
    return changed(lambda raw: raw["data"][0].__setitem__(part, value))


def calling(op: str, args: list[Any], kwargs: Raw | None = None, outputs: int = 1) -> bytes:
    """Return the sample graph with one more node."""
    return with_nodes([(op, args, kwargs or {}, outputs)])


def with_nodes(calls: list[tuple[str, list[Any], Raw, int]]) -> bytes:
    """Return the sample graph with more nodes, whose results are numbered from FIRST_FREE."""
    raw, following = sample_graph(), FIRST_FREE
    for op, args, kwargs, outputs in calls:
        raw["nodes"].append([op, args, kwargs, list(range(following, following + outputs)), ""])
        following += outputs
    return as_bytes(raw)


def text(old: bytes, new: bytes) -> bytes:
    """Return the sample graph's text with one place replaced."""
    whole = as_bytes(sample_graph())
    assert old in whole
    return whole.replace(old, new, 1)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def largest_but_wrong_at_its_end() -> bytes:
    """Return a graph of nearly as many nodes as are allowed, of which only the last is wrong."""
    calls: list[tuple[str, list[Any], Raw, int]] = [("aten.linear.default", [INPUT, WEIGHT], {}, 1) for _ in range(MAX_NODES - 50)]
    return with_nodes([*calls, ("aten.linear.default", [INPUT], {}, 1)])


def unlike(letters: str) -> str:
    """Return `letters` with an 'a' that only looks like one."""
    return letters.replace("a", "\u0430")


NEW = {"value": FIRST_FREE}

OF_TEXT: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "pickle": lambda: b"\x80\x04\x95\x1b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94",
    "not JSON": lambda: b"import os",
    "JSON that is no object": lambda: b"[]",
    "cut short": lambda: as_bytes(sample_graph())[:-20],
    "two documents": lambda: as_bytes(sample_graph()) * 2,
    "over the byte limit": lambda: b" " * MAX_GRAPH_BYTES + as_bytes(sample_graph()),
    "UTF-16": lambda: as_bytes(sample_graph()).decode().encode("utf-16"),
    "UTF-32": lambda: as_bytes(sample_graph()).decode().encode("utf-32"),
    "byte order mark": lambda: b"\xef\xbb\xbf" + as_bytes(sample_graph()),
    "invalid UTF-8": lambda: text(b'"sample"', b'"sam\xffple"'),
    "encoded half surrogates": lambda: text(b'"sample"', b'"sam\xed\xa0\x80ple"'),
    "half a surrogate pair": lambda: text(b'"sample"', b'"sam\\ud800ple"'),
    "NUL byte": lambda: text(b'"sample"', b'"sam\x00ple"'),
    "gzip bomb": lambda: gzip.compress(b"[" * (64 << 20), 1),
    "deflate bomb": lambda: zlib.compress(b"[" * (64 << 20), 1),
    "zip file": lambda: b"PK\x03\x04" + bytes(200),
    "lists as deep as the file": lambda: b"[" * (MAX_GRAPH_BYTES - 1),
    "objects as deep as the file": lambda: b'{"a":' * (MAX_GRAPH_BYTES // 5 - 1),
    "as many lists as fit": lambda: b"[" + b"[]," * (MAX_GRAPH_BYTES // 3 - 2) + b"[]]",
    "as many objects as fit": lambda: b"[" + b'{"a":{}},' * (MAX_GRAPH_BYTES // 9 - 2) + b"{}]",
    "as many numbers as fit": lambda: b"[" + b"0.1," * (MAX_GRAPH_BYTES // 4 - 2) + b"1]",
    "as many fields as fit": lambda: b"{" + b",".join(b'"%06d":1' % index for index in range(MAX_GRAPH_BYTES // 11)) + b"}",
    "number of a million digits": lambda: text(b'"inputs":1', b'"inputs":' + b"1" * LARGE),
    "integers of many digits, again and again": lambda: text(b"[5]", b"[" + (b"9" * 4299 + b",") * 450 + b"5]"),
    "10 to the 400": lambda: setting("inputs", 10**400),
    "field given twice": lambda: text(b'"inputs":1', b'"inputs":1,"inputs":1'),
    "NaN": lambda: text(b"0.1", b"NaN"),
    "Infinity": lambda: text(b"0.1", b"Infinity"),
    "1e999": lambda: text(b"0.1", b"1e999"),
}

OF_HEADER: dict[str, Callable[[], bytes]] = {
    "older format": lambda: setting("format", FORMAT_VERSION - 1),
    "newer format": lambda: setting("format", FORMAT_VERSION + 1),
    "format that is a boolean": lambda: setting("format", True),
    "format that is half a surrogate pair": lambda: setting("format", "\ud800"),
    "format that is a number with a fraction": lambda: setting("format", float(FORMAT_VERSION)),
    "other torch": lambda: setting("torch", "2.12.0"),
    "torch that is a list": lambda: setting("torch", [running_torch_version()]),
    "missing field": lambda: changed(lambda raw: raw.pop("metric")),
    "extra field": lambda: setting("code", "import os"),
    "name of a megabyte": lambda: setting("name", "a" * LARGE),
    "name that moves the cursor": lambda: setting("name", "\x1b[2J"),
    "name with text that runs backwards": lambda: setting("name", "sample\u202egnp.exe"),
    "no inputs": lambda: setting("inputs", 0),
    "more inputs than data": lambda: setting("inputs", 3),
    "inputs that are a boolean": lambda: setting("inputs", True),
    "data input of unknown dtype": lambda: in_data(1, "complex64"),
    "data input of negative size": lambda: in_data(2, [None, -6]),
    "data input of fixed batch": lambda: in_data(2, [8, 6]),
    "data input without dimensions": lambda: in_data(2, []),
    "data input of NaN size": lambda: text(b"[null,6]", b"[null,NaN]"),
    "data input whose size is a boolean": lambda: in_data(2, [None, True]),
    "data input of too many elements": lambda: in_data(2, [None, 2**62, 2**62]),
    "data inputs of one name": lambda: changed(lambda raw: raw["data"][1].__setitem__(0, "input_0")),
    "a million data inputs": lambda: setting("data", [["a", "int8", [None]]] * 100_000),
    "loss that is an input": lambda: setting("loss", 0),
    "loss that is a parameter": lambda: setting("loss", 2),
    "loss that is an index": lambda: setting("loss", 10),
    "loss that is a comparison": lambda: setting("loss", 11),
    "loss that does not exist": lambda: setting("loss", 10**6),
    "negative loss": lambda: setting("loss", -1),
    "metric that is an input": lambda: setting("metric", 1),
    "metric that is text": lambda: setting("metric", "13"),
}

OF_TENSORS: dict[str, Callable[[], bytes]] = {
    "tensor of unknown dtype": lambda: in_tensor(1, "object"),
    "tensor of unknown kind": lambda: in_tensor(3, "code"),
    "trainable integers": lambda: in_tensor(1, "int64"),
    "trainable buffer": lambda: in_tensor(3, "buffer"),
    "trainable that is a number": lambda: in_tensor(4, 1),
    "tensor that is an object": lambda: setting("tensors", [{"name": "a"}]),
    "tensor with one field more": lambda: changed(lambda raw: raw["tensors"][0].append(0)),
    "negative size": lambda: in_tensor(2, [-16, 6]),
    "size with a fraction": lambda: in_tensor(2, [16.0, 6]),
    "size that is a boolean": lambda: in_tensor(2, [True, 6]),
    "size that is infinite": lambda: text(b"[16,6]", b"[Infinity,6]"),
    "huge tensor": lambda: in_tensor(2, [2**40, 2**20]),
    "sizes whose product wraps to a small number": lambda: in_tensor(2, [2**32, 2**32]),
    "a million dimensions": lambda: in_tensor(2, [1] * 500_000),
    "name that is a path": lambda: in_tensor(0, "../../etc/passwd"),
    "name that is an absolute path": lambda: in_tensor(0, "/etc/passwd"),
    "name that is a path of Windows": lambda: in_tensor(0, "C:\\boot"),
    "name with a NUL": lambda: in_tensor(0, "first\x00.weight"),
    "name with a newline": lambda: in_tensor(0, "first.weight\n"),
    "name with an empty part": lambda: in_tensor(0, "first..weight"),
    "empty name": lambda: in_tensor(0, ""),
    "name that is code": lambda: in_tensor(0, "first.__import__('os')"),
    "name that is a dunder": lambda: in_tensor(0, "first.__class__"),
    "name that is a method": lambda: in_tensor(0, "first.forward"),
    "name of a module's own table": lambda: in_tensor(0, "_parameters.weight"),
    "name of a module's own flag": lambda: in_tensor(0, "first.training"),
    "name with a letter of another script": lambda: in_tensor(0, unlike("second.bias")),
    "name with digits of another script": lambda: in_tensor(0, "first.\u0663"),
    "name given twice": lambda: in_tensor(0, "first.bias"),
    "tensor inside a tensor": lambda: in_tensor(0, "first.bias.weight"),
    "tensor around a tensor": lambda: in_tensor(0, "second"),
    "name of a megabyte": lambda: in_tensor(0, "a" * LARGE),
    "names of many parts": lambda: changed(
        lambda raw: raw["tensors"].extend([[".".join(["a"] * 255) + f".b{index}", "int8", [], "buffer", False] for index in range(3_000)])
    ),
}

OF_NODES: dict[str, Callable[[], bytes]] = {
    "unknown operation": lambda: in_node(0, 0, "aten.no_such.default"),
    "operation that reads files": lambda: in_node(0, 0, "aten.from_file.default"),
    "operation that replaces memory": lambda: in_node(0, 0, "aten.set_.source_Storage"),
    "operation that resizes": lambda: in_node(0, 0, "aten.resize_.default"),
    "operation that reads memory nobody wrote": lambda: in_node(0, 0, "aten.empty.memory_format"),
    "operation with free strides": lambda: in_node(0, 0, "aten.as_strided.default"),
    "operation of another library": lambda: in_node(0, 0, "prims.convert_element_type.default"),
    "operation that is an attribute": lambda: in_node(0, 0, "aten.linear.__class__"),
    "operation that is a path of attributes": lambda: in_node(0, 0, "aten.linear.default.__globals__"),
    "operation with a letter of another script": lambda: in_node(0, 0, unlike("aten.linear.default")),
    "operation of a megabyte": lambda: in_node(0, 0, "a" * LARGE),
    "operation that is a number": lambda: in_node(0, 0, 7),
    "too many arguments": lambda: in_node(0, 1, [INPUT] * 9),
    "too few arguments": lambda: in_node(0, 1, [INPUT]),
    "unknown keyword": lambda: in_node(0, 2, {"sizes": 1}),
    "keyword that is code": lambda: in_node(0, 2, {"x=__import__('os').system('id')": 1}),
    "keyword that repeats an argument": lambda: in_node(0, 2, {"input": INPUT}),
    "a hundred thousand keywords": lambda: in_node(0, 2, {f"k{index}": 1 for index in range(100_000)}),
    "device": lambda: in_node(0, 2, {"device": "cuda:0"}),
    "cycle": lambda: in_node(0, 1, [{"value": 8}, WEIGHT]),
    "node that uses itself": lambda: in_node(0, 1, [{"value": 5}, WEIGHT]),
    "negative reference": lambda: in_node(0, 1, [{"value": -1}, WEIGHT]),
    "reference that is a boolean": lambda: in_node(0, 1, [{"value": False}, WEIGHT]),
    "reference that is text": lambda: in_node(0, 1, [{"value": "0"}, WEIGHT]),
    "unknown tag": lambda: in_node(0, 1, [{"code": "1"}, WEIGHT]),
    "two tags": lambda: in_node(0, 1, [{"value": 0, "dtype": "int64"}, WEIGHT]),
    "text as a tensor": lambda: in_node(0, 1, ["import os", WEIGHT]),
    "integer over 64 bits": lambda: calling("aten.mul.Tensor", [INPUT, 2**64]),
    "deep argument": lambda: in_node(0, 1, [nested(60), WEIGHT]),
    "argument as deep as Python goes": lambda: in_node(0, 1, [nested(900), WEIGHT]),
    "list of a hundred thousand": lambda: in_node(0, 1, [[INPUT] * 100_000, WEIGHT]),
    "results out of order": lambda: in_node(0, 3, [99]),
    "results numbered twice": lambda: in_node(1, 3, [5]),
    "more results than the operation has": lambda: in_node(0, 3, [5, 6]),
    "no results": lambda: in_node(0, 3, []),
    "results that are booleans": lambda: in_node(0, 3, [True]),
    "label of a megabyte": lambda: in_node(0, 4, "a" * LARGE),
    "label with a newline": lambda: in_node(0, 4, "first\nforged log line"),
    "node that is an object": lambda: setting("nodes", [{"op": "aten.relu.default"}]),
    "node with one field more": lambda: changed(lambda raw: raw["nodes"][0].append("")),
    "no nodes": lambda: setting("nodes", []),
    "more nodes than allowed": lambda: setting("nodes", [["scalar.add", [1, 1], {}, [5], ""]] * (2 * MAX_NODES)),
    "largest graph, wrong at its end": largest_but_wrong_at_its_end,
    "equation of a megabyte": lambda: calling("aten.einsum.default", ["ij,jk->ik," * 100_000, [INPUT, WEIGHT]]),
    "equation that is code": lambda: calling("aten.einsum.default", ["__import__('os')", [INPUT]]),
    "word that no operation knows": lambda: calling("aten.gelu.default", [INPUT], {"approximate": "import os"}),
    "absurd padding": lambda: calling("aten.avg_pool1d.default", [INPUT, [2], [1], [2**62]]),
    "absurd kernel": lambda: calling("aten.max_pool1d.default", [INPUT, [2**40]]),
    "absurd stride": lambda: calling("aten.im2col.default", [INPUT, [1, 1], [1, 1], [0, 0], [2**62, 2**62]]),
    "absurd dilation": lambda: calling("aten.conv1d.default", [INPUT, WEIGHT, None, [1], [0], [2**62]]),
    "absurd groups": lambda: calling("aten.conv1d.default", [INPUT, WEIGHT, None, [1], [0], [1], 2**62]),
    "absurd number of chunks": lambda: calling("aten.chunk.default", [INPUT, 2**31]),
    "absurd scale": lambda: calling("aten.upsample_nearest1d.vec", [INPUT, None, [1e300]]),
    "infinite scale": lambda: calling("aten.upsample_nearest1d.vec", [INPUT, None, [{"infinity": 1}]]),
    "literal size whose product wraps": lambda: calling("aten.view.default", [INPUT, [2**32, 2**32]]),
    "padding that reads before the tensor": lambda: calling("aten.pad.default", [INPUT, [-8, 9], "replicate"]),
}


def growing_numbers() -> bytes:
    """Return a graph that squares a size again and again: its last number would have more bits than the machine."""
    calls: list[tuple[str, list[Any], Raw, int]] = [("aten.sym_size.int", [INPUT, 0], {}, 1)]
    calls += [("scalar.mul", [{"value": FIRST_FREE + index}] * 2, {}, 1) for index in range(200)]
    return with_nodes(calls)


def many_large_values() -> bytes:
    """Return a graph of many values that would fit one by one and not together."""
    return with_nodes([("aten.full.default", [[2**25], 1.0], {}, 1) for _ in range(1000)])


def many_dimensions() -> bytes:
    """Return a graph that adds dimensions one by one."""
    return with_nodes(
        [("aten.unsqueeze.default", [INPUT if index == 0 else {"value": FIRST_FREE + index - 1}, 0], {}, 1) for index in range(5000)]
    )


def calls_that_all_differ() -> bytes:
    return with_nodes([("aten.full.default", [[index + 1], 1.0], {}, 1) for index in range(10_000)])


def pieces_of_a_long_tensor() -> bytes:
    return with_nodes([("aten.expand.default", [WEIGHT, [2**18, 16, 6]], {}, 1), ("aten.unbind.int", [NEW], {}, 4096)])


def steps_of_a_long_sequence() -> bytes:
    """Return a graph whose recurrent layer would run for a million steps, with weights that do not fit its input."""
    raw = sample_graph()
    raw["data"][0] = ["input_0", "float32", [None, 6]]
    calls: list[tuple[str, list[Any], Raw, int]] = [
        ("aten.expand.default", [INPUT, [2**20, BATCH, 6]], {}, 1),
        ("aten.zeros.default", [[1, BATCH, 4]], {}, 1),
        ("aten.lstm.input", [NEW, [{"value": 15}, {"value": 15}], [WEIGHT] * 4, True, 1, 0.0, True, False, False], {}, 3),
    ]
    return with_nodes(calls)


def weights_that_would_broadcast() -> bytes:
    """Return a graph whose recurrent layer has one row of weights: its definition repeats it, a fast kernel reads beyond it."""
    calls: list[tuple[str, list[Any], Raw, int]] = [
        ("aten.expand.default", [INPUT, [2, BATCH, 6]], {}, 1),
        ("aten.zeros.default", [[1, BATCH, 4]], {}, 1),
        ("aten.zeros.default", [[1, 6]], {}, 1),
        ("aten.zeros.default", [[16, 4]], {}, 1),
    ]
    state, row, square, bias = {"value": 15}, {"value": 16}, {"value": 17}, {"value": 3}
    layer = ("aten.lstm.input", [NEW, [state, state], [row, square, bias, bias], True, 1, 0.0, True, False, False], {}, 3)
    return with_nodes([*calls, layer])


OF_SIZES: dict[str, Callable[[], bytes]] = {
    "literal tensor that does not fit": lambda: calling("aten.zeros.default", [[2**30, 2**9]]),
    "range of a trillion": lambda: calling("aten.arange.default", [10**12]),
    "range without end": lambda: calling("aten.arange.start_step", [0, 1, 1e-300]),
    "identity matrix of a million rows": lambda: calling("aten.eye.default", [10**6]),
    "repeated a billion times": lambda: calling("aten.repeat.default", [INPUT, [2**20, 2**20]]),
    "expanded, then copied": lambda: with_nodes(
        [("aten.expand.default", [INPUT, [2**30, BATCH, 6]], {}, 1), ("aten.clone.default", [NEW], {}, 1)]
    ),
    "one-hot over a trillion classes": lambda: calling("aten.one_hot.default", [{"value": 1}, 2**40]),
    "padding that multiplies": lambda: calling("aten.pad.default", [INPUT, [2**39, 2**39]]),
    "equation that explodes inside": lambda: calling("aten.einsum.default", ["ab,cd,ef,gh,ij,ab,cd,ef,gh,ij->", [WEIGHT] * 10]),
    "outer product in an equation": lambda: calling("aten.einsum.default", ["ab,cd,ef,gh,ij->abcdefghij", [WEIGHT] * 5]),
    "up-sampling a million times": lambda: with_nodes(
        [
            ("aten.view.default", [INPUT, [1, 1, -1]], {}, 1),
            ("aten.upsample_nearest1d.vec", [NEW, None, [LARGE * 1.0]], {}, 1),
            ("aten.outer.default", [{"value": 15}] * 2, {}, 1),
        ]
    ),
    "kernel wider than its input": lambda: with_nodes(
        [("aten.view.default", [INPUT, [1, 1, -1]], {}, 1), ("aten.max_pool1d.default", [NEW, [10**6]], {}, 1)]
    ),
    "numbers that grow": growing_numbers,
    "division by zero": lambda: calling("scalar.floordiv", [1, 0]),
    "remainder of zero": lambda: calling("scalar.mod", [1, 0]),
    "negative size": lambda: calling("aten.zeros.default", [[-1]]),
    "shapes that do not fit": lambda: calling("aten.add.Tensor", [INPUT, WEIGHT]),
    "wrong number of dimensions": lambda: calling("aten.conv2d.default", [INPUT, WEIGHT]),
    "dimension out of range": lambda: calling("aten.gather.default", [INPUT, 7, {"value": 1}]),
    "selection by a mask": lambda: with_nodes([("aten.gt.Scalar", [INPUT, 0], {}, 1), ("aten.index.Tensor", [INPUT, [NEW]], {}, 1)]),
    "index that is a real number": lambda: calling("aten.index_select.default", [INPUT, 0, INPUT]),
    "more pieces than the list has": lambda: calling("aten.split.Tensor", [INPUT, 1], {}, 3),
    "pieces of a long tensor": pieces_of_a_long_tensor,
    "values that do not fit together": many_large_values,
    "dimensions without end": many_dimensions,
    "calls that all differ": calls_that_all_differ,
    "steps of a long sequence": steps_of_a_long_sequence,
    "recurrent weights that would broadcast": weights_that_would_broadcast,
    "write of more elements than there are": lambda: calling("aten.clamp_.Tensor", [{"value": 9}, {"value": 3}, None]),
    "scales of another shape": lambda: calling("aten._weight_norm.default", [WEIGHT, {"value": 3}, 0]),
    "result in a tensor of another size": lambda: calling("aten.div.out", [INPUT, 2.0], {"out": {"value": 8}}),
    "loss that is no single number": lambda: setting("loss", 8),
    "loss that is an integer": lambda: changed(
        lambda raw: raw.update(
            nodes=[*raw["nodes"], ["aten.to.dtype", [{"value": 9}, {"dtype": "int64"}], {}, [FIRST_FREE], ""]], loss=FIRST_FREE
        )
    ),
}
