"""What the coordinator writes down of a running job, so that another process can go on with it (docs/failover.md)."""

from __future__ import annotations

from dataclasses import dataclass

from roost.messages import LeaseGrant
from roost.protocol.data_leases import LeaseBook
from roost.types import LeaseRecord, LinkProfile, NodeProfile, Plan, StageMetrics


@dataclass(frozen=True, kw_only=True)
class LastGrant:
    """What a cluster was given when it last asked for leases: whoever did not get the answer asks again."""

    cluster: int
    number: int
    """Of the request."""
    grant: LeaseGrant
    reported: int
    """Leases that it has reported done so far."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job between two of its moves; the leases since then are in the journal."""

    plan: Plan
    numbers: tuple[int, ...]
    """Of the plan's clusters."""
    next_number: int
    broken: tuple[int, ...]
    """Numbers of clusters that could not go on."""
    gone: tuple[str, ...]
    """Nodes of the plan that were lost."""
    generation: int
    built: bool
    """False if its stages had never all been built."""
    nodes: tuple[NodeProfile, ...]
    links: tuple[LinkProfile, ...]
    correction: str
    """What the job does against staleness."""
    order: int
    """Synchronisation points so far."""
    repairs: int
    cancelled: bool
    checkpoint: str
    """The newest checkpoint; empty if there is none."""
    elapsed_s: float
    past: StageMetrics | None
    leases: LeaseRecord
    grants: tuple[LastGrant, ...]


@dataclass(frozen=True, kw_only=True)
class LeaseOperation:
    """One line of the journal: leases that were given out, or reported done."""

    cluster: int
    want: int = 0
    """Leases that were asked for; 0 for a report."""
    number: int = 0
    """Of the request."""
    done: tuple[int, ...] = ()
    """Leases that were reported done."""


def replay(book: LeaseBook, operations: tuple[LeaseOperation, ...]) -> dict[int, tuple[int, LeaseGrant]]:
    """Do again what the journal says: the book is then what it was.

    Returns, by cluster, the number of its last request and what it was given: whoever did not get the answer asks again.
    """
    grants: dict[int, tuple[int, LeaseGrant]] = {}
    for operation in operations:
        if operation.want:
            leases, drained = book.request(operation.cluster, operation.want)
            grants[operation.cluster] = operation.number, LeaseGrant(leases=leases, drained=drained)
        else:
            book.done(operation.cluster, operation.done)
    return grants
