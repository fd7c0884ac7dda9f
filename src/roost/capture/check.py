"""Compares a captured graph with the eager model it came from, and cut graphs with the whole one, before anything is trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roost.capture.export import Captured
from roost.capture.rehearsal import Rehearsal
from roost.capture.repeatability import line_that_changes
from roost.capture.tracing import CallLayout, Loss
from roost.errors import CaptureMismatchError, NonFiniteLossError, NotCapturableError

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Largest relative difference that counts as the same computation; capture itself adds none on the same machine."""
ROUNDINGS = 8
"""For parameters of low precision: a difference of so many of their dtype's rounding steps counts as the same, if that is more."""

_NEGLIGIBLE = 1e-6
"""Gradients this much smaller than the largest of all are compared with that scale: they are rounding errors of zero."""
_SUM_TOLERANCE = 1e-5
_RATE = 1e-2
"""Learning rate of the step between the two that are compared."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """How close a graph is to the eager model."""

    same_loss: bool
    """True if the training losses are equal bit by bit."""
    max_relative_gradient_error: float
    """Largest over the parameters of max|graph - eager| / max|eager|."""
    worst_parameter: str
    """The parameter it belongs to; empty if all gradients are equal."""


@dataclass(frozen=True, kw_only=True)
class CutReport:
    """How close a cut graph is to the whole one, over two steps."""

    cuts: tuple[int, ...]
    same_loss: bool
    """True if both losses are equal bit by bit."""
    max_relative_error: float
    """Largest over the gradients of both steps and the buffers after them."""
    worst_tensor: str
    """The parameter or buffer it belongs to; empty if all are equal."""

    @property
    def stages(self) -> int:
        """How many stages the cuts make."""
        return len(self.cuts) + 1


@dataclass(frozen=True, kw_only=True)
class _Eager:
    """The user's model and loss as they are called without Roost."""

    model: nn.Module
    loss: Loss
    layout: CallLayout

    def set_training(self, training: bool) -> None:
        self.model.train(training)
        if isinstance(self.loss, nn.Module):
            self.loss.train(training)

    def loss_of(self, data: Sequence[Tensor], seed: int) -> Tensor:
        device = next((item.device for item in self.model.parameters()), torch.device("cpu"))
        copies = [_copy(item, device) for item in data]
        torch.manual_seed(seed)
        output: Any = self.layout.call(self.model, copies)
        return self.loss(output, *self.layout.labels(copies))

    def step(self, data: Sequence[Tensor], seed: int) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Return the loss and the gradient of every trainable parameter; buffers change."""
        self.set_training(True)
        parameters = {name: item for name, item in self.model.named_parameters() if item.requires_grad}
        value = self.loss_of(data, seed)
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        return value.detach().cpu(), {name: None if item is None else item.cpu() for name, item in zip(parameters, found, strict=True)}


def check_against_eager(
    model: nn.Module,
    loss: Loss,
    captured: Captured,
    inputs: tuple[Tensor, ...],
    labels: tuple[Tensor, ...],
    *,
    layout: CallLayout | None = None,
    seed: int,
) -> CheckReport:
    """Return how the graph's loss and gradients on one batch compare with the eager model's, both drawing random numbers from `seed`.

    `layout` is the one the graph was captured with. Raises CaptureMismatchError, naming the worst parameter and the likely reason,
    if a gradient, a buffer or the loss differs by more than TOLERANCE, and if evaluation or a batch with one sample less gives
    another loss. The model is left as it was.
    """
    eager = _Eager(model=model, loss=loss, layout=CallLayout(positional=len(inputs)) if layout is None else layout)
    data = (*inputs, *labels)
    with _kept_state(model, loss), torch.random.fork_rng(devices=[]), torch.enable_grad():
        eager_loss, theirs = eager.step(data, seed)
        _require_finite(captured, eager_loss, data)
        buffers = {name: item.detach().cpu().clone() for name, item in model.named_buffers()}
        whole = Rehearsal(captured)
        graph_loss = whole.step(data, seed)
        gradients = whole.gradients()
        error, worst = _worst(theirs, {name: gradients.get(name) for name in theirs.keys() | gradients.keys()})
        report = CheckReport(same_loss=torch.equal(eager_loss, graph_loss), max_relative_gradient_error=error, worst_parameter=worst)
        logger.info("capture_checked same_loss=%s gradient_error=%.3g parameter=%s", report.same_loss, error, worst)
        if error > tolerance(captured, worst):
            reason = _reason(eager, captured, data, seed, eager_loss, theirs.get(worst), gradients.get(worst))
            raise CaptureMismatchError(
                f"the gradient of parameter {worst!r} differs from the eager model's by {error:.2g} (relative)", hint=reason
            )
        _require_close(
            graph_loss, eager_loss, "in training", lambda: _unrepeatable(eager, captured, data, seed, eager_loss) or _OTHER_RANDOM
        )
        _check_buffers(captured, whole, buffers)
        _check_evaluation(eager, captured, data, seed)
        _check_mean(eager, captured, data, seed)
    return report


def check_batch_sizes(
    model: nn.Module, loss: Loss, captured: Captured, data: Sequence[Tensor], sizes: Sequence[int], *, layout: CallLayout, seed: int
) -> None:
    """Run the eager model in training on the first samples of `data`, as many as each of `sizes` says.

    Raises NotCapturableError, naming the size, if model or loss fail there: a job would fail on such a batch in the middle of an
    epoch. The model is left as it was.
    """
    eager = _Eager(model=model, loss=loss, layout=layout)
    with _kept_state(model, loss), torch.random.fork_rng(devices=[]), torch.no_grad():
        eager.set_training(True)
        for size in sizes:
            try:
                eager.loss_of([item[:size] for item in data], seed)
            except (RuntimeError, ValueError) as error:
                raise NotCapturableError(
                    f"model or loss fail in training on {size} sample(s), and the data gives a micro-batch of that size in every epoch: "
                    f"{str(error).splitlines()[0]}",
                    hint="Choose batch_size and micro_batch_size so that no such rest is left, or leave samples out; batch-norm needs two.",
                ) from error


def check_cuts(captured: Captured, cuts: Sequence[int], data: Sequence[Tensor], *, seed: int) -> CutReport:
    """Return how two training steps in stages compare with the same two of the whole graph.

    `cuts` are legal positions inside the graph; `data` one batch. Random numbers are drawn from `seed` and the seed after it; the
    global generator is put back.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        whole, staged = Rehearsal(captured), Rehearsal(captured, cuts)
        same, error, worst = True, 0.0, ""
        for step in (seed, seed + 1):
            same = torch.equal(whole.step(data, step), staged.step(data, step)) and same
            found = _worst(whole.gradients(), staged.gradients())
            error, worst = max((error, worst), found)
            whole.descend(_RATE)
            staged.descend(_RATE)
        found = _worst(_buffers(whole), _buffers(staged))
        error, worst = max((error, worst), found)
    return CutReport(cuts=tuple(cuts), same_loss=same, max_relative_error=error, worst_tensor=worst)


def check_precision(
    captured: Captured, data: Sequence[Tensor], precision: str, computing: AbstractContextManager[object], *, seed: int
) -> None:
    """Run one step and one evaluation of the graph inside `computing`, the context of that precision.

    Raises NotCapturableError if an operation refuses the dtypes that come together there, or if a trainable parameter is not
    float32, and NonFiniteLossError if the loss is no number. The global generator is put back.
    """
    other = next((record for record in captured.graph.tensors if record.trainable and record.dtype != "float32"), None)
    if other is not None:
        raise NotCapturableError(
            f"precision {precision!r} keeps parameters in float32, but {other.name!r} is {other.dtype}",
            hint="Use precision='float32', which computes in the model's own dtypes, or convert the model with model.float().",
        )
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), computing:
        try:
            whole = Rehearsal(captured)
            loss = whole.step(data, seed)
            whole.evaluate(data)
        except RuntimeError as error:
            raise NotCapturableError(
                f"the model cannot compute in {precision}: {str(error).splitlines()[0]}",
                hint="Use precision='float32', or convert values to one dtype where the model's code joins them.",
            ) from error
    if not bool(loss.isfinite()):
        raise NonFiniteLossError(f"the loss of the first batch is {float(loss)} in {precision}")


def even_cuts(captured: Captured, legal: Sequence[int], stages: int) -> tuple[int, ...]:
    """Return the legal cuts that divide the graph's operations into about `stages` equal parts; fewer if there are not so many."""
    total = len(captured.graph.nodes)
    wanted = (total * index // stages for index in range(1, stages))
    return tuple(sorted({min(legal, key=lambda position: abs(position - goal)) for goal in wanted})) if legal else ()


def tolerance(captured: Captured, name: str) -> float:
    """Return the largest relative difference that counts as the same for the tensor `name`."""
    dtype = captured.tensors[name].dtype if name in captured.tensors else torch.float32
    return max(TOLERANCE, ROUNDINGS * torch.finfo(dtype).eps) if dtype.is_floating_point else TOLERANCE


_OTHER_MODE = "The model's code looks at self.training or at the batch size: only dropout and norms may."
_OTHER_RANDOM = "Look for random numbers that do not come from torch, and for state kept between calls in plain attributes."


def _reason(
    eager: _Eager,
    captured: Captured,
    data: Sequence[Tensor],
    seed: int,
    eager_loss: Tensor,
    theirs: Tensor | None,
    ours: Tensor | None,
) -> str:
    """Return the likeliest reason for a wrong gradient."""
    repeated = _unrepeatable(eager, captured, data, seed, eager_loss)
    if repeated:
        return repeated
    if ours is None and theirs is not None:
        return "The graph has no path from the loss to it: look for .data, .detach(), no_grad or a custom backward between the two."
    if theirs is None and ours is not None:
        return "The eager model gives it no gradient: look for a backward hook or a custom function that stops it."
    return "The loss is right and its gradient is not: look for hooks (register_hook), custom backwards, or weights changed in place."


def _unrepeatable(eager: _Eager, captured: Captured, data: Sequence[Tensor], seed: int, first: Tensor) -> str:
    """Return what to tell about a model whose eager loss, in the mode it is in, is not `first` again; empty for any other."""
    with torch.no_grad(), _kept_state(eager.model, eager.loss):
        _load(eager.model, captured)
        again = eager.loss_of(data, seed).cpu()
    if torch.equal(again, first) or (bool(again.isnan()) and bool(first.isnan())):
        return ""
    where = line_that_changes(eager.model, eager.loss, data, eager.layout)
    return (
        f"The eager model itself gives another loss when it runs twice with one seed ({float(first):.6g}, then {float(again):.6g}): "
        f"it computes with the time or with random numbers that do not come from torch, or keeps state between calls{where}."
    )


def _check_buffers(captured: Captured, whole: Rehearsal, eager: Mapping[str, Tensor]) -> None:
    ours = {name: item.detach() for name, item in _buffers(whole).items() if item is not None and name in eager}
    error, worst = _worst({name: eager[name] for name in ours}, ours)
    if error > tolerance(captured, worst):
        raise CaptureMismatchError(
            f"after one step the buffer {worst!r} differs from the eager model's by {error:.2g} (relative)",
            hint="Change buffers in place (buffer.add_(...), buffer.copy_(...)); one that is assigned anew in forward is not seen.",
        )


def _buffers(rehearsal: Rehearsal) -> dict[str, Tensor | None]:
    return {name: item.detach() for name, item in rehearsal.tensors.items() if not item.requires_grad}


def _copy(data: Tensor, device: torch.device) -> Tensor:
    """Return a copy, because a model may change its inputs in place; contiguous, as nodes receive it."""
    return data.detach().to(device, copy=True, memory_format=torch.contiguous_format)


def _worst(eager: Mapping[str, Tensor | None], found: Mapping[str, Tensor | None]) -> tuple[float, str]:
    """Return the largest relative error over all tensors, and the tensor; a missing one is zero."""
    largest = max((float(item.abs().max()) for item in eager.values() if item is not None and item.numel()), default=0.0)
    worst, name_of_worst = 0.0, ""
    for name in eager.keys() | found.keys():
        ours, theirs = found.get(name), eager.get(name)
        if ours is None and theirs is None:
            continue
        reference = theirs if theirs is not None else torch.zeros_like(ours)  # type: ignore[arg-type]
        error = _relative_error(ours if ours is not None else torch.zeros_like(reference), reference, largest * _NEGLIGIBLE)
        if error > worst:
            worst, name_of_worst = error, name
    return worst, name_of_worst


def _relative_error(ours: Tensor, theirs: Tensor, floor: float) -> float:
    if torch.equal(ours, theirs) or theirs.numel() == 0 or torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True):
        return 0.0
    if not theirs.is_floating_point():
        return float("inf")
    difference = float((ours.double() - theirs.double()).abs().max())
    scale = max(float(theirs.abs().max()), floor)
    ratio = difference / scale if scale > 0 else float("inf")
    return ratio if ratio == ratio else float("inf")


def _check_evaluation(eager: _Eager, captured: Captured, data: Sequence[Tensor], seed: int) -> None:
    """Compare the losses of model.eval() on the whole batch, and on all samples but the last."""
    eager.set_training(False)
    samples = data[0].shape[0]
    _check_evaluated(eager, captured, data, seed, "in evaluation")
    if samples > 1:
        some = tuple(item[:-1] for item in data)
        _check_evaluated(eager, captured, some, seed, f"in evaluation with {samples - 1} instead of {samples} samples")


def _require_finite(captured: Captured, loss: Tensor, data: Sequence[Tensor]) -> None:
    """Raise NonFiniteLossError if the loss is no number: nothing could be compared with it, nor trained."""
    if bool(loss.isfinite()):
        return
    named = zip(captured.graph.data, data, strict=True)
    wrong = next((record.name for record, item in named if item.is_floating_point() and not bool(item.isfinite().all())), None)
    if wrong is not None:
        raise NonFiniteLossError(f"{wrong!r} has NaN or infinite values in the first batch, and so the loss is {float(loss)}")
    raise NonFiniteLossError(
        f"the loss of the first batch is {float(loss)}",
        hint="Call loss(model(inputs), labels) on it in plain PyTorch; a mean over no labels, all of them ignored (-100), is NaN.",
    )


def _check_mean(eager: _Eager, captured: Captured, data: Sequence[Tensor], seed: int) -> None:
    """Raise NotCapturableError if the loss of a batch is the sum of the losses of its two parts, not their mean."""
    samples = data[0].shape[0]
    if samples < 2:
        return
    half = samples // 2
    with torch.no_grad(), _kept_state(eager.model, eager.loss):
        _load(eager.model, captured)
        eager.set_training(False)
        parts = ((0, samples), (0, half), (half, samples))
        whole, first, second = (float(eager.loss_of([item[begin:end] for item in data], seed)) for begin, end in parts)
    mean = (half * first + (samples - half) * second) / samples
    if abs(first + second - whole) <= _SUM_TOLERANCE * abs(whole) < abs(mean - whole):
        raise NotCapturableError(
            f"the loss of {samples} samples ({whole:.6g}) is the sum of the losses of {half} and of {samples - half} of them: "
            "gradients of micro-batches could not be combined",
            hint="Let the loss be the mean over the samples, for example with reduction='mean'.",
        )


def _check_evaluated(eager: _Eager, captured: Captured, data: Sequence[Tensor], seed: int, where: str) -> None:
    # The values must be fresh: training has changed the buffers of model and graph alike, so both are put back.
    with torch.no_grad(), _kept_state(eager.model, eager.loss):
        _load(eager.model, captured)
        eager_loss = eager.loss_of(data, seed).cpu()
    torch.manual_seed(seed)
    try:
        graph_loss, _ = Rehearsal(captured).evaluate(data)
    except RuntimeError as error:
        raise CaptureMismatchError(
            f"the graph cannot run {len(data[0])} samples, the eager model can: {str(error).splitlines()[0]}",
            hint="Use x.shape[0] or -1 where the model or the loss contains the batch size.",
        ) from error
    _require_close(graph_loss, eager_loss, where, lambda: _unrepeatable(eager, captured, data, seed, eager_loss) or _OTHER_MODE)


def _load(model: nn.Module, captured: Captured) -> None:
    """Put the captured values of the buffers into the model."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in captured.tensors:
                buffer.copy_(captured.tensors[name])


def _require_close(ours: Tensor, theirs: Tensor, where: str, hint: Callable[[], str]) -> None:
    if _relative_error(ours, theirs, 0.0) > max(TOLERANCE, ROUNDINGS * torch.finfo(theirs.dtype).eps):
        raise CaptureMismatchError(f"{where} the graph's loss is {float(ours):.6g}, the eager model's {float(theirs):.6g}", hint=hint())


@contextmanager
def _kept_state(model: nn.Module, loss: Loss) -> Iterator[None]:
    """Put training flags and buffers back at the end."""
    modules = [part for root in (model, loss) if isinstance(root, nn.Module) for part in root.modules()]
    modes = [(part, part.training) for part in modules]
    buffers = [(part, name, item, item.detach().clone()) for part in modules for name, item in part._buffers.items() if item is not None]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        with torch.no_grad():
            for part, name, item, copy in buffers:
                item.copy_(copy)
                part._buffers[name] = item
