"""Runs a captured graph operation by operation and compares what happens with what the analysis says will."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from roost.capture.analysis import GraphAnalysis
from roost.capture.arguments import Argument, ValueRef, to_torch
from roost.capture.export import Captured
from roost.capture.graph import GraphNode
from roost.capture.ops import resolve
from roost.capture.signatures import signature_of


def surprises(captured: Captured, data: tuple[Tensor, ...]) -> list[str]:
    """Return every effect of the training forward that the analysis does not foresee: writes, shared memory, random numbers, gradients."""
    graph, analysis = captured.graph, GraphAnalysis(captured.graph)
    values: dict[int, Any] = {number: item.clone() for number, item in enumerate(data)}
    for index, record in enumerate(graph.tensors):
        values[len(data) + index] = captured.tensors[record.name].clone().requires_grad_(record.trainable)
    found: list[str] = []
    for position in analysis.needed_in_training(0, len(graph.nodes), [graph.loss]):
        found += _run(position, graph.nodes[position], analysis, values)
    # An update may need a gradient of every value that carries one: none may have been missed.
    missed = [number for number, value in values.items() if _has_gradient(value) and number not in analysis._from_parameters()]
    return found + [f"value {number} carries a gradient" for number in missed]


def _run(position: int, node: GraphNode, analysis: GraphAnalysis, values: dict[int, Any]) -> Iterator[str]:
    effects = analysis.effects[position]
    used = {number: values[number] for number in node.uses if isinstance(values[number], Tensor)}
    versions = {number: value._version for number, value in used.items()}
    state = torch.get_rng_state()
    function = resolve(node.op)
    result = function(*(_given(item, values) for item in node.args), **{name: _given(item, values) for name, item in node.kwargs})
    results = list(result) if signature_of(node.op).unpack else [result]
    values.update(zip(node.outputs, results, strict=True))
    what = f"{node.op} at {position}"
    if not effects.random and not torch.equal(state, torch.get_rng_state()):
        yield f"{what} draws random numbers"
    written = {analysis.memory[number] for number in effects.written}
    for number, value in used.items():
        if value._version != versions[number] and analysis.memory[number] not in written:
            yield f"{what} changes value {number}"
        for output, item in zip(node.outputs, results, strict=True):
            shared = isinstance(item, Tensor) and item.numel() and _address(item) == _address(value)
            if shared and analysis.memory[output] != analysis.memory[number]:
                yield f"{what} returns the memory of value {number}"


def _given(argument: Argument, values: dict[int, Any]) -> Any:
    if isinstance(argument, ValueRef):
        return values[argument.value]
    if isinstance(argument, tuple):
        return [_given(item, values) for item in argument]
    return to_torch(argument)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
