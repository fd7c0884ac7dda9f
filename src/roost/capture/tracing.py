"""Runs torch.export on model, loss and metric together, with guards against what it would get silently wrong."""

from __future__ import annotations

import io
import logging
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from roost.errors import NotCapturableError

Loss = Callable[..., Tensor]
Metric = Callable[..., Tensor]

MODEL_PART = "model"
PART_NAMES = {"loss_part": "loss", "metric_part": "metric"}
"""Attributes of TracedTraining besides the model, and what people call them."""

_LIBRARY_ROOTS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_RANDOM_FUNCTIONS = ("random", "randint", "uniform", "randrange", "choice", "choices", "sample", "shuffle", "gauss", "normalvariate")
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
    that of `data`. The module's training flags and all random generators are left as they were. Raises NotCapturableError, naming the
    user's line where there is one.
    """
    shapes = {"data": tuple(dict.fromkeys((0, *sorted(varying)), Dim.AUTO) for varying in dynamic)}
    with ExitStack() as stack:
        stack.enter_context(_kept_modes(wrapped))
        stack.enter_context(_kept_generators())
        stack.enter_context(_refused_functions())
        stack.enter_context(_refused_python_random())
        stack.enter_context(_quiet_export())
        try:
            exported = torch.export.export(wrapped.train(), data, strict=False, dynamic_shapes=shapes)
        except GuardOnDataDependentSymNode as error:
            where = user_line(error.__traceback__)
            raise NotCapturableError(
                f"the model's Python code decides by the values of a tensor{where}",
                hint="Write the decision with torch.where, so that both branches are computed; see docs/models.md.",
            ) from error
        # torch.export raises these for what it cannot trace, and for errors of the model itself.
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, AssertionError, LookupError) as error:
            where = user_line(error.__traceback__)
            reason = str(error).strip().splitlines()
            raise NotCapturableError(
                f"torch.export refuses the model{where}: {reason[0][:300] if reason else type(error).__name__}"
            ) from error
    _check_dynamic(exported, data)
    return exported


def user_line(trace_back: TracebackType | None) -> str:
    """Return ' at FILE:LINE: CODE' for the innermost frame that is neither torch's nor ours; empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(trace_back) if not frame.filename.startswith(_LIBRARY_ROOTS)]
    own = [frame for frame in frames if frame.name == "forward" or not frame.filename.startswith(sys.base_prefix)]
    return _place(own[-1].filename, own[-1].lineno, own[-1].line) if own else ""


def user_line_of_stack(stack_trace: str | None) -> str:
    """Return ' at FILE:LINE: CODE' from the stack trace that torch.export keeps with a node; empty if there is none."""
    lines = (stack_trace or "").splitlines()
    for index in range(len(lines) - 1, -1, -1):
        parts = lines[index].strip().split('"')
        if len(parts) == 3 and parts[0] == "File " and not parts[1].startswith(_LIBRARY_ROOTS):
            number = parts[2].removeprefix(", line ").split(",")[0]
            return _place(parts[1], number, lines[index + 1] if index + 1 < len(lines) else "")
    return ""


def _place(file: str, line: int | str | None, code: str | None) -> str:
    text = (code or "").strip()
    return f" at {file}:{line}" + (f": {text}" if text else "")


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
    state = random.getstate()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        # Recurrent layers list their weights as plain attributes too; torch.export puts them back.
        warnings.filterwarnings("ignore", message="The tensor attribute")
        try:
            yield
        finally:
            random.setstate(state)


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


@contextmanager
def _refused_functions() -> Iterator[None]:
    """Make every custom autograd.Function raise: export would keep its forward and lose its backward."""
    original = torch.autograd.Function.__dict__["apply"]
    thread = threading.get_ident()

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original.__get__(None, cls)(*args, **kwargs)
        raise NotCapturableError(
            f"the custom autograd function {cls.__qualname__} would lose its backward{_calling_line()}",
            hint="Write it with ordinary torch operations, whose gradients are known.",
        )

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


@contextmanager
def _refused_python_random() -> Iterator[None]:
    """Make Python's random functions raise: export would bake one number in as a constant.

    Functions that were imported by name escape the replacement, so the generator's state is compared as well.
    """
    thread = threading.get_ident()
    originals = {name: getattr(random, name) for name in _RANDOM_FUNCTIONS}
    state = random.getstate()

    def refuse(name: str) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return originals[name](*args, **kwargs)
            raise NotCapturableError(f"random.{name} would become a constant{_calling_line()}", hint="Draw with torch.rand instead.")

        return refused

    for name in originals:
        setattr(random, name, refuse(name))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(random, name, function)
    if random.getstate() != state:
        raise NotCapturableError("the model draws from Python's random module, which would become a constant", hint="Draw with torch.rand.")


def _calling_line() -> str:
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_LIBRARY_ROOTS)]
    return _place(frames[-1].filename, frames[-1].lineno, frames[-1].line) if frames else ""


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
            raise NotCapturableError(
                f"the batch size {item.shape[0]} of data input {index} is written into the code of model, loss or metric",
                hint="Use x.shape[0] or -1 for the batch size, not a number or len(x); the last batch of an epoch is smaller.",
            )
    for symbol, bounds in exported.range_constraints.items():
        limited = bounds.lower > _LARGEST_LOWER_BOUND or (bounds.upper.is_number and bounds.upper.is_finite and bounds.upper < 2**31)
        if limited:
            raise NotCapturableError(
                f"the model's code decides by the batch size: the graph holds only for {symbol} in {bounds.lower}..{bounds.upper}",
                hint="Remove the condition on the batch size; the last batch of an epoch is smaller.",
            )
