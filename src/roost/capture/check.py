"""Compares a captured graph with the eager model it came from: loss, gradients, evaluation, and a smaller batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roost.capture.cut import cut
from roost.capture.export import Captured
from roost.capture.program import StageProgram
from roost.capture.tracing import Loss
from roost.errors import CaptureMismatchError

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Largest relative difference that counts as the same computation; capture itself adds none on the same machine."""

_NEGLIGIBLE = 1e-6
"""Gradients this much smaller than the largest of all are compared with that scale: they are rounding errors of zero."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """How close a graph is to the eager model."""

    same_loss: bool
    """True if the training losses are equal bit by bit."""
    max_relative_gradient_error: float
    """Largest over the parameters of max|graph - eager| / max|eager|."""
    worst_parameter: str
    """The parameter it belongs to; empty if all gradients are equal."""


def check_against_eager(
    model: nn.Module,
    loss: Loss,
    captured: Captured,
    inputs: tuple[Tensor, ...],
    labels: tuple[Tensor, ...],
    *,
    seed: int,
) -> CheckReport:
    """Return how the graph's loss and gradients on one batch compare with the eager model's, both drawing random numbers from `seed`.

    Raises CaptureMismatchError, naming the worst parameter, if a gradient or the loss differs by more than TOLERANCE, and
    if evaluation or a batch with one sample less gives another loss. The model is left as it was.
    """
    program = cut(captured.graph, [0, len(captured.graph.nodes)])[0]
    with _kept_state(model, loss), torch.random.fork_rng(devices=[]), torch.enable_grad():
        eager_loss, eager = _eager_training(model, loss, inputs, labels, seed)
        graph_loss, found = _graph_training(program, captured, (*inputs, *labels), seed)
        error, worst = _worst_gradient(eager, found)
        report = CheckReport(same_loss=torch.equal(eager_loss, graph_loss), max_relative_gradient_error=error, worst_parameter=worst)
        logger.info("capture_checked same_loss=%s gradient_error=%.3g parameter=%s", report.same_loss, error, worst)
        if error > TOLERANCE:
            raise CaptureMismatchError(f"the gradient of parameter {worst!r} differs from the eager model's by {error:.2g} (relative)")
        _require_close(graph_loss, eager_loss, "in training", "Look for random numbers that do not come from torch.")
        _check_evaluation(model, loss, program, captured, inputs, labels, seed)
    return report


def _eager_training(
    model: nn.Module, loss: Loss, inputs: tuple[Tensor, ...], labels: tuple[Tensor, ...], seed: int
) -> tuple[Tensor, dict[str, Tensor | None]]:
    parameters = {name: item for name, item in model.named_parameters() if item.requires_grad}
    model.train()
    if isinstance(loss, nn.Module):
        loss.train()
    value = _eager_loss(model, loss, inputs, labels, seed)
    gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    return value.detach().cpu(), {name: None if item is None else item.cpu() for name, item in zip(parameters, gradients, strict=True)}


def _eager_loss(model: nn.Module, loss: Loss, inputs: tuple[Tensor, ...], labels: tuple[Tensor, ...], seed: int) -> Tensor:
    device = next((item.device for item in model.parameters()), torch.device("cpu"))
    torch.manual_seed(seed)
    return loss(model(*(_copy(item, device) for item in inputs)), *(_copy(item, device) for item in labels))


def _copy(data: Tensor, device: torch.device) -> Tensor:
    """Return a copy, because a model may change its inputs in place; contiguous, as nodes receive it."""
    return data.detach().to(device, copy=True, memory_format=torch.contiguous_format)


def _graph_training(
    program: StageProgram, captured: Captured, data: tuple[Tensor, ...], seed: int
) -> tuple[Tensor, dict[str, Tensor | None]]:
    trainable = [record.name for record in captured.graph.tensors if record.trainable]
    tensors = _copies(program, captured)
    for name in trainable:
        tensors[name].requires_grad_()
    torch.manual_seed(seed)
    value = _graph_loss(program, tensors, data, training=True)
    gradients = torch.autograd.grad(value, [tensors[name] for name in trainable], allow_unused=True)
    return value.detach(), dict(zip(trainable, gradients, strict=True))


def _copies(program: StageProgram, captured: Captured) -> dict[str, Tensor]:
    return {record.name: captured.tensors[record.name].clone() for record in program.tensors}


def _graph_loss(program: StageProgram, tensors: Mapping[str, Tensor], data: tuple[Tensor, ...], *, training: bool) -> Tensor:
    assert program.loss_value is not None
    values = {number: _copy(item, torch.device("cpu")) for number, item in enumerate(data)}
    return program.run(values, tensors, training=training)[program.loss_value]


def _worst_gradient(eager: Mapping[str, Tensor | None], found: Mapping[str, Tensor | None]) -> tuple[float, str]:
    """Return the largest relative error over all parameters, and the parameter; a missing gradient is zero."""
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
    difference = float((ours - theirs).abs().max())
    scale = max(float(theirs.abs().max()), floor)
    ratio = difference / scale if scale > 0 else float("inf")
    return ratio if ratio == ratio else float("inf")


def _check_evaluation(
    model: nn.Module,
    loss: Loss,
    program: StageProgram,
    captured: Captured,
    inputs: tuple[Tensor, ...],
    labels: tuple[Tensor, ...],
    seed: int,
) -> None:
    """Compare the losses of model.eval() on the whole batch, and on all samples but the last."""
    model.eval()
    if isinstance(loss, nn.Module):
        loss.eval()
    samples = inputs[0].shape[0]
    for count in sorted({samples, max(1, samples - 1)}, reverse=True):
        some_inputs, some_labels = tuple(item[:count] for item in inputs), tuple(item[:count] for item in labels)
        # The copies must be fresh: training has changed the buffers of model and graph alike, so both are put back.
        with torch.no_grad(), _kept_state(model, loss):
            _load(model, captured)
            eager_loss = _eager_loss(model, loss, some_inputs, some_labels, seed).cpu()
        torch.manual_seed(seed)
        try:
            graph_loss = _graph_loss(program, _copies(program, captured), (*some_inputs, *some_labels), training=False)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CaptureMismatchError(
                f"the graph cannot run {count} samples, the eager model can: {reason}",
                hint="Use x.shape[0] or -1 where the model or the loss contains the batch size.",
            ) from error
        where = "in evaluation" if count == samples else f"in evaluation with {count} instead of {samples} samples"
        _require_close(
            graph_loss, eager_loss, where, "The model's code looks at self.training or at the batch size: only dropout and norms may."
        )


def _load(model: nn.Module, captured: Captured) -> None:
    """Put the captured values of the buffers into the model."""
    for name, buffer in model.named_buffers():
        if name in captured.tensors:
            buffer.copy_(captured.tensors[name])


def _require_close(ours: Tensor, theirs: Tensor, where: str, hint: str) -> None:
    if _relative_error(ours, theirs, 0.0) > TOLERANCE:
        raise CaptureMismatchError(f"{where} the graph's loss is {float(ours):.6g}, the eager model's {float(theirs):.6g}", hint=hint)


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
