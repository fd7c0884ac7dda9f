"""Compressed values and gradients between stages, against exact ones: `python -m benchmarks.compression`.

The digits CNN and a small character GPT (on Python's own help topics) are captured, cut into three stages, and trained as an
asynchronous pipeline with every codec of `Job(activation_compression=...)`, three seeds each; all codecs see the same samples in the
same order, from the same weights. Stages (StageRunner), what decides their order (PipelineSchedule) and what makes bytes of values
(ValueWire) are those of the agent; all run in one process under an exact clock, as in `benchmarks.convergence`.

`loss_over_none`: validation loss at the end over that with exact values and the same seed, median over the seeds. `bytes`: values and
gradients of a micro-batch over both hops, as they are put on the wire. `--quick` is a check that all of it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.convergence_model import text, windows
from benchmarks.convergence_pipeline import BACKWARD, FORWARD, UPDATE, Clock
from benchmarks.models import SmallGPT, next_token_loss
from roost.agent.value_wire import PackedValues, ValueWire, WireValue
from roost.capture.check import even_cuts
from roost.capture.cut import cut, legal_cuts
from roost.capture.export import Captured, capture
from roost.capture.program import StageProgram
from roost.config import JobConfig, NamedArguments, TensorCodec
from roost.demo.digits import DigitsCNN, load_digits
from roost.pipeline.host_buffers import host_buffers
from roost.pipeline.stage_runner import StageRunner, add_gradients
from roost.protocol import pipeline_schedule as schedules
from roost.types import MicroBatch

STAGES = 3
SEEDS = (1, 2, 3)
WAITING_AT_FIRST = 2
CONTEXT = 64
EVALUATED_AT_ONCE = 64
HELD_OUT_STRIDE = 16
"""Every so many windows of the held-out text are evaluated."""

Samples = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model, and what it is trained on."""

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    training: Samples
    validation: Samples
    batch_size: int
    updates: int
    rate: float


def digits(updates: int) -> TrainedModel:
    training, validation = load_digits()
    return TrainedModel(
        model=DigitsCNN,
        loss=functional.cross_entropy,
        training=training,
        validation=validation,
        batch_size=32,
        updates=updates,
        rate=1e-3,
    )


def character_gpt(updates: int) -> TrainedModel:
    training, held_out, characters = text()
    every = torch.arange(0, len(training) - CONTEXT - 1, CONTEXT // 2)
    return TrainedModel(
        model=lambda: SmallGPT(layers=3, width=64, heads=4, vocabulary=characters, length=CONTEXT),
        loss=next_token_loss,
        training=windows(training, every, CONTEXT),
        validation=windows(held_out, torch.arange(0, len(held_out) - CONTEXT - 1, HELD_OUT_STRIDE * CONTEXT), CONTEXT),
        batch_size=16,
        updates=updates,
        rate=2e-3,
    )


class PipelineStage:
    """One stage: its schedule, its runner, and what has arrived for it as bytes."""

    def __init__(self, program: StageProgram, tensors: dict[str, Tensor], config: JobConfig, programs: int, carries_rng: bool) -> None:
        index = program.index
        self.program = program
        self.runner = StageRunner(program, tensors, config, 1.0, carries_rng=carries_rng)
        self.wire = ValueWire(config.activation_compression, program.differentiable, host_buffers("cpu"))
        self.values: dict[int, dict[int, Tensor | WireValue]] = {}
        self.rng: dict[int, Tensor | None] = {}
        self.gradients: dict[int, dict[int, dict[int, WireValue]]] = {}
        self.sources = frozenset(program.receives) - {schedules.DATA} | ({index - 1} if index else frozenset())
        self.targets = frozenset(program.sends) | (frozenset() if program.is_last else {index + 1})
        self.schedule = schedules.PipelineSchedule(
            index,
            programs,
            self.sources if index else frozenset({schedules.DATA}),
            self.targets,
            schedules.bubble_free_in_flight(index, programs),
        )


class CodedPipeline:
    """The stages of a captured model, cut evenly, with a codec between them."""

    def __init__(self, subject: TrainedModel, captured: Captured, codec: TensorCodec, seed: int) -> None:
        self._subject = subject
        self._config = _config(subject, codec, seed)
        cuts = even_cuts(captured, legal_cuts(captured.graph), STAGES)
        programs = cut(captured.graph, (0, *cuts, len(captured.graph.nodes)))
        self.stages = [
            PipelineStage(
                program,
                {record.name: captured.tensors[record.name].clone() for record in (*program.tensors, *program.shared)},
                self._config,
                len(programs),
                any(later.draws_random for later in programs[program.index + 1 :]),
            )
            for program in programs
        ]
        self._clock = Clock()
        self._order = torch.Generator().manual_seed(seed)
        self._fed = 0
        self.wire_bytes = 0

    def train(self) -> None:
        """Run all updates."""
        for _ in range(WAITING_AT_FIRST):
            self._feed()
        self._clock.run()

    def evaluate(self) -> float:
        """Return the validation loss."""
        total = 0.0
        inputs, labels = self._subject.validation
        for number, start in enumerate(range(0, len(labels), EVALUATED_AT_ONCE)):
            data = (inputs[start : start + EVALUATED_AT_ONCE], labels[start : start + EVALUATED_AT_ONCE])
            header = _header(number, len(data[1]), 0, training=False)
            values: dict[int, Tensor] = dict(enumerate(data))
            for stage in self.stages:
                received = {value: values[value] for numbers in stage.program.receives.values() for value in numbers}
                result = stage.runner.evaluate(header, received)
                values |= result.outputs
                total += (result.loss or 0.0) * len(data[1])
        return total / len(labels)

    def _feed(self) -> None:
        if self._fed < self._subject.updates:
            self._clock.after(0, partial(self._inject, self._fed))
            self._fed += 1

    def _inject(self, number: int) -> None:
        inputs, labels = self._subject.training
        chosen = torch.randint(len(labels), (self._subject.batch_size,), generator=self._order)
        first = self.stages[0]
        first.values[number] = dict(enumerate((inputs[chosen], labels[chosen])))
        header = _header(number, self._subject.batch_size, self._config.seed, training=True)
        self._handle(first, schedules.ValuesArrived(micro_batch=header, source=schedules.DATA))

    def _handle(self, stage: PipelineStage, event: schedules.ScheduleEvent) -> None:
        for computation in stage.schedule.handle(event):
            send, duration = self._compute(stage, computation)
            self._clock.after(duration, partial(self._finished, stage, send))

    def _finished(self, stage: PipelineStage, send: Callable[[], None]) -> None:
        self._handle(stage, schedules.ComputeFinished())
        send()

    def _compute(self, stage: PipelineStage, computation: schedules.Computation) -> tuple[Callable[[], None], int]:
        match computation:
            case schedules.RunForward(micro_batch=micro_batch):
                if stage.program.index == 0:
                    self._feed()
                received = stage.wire.unpack(stage.values.pop(micro_batch.number))
                result = stage.runner.forward(micro_batch, received, stage.rng.pop(micro_batch.number, None))
                sends = {
                    target: {value: result.outputs[value] for value in stage.program.sends.get(target, ())} for target in stage.targets
                }
                packed = {target: stage.wire.pack(values, training=True) for target, values in sends.items()}
                return partial(self._forwarded, stage, micro_batch, packed, result.rng_state), FORWARD
            case schedules.RunBackward(micro_batch=micro_batch):
                gradients = {target: stage.wire.unpack(values) for target, values in stage.gradients.pop(micro_batch.number, {}).items()}
                back = stage.runner.backward(micro_batch.number, add_gradients(gradients))
                packed = {source: stage.wire.pack(back.get(source, {}), training=True) for source in stage.sources}
                return partial(self._backwarded, stage, micro_batch.number, packed), BACKWARD
            case schedules.RunUpdate(batch=batch):
                stage.runner.update(batch)
                return lambda: None, UPDATE
        raise AssertionError(f"no evaluation is fed: {computation}")

    def _forwarded(self, stage: PipelineStage, micro_batch: MicroBatch, sent: Mapping[int, PackedValues], rng: Tensor | None) -> None:
        index, number = stage.program.index, micro_batch.number
        for target, packed in sorted(sent.items()):
            other = self.stages[target]
            self.wire_bytes += packed.nbytes
            expected = other.program.receives.get(index, ())
            arrived = other.wire.arrived(packed.specs, packed.codecs, packed.buffers, expected, training=True)
            other.values.setdefault(number, {}).update(arrived)
            if target == index + 1:
                other.rng[number] = rng
            self._handle(other, schedules.ValuesArrived(micro_batch=micro_batch, source=index))

    def _backwarded(self, stage: PipelineStage, number: int, sent: Mapping[int, PackedValues]) -> None:
        index = stage.program.index
        for source, packed in sorted(sent.items()):
            other = self.stages[source]
            self.wire_bytes += packed.nbytes
            expected = other.program.sends.get(index, ())
            arrived = other.wire.arrived(packed.specs, packed.codecs, packed.buffers, expected, training=True)
            other.gradients.setdefault(number, {})[index] = arrived
            self._handle(other, schedules.GradientsArrived(number=number, source=index))


def _config(subject: TrainedModel, codec: TensorCodec, seed: int) -> JobConfig:
    return JobConfig(
        job_id="compression",
        optimizer=NamedArguments(name="AdamW", arguments=(("lr", subject.rate),)),
        schedule=NamedArguments(name="CosineAnnealingLR", arguments=(("T_max", subject.updates),)),
        batch_size=subject.batch_size,
        micro_batch_size=subject.batch_size,
        samples=subject.updates * subject.batch_size,
        activation_compression=codec,
        seed=seed,
    )


def _header(number: int, samples: int, seed: int, *, training: bool) -> MicroBatch:
    return MicroBatch(
        number=number,
        batch=number if training else -1,
        position=0,
        count=1,
        samples=samples,
        batch_samples=samples,
        training=training,
        seed=(seed << 32) + number,
        lease=0,
    )


def measure(subject: TrainedModel, seeds: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Return by codec the loss of every seed, over that with exact values (median, least and largest), and the bytes of a micro-batch."""
    losses: dict[TensorCodec, list[float]] = {codec: [] for codec in TensorCodec}
    sizes: dict[TensorCodec, float] = {}
    for seed in seeds:
        torch.manual_seed(seed)
        inputs, labels = (part[: subject.batch_size] for part in subject.training)
        captured = capture(subject.model(), subject.loss, (inputs,), (labels,))
        for codec in TensorCodec:
            pipeline = CodedPipeline(subject, captured, codec, seed)
            pipeline.train()
            losses[codec].append(pipeline.evaluate())
            sizes[codec] = pipeline.wire_bytes / subject.updates
    exact = losses[TensorCodec.NONE]
    figures: dict[str, dict[str, Any]] = {}
    for codec, found in losses.items():
        ratios = [loss / base for loss, base in zip(found, exact, strict=True)]
        figures[codec.value] = {
            "losses": [round(loss, 4) for loss in found],
            "loss_over_none": round(statistics.median(ratios), 4),
            "least": round(min(ratios), 4),
            "largest": round(max(ratios), 4),
            "bytes": round(sizes[codec]),
            "bytes_over_none": round(sizes[codec] / sizes[TensorCodec.NONE], 4),
        }
    return figures


def main() -> None:
    """Measure both models and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few updates of one seed")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    seeds = SEEDS[:1] if quick else SEEDS
    subjects = {"digits": digits(20 if quick else 900), "gpt": character_gpt(20 if quick else 2000)}
    result: dict[str, Any] = {"stages": STAGES, "seeds": len(seeds), "updates": {name: each.updates for name, each in subjects.items()}}
    for name, subject in subjects.items():
        result[name] = measure(subject, seeds)
        for codec, figures in result[name].items():
            print(name, codec, figures, flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
