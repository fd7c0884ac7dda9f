from __future__ import annotations

import pytest

from roost.errors import IllegalTransitionError
from roost.messages import JobState
from roost.protocol import job_lifecycle as life
from roost.protocol.job_lifecycle import JobInstruction, JobLifecycle

WORKING = [state for state in JobState if state not in (JobState.DONE, JobState.FAILED)]
START = (life.NodesReady(), life.LinksMeasured(), life.StagesReady())
TO_STATE: dict[JobState, tuple[life.JobEvent, ...]] = {
    JobState.SUBMITTED: (),
    JobState.PROBING: START[:1],
    JobState.PREPARING: START[:2],
    JobState.TRAINING: START,
    JobState.AVERAGING: (*START, life.TrainingDrained()),
    JobState.EVALUATING: (*START, life.TrainingDrained(), life.ClustersAveraged()),
    JobState.SAVING: (*START, life.TrainingDrained(), life.ClustersAveraged(), life.EvaluationFinished()),
    JobState.REPAIRING: (*START, life.PlanBroken()),
}


def job_in(state: JobState) -> JobLifecycle:
    job = JobLifecycle("j", evaluates=True)
    for event in TO_STATE[state]:
        job.handle(event)
    assert job.state is state
    return job


def test_a_job_goes_round_from_training_to_saving_until_all_epochs_are_done() -> None:
    job = job_in(JobState.SAVING)
    assert job.handle(life.CheckpointSaved(finished=False)) == [JobInstruction.OPEN_TRAINING]
    assert job.state is JobState.TRAINING
    assert job.handle(life.TrainingDrained()) == [JobInstruction.AVERAGE]
    assert job.handle(life.ClustersAveraged()) == [JobInstruction.OPEN_EVALUATION]
    assert job.handle(life.EvaluationFinished()) == [JobInstruction.SAVE_CHECKPOINT]
    assert job.handle(life.CheckpointSaved(finished=True)) == [JobInstruction.END_STAGES]
    assert job.ended


def test_without_validation_data_saving_follows_averaging() -> None:
    job = JobLifecycle("j", evaluates=False)
    for event in (*START, life.TrainingDrained()):
        job.handle(event)
    assert job.handle(life.ClustersAveraged()) == [JobInstruction.SAVE_CHECKPOINT]


@pytest.mark.parametrize("state", WORKING)
def test_any_fault_fails_a_job_that_has_not_ended_and_frees_its_nodes(state: JobState) -> None:
    job = job_in(state)
    assert job.handle(life.FaultOccurred(reason="a node is lost")) == [JobInstruction.END_STAGES]
    assert job.state is JobState.FAILED


@pytest.mark.parametrize("state", [JobState.SUBMITTED, JobState.PROBING, JobState.PREPARING])
def test_cancelling_before_training_ends_the_job_at_once(state: JobState) -> None:
    job = job_in(state)
    assert job.handle(life.CancelRequested()) == [JobInstruction.END_STAGES]
    assert job.state is JobState.DONE


def test_cancelling_in_training_stops_leasing_averages_saves_and_ends_without_evaluating() -> None:
    job = job_in(JobState.TRAINING)
    assert job.handle(life.CancelRequested()) == [JobInstruction.STOP_LEASING]
    assert job.handle(life.CancelRequested()) == []
    assert job.handle(life.TrainingDrained()) == [JobInstruction.AVERAGE]
    assert job.handle(life.ClustersAveraged()) == [JobInstruction.SAVE_CHECKPOINT]
    assert job.handle(life.CheckpointSaved(finished=False)) == [JobInstruction.END_STAGES]
    assert job.state is JobState.DONE


@pytest.mark.parametrize("state", [JobState.AVERAGING, JobState.EVALUATING, JobState.SAVING])
def test_cancelling_at_a_synchronisation_point_lets_it_finish_and_ends_there(state: JobState) -> None:
    job = job_in(state)
    assert job.handle(life.CancelRequested()) == []
    assert job.state is state
    while job.state is not JobState.SAVING:
        job.handle(life.ClustersAveraged() if job.state is JobState.AVERAGING else life.EvaluationFinished())
    assert job.handle(life.CheckpointSaved(finished=False)) == [JobInstruction.END_STAGES]


def test_an_event_out_of_turn_is_refused_with_the_history() -> None:
    job = job_in(JobState.PROBING)
    with pytest.raises(IllegalTransitionError, match="submitted -- NodesReady -> probing"):
        job.handle(life.TrainingDrained())
    assert job.state is JobState.PROBING


@pytest.mark.parametrize("end", [JobState.DONE, JobState.FAILED])
def test_nothing_moves_a_job_that_has_ended(end: JobState) -> None:
    job = job_in(JobState.SUBMITTED)
    job.handle(life.CancelRequested() if end is JobState.DONE else life.FaultOccurred(reason="r"))
    for event in (life.NodesReady(), life.CancelRequested(), life.FaultOccurred(reason="r")):
        with pytest.raises(IllegalTransitionError):
            job.handle(event)


@pytest.mark.parametrize("state", [JobState.PREPARING, JobState.TRAINING, JobState.AVERAGING, JobState.EVALUATING, JobState.SAVING])
def test_a_plan_that_breaks_is_repaired_and_the_job_goes_on_training_whatever_it_was_doing(state: JobState) -> None:
    job = job_in(state)
    assert job.handle(life.PlanBroken()) == [JobInstruction.REPAIR]
    assert job.state is JobState.REPAIRING
    assert job.handle(life.PlanBroken()) == [JobInstruction.REPAIR]
    assert job.handle(life.PlanRepaired()) == [JobInstruction.GO_ON]
    assert job.state is JobState.TRAINING


def test_a_job_that_is_cancelled_while_it_is_repaired_stops_leasing_afterwards() -> None:
    job = job_in(JobState.REPAIRING)
    assert job.handle(life.CancelRequested()) == []
    assert job.handle(life.PlanRepaired()) == [JobInstruction.GO_ON, JobInstruction.STOP_LEASING]
