"""Stages of a really captured model, run by stage runners in one process."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from roost.capture.cut import cut, legal_cuts
from roost.capture.export import capture
from roost.pipeline.program_interface import DATA_SOURCE, RunnableProgram
from roost.pipeline.stage_runner import StageRunner, add_gradients
from roost.pipeline.tensor_bytes import from_buffer, ordered_spec_of, to_buffer


class TiedModel(nn.Module):
    """Tied weights, dropout, batch-norm and a residual value that skips stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        start = self.embedding(tokens).mean(1)
        hidden = self.dropout(torch.relu(self.norm(self.first(start))))
        return self.head(self.dropout(self.second(hidden)) + start)


def model() -> TiedModel:
    torch.manual_seed(5)
    return TiedModel()


def data(batches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(9)
    return [(torch.randint(11, (6, 5), generator=generator), torch.randint(11, (6,), generator=generator)) for _ in range(batches)]


def over_the_wire(values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    specs = {number: ordered_spec_of(str(number), tensor) for number, tensor in values.items()}
    return {number: from_buffer(spec, bytearray(to_buffer(values[number], spec.order))) for number, spec in specs.items()}


class LocalPipeline:
    """Carries values and gradients between the stages of one cluster, through bytes as a network would."""

    def __init__(self, programs: tuple[RunnableProgram, ...], runners: list[StageRunner]) -> None:
        self.programs = programs
        self.runners = runners
        self.inboxes: dict[int, list[dict[int, torch.Tensor]]] = {}

    def _deliver(self, inbox, index, outputs) -> None:
        for target, numbers in self.programs[index].sends.items():
            inbox[target].update(over_the_wire({number: outputs[number] for number in numbers}))

    def forward(self, header, inputs) -> float | None:
        inbox = [dict(zip(self.programs[0].receives[DATA_SOURCE], inputs, strict=True)), *({} for _ in self.runners[1:])]
        state, loss = None, None
        for index, runner in enumerate(self.runners):
            result = runner.forward(header, inbox[index], state)
            self._deliver(inbox, index, result.outputs)
            state, loss = result.rng_state, result.loss
        return loss

    def backward_and_update(self, header) -> None:
        parts: list[dict[int, dict[int, torch.Tensor]]] = [{} for _ in self.runners]
        for index in reversed(range(len(self.runners))):
            back = self.runners[index].backward(header.number, add_gradients(parts[index]))
            self.runners[index].update(header.batch)
            for source, gradients in back.items():
                parts[source][index] = over_the_wire(gradients)

    def evaluate(self, header, inputs):
        inbox = [dict(zip(self.programs[0].receives[DATA_SOURCE], inputs, strict=True)), *({} for _ in self.runners[1:])]
        for index, runner in enumerate(self.runners):
            result = runner.evaluate(header, inbox[index])
            self._deliver(inbox, index, result.outputs)
        return result

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor for runner in self.runners for name, tensor in runner.state().items()}


def build(config, boundaries_of, *, whole=None, example=None, recompute=False) -> LocalPipeline:
    """Return the pipeline of `whole`, captured with the batch `example`; every stage recomputes if `recompute`."""
    inputs, labels = data(1)[0] if example is None else example
    captured = capture(model() if whole is None else whole, functional.cross_entropy, (inputs,), (labels,))
    programs = cut(captured.graph, boundaries_of(captured.graph))
    runners = []
    for program in programs:
        tensors = {record.name: captured.tensors[record.name].detach().clone() for record in (*program.tensors, *program.shared)}
        carries = any(later.draws_random for later in programs[program.index + 1 :])
        runners.append(StageRunner(program, tensors, config, 1.0, carries_rng=carries, recompute=recompute))
    return LocalPipeline(programs, runners)


def every_cut(graph):
    return [0, *legal_cuts(graph), len(graph.nodes)]


def no_cut(graph):
    return [0, len(graph.nodes)]
