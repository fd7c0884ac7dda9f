"""Where first stages get the leases of a job and say that they are done; all of it goes into the journal (docs/failover.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection

from roost import messages as m
from roost.coordinator.job_record import JobRecord, LastGrant, LeaseOperation, replay
from roost.protocol.data_leases import LeaseBook

MAX_LEASES = 64
"""Leases one request may get."""


class LeaseDesk:
    """The leases of one job, with what every cluster asked for last: an answer that was lost is given again."""

    def __init__(self, book: LeaseBook, on_operation: Callable[[LeaseOperation], None]) -> None:
        """`on_operation` is given every line of the journal before what it says is answered."""
        self.book = book
        self._on_operation = on_operation
        self._grants: dict[int, tuple[int, m.LeaseGrant]] = {}  # per cluster, the number of its last request and what it was given
        self._reported: dict[int, int] = {}  # per cluster, how many leases it has reported done
        self._released: set[int] = set()  # broken clusters whose leases were given to others

    def restore(self, record: JobRecord, operations: tuple[LeaseOperation, ...]) -> None:
        """Take what another coordinator wrote down; the leases of broken clusters have been given to others."""
        self.book.restore(record.leases)
        self._grants = {last.cluster: (last.number, last.grant) for last in record.grants}
        self._reported = {last.cluster: last.reported for last in record.grants}
        self._grants |= replay(self.book, operations)
        for operation in operations:
            self._count(operation.cluster, operation.done)
        self._released = set(record.broken)

    @property
    def last_grants(self) -> tuple[LastGrant, ...]:
        """What every cluster was given last."""
        return tuple(
            LastGrant(cluster=cluster, number=number, grant=grant, reported=self._reported.get(cluster, 0))
            for cluster, (number, grant) in self._grants.items()
        )

    def knows_of(self, number: int, *, granted: int, reported: int) -> bool:
        """Return False if cluster `number` was given leases for request `granted`, or was heard to be done with more, than is known here.

        Both are on the disk before they are answered, so this is not the state that the coordinator before this one left.
        """
        return granted <= self._grants.get(number, (0, None))[0] and reported <= self._reported.get(number, 0)

    def answered(self, number: int, request: m.LeaseRequest) -> m.LeaseGrant | None:
        """Return what cluster `number` was given for this very request before, None if it is a new one."""
        known, grant = self._grants.get(number, (0, None))
        return grant if request.number == known > 0 else None

    def grant(self, number: int, request: m.LeaseRequest) -> m.LeaseGrant:
        """Give cluster `number` its fair part of what is left, at most what it asks for."""
        want = self.book.fair_number(max(1, min(request.want, MAX_LEASES)))
        leases, drained = self.book.request(number, want)
        if leases:
            self._on_operation(LeaseOperation(cluster=number, want=want, number=request.number))
        grant = m.LeaseGrant(leases=leases, drained=drained)
        self._grants[number] = (request.number, grant)
        return grant

    def done(self, number: int, lease_ids: tuple[int, ...]) -> None:
        """Take word that every stage of a cluster has applied these leases. Raises ForbiddenError if it has not got them."""
        self.book.done(number, lease_ids)
        self._count(number, lease_ids)
        self._on_operation(LeaseOperation(cluster=number, done=lease_ids))

    def _count(self, number: int, lease_ids: tuple[int, ...]) -> None:
        self._reported[number] = self._reported.get(number, 0) + len(lease_ids)

    def released(self, number: int) -> bool:
        """Return True if the leases of a broken cluster were given to others."""
        return number in self._released

    def release(self, number: int) -> None:
        """Give the leases of a cluster that broke to others."""
        self.book.release(number, "the cluster lost a node")
        self._released.add(number)

    def all_mended(self, numbers: Collection[int]) -> None:
        """No cluster of the plan is broken any more; these are its clusters."""
        self._released.clear()
        self._grants = {number: last for number, last in self._grants.items() if number in numbers}
        self._reported = {number: count for number, count in self._reported.items() if number in numbers}
