"""The life of one job, as a state machine: the coordinator reports events and carries out the instructions.

submitted -> probing -> preparing -> training -> averaging -> [evaluating] -> saving -> training ... -> done; any state but
the last two may fail. Cancelling drains the pipelines, skips the evaluation, saves and ends. When a cluster breaks, or the plan
changes for another reason, the job is repaired and goes on training: if nothing is left to train up to the synchronisation point,
that is only a step to the averaging that may have been interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from roost.messages import JobState
from roost.protocol.machine import StateMachine

# ---------------------------------------------------------------- events


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """Base of what happens to a job."""


@dataclass(frozen=True, kw_only=True)
class NodesReady(JobEvent):
    """Enough nodes have joined."""


@dataclass(frozen=True, kw_only=True)
class LinksMeasured(JobEvent):
    """Every pair of nodes has been probed."""


@dataclass(frozen=True, kw_only=True)
class StagesReady(JobEvent):
    """All nodes have built their stages."""


@dataclass(frozen=True, kw_only=True)
class TrainingDrained(JobEvent):
    """Every lease up to the synchronisation point is done, or, after a cancellation, every lease that was given out."""


@dataclass(frozen=True, kw_only=True)
class ClustersAveraged(JobEvent):
    """All clusters hold the same parameters."""


@dataclass(frozen=True, kw_only=True)
class EvaluationFinished(JobEvent):
    """Every validation sample has been evaluated."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(JobEvent):
    """The checkpoint is on the requester's disk; `finished` says that all epochs are done."""

    finished: bool


@dataclass(frozen=True, kw_only=True)
class PlanBroken(JobEvent):
    """A cluster cannot go on as it is, or shall not; again while that is mended: something else has happened to the plan."""


@dataclass(frozen=True, kw_only=True)
class PlanRepaired(JobEvent):
    """Every cluster of the plan is ready."""


@dataclass(frozen=True, kw_only=True)
class CancelRequested(JobEvent):
    """The requester wants to stop."""


@dataclass(frozen=True, kw_only=True)
class FaultOccurred(JobEvent):
    """Something the job cannot survive."""

    reason: str


# ---------------------------------------------------------------- instructions


class JobInstruction(StrEnum):
    """What the coordinator must do."""

    MEASURE_LINKS = "measure_links"
    PREPARE_STAGES = "prepare_stages"
    OPEN_TRAINING = "open_training"
    STOP_LEASING = "stop_leasing"
    AVERAGE = "average"
    OPEN_EVALUATION = "open_evaluation"
    SAVE_CHECKPOINT = "save_checkpoint"
    REPAIR = "repair"
    GO_ON = "go_on"
    END_STAGES = "end_stages"


TRANSITIONS: dict[JobState, dict[type[object], JobState | tuple[JobState, ...]]] = {
    # A cancellation before training ends the job at once: there is nothing to save yet.
    JobState.SUBMITTED: {NodesReady: JobState.PROBING, CancelRequested: JobState.DONE, FaultOccurred: JobState.FAILED},
    JobState.PROBING: {LinksMeasured: JobState.PREPARING, CancelRequested: JobState.DONE, FaultOccurred: JobState.FAILED},
    JobState.PREPARING: {
        StagesReady: JobState.TRAINING,
        PlanBroken: JobState.REPAIRING,
        CancelRequested: JobState.DONE,
        FaultOccurred: JobState.FAILED,
    },
    # Later it only marks the job: training drains, then the usual way to a checkpoint.
    JobState.TRAINING: {
        TrainingDrained: JobState.AVERAGING,
        PlanBroken: JobState.REPAIRING,
        CancelRequested: JobState.TRAINING,
        FaultOccurred: JobState.FAILED,
    },
    JobState.AVERAGING: {
        ClustersAveraged: (JobState.EVALUATING, JobState.SAVING),
        PlanBroken: JobState.REPAIRING,
        CancelRequested: JobState.AVERAGING,
        FaultOccurred: JobState.FAILED,
    },
    JobState.EVALUATING: {
        EvaluationFinished: JobState.SAVING,
        PlanBroken: JobState.REPAIRING,
        CancelRequested: JobState.EVALUATING,
        FaultOccurred: JobState.FAILED,
    },
    JobState.SAVING: {
        CheckpointSaved: (JobState.TRAINING, JobState.DONE),
        PlanBroken: JobState.REPAIRING,
        CancelRequested: JobState.SAVING,
        FaultOccurred: JobState.FAILED,
    },
    JobState.REPAIRING: {
        PlanBroken: JobState.REPAIRING,
        PlanRepaired: JobState.TRAINING,
        CancelRequested: JobState.REPAIRING,
        FaultOccurred: JobState.FAILED,
    },
}


class JobLifecycle:
    """Where one job is. `handle` is the only way to move it."""

    def __init__(self, job_id: str, *, evaluates: bool, state: JobState = JobState.SUBMITTED, cancelled: bool = False) -> None:
        """`state` is where a job is that a coordinator finds again, and `cancelled` whether it was asked to stop."""
        self._evaluates = evaluates
        self._machine = StateMachine(f"job {job_id}", state, TRANSITIONS)
        self.cancelled = cancelled

    @property
    def state(self) -> JobState:
        return self._machine.state

    @property
    def ended(self) -> bool:
        return self.state in (JobState.DONE, JobState.FAILED)

    def handle(self, event: JobEvent) -> list[JobInstruction]:
        """Return what to do next. Raises IllegalTransitionError with the recent history."""
        self._machine.allowed(event)
        target, instructions = self._decide(event)
        self._machine.move(event, target)
        return instructions

    def _decide(self, event: JobEvent) -> tuple[JobState, list[JobInstruction]]:
        match event:
            case NodesReady():
                return JobState.PROBING, [JobInstruction.MEASURE_LINKS]
            case LinksMeasured():
                return JobState.PREPARING, [JobInstruction.PREPARE_STAGES]
            case StagesReady():
                return JobState.TRAINING, [JobInstruction.OPEN_TRAINING]
            case TrainingDrained():
                return JobState.AVERAGING, [JobInstruction.AVERAGE]
            case ClustersAveraged() if self._evaluates and not self.cancelled:
                return JobState.EVALUATING, [JobInstruction.OPEN_EVALUATION]
            case ClustersAveraged() | EvaluationFinished():
                return JobState.SAVING, [JobInstruction.SAVE_CHECKPOINT]
            case CheckpointSaved(finished=finished):
                if finished or self.cancelled:
                    return JobState.DONE, [JobInstruction.END_STAGES]
                return JobState.TRAINING, [JobInstruction.OPEN_TRAINING]
            case PlanBroken():
                return JobState.REPAIRING, [JobInstruction.REPAIR]
            case PlanRepaired():
                return JobState.TRAINING, [JobInstruction.GO_ON, *([JobInstruction.STOP_LEASING] if self.cancelled else [])]
            case CancelRequested():
                return self._decide_cancel()
            case _:
                return JobState.FAILED, [JobInstruction.END_STAGES]

    def _decide_cancel(self) -> tuple[JobState, list[JobInstruction]]:
        first = not self.cancelled
        self.cancelled = True
        if self.state in (JobState.SUBMITTED, JobState.PROBING, JobState.PREPARING):
            return JobState.DONE, [JobInstruction.END_STAGES]
        if self.state is JobState.TRAINING and first:
            return self.state, [JobInstruction.STOP_LEASING]
        return self.state, []
