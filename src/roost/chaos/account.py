"""What became of every sample: how often it was applied, from what nodes fetched and what was reported as given out again. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from roost.types import Lease


@dataclass(frozen=True, kw_only=True)
class TrainedPart:
    """What one run did, from the epoch it began with to where it, or the checkpoint that the next one went on from, ended."""

    start_epoch: int
    end: float
    """Epochs done at its end, those before `start_epoch` included; whole if another run went on from there."""
    served: tuple[Lease, ...]
    """Training leases whose samples a node has fetched."""
    replayed: frozenset[int]
    """Leases that were reported as given out again."""


@dataclass(frozen=True, kw_only=True)
class DataAccount:
    """Samples over all epochs that were trained."""

    trained: int
    """Samples of an epoch that were applied at least once."""
    lost: int
    """Samples that should have been applied and were not."""
    applied_twice: int
    """Applications beyond the first that no report accounts for."""
    replayed: int
    """Samples that were given out again, and are in the report."""


def account(parts: Iterable[TrainedPart], *, samples: int) -> DataAccount:
    """Return the account of consecutive runs over a training set of so many samples.

    A lease counts as applied unless it was reported as given out again; what a run did beyond its `end` is gone with its weights.
    """
    trained = lost = twice = replayed = 0
    for part in parts:
        leases = {lease.lease_id: lease for lease in part.served}
        replayed += sum(lease.samples for lease in leases.values() if lease.lease_id in part.replayed)
        applied = [lease for lease in leases.values() if lease.lease_id not in part.replayed and lease.epoch < part.end]
        times = _times_applied(applied, samples)
        covered = sum(sum(count > 0 for count in counts) for counts in times.values())
        trained += covered
        twice += sum(sum(count - 1 for count in counts if count > 1) for counts in times.values())
        lost += round((part.end - part.start_epoch) * samples) - covered
    return DataAccount(trained=trained, lost=lost, applied_twice=twice, replayed=replayed)


def _times_applied(leases: Collection[Lease], samples: int) -> Mapping[int, list[int]]:
    times: dict[int, list[int]] = {}
    for lease in leases:
        counts = times.setdefault(lease.epoch, [0] * samples)
        for position in range(lease.start, lease.stop):
            counts[position] += 1
    return times
