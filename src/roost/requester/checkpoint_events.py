"""What the coordinator tells of checkpoints: which of it is new, and whether one is being uploaded now."""

from __future__ import annotations

from roost import messages as m
from roost.types import CheckpointEvent, CheckpointState


def unheard(before: m.JobUpdate | None, update: m.JobUpdate) -> tuple[CheckpointEvent, ...]:
    """Return what the update before did not tell."""
    heard = before.checkpoints if before is not None else ()
    return tuple(event for event in update.checkpoints if event not in heard)


def saved_beside(update: m.JobUpdate | None) -> str:
    """Return the checkpoint that is being uploaded while training goes on; empty if none is."""
    events = update.checkpoints if update is not None else ()
    last = next((event for event in reversed(events) if event.state is not CheckpointState.SKIPPED), None)
    return last.name if last is not None and last.state is CheckpointState.BEGUN and last.background else ""
