"""Translates an exported FX graph into graph nodes, refusing what nodes would not run."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from roost.capture.analysis import GraphAnalysis
from roost.capture.arguments import (
    DTYPE_NAMES,
    MEMORY_FORMAT_NAMES,
    Argument,
    DtypeName,
    MemoryFormatName,
    ValueRef,
    replace_references,
)
from roost.capture.graph import MAX_LABEL, DataRecord, Graph, GraphNode, running_torch_version
from roost.capture.ops import ALLOWED_OPS, SCALAR_OPS
from roost.capture.signatures import signature_of
from roost.capture.tracing import MODEL_PART, PART_NAMES, user_line_of_stack
from roost.errors import NotCapturableError, UnsupportedOpError
from roost.types import TensorRecord

_ASSERTIONS = frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten._assert_async.msg",
        "aten._assert_scalar.default",
        "aten.sym_constrain_range_for_size.default",
        "aten.sym_constrain_range.default",
    }
)
"""Checks without a result; they are left out."""

_REPLACEMENTS = {
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
    "aten.to.dtype_layout": "aten.to.dtype",
    "aten.to.device": "aten.to.dtype",
}
"""Operations that read memory nobody wrote, or name a device, by the allowed one with the same result."""

_PLACEMENT = frozenset({"device", "layout", "pin_memory", "non_blocking", "generator"})
"""Keywords about where a tensor lies: the stage that runs the node decides that."""

_SCALAR_NAMES = {function: name for name, function in SCALAR_OPS.items()}

_HIGHER_ORDER_HINTS = {
    "wrap_with_autocast": "Leave autocast out; choose the model's dtype instead.",
    "cond": "Write the decision with torch.where, so that both branches are computed.",
}


class Translation:
    """One exported program on its way to a Graph."""

    def __init__(self, exported: ExportedProgram, tensor_names: Mapping[str, str]) -> None:
        self._exported = exported
        self._tensor_names = tensor_names
        """Placeholder name -> tensor name."""
        self._nodes: list[GraphNode] = []
        self._next = 0
        self._values: dict[fx.Node, Any] = {}
        """What each FX node became: a ValueRef, a tuple of them, or a constant."""

    def graph(
        self, *, name: str, data: tuple[DataRecord, ...], inputs: int, records: Mapping[str, TensorRecord], has_metric: bool
    ) -> Graph:
        """Return the graph without the nodes and tensors that nothing needs. Raises UnsupportedOpError, NotCapturableError."""
        module = self._exported.graph_module
        names = list(dict.fromkeys(self._tensor_names.values()))
        numbers = {tensor_name: len(data) + index for index, tensor_name in enumerate(names)}
        placeholders = [str(item) for item in self._exported.graph_signature.user_inputs]
        for node in module.graph.nodes:
            if node.op == "placeholder":
                known = self._tensor_names.get(node.name)
                self._values[node] = ValueRef(placeholders.index(node.name) if known is None else numbers[known])
        self._next = len(data) + len(names)
        results = self._translate_all(module, detach_inputs=False)
        _check_results(module, has_metric)
        graph = Graph(
            name=name,
            torch_version=running_torch_version(),
            data=data,
            inputs=inputs,
            tensors=tuple(records[tensor_name] for tensor_name in names),
            nodes=tuple(self._nodes),
            loss=_number(results[0], "loss"),
            metric=_number(results[1], "metric") if has_metric else None,
        )
        return prune(graph)

    def _translate_all(self, module: fx.GraphModule, *, detach_inputs: bool) -> tuple[Any, ...]:
        """Translate every node of `module` and return what its outputs became."""
        outputs: tuple[Any, ...] = ()
        for node in module.graph.nodes:
            if node.op == "output":
                outputs = tuple(self._values[item] if isinstance(item, fx.Node) else item for item in node.args[0])
            elif node.op == "call_function":
                self._translate(module, node, inside_no_grad=detach_inputs)
            elif node.op not in ("placeholder", "get_attr"):
                raise NotCapturableError(f"torch.export left a {node.op} node, which cannot be carried out{_line(node)}")
        return outputs

    def _translate(self, module: fx.GraphModule, node: fx.Node, *, inside_no_grad: bool) -> None:
        target = node.target
        if target is operator.getitem:
            source, index = node.args[0], node.args[1]
            assert isinstance(source, fx.Node) and isinstance(index, int)
            self._values[node] = self._values[source][index]
        elif isinstance(target, torch._ops.HigherOrderOperator):
            self._inline(module, node, inside_no_grad=inside_no_grad)
        elif target in _SCALAR_NAMES:
            self._emit(node, _SCALAR_NAMES[target], tuple(self._argument(item, node) for item in node.args), {})
        elif isinstance(target, torch._ops.OpOverload):
            self._translate_overload(node, str(target))
        else:
            raise UnsupportedOpError(f"the model uses {getattr(target, '__name__', str(target))!r}{_line(node)}")

    def _translate_overload(self, node: fx.Node, op: str) -> None:
        if op in _ASSERTIONS:
            return
        args = [self._argument(item, node) for item in node.args]
        kwargs = {key: self._argument(item, node) for key, item in node.kwargs.items() if key not in _PLACEMENT}
        if op == "aten.to.device":
            del args[1]
        if op == "aten.empty.memory_format":
            kwargs.pop("memory_format", None)
        op = _REPLACEMENTS.get(op, op)
        if op == "aten.to.dtype" and len(args) < 2 and kwargs.get("dtype") is None:
            op, kwargs = "aten.alias.default", {}
        if op not in ALLOWED_OPS:
            raise UnsupportedOpError(f"the model uses {op}, which is not on the list of allowed operations{_line(node)}")
        self._emit(node, op, tuple(args), kwargs)

    def _emit(self, node: fx.Node, op: str, args: tuple[Argument, ...], kwargs: Mapping[str, Argument]) -> None:
        signature = signature_of(op)
        count = signature.outputs if signature.outputs is not None else len(node.meta["val"])
        numbers = tuple(range(self._next, self._next + count))
        self._next += count
        self._nodes.append(GraphNode(op=op, args=args, kwargs=tuple(kwargs.items()), outputs=numbers, label=_label(node)))
        refs = tuple(ValueRef(number) for number in numbers)
        self._values[node] = refs if signature.unpack else refs[0]

    def _inline(self, module: fx.GraphModule, node: fx.Node, *, inside_no_grad: bool) -> None:
        """Put the nodes of a no_grad region in place, on detached inputs: nothing in it then carries a gradient."""
        kind = str(node.target)
        if kind != "wrap_with_set_grad_enabled":
            hint = _HIGHER_ORDER_HINTS.get(kind)
            raise NotCapturableError(f"the model uses {kind}, which cannot be captured{_line(node, module)}", hint=hint)
        enabled, region, *inputs = node.args
        if enabled and inside_no_grad:
            raise NotCapturableError(f"gradients are enabled inside a no_grad region{_line(node, module)}")
        assert isinstance(region, fx.Node)
        inner = module.get_submodule(str(region.target))
        assert isinstance(inner, fx.GraphModule)
        placeholders = [item for item in inner.graph.nodes if item.op == "placeholder"]
        for placeholder, item in zip(placeholders, inputs, strict=True):
            value = self._argument(item, node)
            is_tensor = isinstance(placeholder.meta.get("val"), torch.Tensor)
            if is_tensor and not enabled:
                self._emit(placeholder, "aten.detach.default", (value,), {})
            else:
                self._values[placeholder] = value
        self._values[node] = self._translate_all(inner, detach_inputs=inside_no_grad or not enabled)

    def _argument(self, item: Any, node: fx.Node) -> Argument:
        if isinstance(item, fx.Node):
            value: Argument = self._values[item]
            return value
        if isinstance(item, list | tuple):
            return tuple(self._argument(part, node) for part in item)
        if isinstance(item, torch.dtype):
            if item not in DTYPE_NAMES:
                raise UnsupportedOpError(f"the model uses dtype {item}, which nodes do not exchange{_line(node)}")
            return DtypeName(DTYPE_NAMES[item])
        if isinstance(item, torch.memory_format):
            return MemoryFormatName(MEMORY_FORMAT_NAMES[item])
        if isinstance(item, torch.device | torch.layout):
            return None
        if item is None or isinstance(item, bool | int | float | str):
            return item
        raise UnsupportedOpError(f"an argument of {node.target} is a {type(item).__name__}, which a graph cannot hold{_line(node)}")


def prune(graph: Graph) -> Graph:
    """Return `graph` without nodes and tensors that neither loss, metric nor a buffer needs; tensors in the order of first use."""
    analysis = GraphAnalysis(graph)
    total = len(graph.nodes)
    roots = [graph.loss, *([] if graph.metric is None else [graph.metric])]
    kept = sorted(set(analysis.needed_in_training(0, total, roots)) | set(analysis.needed_in_evaluation(0, total, roots)))
    numbers = {value: value for value in range(graph.data_inputs)}
    used = [value for position in kept for value in graph.nodes[position].uses if graph.tensor_of(value) is not None]
    order = list(dict.fromkeys(used))
    numbers.update((value, graph.data_inputs + index) for index, value in enumerate(order))
    following = graph.data_inputs + len(order)
    nodes = []
    for position in kept:
        node = graph.nodes[position]
        outputs = tuple(range(following, following + len(node.outputs)))
        args = tuple(replace_references(item, numbers.__getitem__) for item in node.args)
        kwargs = tuple((key, replace_references(item, numbers.__getitem__)) for key, item in node.kwargs)
        numbers.update(zip(node.outputs, outputs, strict=True))
        following += len(outputs)
        nodes.append(GraphNode(op=node.op, args=args, kwargs=kwargs, outputs=outputs, label=node.label))
    return Graph(
        name=graph.name,
        torch_version=graph.torch_version,
        data=graph.data,
        inputs=graph.inputs,
        tensors=tuple(record for record in map(graph.tensor_of, order) if record is not None),
        nodes=tuple(nodes),
        loss=numbers[graph.loss],
        metric=None if graph.metric is None else numbers[graph.metric],
    )


def _check_results(module: fx.GraphModule, has_metric: bool) -> None:
    results = next(node for node in module.graph.nodes if node.op == "output").args[0]
    for what, item in zip(("loss", "metric")[: 1 + has_metric], results, strict=True):
        value = item.meta.get("val") if isinstance(item, fx.Node) else item
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise NotCapturableError(
                f"the {what} must be a tensor with one number, not {shape}",
                hint=f"Let the {what} return its mean over the samples.",
            )


def _number(result: Any, what: str) -> int:
    if not isinstance(result, ValueRef):
        raise NotCapturableError(f"the {what} does not depend on the model")
    return result.value


def _line(node: fx.Node, module: fx.GraphModule | None = None) -> str:
    """Return where the user's code made `node`; for a region, where its first operation was made."""
    place = user_line_of_stack(node.stack_trace)
    if place or module is None:
        return place
    for item in _regions(node, module):
        for inner in item.graph.nodes:
            place = user_line_of_stack(inner.stack_trace)
            if place:
                return place
    return ""


def _regions(node: fx.Node, module: fx.GraphModule) -> Iterable[fx.GraphModule]:
    for argument in node.args:
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            region = getattr(module, str(argument.target), None)
            if isinstance(region, fx.GraphModule):
                yield region


def _label(node: fx.Node) -> str:
    """Return the path of the module that made `node`, without our own wrapper."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    part, _, rest = path.partition(".")
    label = rest if part == MODEL_PART else ".".join(filter(None, (PART_NAMES.get(part, ""), rest)))
    return "".join(character for character in label if character.isprintable())[:MAX_LABEL]
