"""A graph survives its bytes; anything else is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_models import example
from hypothesis import given, settings
from hypothesis import strategies as st

from roost.capture.export import capture
from roost.capture.graph_format import from_bytes, to_bytes
from roost.capture.ops import ALLOWED_OPS, CREATES_TENSORS, EVALUATION_SETTINGS, FREE_OPS, INTEGER_OUTPUTS, NO_GRADIENT, RANDOM_OPS, resolve
from roost.capture.signatures import signature_of
from roost.errors import GraphFormatError

Raw = dict[str, Any]
PERCEPTRON = to_bytes(example("perceptron").captured().graph)


def raw_graph() -> Raw:
    found: Raw = json.loads(PERCEPTRON)
    return found


def changed(field: str, value: Any) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        raw[field] = value

    return change


def node(position: int, part: int, value: Any) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        raw["nodes"][position][part] = value

    return change


def tensor(position: int, part: int, value: Any) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        raw["tensors"][position][part] = value

    return change


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def drop(field: str) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        del raw[field]

    return change


HOSTILE: dict[str, tuple[Callable[[Raw], None], str]] = {
    "operation that opens files": (node(0, 0, "aten.from_file.default"), "not on the list"),
    "operation outside aten": (node(0, 0, "os.system"), "not on the list"),
    "operation by attribute": (node(0, 0, "aten.add.__class__"), "not on the list"),
    "operation that is no text": (node(0, 0, 7), "must be text"),
    "too many arguments": (node(0, 1, [{"value": 0}] * 9), "at most"),
    "too few arguments": (node(0, 1, [{"value": 0}]), "is missing"),
    "unknown keyword": (node(0, 2, {"__import__": 1}), "unknown keyword"),
    "argument given twice": (node(0, 2, {"input": {"value": 0}}), "given twice"),
    "device": (node(0, 2, {"device": "cuda:0"}), "unknown keyword"),
    "forward reference": (node(0, 1, [{"value": 9999}, {"value": 2}]), "before it is made"),
    "reference to itself": (node(0, 1, [{"value": 8}, {"value": 2}]), "before it is made"),
    "negative reference": (node(0, 1, [{"value": -1}, {"value": 2}]), "before it is made"),
    "reference that is a boolean": (node(0, 1, [{"value": True}, {"value": 2}]), "must be an integer"),
    "reference that is text": (node(0, 1, [{"value": "0"}, {"value": 2}]), "must be an integer"),
    "wrong kind of argument": (node(0, 1, ["none", {"value": 2}]), "must be Tensor"),
    "free text": (node(1, 1, ["import os"]), "must be Tensor"),
    "unknown tag": (node(0, 1, [{"code": "1"}, {"value": 2}]), "unknown tagged"),
    "two tags": (node(0, 1, [{"value": 0, "dtype": "int64"}, {"value": 2}]), "exactly one field"),
    "deep nesting": (node(0, 1, [nested(50), {"value": 2}]), "nested too deeply"),
    "long list": (node(0, 1, [[1] * 5000, {"value": 2}]), "too long"),
    "results out of order": (node(0, 3, [99]), "must be numbered"),
    "too many results": (node(0, 3, [8, 9]), "expected 1"),
    "no results": (node(0, 3, []), "0 results"),
    "label with control characters": (node(0, 4, "a\u001b[2J"), "printable"),
    "label of a megabyte": (node(0, 4, "a" * 2**20), "printable"),
    "node that is no list": (changed("nodes", [{"op": "aten.add.Tensor"}]), "must be a list"),
    "no nodes": (changed("nodes", []), "0 nodes"),
    "two tensors of one name": (tensor(1, 0, "layers.0.weight"), "two tensors"),
    "path as a name": (tensor(0, 0, "../../etc/passwd"), "identifiers or digits"),
    "absolute path as a name": (tensor(0, 0, "/etc/passwd"), "identifiers or digits"),
    "empty part of a name": (tensor(0, 0, "layers..weight"), "identifiers or digits"),
    "name with a newline": (tensor(0, 0, "layers.weight\n"), "identifiers or digits"),
    "name that is an attribute of modules": (tensor(0, 0, "layers.forward"), "attribute of every module"),
    "dunder name": (tensor(0, 0, "__class__"), "attribute of every module"),
    "tensor inside a tensor": (tensor(1, 0, "layers.0.weight.bias"), "lies inside"),
    "long name": (tensor(0, 0, "a" * 10_000), "identifiers or digits"),
    "unknown dtype": (tensor(0, 1, "object"), "dtype"),
    "negative size": (tensor(0, 2, [-1, 4]), "negative size"),
    "huge tensor": (tensor(0, 2, [2**40, 2**20]), "too large"),
    "too many dimensions": (tensor(0, 2, [1] * 99), "dimensions"),
    "unknown kind of tensor": (tensor(0, 3, "code"), "kind"),
    "trainable integers": (tensor(0, 1, "int64"), "cannot be trained"),
    "trainable that is no boolean": (tensor(0, 4, 1), "a tensor must be"),
    "loss that is an input": (changed("loss", 0), "loss is not the result"),
    "loss that does not exist": (changed("loss", 10**6), "loss is not the result"),
    "metric that does not exist": (changed("metric", 10**6), "metric is not the result"),
    "no inputs": (changed("inputs", 0), "inputs"),
    "a million inputs": (changed("inputs", 10**6), "at most"),
    "inputs that are a number with a fraction": (changed("inputs", 1.5), "must be an integer"),
    "integer over 64 bits": (changed("inputs", 2**70), "must be an integer"),
    "other format version": (changed("format", 1), "format 1"),
    "format version that is a boolean": (changed("format", True), "format True"),
    "other torch version": (changed("torch", "2.12.0"), "torch '2.12.0'"),
    "missing field": (drop("metric"), "exactly the fields"),
    "extra field": (changed("code", "import os"), "exactly the fields"),
    "missing version": (drop("format"), "no format version"),
    "name with control characters": (changed("name", "\u0007"), "printable"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_graph_is_refused(case: str) -> None:
    change, words = HOSTILE[case]
    raw = raw_graph()
    change(raw)
    with pytest.raises(GraphFormatError, match=words):
        from_bytes(json.dumps(raw).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04\x95",
        b"not json",
        b"[" * 100_000,
        b'{"format":' + b"1" * 5000 + b"}",
        b"null",
        b"[]",
        PERCEPTRON[:-10],
        PERCEPTRON.replace(b"0.3", b"NaN", 1),
        PERCEPTRON.replace(b"0.3", b"Infinity", 1),
        PERCEPTRON.replace(b"0.3", b"1e999", 1),
        PERCEPTRON.replace(b'"loss":', b'"loss":1,"loss":', 1),
    ],
)
def test_bytes_that_are_no_graph_are_refused(data: bytes) -> None:
    with pytest.raises(GraphFormatError):
        from_bytes(data)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(PERCEPTRON) - 1), st.binary(min_size=1, max_size=4))
def test_damaged_bytes_give_a_graph_or_a_format_error_and_nothing_else(position: int, noise: bytes) -> None:
    damaged = PERCEPTRON[:position] + noise + PERCEPTRON[position + len(noise) :]
    try:
        from_bytes(damaged)
    except GraphFormatError as error:
        assert error.message


def test_infinite_constants_survive() -> None:
    def hide(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return output.masked_fill(labels > 0, float("-inf")).softmax(-1).nan_to_num().mean()

    graph = capture(torch.nn.Linear(4, 4), hide, (torch.randn(8, 4),), (torch.randn(8, 4),)).graph
    assert b'{"infinity":-1}' in to_bytes(graph)
    assert from_bytes(to_bytes(graph)) == graph


def test_every_allowed_operation_exists_in_this_torch_and_has_a_signature() -> None:
    for op in ALLOWED_OPS:
        assert callable(resolve(op))
        assert signature_of(op).op == op


def test_tables_about_operations_speak_of_allowed_operations_only() -> None:
    for table in (CREATES_TENSORS, FREE_OPS, NO_GRADIENT, RANDOM_OPS, set(INTEGER_OUTPUTS), set(EVALUATION_SETTINGS)):
        assert table <= ALLOWED_OPS


def test_evaluation_settings_point_at_training_arguments() -> None:
    names = {signature_of(op).parameters[position].name for op, (position, _, _) in EVALUATION_SETTINGS.items()}
    assert names == {"train", "training", "use_input_stats", "dropout_p"}


@pytest.mark.parametrize(
    "op", ["aten.from_file.default", "aten.empty.memory_format", "aten.save.default", "builtins.eval", "", "aten..", "aten"]
)
def test_operations_that_are_not_listed_cannot_be_resolved(op: str) -> None:
    with pytest.raises(GraphFormatError):
        resolve(op)
