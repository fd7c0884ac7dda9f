"""Runs one stage of a pipeline: forward, backward, update, evaluation. Synchronous, for one compute thread."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from roost.config import JobConfig
from roost.errors import NonFiniteLossError, ProtocolError, StageFailedError
from roost.pipeline.corrections import Correction, mean_delay
from roost.pipeline.optimizer import StageOptimizer
from roost.pipeline.precision import computing
from roost.pipeline.program_interface import DATA_SOURCE, RunnableProgram
from roost.pipeline.random_state import ForwardRandomness
from roost.pipeline.tensor_bytes import dtype_name
from roost.pipeline.weight_versions import WeightVersion, WeightVersions
from roost.types import MicroBatch

logger = logging.getLogger(__name__)

_PROGRAM_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError)
"""What torch raises when an operation cannot run on what it is given, out of memory included."""


@dataclass(frozen=True, kw_only=True)
class ForwardResult:
    """What a training forward gives."""

    outputs: dict[int, Tensor]
    """Values to send, by number, without grad, on the stage's device. They may share storage with weights: what is not
    sent when the micro-batch's backward has run here must be copied."""
    rng_state: Tensor | None
    """The generator's state to pass on, (bytes,) uint8; None unless a later stage draws random numbers."""
    loss: float | None
    """Mean over the micro-batch's samples; on the last stage only."""


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    """What an evaluation forward gives."""

    outputs: dict[int, Tensor]
    """Values to send, by number, on the stage's device; they do not share storage with weights."""
    loss: float | None
    """Mean over the micro-batch's samples; on the last stage only."""
    metric: float | None
    """Mean over the micro-batch's samples; on the last stage of a job with a metric only."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Recorded:
    """A forward as autograd recorded it. Edges, not tensors: a sent value is kept only if the graph needs it."""

    received: dict[int, Tensor]
    """Leaves for the received values that carry a gradient."""
    edges: dict[int, GradientEdge]
    """Where the gradients of sent values enter the graph; on the last stage the loss alone."""
    loss: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Repeatable:
    """What a forward that kept nothing else needs to be run again."""

    values: dict[int, Tensor]
    """All received values as they were before it."""
    tensors: dict[str, Tensor]
    """Copies of the tensors that it changes, as they were before it: the second run changes these."""
    rng_state: Tensor | None
    """The state of the generator that it was given; None as well if it draws nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _InFlight:
    """What the backward of a micro-batch needs."""

    micro_batch: MicroBatch
    updates: int
    """Updates applied here before its forward."""
    version: WeightVersion
    forward: _Recorded | _Repeatable


@dataclass(kw_only=True, slots=True, eq=False)
class _BatchGradients:
    """Sums of gradients, by parameter name, over the micro-batches of one batch that went backward."""

    micro_batches: int = 0
    samples: int = 0
    delays: list[int] = field(default_factory=list)
    """Per micro-batch: updates of this stage between its forward and this batch's update."""
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a gradient, which becomes this record's own, in the order of the micro-batches."""
        if name in self.sums:
            self.sums[name].add_(gradient)
        else:
            self.sums[name] = gradient


class StageRunner:
    """One stage: its weights, its micro-batches in flight, its optimizer."""

    def __init__(
        self,
        program: RunnableProgram,
        tensors: dict[str, Tensor],
        config: JobConfig,
        share: float,
        device: torch.device | str = "cpu",
        *,
        carries_rng: bool = False,
        parameter_share: float = 1.0,
        recompute: bool = False,
    ) -> None:
        """Build a stage of `tensors` (owned and shared, by name), which become the runner's own and change in place.

        `share` is the fraction of the data this cluster consumes; `carries_rng` says that a later stage draws random
        numbers; `parameter_share` is this stage's fraction of the model's trainable elements. With `recompute` a micro-batch in
        flight keeps the values it came with instead of its activations, and its forward runs a second time just before its backward
        (arXiv 1604.06174, with one segment per stage). Raises StageFailedError for a tensor that is missing or differs from the
        program's record, and InvalidConfigError for an optimizer, schedule or correction that cannot work.
        """
        _check_tensors(program, tensors)
        self._program = program
        self._device = torch.device(device)
        self._job = config.job_id
        self._versions = WeightVersions(program.tensors, tensors, self._device)
        self._trainable = tuple(self._versions.parameters)
        self._optimizer = (
            StageOptimizer(self._versions.parameters, config, share, parameter_share=parameter_share) if self._trainable else None
        )
        self._correction = self._optimizer.correction if self._optimizer is not None else Correction()
        self._delay = 0.0  # mean delay of the last batch that was applied
        self._predicted: dict[str, Tensor] | None = None  # weights for forwards, until weights change
        self._flush = config.mode == "sync"
        self._recompute = recompute
        self._precision = config.precision
        self._waiting_averages: list[tuple[dict[str, Tensor], ...]] = []  # average and snapshot of each
        self._random = ForwardRandomness(stage=program.index, draws=program.draws_random, carries=carries_rng, device=self._device)
        self._sent = frozenset(number for numbers in program.sends.values() for number in numbers)
        self._in_flight: dict[int, _InFlight] = {}
        self._batches: dict[int, _BatchGradients] = {}
        self._updates = 0
        self._samples = 0

    @property
    def versions_alive(self) -> int:
        """Weight versions in memory, the current one included."""
        return self._versions.alive

    @property
    def in_flight(self) -> int:
        """Micro-batches that went forward and not yet backward."""
        return len(self._in_flight)

    @property
    def updates(self) -> int:
        """Updates applied in this run."""
        return self._updates

    @property
    def samples(self) -> int:
        """Training samples whose update has been applied."""
        return self._samples

    @property
    def schedule_steps(self) -> int:
        """Schedule steps taken, those of the run that was resumed included; 0 on a stage without trainable parameters."""
        return self._optimizer.schedule_steps if self._optimizer is not None else 0

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the next update; None on a stage without trainable parameters."""
        return self._optimizer.learning_rate if self._optimizer is not None else None

    def forward(self, mb: MicroBatch, values: Mapping[int, Tensor], rng_state: Tensor | None) -> ForwardResult:
        """Run a training forward and keep what its backward needs.

        `values` are all received values by number. Without `rng_state` the random numbers start from the micro-batch's
        seed. Raises NonFiniteLossError on the last stage, StageFailedError if an operation fails, and ProtocolError for a
        micro-batch that is in flight already; after an error nothing of the micro-batch is kept.
        """
        if mb.number in self._in_flight:
            raise ProtocolError(f"stage {self._program.index}: micro-batch {mb.number} is in flight already")
        arguments = {value: tensor.to(self._device) for value, tensor in values.items()}
        predicted = self._predicted_weights()
        repeatable = self._repeatable(arguments, rng_state) if self._recompute else None
        leaves = self._leaves(arguments)
        # With a gradient in either case: some kernels (the LSTM's) round otherwise without one.
        with torch.enable_grad(), self._running(mb, rng_state, "forward"), self._versions.forward(predicted) as tensors:
            produced = self._program.run({**arguments, **leaves}, tensors, training=True)
        loss = self._loss_of(produced)
        number = float(loss.detach()) if loss is not None else None
        if number is not None and not math.isfinite(number):
            raise NonFiniteLossError(f"the loss of micro-batch {mb.number} (batch {mb.batch}) is {number} on stage {self._program.index}")
        forward = repeatable if repeatable is not None else self._recorded(leaves, produced)
        version = self._versions.take(predicted)
        self._in_flight[mb.number] = _InFlight(micro_batch=mb, updates=self._updates, version=version, forward=forward)
        outputs = {value: produced[value].detach() for value in self._sent}
        return ForwardResult(outputs=outputs, rng_state=self._random.after, loss=number)

    def backward(self, number: int, gradients: Mapping[int, Tensor]) -> dict[int, dict[int, Tensor]]:
        """Run the backward of micro-batch `number` with the weights of its forward; add to its batch's gradients.

        `gradients` are those of the sent values, summed over the stages they went to (`add_gradients`); a value left out
        counts as zero. The last stage starts from its loss, weighted by samples / batch_samples. Returns, for every
        source stage, the gradients of the values received from it; a value that the loss does not depend on is left out.
        Raises ProtocolError for a micro-batch that is not in flight, StageFailedError if an operation fails.
        """
        flight = self._in_flight.pop(number, None)
        if flight is None:
            raise ProtocolError(f"stage {self._program.index}: micro-batch {number} goes backward but is not in flight")
        self._versions.release(flight.version)
        recorded = flight.forward if isinstance(flight.forward, _Recorded) else self._run_again(flight, flight.forward)
        batch = self._batches.setdefault(flight.micro_batch.batch, _BatchGradients())
        sums: dict[str, Tensor] = {} if self._correction.compensates else batch.sums
        with self._failing(number, "backward"):
            by_value = self._differentiate(flight, recorded, gradients, sums)
        batch.micro_batches += 1
        batch.samples += flight.micro_batch.samples
        # No update comes between a backward and its own batch's update: batches end in order, and each is applied at once.
        batch.delays.append(self._updates - flight.updates)
        if self._correction.compensates:
            for name, gradient in self._compensated(sums, flight).items():
                batch.add(name, gradient)
        return {
            source: {value: by_value[value] for value in values if value in by_value}
            for source, values in self._program.receives.items()
            if source != DATA_SOURCE
        }

    def gradient_square(self, batch: int) -> float:
        """Return the squared norm of this stage's gradient of `batch`, all of whose micro-batches went backward.

        Raises NonFiniteLossError if it is not finite.
        """
        sums = self._batches[batch].sums.values() if batch in self._batches else ()
        square = sum(float(torch.linalg.vector_norm(gradient.float())) ** 2 for gradient in sums)
        if not math.isfinite(square):
            raise NonFiniteLossError(f"the gradient of batch {batch} is not finite on stage {self._program.index}")
        return square

    def update(self, batch: int, norm: float | None = None) -> None:
        """Apply the gradients of `batch`, all of whose micro-batches went backward, and step the schedule.

        `norm` is that of all stages' gradients together, to clip by; None if it is not known, and each stage clips its part.
        Micro-batches still in flight keep the weights of their forward. Raises ProtocolError for a batch that has no
        gradients here.
        """
        gradients = self._batches.pop(batch, None)
        if gradients is None:
            raise ProtocolError(f"stage {self._program.index}: no micro-batch of batch {batch} went backward")
        if self._optimizer is not None:
            self._versions.make_writable(gradients.sums)
            self._delay = mean_delay(gradients.delays)
            self._optimizer.step(gradients.sums, self._delay, norm)
            self._predicted = None
        self._updates += 1
        self._samples += gradients.samples
        waiting, self._waiting_averages = self._waiting_averages, []
        for average, snapshot in waiting:
            self.apply_average(average, snapshot)
        logger.debug(
            "update job=%s stage=%d step=%d micro_batches=%d samples=%d",
            self._job,
            self._program.index,
            self._updates,
            gradients.micro_batches,
            gradients.samples,
        )

    def evaluate(self, mb: MicroBatch, values: Mapping[int, Tensor]) -> EvaluateResult:
        """Run an evaluation forward with the current weights; nothing is kept.

        Raises StageFailedError, and NonFiniteLossError on the last stage if the loss or the metric is no number.
        """
        arguments = {value: tensor.to(self._device) for value, tensor in values.items()}
        with torch.no_grad(), self._failing(mb.number, "evaluation"), computing(self._precision, self._device):
            produced = self._program.run(arguments, self._versions.current.tensors, training=False)
        weights = {tensor.untyped_storage().data_ptr() for tensor in self._versions.current.tensors.values()}
        # No backward keeps a version alive here, so a value that is itself a weight (tied weights) must be copied.
        outputs = {
            value: produced[value].clone() if produced[value].untyped_storage().data_ptr() in weights else produced[value]
            for value in self._sent
        }
        loss = self._loss_of(produced)
        metric = produced.get(self._program.metric_value) if self._program.metric_value is not None else None
        return EvaluateResult(
            outputs=outputs,
            loss=self._finite(loss, "loss", mb) if loss is not None else None,
            metric=self._finite(metric, "metric", mb) if metric is not None else None,
        )

    def _finite(self, value: Tensor, what: str, mb: MicroBatch) -> float:
        number = float(value)
        if not math.isfinite(number):
            raise NonFiniteLossError(
                f"the {what} of evaluation micro-batch {mb.number} is {number} on stage {self._program.index}",
                hint="Check the validation data for NaN, and the metric for divisions by zero.",
            )
        return number

    def snapshot(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return copies of the current tensors `names`, in that order, on the stage's device."""
        return {name: self._versions.tensor(name).clone() for name in names}

    def apply_average(self, average: Mapping[str, Tensor], snapshot: Mapping[str, Tensor]) -> None:
        """Set w to w + (average - snapshot), for parameters and float buffers; to the average itself if w is the snapshot.

        That keeps the updates made while the round ran. Micro-batches in flight keep the weights of their forward. In mode
        "sync" it happens after the update of the batch that has begun here, so that a batch sees one version of the weights.
        """
        if self._flush and (self._in_flight or self._batches):
            # Copies, since a ring's next round may use the memory of this one.
            self._waiting_averages.append(tuple({name: tensor.clone() for name, tensor in part.items()} for part in (average, snapshot)))
            return
        with torch.no_grad():
            self._versions.write({name: self._shifted(name, average[name], snapshot[name]) for name in average})
        self._predicted = None

    def state(self) -> dict[str, Tensor]:
        """Return the owned parameters and buffers by name. They share storage: copy what must outlive the next change."""
        return {record.name: self._versions.tensor(record.name) for record in self._program.tensors}

    def optimizer_state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the optimizer state of the parameters `names` as 'PARAMETER/KEY' tensors; they share storage.

        Names without state (not trainable, or never updated) are left out.
        """
        return self._optimizer.state(names) if self._optimizer is not None else {}

    def set_share(self, share: float) -> None:
        """From now on this cluster consumes that fraction of the data: schedules count it."""
        if self._optimizer is not None:
            self._optimizer.set_share(share)

    def abandon(self) -> None:
        """Forget all micro-batches in flight and all gradients; weights and optimizer state stay as they are."""
        for flight in self._in_flight.values():
            self._versions.release(flight.version)
        self._in_flight.clear()
        self._batches.clear()
        self._predicted = None
        waiting, self._waiting_averages = self._waiting_averages, []
        for average, snapshot in waiting:
            self.apply_average(average, snapshot)

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the optimizer state from 'PARAMETER/KEY' tensors. Raises CheckpointMismatchError if it does not fit."""
        if self._optimizer is not None:
            self._optimizer.load_state(tensors)

    def _leaves(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        carrying = (value for value in values.keys() & self._program.differentiable if values[value].is_floating_point())
        return {value: values[value].detach().requires_grad_() for value in carrying}

    def _recorded(self, leaves: dict[int, Tensor], produced: Mapping[int, Tensor]) -> _Recorded:
        sent = self._sent & self._program.differentiable
        edges = {value: get_gradient_edge(produced[value]) for value in sent if produced[value].requires_grad}
        return _Recorded(received=leaves, edges=edges, loss=self._loss_of(produced))

    def _repeatable(self, values: Mapping[int, Tensor], rng_state: Tensor | None) -> _Repeatable:
        program, now = self._program, self._versions.current.tensors
        return _Repeatable(
            values={value: tensor.clone() if value in program.changed_values else tensor for value, tensor in values.items()},
            tensors={name: now[name].detach().clone() for name in program.changed_tensors},
            rng_state=rng_state if program.draws_random else None,
        )

    def _run_again(self, flight: _InFlight, first: _Repeatable) -> _Recorded:
        """Run the forward of a micro-batch with the weights, random numbers and buffers of the first time; nothing else changes."""
        leaves = self._leaves(first.values)
        with torch.enable_grad(), self._running(flight.micro_batch, first.rng_state, "second forward"):
            produced = self._program.run({**first.values, **leaves}, {**flight.version.tensors, **first.tensors}, training=True)
        return self._recorded(leaves, produced)

    def _differentiate(
        self, flight: _InFlight, recorded: _Recorded, gradients: Mapping[int, Tensor], sums: dict[str, Tensor]
    ) -> dict[int, Tensor]:
        """Return the gradients of received values; add those of parameters to `sums`, one by one as autograd finds them.

        So a second micro-batch of a batch needs no second set of gradients, and sums are rounded as in one process. Those of received
        values are taken before autograd puts them in the order that the value has in memory: later sums would be rounded otherwise.
        """
        roots: list[GradientEdge] = []
        starts: list[Tensor] = []
        if recorded.loss is not None and recorded.loss.requires_grad:
            roots.append(get_gradient_edge(recorded.loss))
            starts.append(torch.full_like(recorded.loss, flight.micro_batch.samples / flight.micro_batch.batch_samples))
        for value, edge in recorded.edges.items():
            if value in gradients:
                roots.append(edge)
                starts.append(gradients[value].to(self._device))
        weights = {name: flight.version.tensors[name] for name in self._trainable}
        leaves = [*weights.values(), *recorded.received.values()]
        if not roots or not leaves:
            return {}
        found: dict[int, Tensor] = {}
        for value, leaf in recorded.received.items():
            leaf.register_hook(partial(found.__setitem__, value))
        for name, total in sums.items():
            weights[name].grad = total
        try:
            torch.autograd.backward(roots, starts, inputs=leaves)
            sums.update({name: leaf.grad for name, leaf in weights.items() if leaf.grad is not None})
        finally:
            # Other micro-batches run with the same leaves.
            for leaf in weights.values():
                leaf.grad = None
        return found

    def _predicted_weights(self) -> dict[str, Tensor]:
        """Return leaves to run forwards on instead of the current weights; the same ones until the weights change."""
        if not self._correction.predicts:
            return {}
        if self._predicted is None:
            with torch.no_grad():
                now = {name: self._versions.tensor(name) for name in self._trainable}
                self._predicted = self._correction.predicted(now, self._delay)
            for tensor in self._predicted.values():
                tensor.requires_grad_()
        return self._predicted

    def _compensated(self, by_name: Mapping[str, Tensor], flight: _InFlight) -> dict[str, Tensor]:
        fraction = flight.micro_batch.samples / flight.micro_batch.batch_samples
        now, then = self._versions.current.tensors, flight.version.tensors
        with torch.no_grad():
            return {
                name: gradient
                if now[name] is then[name]
                else self._correction.compensated(name, gradient, now[name] - then[name], fraction)
                for name, gradient in by_name.items()
            }

    def _shifted(self, name: str, average: Tensor, snapshot: Tensor) -> Tensor:
        now = self._versions.tensor(name)
        target, base = average.to(self._device), snapshot.to(self._device)
        return target if torch.equal(now, base) else now + (target - base)

    def _loss_of(self, produced: Mapping[int, Tensor]) -> Tensor | None:
        if not self._program.is_last or self._program.loss_value is None:
            return None
        return produced[self._program.loss_value]

    @contextmanager
    def _running(self, mb: MicroBatch, rng_state: Tensor | None, what: str) -> Iterator[None]:
        """What surrounds a training forward: its random numbers, its precision, and the error if an operation fails."""
        with self._failing(mb.number, what), self._random.forward(mb.seed, rng_state), computing(self._precision, self._device):
            yield

    @contextmanager
    def _failing(self, number: int, what: str) -> Iterator[None]:
        try:
            yield
        except _PROGRAM_ERRORS as error:
            where = f"stage {self._program.index} (graph positions {self._program.start}..{self._program.stop})"
            raise StageFailedError(f"{where} cannot run the {what} of micro-batch {number}: {error}") from error


def add_gradients(parts: Mapping[int, Mapping[int, Tensor]]) -> dict[int, Tensor]:
    """Return the gradient of each sent value: the sum over the stages (keys of `parts`) that sent one back.

    Adds from the last stage to the first, as autograd does in one process.
    """
    total: dict[int, Tensor] = {}
    for stage in sorted(parts, reverse=True):
        for value, gradient in parts[stage].items():
            total[value] = total[value] + gradient if value in total else gradient
    return total


def _check_tensors(program: RunnableProgram, tensors: Mapping[str, Tensor]) -> None:
    for record in (*program.tensors, *program.shared):
        tensor = tensors.get(record.name)
        if tensor is None:
            raise StageFailedError(f"stage {program.index} was given no tensor {record.name!r}")
        found = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
        wanted = f"{record.dtype} {list(record.shape)}"
        if found != wanted:
            raise StageFailedError(f"stage {program.index}: tensor {record.name!r} is {found}, the graph says {wanted}")
