"""Finds what a model makes anew each time it is traced: the time, numbers from generators of its own, counters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from roost.capture.lines import user_line_of_stack
from roost.capture.tracing import CallLayout, Loss, TracedTraining, trace_twice


def line_that_changes(model: nn.Module, loss: Loss, data: Sequence[Tensor], layout: CallLayout) -> str:
    """Trace the model twice and return ' at FILE:LINE: CODE' of the first operation that is not the same again.

    If all are, it is a line where the model keeps something in a plain attribute for the next call; empty if there is none either.
    Raises NotCapturableError as capture does.
    """
    copies = tuple(item.contiguous() for item in data)
    wrapped = TracedTraining(model, loss, None, layout)
    fixed = [frozenset[int]()] * len(copies)
    first, second, assigned = trace_twice(wrapped, copies, fixed)
    return first_change(first, second) or (assigned[-1] if assigned else "")


def first_change(first: ExportedProgram, second: ExportedProgram) -> str:
    """Return the user's line of the first operation in which two exported programs differ; empty if there is none."""
    found = _first_change(first.graph_module, second.graph_module)
    if found is not None:
        return _line_near(found)
    for name, constant in first.constants.items():
        other = second.constants.get(name)
        if isinstance(constant, Tensor) and not (isinstance(other, Tensor) and torch.equal(constant, other)):
            placeholder = _placeholder_of(first, name)
            return "" if placeholder is None else _line_near(placeholder)
    return ""


def _first_change(first: fx.GraphModule, second: fx.GraphModule) -> fx.Node | None:
    theirs = list(second.graph.nodes)
    for index, node in enumerate(first.graph.nodes):
        if index >= len(theirs) or _description(node) != _description(theirs[index]):
            return node
        region, other = (_region(module, item) for module, item in ((first, node), (second, theirs[index])))
        if region is not None and other is not None:
            inner = _first_change(region, other)
            if inner is not None:
                return inner
    return None


def _description(node: fx.Node) -> str:
    return repr((node.op, str(node.target), node.args, node.kwargs))


def _region(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    region = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return region if isinstance(region, fx.GraphModule) else None


def _placeholder_of(exported: ExportedProgram, constant: str) -> fx.Node | None:
    names = {spec.arg.name for spec in exported.graph_signature.input_specs if spec.target == constant}
    return next((node for node in exported.graph.nodes if node.name in names), None)


def _line_near(node: fx.Node) -> str:
    """Return the line of a node, or of the first one that uses it."""
    return next((line for item in (node, *node.users) if (line := user_line_of_stack(item.stack_trace))), "")
