"""Which computation a stage does next: the zero-bubble asynchronous schedule (arXiv 2401.01728, section on asynchronous
model parallelism). No flush: a stage goes forward whenever the bound on in-flight micro-batches lets it, and backward as soon
as it can; where both wait it does one of each in turn (docs/decisions/0004). With flush, for jobs in mode "sync", a stage starts
a batch only when it has applied the one before it: 1F1B with flush (arXiv 2104.04473, section 2.2), which equals one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from roost.errors import ProtocolError
from roost.protocol.machine import StateMachine
from roost.types import MicroBatch

DATA = -1
"""The source of stage 0: the samples themselves."""


@dataclass(frozen=True, kw_only=True)
class ValuesArrived:
    """Everything stage `source` sends for the forward of `micro_batch` is here; `source` is DATA for the samples."""

    micro_batch: MicroBatch
    source: int


@dataclass(frozen=True, kw_only=True)
class GradientsArrived:
    """Everything stage `source` sends for the backward of micro-batch `number` is here."""

    number: int
    source: int


@dataclass(frozen=True, kw_only=True)
class NormArrived:
    """The norm of stage `source`'s gradient of `batch` is here."""

    batch: int
    source: int


@dataclass(frozen=True, kw_only=True)
class ComputeFinished:
    """The computation that was asked for last is done."""


@dataclass(frozen=True, kw_only=True)
class RunForward:
    """Run the forward of a training micro-batch, keep its weight version, send its values on."""

    micro_batch: MicroBatch


@dataclass(frozen=True, kw_only=True)
class RunBackward:
    """Run the backward with the weights of its forward, send the gradients back, add to the batch's gradient."""

    micro_batch: MicroBatch


@dataclass(frozen=True, kw_only=True)
class RunEvaluation:
    """Run a forward with the current weights, keep nothing, send the values on."""

    micro_batch: MicroBatch


@dataclass(frozen=True, kw_only=True)
class RunUpdate:
    """Take one optimizer step with the gradient of `batch`."""

    batch: int
    staleness: tuple[int, ...]
    """Per micro-batch of the batch, in order: updates of this stage between its forward and this update."""


ScheduleEvent = ValuesArrived | GradientsArrived | NormArrived | ComputeFinished
Computation = RunForward | RunBackward | RunEvaluation | RunUpdate


class ScheduleState(StrEnum):
    """Whether a computation is outstanding."""

    WAITING = "waiting"
    COMPUTING = "computing"


TRANSITIONS: dict[ScheduleState, dict[type[object], ScheduleState | tuple[ScheduleState, ...]]] = {
    ScheduleState.WAITING: {
        ValuesArrived: (ScheduleState.WAITING, ScheduleState.COMPUTING),
        GradientsArrived: (ScheduleState.WAITING, ScheduleState.COMPUTING),
        NormArrived: (ScheduleState.WAITING, ScheduleState.COMPUTING),
    },
    ScheduleState.COMPUTING: {
        ValuesArrived: ScheduleState.COMPUTING,
        GradientsArrived: ScheduleState.COMPUTING,
        NormArrived: ScheduleState.COMPUTING,
        ComputeFinished: (ScheduleState.WAITING, ScheduleState.COMPUTING),
    },
}


def bubble_free_in_flight(stage: int, stages: int) -> int:
    """Return the in-flight micro-batches with which a stage never waits in a balanced pipeline: one per stage from here to the last."""
    return stages - stage


class PipelineSchedule:
    """Decides for one stage, one computation at a time: update > backward > evaluation > forward.

    Training micro-batches go forward in the order of their numbers, without gaps, and backward in the same order, so the
    same data gives the same updates whatever the network does. Numbers start at `first_number`.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        sources: frozenset[int],
        targets: frozenset[int],
        max_in_flight: int,
        *,
        first_number: int = 0,
        flush: bool = False,
        norm_sources: frozenset[int] = frozenset(),
    ) -> None:
        """`sources` are the stages whose values each forward needs (DATA for stage 0), `targets` those whose gradients each
        backward needs (none for the last stage). With `flush` all micro-batches of a batch see the same weights: a batch goes
        forward only when the update of the batch before it is done here, which may then wait for the norms of other stages'
        gradients, those of `norm_sources`.
        """
        self._name = f"stage {stage} of {stages}"
        self._sources = sources
        self._targets = targets
        self._max_in_flight = max_in_flight
        self._flush = flush
        self._norm_sources = norm_sources
        self._norms: set[int] = set()  # stages whose norm of the current batch has arrived
        self._machine = StateMachine(f"schedule of {self._name}", ScheduleState.WAITING, TRANSITIONS)
        self._outstanding: Computation | None = None
        self._headers: dict[int, MicroBatch] = {}  # micro-batches that have arrived, in part or whole, and not gone forward
        self._values: dict[int, set[int]] = {}  # for each of them, the sources that have arrived
        self._next_number = first_number  # every lower number has gone forward
        self._overtaken: set[int] = set()  # evaluations with higher numbers that have gone forward too
        self._in_flight: list[MicroBatch] = []  # forward done or running, backward not finished; oldest first
        self._gradients: dict[int, set[int]] = {}  # for each of them, the targets whose gradients have arrived
        self._forward_version: dict[int, int] = {}  # updates done here when it went forward; until its update
        self._batch_numbers: list[int] = []  # micro-batches of the current batch whose backward is done
        self._update_due: int | None = None
        self._backward_last = False
        self._last_training: MicroBatch | None = None
        self._updates = 0

    @property
    def in_flight(self) -> int:
        """Training micro-batches whose forward has started here and whose backward has not finished."""
        return len(self._in_flight)

    @property
    def updates(self) -> int:
        """Updates finished here."""
        return self._updates

    @property
    def computing(self) -> bool:
        """True while a computation is outstanding."""
        return self._outstanding is not None

    @property
    def idle(self) -> bool:
        """True if the stage is drained: no computation outstanding, nothing queued, nothing in flight."""
        return not (self.computing or self._headers or self._in_flight or self._update_due is not None)

    def handle(self, event: ScheduleEvent) -> list[Computation]:
        """Take in `event` and return what to compute now: nothing, or one computation that ends with ComputeFinished.

        Raises ProtocolError for arrivals that are unknown, contradictory or repeated.
        """
        self._machine.allowed(event)
        if isinstance(event, ValuesArrived):
            self._take_values(event)
        elif isinstance(event, GradientsArrived):
            self._take_gradients(event)
        elif isinstance(event, NormArrived):
            self._take_norm(event)
        else:
            self._finish()
        if self._outstanding is not None:
            self._machine.move(event, ScheduleState.COMPUTING)
            return []
        chosen = self._choose()
        self._machine.move(event, ScheduleState.WAITING if chosen is None else ScheduleState.COMPUTING)
        if chosen is None:
            return []
        self._begin(chosen)
        return [chosen]

    def _take_values(self, event: ValuesArrived) -> None:
        number = event.micro_batch.number
        if event.source not in self._sources:
            raise self._broken(f"values of micro-batch {number} came from {event.source}, which is not one of {sorted(self._sources)}")
        if number < self._next_number or number in self._overtaken or event.source in self._values.get(number, ()):
            raise self._broken(f"values of micro-batch {number} from {event.source} came twice")
        known = self._headers.setdefault(number, event.micro_batch)
        if known != event.micro_batch:
            raise self._broken(f"micro-batch {number} came with two headers: {known} and {event.micro_batch}")
        self._values.setdefault(number, set()).add(event.source)

    def _take_gradients(self, event: GradientsArrived) -> None:
        if event.source not in self._targets:
            raise self._broken(
                f"gradients of micro-batch {event.number} came from {event.source}, which is not one of {sorted(self._targets)}"
            )
        arrived = self._gradients.get(event.number)
        if arrived is None:
            raise self._broken(f"gradients of micro-batch {event.number} came from {event.source}, but it is not in flight here")
        if event.source in arrived:
            raise self._broken(f"gradients of micro-batch {event.number} from {event.source} came twice")
        arrived.add(event.source)

    def _take_norm(self, event: NormArrived) -> None:
        if event.source not in self._norm_sources or event.source in self._norms:
            raise self._broken(f"the norm of batch {event.batch} from {event.source} was not to come, or came twice")
        if self._last_training is None or self._last_training.batch != event.batch:
            raise self._broken(f"the norm of batch {event.batch} came from {event.source}, but that batch is not in flight here")
        self._norms.add(event.source)

    def _finish(self) -> None:
        done, self._outstanding = self._outstanding, None
        if isinstance(done, RunBackward):
            micro_batch = self._in_flight.pop(0)
            del self._gradients[micro_batch.number]
            self._batch_numbers.append(micro_batch.number)
            if micro_batch.position == micro_batch.count - 1:
                self._update_due = micro_batch.batch
        elif isinstance(done, RunUpdate):
            for number in self._batch_numbers:
                del self._forward_version[number]
            self._batch_numbers.clear()
            self._norms.clear()
            self._update_due = None
            self._updates += 1

    def _choose(self) -> Computation | None:
        if self._update_due is not None and self._norms == self._norm_sources:
            staleness = tuple(self._updates - self._forward_version[number] for number in self._batch_numbers)
            return RunUpdate(batch=self._update_due, staleness=staleness)
        waiting = self._headers.get(self._next_number)
        forward = waiting is not None and waiting.training and self._complete(waiting.number) and self._has_room(waiting)
        backward = bool(self._in_flight) and self._gradients[self._in_flight[0].number] == self._targets
        if backward and not (forward and self._backward_last):
            return RunBackward(micro_batch=self._in_flight[0])
        evaluations = [number for number, header in self._headers.items() if not header.training and self._complete(number)]
        if evaluations:
            return RunEvaluation(micro_batch=self._headers[min(evaluations)])
        if forward and waiting is not None:
            self._check_order(waiting)
            return RunForward(micro_batch=waiting)
        return None

    def _has_room(self, waiting: MicroBatch) -> bool:
        # Micro-batches that went forward and whose update is not done are those with a forward version.
        starts_early = self._flush and waiting.position == 0 and bool(self._forward_version)
        return self.in_flight < self._max_in_flight and not starts_early

    def _complete(self, number: int) -> bool:
        return self._values[number] == self._sources

    def _begin(self, chosen: Computation) -> None:
        self._outstanding = chosen
        if isinstance(chosen, RunForward | RunBackward):
            self._backward_last = isinstance(chosen, RunBackward)
        if isinstance(chosen, RunUpdate | RunBackward):
            return
        number = chosen.micro_batch.number
        del self._headers[number], self._values[number]
        self._overtaken.add(number)
        while self._next_number in self._overtaken:
            self._overtaken.remove(self._next_number)
            self._next_number += 1
        if isinstance(chosen, RunForward):
            self._in_flight.append(chosen.micro_batch)
            self._gradients[number] = set()
            self._forward_version[number] = self._updates
            self._last_training = chosen.micro_batch

    def _check_order(self, micro_batch: MicroBatch) -> None:
        before = self._last_training
        if before is None:
            follows = micro_batch.position == 0
        elif before.position == before.count - 1:
            follows = micro_batch.position == 0 and micro_batch.batch == before.batch + 1
        else:
            follows = (micro_batch.batch, micro_batch.position, micro_batch.count) == (before.batch, before.position + 1, before.count)
        if not follows:
            raise self._broken(f"micro-batch {micro_batch} does not follow {before}")

    def _broken(self, what: str) -> ProtocolError:
        return ProtocolError(
            f"{self._name}: {what}",
            hint="A neighbouring stage sends what it should not: run the same version of roost everywhere, then report this.",
        )
