"""Rules on arguments that torch's kernels rely on without checking them: breaking one would read or write foreign memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from roost.errors import GraphFormatError

_GATES = {"aten.lstm.input": 4, "aten.gru.input": 3, "aten.rnn_tanh.input": 1, "aten.rnn_relu.input": 1}
RECURRENT_OPS = frozenset(_GATES)
ATTENTION_OP = "aten.scaled_dot_product_attention.default"
_ATTENTION_DIMENSIONS = 4
_LSTM_GATES = 4
_INDEX_DTYPES = (torch.int32, torch.int64)
_INDEX_PARAMETERS = {
    "aten.index_select.default": "index",
    "aten.gather.default": "index",
    "aten.index_add.default": "index",
    "aten.embedding.default": "indices",
    "aten.scatter.src": "index",
    "aten.scatter.value": "index",
    "aten.scatter_add.default": "index",
}
"""Arguments whose dtype kernels look at late, or not at all on the meta device."""


def check_shapes(op: str, given: Mapping[str, Any]) -> None:
    """Raise GraphFormatError if tensors among the arguments of a call do not fit together.

    `given` has the arguments by name, tensors on the meta device.
    """
    index = _INDEX_PARAMETERS.get(op)
    if index is not None and given[index].dtype not in _INDEX_DTYPES:
        raise GraphFormatError(f"{op}: argument {index!r} must have integers of 32 or 64 bits")
    rule = _RULES.get(op)
    if rule is not None and not rule(given):
        raise GraphFormatError(f"{op}: the shapes of its tensors do not fit together")


def keeps_scores(op: str, given: Mapping[str, Any]) -> bool:
    """Return False for attention that never holds all scores at once, though its definition makes them; True for all else.

    The conditions are those under which torch's own choice falls on a fused kernel.
    """
    if op != ATTENTION_OP:
        return True
    query, key, value = given["query"], given["key"], given["value"]
    mask = given.get("attn_mask")
    fused = (
        not given.get("dropout_p")
        and all(item.dim() == _ATTENTION_DIMENSIONS and item.stride(-1) == 1 and item.numel() > 0 for item in (query, key, value))
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.dtype == key.dtype == value.dtype
        and (mask is None or mask.dim() in (2, _ATTENTION_DIMENSIONS))
    )
    return not fused


def _weight_norm(given: Mapping[str, Any]) -> bool:
    weight, scale, dimension = given["v"], given["g"], given.get("dim", 0)
    if not -weight.dim() <= dimension < weight.dim():
        return False
    expected = [1] * weight.dim()
    expected[dimension] = weight.shape[dimension]
    return list(scale.shape) == expected and scale.dtype == weight.dtype


def _written_in_place(given: Mapping[str, Any]) -> bool:
    shapes = [item.shape for item in (given["self"], given["other"]) if isinstance(item, Tensor)]
    return given["out"].shape == torch.broadcast_shapes(*shapes)


def _recurrent(op: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return the rule of a recurrent layer: fast kernels read weights of exactly these sizes, where the definition would broadcast."""

    def rule(given: Mapping[str, Any]) -> bool:
        states = list(given["hx"]) if isinstance(given["hx"], list) else [given["hx"]]
        data, weights = given["input"], given["params"]
        if len(states) != (2 if _GATES[op] == _LSTM_GATES else 1) or any(item.dim() != 3 for item in (data, *states)):
            return False
        ways = 2 if given["bidirectional"] else 1
        batch = data.shape[0 if given["batch_first"] else 1]
        width, hidden = states[0].shape[2], states[-1].shape[2]
        expected: list[list[int]] = []
        for layer in range(min(given["num_layers"], len(weights))):
            rows, columns = _GATES[op] * hidden, data.shape[2] if layer == 0 else width * ways
            biases = [[rows]] * 2 if given["has_biases"] else []
            projection = [[width, hidden]] if width != hidden else []
            expected += [[rows, columns], [rows, width], *biases, *projection] * ways
        fits = [list(item.shape) for item in weights] == expected
        same = {item.dtype for item in (data, *states, *weights)} == {data.dtype}
        return fits and same and all(list(item.shape[:2]) == [given["num_layers"] * ways, batch] for item in states)

    return rule


_RULES: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "aten._weight_norm.default": _weight_norm,
    "aten.div.out": _written_in_place,
    **{op: _recurrent(op) for op in RECURRENT_OPS},
}
