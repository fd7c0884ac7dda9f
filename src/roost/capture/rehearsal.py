"""Runs the stages of a cut graph one after another in this process, as a pipeline of nodes would."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from roost.capture.cut import cut
from roost.capture.export import Captured
from roost.capture.program import DATA_SOURCE, StageProgram


class Rehearsal:
    """A captured model in stages, on copies of its tensors; values cross between stages as copies, with the order
    that their dimensions have in memory, as they do on a network."""

    def __init__(self, captured: Captured, cuts: Sequence[int] = ()) -> None:
        """`cuts` are legal positions inside the graph, ascending; without any there is one stage."""
        graph = captured.graph
        trainable = {record.name for record in graph.tensors if record.trainable}
        names = [record.name for record in graph.tensors]
        self.programs: tuple[StageProgram, ...] = cut(graph, [0, *cuts, len(graph.nodes)])
        self.tensors: dict[str, Tensor] = {name: captured.tensors[name].clone().requires_grad_(name in trainable) for name in names}
        """The tensors the graph uses, by name: parameters keep their gradient, buffers change as in training."""

    def step(self, data: Sequence[Tensor], seed: int) -> Tensor:
        """Run forward and backward of one micro-batch, adding to the gradients of `tensors`; return the loss.

        Random numbers are drawn from the global generator after seeding it with `seed`, as plain training would.
        """
        torch.manual_seed(seed)
        received, sent = self._forward(data, training=True)
        self._backward(received, sent)
        loss = self.programs[-1].loss_value
        assert loss is not None
        return sent[-1][loss].detach()

    def evaluate(self, data: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return loss and metric (None if the graph has none) in evaluation mode; nothing changes."""
        _, sent = self._forward(data, training=False)
        last = self.programs[-1]
        assert last.loss_value is not None
        return sent[-1][last.loss_value], None if last.metric_value is None else sent[-1][last.metric_value]

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradient of every trainable parameter, None where there is none yet."""
        return {name: tensor.grad for name, tensor in self.tensors.items() if tensor.requires_grad}

    def descend(self, rate: float) -> None:
        """Move every parameter against its gradient by `rate` and forget the gradients: a plain SGD step."""
        with torch.no_grad():
            for tensor in self.tensors.values():
                if tensor.grad is not None:
                    tensor.sub_(tensor.grad, alpha=rate)
                    tensor.grad = None

    def _forward(self, data: Sequence[Tensor], *, training: bool) -> tuple[list[dict[int, Tensor]], list[dict[int, Tensor]]]:
        received: list[dict[int, Tensor]] = []
        sent: list[dict[int, Tensor]] = []
        for program in self.programs:
            values = {
                number: data[number].clone(memory_format=torch.contiguous_format)
                if source == DATA_SOURCE
                else sent[source][number].detach().clone()
                for source, numbers in program.receives.items()
                for number in numbers
            }
            own = {record.name: self.tensors[record.name] for record in (*program.tensors, *program.shared)}
            received.append(values)
            sent.append(program.run(values, own, training=training))
        return received, sent

    def _backward(self, received: list[dict[int, Tensor]], sent: list[dict[int, Tensor]]) -> None:
        gradients: list[dict[int, Tensor]] = [{} for _ in self.programs]
        for program in reversed(self.programs):
            given = gradients[program.index]
            roots = [sent[program.index][number] for number in given]
            starts: list[Tensor | None] = list(given.values())
            if program.loss_value is not None:
                roots, starts = [*roots, sent[program.index][program.loss_value]], [*starts, None]
            if not roots:
                continue
            found = _gradients_of(program, received[program.index])
            torch.autograd.backward(roots, starts)
            for source, numbers in program.receives.items():
                for number in program.differentiable.intersection(numbers):
                    gradient = found.get(number)
                    if gradient is not None:
                        known = gradients[source].get(number)
                        gradients[source][number] = gradient if known is None else known + gradient


def _gradients_of(program: StageProgram, received: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return a dict that a backward will fill with the gradients of the received values.

    A value's own `grad` would bring them in the order that the value has in memory, and so change how later sums are rounded.
    """
    found: dict[int, Tensor] = {}
    for number in program.differentiable.intersection(received):
        if received[number].requires_grad:
            received[number].register_hook(partial(found.__setitem__, number))
    return found
