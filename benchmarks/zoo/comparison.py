"""Compares a captured model, whole and cut, with the eager one: losses, gradients and tensors of two training steps.

What is compared in the second step is the second step: it starts from the eager model's tensors, which a graph with the same bits has
anyway. Carried over, a difference in rounding would grow beyond any bound in models like Inception-V3 at its random start, where
changing the weights by 1e-7 changes gradients by a tenth, in eager as well.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.zoo.case import ZooCase
from roost.capture.cut import legal_cuts
from roost.capture.export import Captured, capture
from roost.capture.graph_format import to_bytes
from roost.capture.rehearsal import Rehearsal

SEEDS = (11, 12)
"""Before each of the two steps, so that dropout draws the same everywhere."""
LEARNING_RATE = 0.01
FEWEST_STAGES, MOST_STAGES = 2, 6
NEGLIGIBLE = 1e-6
"""Gradients this much smaller than the largest of all are compared with that scale: they are rounding errors of zero."""


@dataclass(frozen=True, kw_only=True)
class TwoSteps:
    """What two training steps of the eager model gave."""

    losses: tuple[Tensor, ...]
    gradients: tuple[dict[str, Tensor], ...]
    """By step and parameter; a parameter without an influence is missing."""
    tensors: tuple[dict[str, Tensor], ...]
    """Copies of parameters and buffers, after each step; the second is not followed by an update."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far a graph, cut in some way, is from the eager model."""

    cuts: tuple[int, ...]
    relative_error: float
    """The largest over losses, gradients and tensors: max|graph - eager| / max|eager|."""
    worst: str
    """What it belongs to; empty if all bits are equal."""

    @property
    def bit_equal(self) -> bool:
        """True if every loss, gradient and tensor has the same bits."""
        return not self.worst


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A captured model against the eager one."""

    captured: Captured
    capture_s: float
    graph_bytes: int
    legal_cuts: int
    whole: Difference
    pieces: tuple[Difference, ...]
    """One for each choice of cuts."""
    evaluation_error: float
    """Relative error of the loss in evaluation, the largest of the whole batch and a smaller one."""


def compare(case: ZooCase, *, choices: int, seed: int = 0, note: Callable[[str], None] = lambda text: None) -> Comparison:
    """Capture a model and compare it, whole and cut in `choices` random ways; the model is trained by two steps.

    `note` gets a line of progress now and then.
    """
    began = time.perf_counter()
    captured = capture(case.model, case.loss, case.inputs, case.labels, layout=case.layout, dynamic=case.dynamic)
    capture_s = time.perf_counter() - began
    graph = captured.graph
    positions = legal_cuts(graph)
    note(f"captured in {capture_s:.1f} s: {len(graph.nodes)} operations, {len(positions)} legal cuts")
    eager = eager_steps(case, captured)
    whole = difference(captured, (), case.data, eager)
    note(f"whole: relative error {whole.relative_error:.2g} {whole.worst}")
    rng = random.Random(seed)
    pieces = []
    for index in range(choices):
        stages = FEWEST_STAGES + index % (MOST_STAGES - FEWEST_STAGES + 1)
        cuts = tuple(sorted(rng.sample(positions, min(stages - 1, len(positions)))))
        pieces.append(difference(captured, cuts, case.data, eager))
        note(f"cut at {cuts}: relative error {pieces[-1].relative_error:.2g} {pieces[-1].worst}")
    return Comparison(
        captured=captured,
        capture_s=capture_s,
        graph_bytes=len(to_bytes(graph)),
        legal_cuts=len(positions),
        whole=whole,
        pieces=tuple(pieces),
        evaluation_error=evaluation_error(case, captured, eager),
    )


def eager_steps(case: ZooCase, captured: Captured) -> TwoSteps:
    """Train the model by two steps of plain SGD and return what they gave."""
    case.model.train()
    parameters = {name: item for name, item in case.model.named_parameters() if item.requires_grad}
    losses, gradients, tensors = [], [], []
    for step, seed in enumerate(SEEDS):
        torch.manual_seed(seed)
        loss = case.eager_loss(case.data)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(_take_gradients(parameters))
        if step == 0:
            _descend(parameters, gradients[-1])
        tensors.append(_tensors_of(case, captured))
    return TwoSteps(losses=tuple(losses), gradients=tuple(gradients), tensors=tuple(tensors))


def _take_gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            found[name], parameter.grad = parameter.grad, None
    return found


def _descend(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, gradient in gradients.items():
            parameters[name].sub_(gradient, alpha=LEARNING_RATE)


def _tensors_of(case: ZooCase, captured: Captured) -> dict[str, Tensor]:
    own = dict(case.model.named_parameters()) | dict(case.model.named_buffers())
    return {record.name: own[record.name].detach().clone() for record in captured.graph.tensors if record.name in own}


def difference(captured: Captured, cuts: Sequence[int], data: Sequence[Tensor], eager: TwoSteps) -> Difference:
    """Return how two steps of the graph, cut at `cuts`, differ from the eager model's."""
    rehearsal = Rehearsal(captured, cuts)
    errors: dict[str, float] = {}
    for step, seed in enumerate(SEEDS):
        floor = negligible(eager.gradients[step])
        loss = rehearsal.step(data, seed)
        found = {name: item for name, item in rehearsal.gradients().items() if item is not None}
        errors[f"loss of step {step}"] = relative_error(loss, eager.losses[step], 0.0)
        errors |= {
            f"gradient of {name} in step {step}": error for name, error in _gradient_errors(found, eager.gradients[step], floor).items()
        }
        if step == 0:
            rehearsal.descend(LEARNING_RATE)
        for name, expected in eager.tensors[step].items():
            tensor = rehearsal.tensors[name].detach()
            errors[f"{name} after step {step}"] = relative_error(tensor, expected, LEARNING_RATE * floor)
            tensor.copy_(expected)
    worst = max(errors, key=errors.__getitem__)
    return Difference(cuts=tuple(cuts), relative_error=errors[worst], worst=worst if errors[worst] > 0 else "")


def negligible(gradients: Mapping[str, Tensor]) -> float:
    """Return up to what scale gradients are rounding errors of zero, such as those of the biases of keys in attention."""
    return NEGLIGIBLE * max((float(item.abs().max()) for item in gradients.values() if item.numel()), default=0.0)


def _gradient_errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float) -> dict[str, float]:
    """Return the relative error of every gradient; one that is missing on one side counts as zeros."""
    errors = {}
    for name in found.keys() | expected.keys():
        known = found[name] if name in found else expected[name]
        errors[name] = relative_error(found.get(name, torch.zeros_like(known)), expected.get(name, torch.zeros_like(known)), floor)
    return errors


def relative_error(found: Tensor, expected: Tensor, floor: float) -> float:
    """Return max|found - expected| / max(max|expected|, floor); 0 only for equal bits, infinity for NaN or another dtype."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return float("inf")
    if torch.equal(found, expected):
        return 0.0
    apart, scale = float((found.double() - expected.double()).abs().max()), max(float(expected.double().abs().max()), floor)
    return apart / scale if scale > 0 and apart == apart else float("inf")


def evaluation_error(case: ZooCase, captured: Captured, eager: TwoSteps) -> float:
    """Return the relative error of the graph's loss against model.eval(), with the trained tensors."""
    rehearsal = Rehearsal(captured)
    rehearsal.tensors.update(eager.tensors[-1])
    case.model.eval()
    errors = []
    for data in (case.data, case.narrowed(captured.graph, max(1, case.inputs[0].shape[0] // 2))):
        torch.manual_seed(SEEDS[0])
        with torch.no_grad():
            expected = case.eager_loss(data)
        torch.manual_seed(SEEDS[0])
        found, _ = rehearsal.evaluate(data)
        errors.append(relative_error(found, expected, 0.0))
    return max(errors)
