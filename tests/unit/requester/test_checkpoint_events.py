"""What a requester makes of what it is told of checkpoints."""

from __future__ import annotations

from roost import messages as m
from roost.messages import JobState
from roost.requester.checkpoint_events import saved_beside, unheard
from roost.types import CheckpointEvent, CheckpointState


def event(state: str, attempt: int = 1, *, background: bool = True) -> CheckpointEvent:
    return CheckpointEvent(name=f"epoch-{attempt:04d}", attempt=attempt, epoch=attempt, state=CheckpointState(state), background=background)


def update(*events: CheckpointEvent) -> m.JobUpdate:
    return m.JobUpdate(
        job_id="job",
        state=JobState.TRAINING,
        epochs_done=1.0,
        elapsed_s=1.0,
        metrics=(),
        history=(),
        cancelled=False,
        error=None,
        checkpoints=events,
    )


def test_every_event_is_heard_once_however_often_it_is_told() -> None:
    begun, complete, next_one = event("begun"), event("complete"), event("begun", 2)
    assert unheard(None, update(begun)) == (begun,)
    assert unheard(update(begun), update(begun, complete)) == (complete,)
    assert unheard(update(begun, complete), update(begun, complete)) == ()
    assert unheard(update(begun, complete), update(complete, next_one)) == (next_one,)


def test_another_coordinator_begins_with_no_events() -> None:
    assert unheard(update(event("begun")), update()) == ()
    assert unheard(update(), update(event("begun", 1 << 20))) == (event("begun", 1 << 20),)


def test_a_checkpoint_is_saved_beside_training_until_it_is_over() -> None:
    assert saved_beside(None) == ""
    assert saved_beside(update()) == ""
    assert saved_beside(update(event("begun"))) == "epoch-0001"
    assert saved_beside(update(event("begun"), event("skipped", 2))) == "epoch-0001"
    assert saved_beside(update(event("begun"), event("abandoned"))) == ""
    assert saved_beside(update(event("begun"), event("complete"))) == ""


def test_a_checkpoint_that_training_waits_for_is_not_saved_beside_it() -> None:
    assert saved_beside(update(event("begun", background=False))) == ""
