"""Translates an exported FX graph into graph nodes, refusing what nodes would not run."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

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
from roost.capture.lines import user_line_of_stack
from roost.capture.ops import ALLOWED_OPS, SCALAR_OPS
from roost.capture.signatures import signature_of
from roost.capture.tracing import MODEL_PART, PART_NAMES
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
    "aten.to.other": "aten.to.dtype",
    "aten.type_as.default": "aten.to.dtype",
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
    "aten.to.dtype_layout": "aten.to.dtype",
    "aten.to.device": "aten.to.dtype",
}
"""Operations that read memory nobody wrote, or name a device or another tensor's dtype, by the allowed one with the same result."""

_TAKES_DTYPE_OF_OTHER = frozenset({"aten.to.other", "aten.type_as.default"})

_PLACEMENT = frozenset({"device", "layout", "pin_memory", "non_blocking", "generator"})
"""Keywords about where a tensor lies: the stage that runs the node decides that."""

_SCALAR_NAMES = {function: name for name, function in SCALAR_OPS.items()}

_SPARSE_GRADIENT = {"aten.embedding.default": 4}
"""Operations that can give a sparse gradient, and the position of the argument that says so."""

_HIGHER_ORDER_HINTS = {
    "cond": "Write the decision with torch.where, so that both branches are computed.",
}


class Translation:
    """One exported program on its way to a Graph."""

    def __init__(self, exported: ExportedProgram, tensor_names: Mapping[str, str]) -> None:
        self._exported = exported
        self._tensor_names = tensor_names
        """Placeholder name -> tensor name."""
        self._nodes: list[GraphNode] = []
        self._origins: list[fx.Node] = []
        """For each of `nodes` what it was made from."""
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
        results = self._translate_all(module, inside_no_grad=False)
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
        self._check_parameters(graph)
        return prune(graph)

    def _check_parameters(self, graph: Graph) -> None:
        """Raise NotCapturableError, with the line, if the forward changes a parameter."""
        analysis = GraphAnalysis(graph)
        if analysis.written_parameters:
            memory = min(analysis.written_parameters)
            records = [record for record in map(graph.tensor_of, analysis.members[memory]) if record is not None]
            where = _line(self._origins[analysis.writes[memory][0]])
            raise NotCapturableError(
                f"the forward changes the parameter {records[0].name!r} in place{where}",
                hint="Change parameters with the optimizer only, or register the tensor as a buffer.",
            )

    def _translate_all(self, module: fx.GraphModule, *, inside_no_grad: bool) -> tuple[Any, ...]:
        """Translate every node of `module` and return what its outputs became."""
        outputs: tuple[Any, ...] = ()
        idle = _only_asserted(module)
        for node in module.graph.nodes:
            if node in idle:
                continue
            if node.op == "output":
                outputs = tuple(self._values[item] if isinstance(item, fx.Node) else item for item in node.args[0])
            elif node.op == "call_function":
                _check_sizes_known(node)
                self._translate(module, node, inside_no_grad=inside_no_grad)
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
        _check_settings(node, op)
        args = [self._argument(item, node) for item in node.args]
        kwargs = {key: self._argument(item, node) for key, item in node.kwargs.items() if key not in _PLACEMENT}
        if op == "aten.to.device":
            del args[1]
        if op == "aten.empty.memory_format":
            kwargs.pop("memory_format", None)
        if op in _TAKES_DTYPE_OF_OTHER:
            args[1] = self._argument(node.meta["val"].dtype, node)
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
        self._origins.append(node)
        refs = tuple(ValueRef(number) for number in numbers)
        self._values[node] = refs if signature.unpack else refs[0]

    def _inline(self, module: fx.GraphModule, node: fx.Node, *, inside_no_grad: bool) -> None:
        """Put the nodes of a region in place."""
        kind = str(node.target)
        if kind == "wrap_with_set_grad_enabled":
            enabled, region, *inputs = node.args
            if enabled and inside_no_grad:
                raise NotCapturableError(f"gradients are enabled inside a no_grad region{_line(node, module)}")
            detached = not enabled
        elif kind == "wrap_with_autocast":
            _, _, enabled, _, region, *inputs = node.args
            if enabled:
                raise NotCapturableError(
                    f"the model enables autocast, which cannot be captured{_line(node, module)}",
                    hint="Leave autocast out; choose the model's dtype instead.",
                )
            # Switching off what is off: nothing around this region is on, or it would have been refused.
            detached = False
        else:
            hint = _HIGHER_ORDER_HINTS.get(kind)
            raise NotCapturableError(f"the model uses {kind}, which cannot be captured{_line(node, module)}", hint=hint)
        assert isinstance(region, fx.Node)
        inner = module.get_submodule(str(region.target))
        assert isinstance(inner, fx.GraphModule)
        given = {
            placeholder: self._argument(item, node)
            for placeholder, item in zip(inner.graph.find_nodes(op="placeholder"), inputs, strict=True)
        }
        self._values[node] = self._inlined(inner, given, detached=detached, inside_no_grad=inside_no_grad)

    def _inlined(
        self, inner: fx.GraphModule, given: Mapping[fx.Node, Argument], *, detached: bool, inside_no_grad: bool
    ) -> tuple[Any, ...]:
        """Translate the nodes of a region and return what its outputs became.

        On detached inputs nothing in it carries a gradient. An input that it only hands on, or changes in place, is afterwards
        the same tensor as before, and keeps its gradient.
        """
        for placeholder, value in given.items():
            if detached and isinstance(placeholder.meta.get("val"), torch.Tensor):
                self._emit(placeholder, "aten.detach.default", (value,), {})
            else:
                self._values[placeholder] = value
        results = self._translate_all(inner, inside_no_grad=inside_no_grad or detached)
        outputs = inner.graph.output_node().args[0]
        assert isinstance(outputs, list | tuple)
        sources = [_source_in_place(item) for item in outputs]
        return tuple(result if source is None else given.get(source, result) for result, source in zip(results, sources, strict=True))

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


def _source_in_place(item: Any) -> fx.Node | None:
    """Return the node whose tensor `item` is, itself or after changes in place."""
    while isinstance(item, fx.Node) and isinstance(item.target, torch._ops.OpOverload):
        schema = item.target._schema
        first = schema.arguments[0].alias_info if schema.arguments else None
        if first is None or not first.is_write or len(schema.returns) != 1:
            break
        item = item.args[0]
    return item if isinstance(item, fx.Node) else None


def _only_asserted(module: fx.GraphModule) -> set[fx.Node]:
    """Return the assertions, and the arithmetic on sizes that nothing but them needs."""
    found: set[fx.Node] = set()
    for node in reversed(module.graph.nodes):
        if node.op != "call_function":
            continue
        is_tensor = isinstance(node.target, torch._ops.OpOverload)
        number = not (is_tensor or isinstance(node.target, torch._ops.HigherOrderOperator) or node.target is operator.getitem)
        if (is_tensor and str(node.target) in _ASSERTIONS) or (number and all(user in found for user in node.users)):
            found.add(node)
    return found


def _check_sizes_known(node: fx.Node) -> None:
    """Raise NotCapturableError if the result of `node` is a number, or has a size, that the values of the data decide."""
    values = node.meta.get("val")
    for value in values if isinstance(values, list | tuple) else (values,):
        numbers = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) and free_unbacked_symbols(number) for number in numbers):
            raise NotCapturableError(
                f"a number or a size depends on the values of the data{_line(node)}",
                hint="Keep tensors instead of .item() or .tolist(), and use torch.where or a mask instead of nonzero, unique or "
                "indexing with booleans, so that every size is known from the sizes of the inputs.",
            )


def _check_settings(node: fx.Node, op: str) -> None:
    """Raise NotCapturableError for arguments that would not mean the same on a node."""
    if node.kwargs.get("generator") is not None:
        raise NotCapturableError(
            f"the model draws from a generator of its own{_line(node)}", hint="Leave 'generator' out: the job's seed decides what is drawn."
        )
    position = _SPARSE_GRADIENT.get(op)
    if position is not None and (node.kwargs.get("sparse") or (len(node.args) > position and node.args[position])):
        raise NotCapturableError(f"the model asks for a sparse gradient{_line(node)}", hint="Leave sparse=True out.")


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
