"""Captures a model with its loss and metric as a graph, and its tensors by the model's own names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from roost.capture.analysis import GraphAnalysis
from roost.capture.arguments import DTYPE_NAMES
from roost.capture.graph import DataRecord, Graph, check_tensor_name
from roost.capture.names import NamedTensors, name_tensors
from roost.capture.tracing import MODEL_PART, CallLayout, Loss, Metric, TracedTraining, trace, traced_shapes
from roost.capture.translation import Translation
from roost.errors import GraphFormatError, NotCapturableError


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A captured model: the graph, and what its tensors held when it was captured."""

    graph: Graph
    tensors: dict[str, Tensor]
    """All parameters and buffers by the model's own names (the first name of a tied one): copies on the CPU, or on meta if the
    model's are."""
    aliases: dict[str, str]
    """Every further name of a tied tensor, with its first name."""
    extras: frozenset[str]
    """Names in `tensors` that the model's state_dict does not have: tensors of the loss, constants, non-persistent buffers."""


def capture(
    model: nn.Module,
    loss: Loss,
    inputs: tuple[Tensor, ...],
    labels: tuple[Tensor, ...],
    *,
    layout: CallLayout | None = None,
    dynamic: Sequence[Collection[int]] | None = None,
    metric: Metric | None = None,
    name: str = "model",
) -> Captured:
    """Return `model` and `loss` as a graph that runs for any batch size, the model being left as it was.

    `inputs` and `labels` are one batch of samples (first dimension: samples). `layout` says which inputs the model takes by
    which keyword (default: all by position). `dynamic` names for each of inputs and labels the further dimensions whose size
    varies from batch to batch (default: none); `graph.data` tells which of them the model leaves free. `loss(output, *labels)`
    is the mean over the samples of a scalar loss; `metric(output, *labels)` the mean of a number per sample. Raises
    NotCapturableError or UnsupportedOpError, both naming the line of the user's code where there is one.
    """
    layout = CallLayout(positional=len(inputs)) if layout is None else layout
    if layout.inputs != len(inputs):
        raise NotCapturableError(f"the layout has places for {layout.inputs} inputs, {len(inputs)} were given")
    data = (*inputs, *labels)
    _check_arguments(loss, inputs, labels)
    varying = [frozenset()] * len(data) if dynamic is None else [frozenset(dimensions) - {0} for dimensions in dynamic]
    data = tuple(_as_traced(item, dimensions) for item, dimensions in zip(data, varying, strict=True))
    wrapped = TracedTraining(model, loss, metric, layout)
    with _without_values(wrapped, data) as traced:
        exported = trace(wrapped, traced, varying)
    named = name_tensors(wrapped, exported)
    translation = Translation(exported, named.canonical)
    try:
        graph = translation.graph(
            name=name,
            data=_data_records(exported, data, layout),
            inputs=layout.inputs,
            records=named.records,
            has_metric=metric is not None,
        )
        for tensor_name in named.tensors:
            check_tensor_name(tensor_name)
    except GraphFormatError as error:
        raise NotCapturableError(f"the graph of the model breaks the rules of the format: {error.message}") from error
    _check_trainable(graph, named)
    copies = {tensor_name: _copy(tensor.detach()) for tensor_name, tensor in named.tensors.items()}
    return Captured(graph=graph, tensors=copies, aliases=named.aliases, extras=named.extras)


@contextmanager
def _without_values(wrapped: nn.Module, data: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the data to trace with: as it is, or without values if the model's parameters have none, on meta.

    As long as the block lasts, such parameters, the buffers and the data are fake tensors that claim to be on the CPU: torch.export
    wants all tensors on one device, and on meta it would lose the constants of the user's code as well.
    """
    on_meta = [name for name, parameter in wrapped.named_parameters() if parameter.is_meta]
    if not on_meta:
        yield data
        return
    real = next((name for name, parameter in wrapped.named_parameters() if not parameter.is_meta), None)
    if real is not None:
        raise NotCapturableError(
            f"parameter {real.removeprefix(MODEL_PART + '.')!r} has values and others are on meta",
            hint="Build the whole model and its loss inside 'with roost.deferred_init():', or none of it.",
        )
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    found: list[tuple[dict[str, Any], str, Any]] = []
    fakes: dict[int, Tensor] = {}
    try:
        for part in wrapped.modules():
            homes: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for tensors in homes:
                for name, item in list(tensors.items()):
                    if item is not None:
                        found.append((tensors, name, item))
                        tensors[name] = fakes.setdefault(id(item), _fake(mode, item))
        yield tuple(mode.from_tensor(item) for item in data)
    finally:
        for tensors, name, item in found:
            tensors[name] = item


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _copy(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.cpu().clone()


def _as_traced(data: Tensor, varying: frozenset[int]) -> Tensor:
    """Return the data contiguous, as nodes receive it, and doubled where it is one sample or a varying dimension is one long:
    torch.export writes sizes of 1 into the graph."""
    for dimension in (0, *sorted(varying)):
        if data.shape[dimension] == 1:
            data = torch.cat([data, data], dim=dimension)
    return data.contiguous()


def _data_records(exported: ExportedProgram, data: Sequence[Tensor], layout: CallLayout) -> tuple[DataRecord, ...]:
    names = layout.names([f"label_{index}" for index in range(len(data) - layout.inputs)])
    shapes = traced_shapes(exported)
    return tuple(
        DataRecord(name=name, dtype=DTYPE_NAMES[item.dtype], shape=shape) for name, item, shape in zip(names, data, shapes, strict=True)
    )


def _check_arguments(loss: Loss, inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> None:
    if not inputs:
        raise NotCapturableError("the model gets no inputs")
    for index, item in enumerate((*inputs, *labels)):
        if item.dtype not in DTYPE_NAMES:
            raise NotCapturableError(f"data input {index} has dtype {item.dtype}; use one of {sorted(DTYPE_NAMES.values())}")
        if item.dim() == 0:
            raise NotCapturableError(f"data input {index} has no dimension for the samples")
    if any(item.shape[0] != inputs[0].shape[0] for item in (*inputs, *labels)):
        raise NotCapturableError(f"the data inputs have different numbers of samples: {[item.shape[0] for item in (*inputs, *labels)]}")
    reduction = getattr(loss, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):
        raise NotCapturableError(
            f"the loss has reduction={reduction!r}, so gradients of micro-batches could not be combined",
            hint="Use reduction='mean': the loss must be the mean over the samples.",
        )


def _check_trainable(graph: Graph, named: NamedTensors) -> None:
    analysis = GraphAnalysis(graph)
    if analysis.written_parameters:
        values = analysis.members[min(analysis.written_parameters)]
        records = [record for record in map(graph.tensor_of, values) if record is not None]
        raise NotCapturableError(
            f"the forward changes the parameter {records[0].name!r} in place",
            hint="Change parameters with the optimizer only, or register the tensor as a buffer.",
        )
    first = graph.data_inputs
    if not any(first + index in analysis.differentiable for index in range(len(graph.tensors))):
        raise NotCapturableError("no trainable parameter has an influence on the loss")
    lost = [record.name for record in graph.tensors if record.trainable and record.name in named.of_loss]
    if lost:
        raise NotCapturableError(f"the loss has a trainable parameter: {lost[0]!r}", hint="Make it a parameter of the model.")
