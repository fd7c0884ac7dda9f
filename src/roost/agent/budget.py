"""A node takes no stage that needs more memory than its owner lends, whatever the coordinator says."""

from __future__ import annotations

from collections.abc import Iterable

from roost.agent.assignment import Assignment
from roost.config import format_bytes
from roost.errors import OutOfBudgetError
from roost.planning.memory import optimizer_copies
from roost.types import TensorRecord


def check_plan(assignment: Assignment, memory_bytes: int) -> None:
    """Raise OutOfBudgetError if the plan says that the stage needs more than the node lends."""
    _check(assignment, assignment.stage.memory_needed_bytes, memory_bytes)


def check_tensors(assignment: Assignment, records: Iterable[TensorRecord], memory_bytes: int) -> None:
    """Raise OutOfBudgetError if the stage's tensors, gradients and optimizer state alone take more than the node lends.

    `records` are those of the stage's own and shared tensors.
    """
    every = tuple(records)
    trainable = sum(record.nbytes for record in every if record.trainable)
    held = sum(record.nbytes for record in every)
    _check(assignment, held + (1 + optimizer_copies(assignment.config.optimizer)) * trainable, memory_bytes)


def _check(assignment: Assignment, needed: int, lent: int) -> None:
    if needed > lent:
        raise OutOfBudgetError(
            f"node {assignment.node_id} lends {format_bytes(lent)}; stage {assignment.stage.index} of cluster "
            f"{assignment.cluster.index} needs {format_bytes(needed)}"
        )
