"""Runs torch.export on model, loss and metric together, with guards against what it would get silently wrong."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from traceback import FrameSummary
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from roost.capture.lines import user_frame, user_line, user_line_of_stack, whole_stacks
from roost.capture.traps import (
    check_hooks,
    generator_states,
    have_drawn,
    kept_attributes,
    kept_generator_states,
    line_that_draws,
    noted_data_uses,
    refused_traps,
)
from roost.errors import NotCapturableError

Loss = Callable[..., Tensor]
Metric = Callable[..., Tensor]

MODEL_PART = "model"
PART_NAMES = {"loss_part": "loss", "metric_part": "metric"}
"""Attributes of TracedTraining besides the model, and what people call them."""

_LARGEST_LOWER_BOUND = 2
"""torch.export assumes at least two samples whatever the model does; more than that is a condition of the model."""


@dataclass(frozen=True, kw_only=True)
class CallLayout:
    """How the data inputs of a graph, which have an order and nothing else, become the call of the user's model."""

    positional: int
    """So many are passed by position."""
    keywords: tuple[str, ...] = ()
    """The following ones are passed by these names. What remains are labels, for the loss and the metric."""
    label_keywords: tuple[str, ...] = ()
    """Those of `keywords` that the loss and the metric get as labels, too, after all others."""

    @property
    def inputs(self) -> int:
        """How many data inputs the model gets."""
        return self.positional + len(self.keywords)

    def names(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Return a name for each data input, given those of the labels."""
        return (*(f"input_{index}" for index in range(self.positional)), *self.keywords, *labels)

    def call(self, model: Callable[..., Any], data: Sequence[Tensor]) -> Any:
        """Return the model's output for `data`, whose labels are left out."""
        named = dict(zip(self.keywords, data[self.positional : self.inputs], strict=True))
        return model(*data[: self.positional], **named)

    def labels(self, data: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what the loss and the metric get after the output."""
        shared = (data[self.positional + self.keywords.index(name)] for name in self.label_keywords)
        return (*data[self.inputs :], *shared)


def own_loss(output: Any, *labels: Tensor) -> Tensor:
    """Return the loss that a model computed itself: the output's `loss`, or its first item. For models that are given their labels.

    Raises TypeError, naming what came instead, if there is none.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    if isinstance(output, Tensor):
        found = output
    if not isinstance(found, Tensor):
        raise TypeError(f"the model returned a {type(output).__name__} without a loss; does the batch have labels?")
    return found


class TracedTraining(nn.Module):
    """Model, loss and metric as one module: takes the model's inputs, then the labels; returns (loss,) or (loss, metric)."""

    def __init__(self, model: nn.Module, loss: Loss, metric: Metric | None, layout: CallLayout) -> None:
        super().__init__()
        self.model = model
        self.loss_part = loss
        self.metric_part = metric
        self.layout = layout

    def forward(self, *data: Tensor) -> tuple[Tensor, ...]:
        output = self.layout.call(self.model, data)
        labels = self.layout.labels(data)
        value = self.loss_part(output, *labels)
        if self.metric_part is None:
            return (value,)
        return value, self.metric_part(output, *labels)


def trace(wrapped: TracedTraining, data: tuple[Tensor, ...], dynamic: Sequence[frozenset[int]]) -> ExportedProgram:
    """Return the exported program of `wrapped` in training mode, with a dynamic first dimension of every input.

    `dynamic` names for each input the further dimensions that may vary; where the model needs a fixed size, it is fixed to
    that of `data`. The module's attributes and all random generators are left as they were. Raises NotCapturableError, naming the
    user's line where there is one.
    """
    check_hooks(wrapped, f"{MODEL_PART}.")
    with _kept_modes(wrapped), kept_attributes(wrapped), _kept_generators():
        before = generator_states()
        exported = _export(wrapped, data, dynamic)
        generator = have_drawn(before)
        if generator:
            where = line_that_draws(lambda: _export(wrapped, data, dynamic))
            raise NotCapturableError(
                f"the model draws from {generator}, which would become a constant{where}",
                hint="Draw with torch.rand or torch.randn: the job's seed then decides what is drawn.",
            )
    _check_dynamic(exported, data)
    return exported


def trace_twice(
    wrapped: TracedTraining, data: tuple[Tensor, ...], dynamic: Sequence[frozenset[int]]
) -> tuple[ExportedProgram, ExportedProgram, list[str]]:
    """Return two exported programs, and the lines where the model assigns plain attributes of its modules.

    Afterwards everything is as it was. Raises NotCapturableError as `trace` does.
    """
    assigned: list[str] = []
    with _kept_modes(wrapped), kept_attributes(wrapped), _kept_generators():
        return _export(wrapped, data, dynamic, assigned), _export(wrapped, data, dynamic), assigned


def _export(
    wrapped: TracedTraining, data: tuple[Tensor, ...], dynamic: Sequence[frozenset[int]], assigned: list[str] | None = None
) -> ExportedProgram:
    shapes = {"data": tuple(dict.fromkeys((0, *sorted(varying)), Dim.AUTO) for varying in dynamic)}
    with torch.enable_grad(), refused_traps(assigned), whole_stacks(), noted_data_uses() as uses, _quiet_export():
        try:
            return torch.export.export(wrapped.train(), data, strict=False, dynamic_shapes=shapes)
        except GuardOnDataDependentSymNode as error:
            where = user_line(error.__traceback__) or user_line_of_stack(str(error))
            raise NotCapturableError(
                f"the model's Python code decides by the values of a tensor{where}",
                hint="Write the decision with torch.where, so that both branches are computed; see docs/models.md.",
            ) from error
        # torch.export raises these for what it cannot trace, and for errors of the model itself.
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, AssertionError, LookupError) as error:
            where = user_line(error.__traceback__)
            if not where and uses:
                raise NotCapturableError(
                    f"the model uses .data, which torch.export cannot follow{uses[-1]}", hint="Use .detach() or torch.no_grad instead."
                ) from error
            reason = str(error).strip().splitlines()
            raise NotCapturableError(
                f"torch.export refuses the model{where}: {reason[0][:300] if reason else type(error).__name__}",
                hint=None
                if where
                else "Call loss(model(inputs), labels) on one batch in plain PyTorch; docs/models.md lists what is refused.",
            ) from error


@contextmanager
def _kept_modes(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def _kept_generators() -> Iterator[None]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices), kept_generator_states(), warnings.catch_warnings():
        # Recurrent layers list their weights as plain attributes too; torch.export puts them back.
        warnings.filterwarnings("ignore", message="The tensor attribute")
        yield


@contextmanager
def _quiet_export() -> Iterator[None]:
    """Keep torch.export from writing the half-made graph to the terminal when it fails: our error says what is wrong."""
    shapes = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    disabled = shapes.disabled
    shapes.disabled = True
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        shapes.disabled = disabled


def traced_shapes(exported: ExportedProgram) -> tuple[tuple[int | None, ...], ...]:
    """Return the shape of every data input, with None for a dimension that may vary."""
    placeholders = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    shapes = (placeholders[str(name)].meta["val"].shape for name in exported.graph_signature.user_inputs)
    # A size that export has fixed may still be a symbol, with a constant behind it.
    return tuple(tuple(size.node.maybe_as_int() if isinstance(size, torch.SymInt) else int(size) for size in shape) for shape in shapes)


def _check_dynamic(exported: ExportedProgram, data: Sequence[Tensor]) -> None:
    """Raise NotCapturableError if the graph holds only for some batch sizes."""
    for index, (shape, item) in enumerate(zip(traced_shapes(exported), data, strict=True)):
        if shape[0] is not None:
            where = _deciding_line(exported, item.shape[0]) or _line_with(exported, item.shape[0])
            raise NotCapturableError(
                f"the batch size {item.shape[0]} of data input {index} is written into the code of model, loss or metric{where}",
                hint="Use x.shape[0] or -1 for the batch size, not a number or len(x); the last batch of an epoch is smaller.",
            )
    samples = _batch_symbols(exported)
    for symbol, bounds in exported.range_constraints.items():
        # A limit of another size, such as the longest sequence that has positions, is the model's own.
        too_many = bounds.upper.is_number and bounds.upper.is_finite and bounds.upper < 2**31
        limited = symbol in samples and (bounds.lower > _LARGEST_LOWER_BOUND or too_many)
        if limited:
            where = _deciding_line(exported, symbol)
            raise NotCapturableError(
                f"the model's code decides by the batch size{where}; the graph holds only for {bounds.lower} to {bounds.upper} samples",
                hint="Remove the condition on the batch size; the last batch of an epoch is smaller.",
            )


def _batch_symbols(exported: ExportedProgram) -> frozenset[Any]:
    """Return the symbols that stand for the number of samples."""
    placeholders = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    sizes = (placeholders[str(name)].meta["val"].shape[0] for name in exported.graph_signature.user_inputs)
    return frozenset(symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols)


def _deciding_line(exported: ExportedProgram, item: Any) -> str:
    """Return ' at FILE:LINE: CODE' of the first decision about sizes, if possible one that names `item`; empty if no line is known."""
    values = (node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder")
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is None or mode.shape_env is None:
        return ""
    frames = [(guard.expr, guard.sloc.framework_loc) for guard in mode.shape_env.guards]
    lines = [(expression, user_frame(frame)) for expression, frame in frames if isinstance(frame, FrameSummary)]
    known = [(expression, line) for expression, line in lines if line]
    return next((line for expression, line in known if item in expression.atoms()), known[0][1] if known else "")


def _line_with(exported: ExportedProgram, size: int) -> str:
    """Return ' at FILE:LINE: CODE' of the first operation that has the number `size` among its arguments; empty if there is none."""
    for node in exported.graph.nodes:
        numbers = [item for argument in node.args for item in (argument if isinstance(argument, list | tuple) else (argument,))]
        if node.op == "call_function" and any(type(item) is int and item == size for item in numbers):
            line = user_line_of_stack(node.stack_trace)
            if line:
                return line
    return ""
