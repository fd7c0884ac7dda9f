"""Captures a model with its loss and metric as a graph, and its tensors by the model's own names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roost.capture.analysis import GraphAnalysis
from roost.capture.arguments import DTYPE_NAMES
from roost.capture.graph import Graph, check_tensor_name
from roost.capture.names import NamedTensors, name_tensors
from roost.capture.tracing import Loss, Metric, TracedTraining, trace
from roost.capture.translation import Translation
from roost.errors import GraphFormatError, NotCapturableError


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A captured model: the graph, and what its tensors held when it was captured."""

    graph: Graph
    tensors: dict[str, Tensor]
    """Copies of all parameters and buffers, on the CPU, by the model's own names (the first name of a tied one)."""
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
    metric: Metric | None = None,
    name: str = "model",
) -> Captured:
    """Return `model` and `loss` as a graph that runs for any batch size, the model being left as it was.

    `inputs` and `labels` are one batch of samples (first dimension: samples). `loss(output, *labels)` is the mean over the
    samples of a scalar loss; `metric(output, *labels)` the mean of a number per sample. Raises NotCapturableError or
    UnsupportedOpError, both naming the line of the user's code where there is one.
    """
    _check_arguments(loss, inputs, labels)
    data = tuple(_as_traced(item) for item in (*inputs, *labels))
    wrapped = TracedTraining(model, loss, metric, len(inputs))
    exported = trace(wrapped, data)
    named = name_tensors(wrapped, exported)
    translation = Translation(exported, named.canonical)
    try:
        graph = translation.graph(name=name, inputs=len(inputs), labels=len(labels), records=named.records, has_metric=metric is not None)
        for tensor_name in named.tensors:
            check_tensor_name(tensor_name)
    except GraphFormatError as error:
        raise NotCapturableError(f"the graph of the model breaks the rules of the format: {error.message}") from error
    _check_trainable(graph, named)
    copies = {tensor_name: tensor.detach().cpu().clone() for tensor_name, tensor in named.tensors.items()}
    return Captured(graph=graph, tensors=copies, aliases=named.aliases, extras=named.extras)


def _as_traced(data: Tensor) -> Tensor:
    """Return the data contiguous, as nodes receive it, and doubled if it is one sample: torch.export writes sizes of 1 into the graph."""
    return torch.cat([data, data]) if data.shape[0] == 1 else data.contiguous()


def _check_arguments(loss: Loss, inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> None:
    if not inputs:
        raise NotCapturableError("the model gets no inputs")
    for index, item in enumerate((*inputs, *labels)):
        if item.dtype not in DTYPE_NAMES:
            raise NotCapturableError(f"data input {index} has dtype {item.dtype}; use one of {sorted(DTYPE_NAMES.values())}")
        if item.dim() == 0:
            raise NotCapturableError(f"data input {index} has no dimension for the samples")
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
