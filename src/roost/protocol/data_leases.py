"""Exactly-once data: which range of samples belongs to which cluster, and what is done.

An epoch is cut into ranges of one batch each. They are divided among the clusters by share, interleaved over the epoch;
a cluster that has used up its own takes from whoever has most left, so nobody idles at an epoch's end.

Clusters have numbers that are never used again. When one is lost, what it had leased goes to the others; when the job goes back
to a checkpoint, so does what was done since. Both are recorded, range by range: the record and what is done account for every sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from roost.errors import ProtocolError
from roost.protocol.machine import StateMachine
from roost.types import Lease, LeaseRecord, OwnedLease, RangesRecord, ReplayedLease

Range = tuple[int, int]
"""Positions in the order of an epoch, half-open."""


def divide(total: int, shares: Sequence[float]) -> list[int]:
    """Return `total` split in whole numbers by share, by the method of largest remainders; ties go to the first."""
    whole = sum(shares)
    exact = [total * share / whole for share in shares]
    counts = [int(part) for part in exact]
    order = sorted(range(len(shares)), key=lambda index: (counts[index] - exact[index], index))
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts


def interleave(counts: Sequence[int]) -> list[int]:
    """Return owners so that owner i appears counts[i] times, each as evenly spread as it can be."""
    places = [((turn + 0.5) / count, owner) for owner, count in enumerate(counts) for turn in range(count)]
    return [owner for _, owner in sorted(places)]


class RangeQueue:
    """The ranges of one epoch (or of the validation data) that nobody has leased yet."""

    def __init__(self) -> None:
        self._own: dict[int, deque[Range]] = {}
        self._returned: deque[Range] = deque()

    def fill(self, samples: int, step: int, shares: Mapping[int, float]) -> None:
        """Cut `samples` into ranges of `step` and divide them among clusters by share."""
        self._divide([(start, min(start + step, samples)) for start in range(0, samples, step)], shares)

    def divide_again(self, shares: Mapping[int, float]) -> None:
        """Divide what is left among other clusters, or by other shares."""
        self._divide(sorted(span for own in self._own.values() for span in own), shares)

    def _divide(self, spans: Sequence[Range], shares: Mapping[int, float]) -> None:
        clusters = list(shares)
        self._own = {cluster: deque() for cluster in clusters}
        for span, owner in zip(spans, interleave(divide(len(spans), list(shares.values()))), strict=True):
            self._own[clusters[owner]].append(span)

    def __len__(self) -> int:
        return len(self._returned) + sum(len(own) for own in self._own.values())

    def take(self, cluster: int) -> Range:
        """Remove and return the next range for `cluster`: returned ones first, then its own, then from the end of the longest."""
        if self._returned:
            return self._returned.popleft()
        if self._own.get(cluster):
            return self._own[cluster].popleft()
        return max(self._own.values(), key=len).pop()

    def record(self, epoch: int) -> RangesRecord:
        """Return all that is left, to be filled in again with `restore`."""
        return RangesRecord(
            epoch=epoch,
            clusters=tuple(self._own),
            own=tuple(tuple(own) for own in self._own.values()),
            returned=tuple(self._returned),
        )

    def restore(self, record: RangesRecord) -> None:
        """Fill in what `record` says."""
        self._own = {cluster: deque(own) for cluster, own in zip(record.clusters, record.own, strict=True)}
        self._returned = deque(record.returned)

    def put_back(self, span: Range) -> None:
        """Make a range available again, before all others."""
        self._returned.append(span)


class LeasePhase(StrEnum):
    """What the open ranges are for."""

    CLOSED = "closed"
    TRAINING = "training"
    EVALUATION = "evaluation"


class TrainingOpened:
    """The epochs up to the next synchronisation point may be leased."""


class EvaluationOpened:
    """The validation data may be leased."""


class EvaluationDropped:
    """An evaluation that cannot be finished is given up; what is trained up to the synchronisation point stays."""


TRANSITIONS: dict[LeasePhase, dict[type[object], LeasePhase | tuple[LeasePhase, ...]]] = {
    LeasePhase.CLOSED: {TrainingOpened: LeasePhase.TRAINING, EvaluationOpened: LeasePhase.EVALUATION},
    LeasePhase.TRAINING: {TrainingOpened: LeasePhase.TRAINING, EvaluationOpened: LeasePhase.EVALUATION},
    LeasePhase.EVALUATION: {TrainingOpened: LeasePhase.TRAINING, EvaluationDropped: LeasePhase.TRAINING},
}


@dataclass(frozen=True, kw_only=True)
class LeaseMark:
    """A synchronisation point in a book."""

    epoch: int
    """The first epoch of which nothing had been leased."""
    done: frozenset[int]
    """Leases that were done by then, and in no checkpoint."""


class LeaseBook:
    """Who has which samples. Phases are opened by the caller: training up to a synchronisation point, then evaluation."""

    def __init__(
        self,
        samples: int,
        validation_samples: int,
        shares: tuple[float, ...],
        batch_size: int,
        epochs: int,
        start_epoch: int,
        sync_interval: int,
        evaluate: bool,
    ) -> None:
        """`shares` has one entry for each of clusters 0, 1, ...; `evaluate` False means that evaluation phases are empty."""
        self._samples = samples
        self._validation_samples = validation_samples if evaluate else 0
        self._shares = dict(enumerate(shares))
        self._batch_size = batch_size
        self._epochs = epochs
        self._sync_interval = sync_interval
        self._machine = StateMachine("leases", LeasePhase.CLOSED, TRANSITIONS)
        self._start_epoch = start_epoch
        self._next_epoch = start_epoch  # the first epoch that has not been cut into ranges
        self._sync_epoch = start_epoch  # the epoch at which the next synchronisation point stops
        self._queues: dict[int, RangeQueue] = {}  # epoch -> what is left of it, earliest epoch first
        self._leased: dict[int, tuple[int, Lease]] = {}  # lease id -> its cluster and the lease, until done
        self._released: set[int] = set()  # lost clusters: a request of theirs may still be on its way
        self._kept_epoch = start_epoch  # what was done before this epoch is in a checkpoint
        self._done: dict[int, tuple[int, Lease]] = {}  # as _leased: training that is done and in no checkpoint yet
        self._replayed: list[ReplayedLease] = []
        self._next_lease = 0
        self._samples_done = 0
        self._batches_done = 0
        self._stopped = False

    @property
    def phase(self) -> LeasePhase:
        """What was opened last."""
        return self._machine.state

    @property
    def all_done(self) -> bool:
        """True if everything of the opened phase has been leased and reported done."""
        return not self._leased and not self._available()

    @property
    def samples_done(self) -> int:
        """Training samples reported done."""
        return self._samples_done

    @property
    def epochs_done(self) -> float:
        """Epochs reported done, those of the resumed run included."""
        return self._start_epoch + self._samples_done / self._samples

    @property
    def at_end(self) -> bool:
        """True if every training sample of every epoch is done, or leasing was stopped and all that was leased is done."""
        everything = self._samples_done == self._samples * (self._epochs - self._start_epoch)
        return everything or (self._stopped and not self._leased)

    @property
    def outstanding(self) -> tuple[Lease, ...]:
        """Leases given and not yet done."""
        return tuple(lease for _, lease in self._leased.values())

    def busy(self, clusters: Collection[int]) -> bool:
        """Return True if one of these clusters has training leases that are not done; an evaluation is done again after a change."""
        return any(owner in clusters and lease.training for owner, lease in self._leased.values())

    def fair_number(self, want: int) -> int:
        """Return how many of `want` leases a cluster should get at most: towards the end of a phase fewer, so that none is left waiting
        for another that has much (guided self-scheduling, Polychronopoulos and Kuck 1987)."""
        if len(self._shares) == 1 or (self.phase is LeasePhase.TRAINING and self._next_epoch < self._sync_epoch):
            return want
        left = sum(len(queue) for queue in self._queues.values())
        return max(1, min(want, left // (2 * len(self._shares))))

    @property
    def clusters(self) -> tuple[int, ...]:
        """Clusters that may lease."""
        return tuple(self._shares)

    @property
    def replayed(self) -> tuple[ReplayedLease, ...]:
        """Training leases whose samples were leased again, in the order in which that was decided."""
        return tuple(self._replayed)

    @property
    def batches_done(self) -> int:
        """Training leases reported done, one batch each, in this run; what the job went back on does not count."""
        return self._batches_done

    def open_training(self) -> None:
        """Make the epochs up to the next synchronisation point available. Raises ProtocolError before the phase is done."""
        self._check_phase_done()
        self._machine.move(TrainingOpened())
        self._sync_epoch = min(self._epochs, (self._next_epoch // self._sync_interval + 1) * self._sync_interval)

    def open_evaluation(self) -> None:
        """Make the validation samples available (none without evaluation). Raises ProtocolError before the phase is done."""
        self._check_phase_done()
        self._machine.move(EvaluationOpened())
        if self._validation_samples:
            queue = RangeQueue()
            queue.fill(self._validation_samples, self._batch_size, self._shares)
            self._queues[self._next_epoch] = queue

    def stop(self) -> None:
        """Lease no more training samples: what is leased may still be reported done."""
        self._stopped = True
        if self.phase is LeasePhase.TRAINING:
            self._queues.clear()

    def request(self, cluster: int, want: int) -> tuple[tuple[Lease, ...], bool]:
        """Return up to `want` leases for `cluster`, and whether nothing is left to lease in this phase.

        Ranges may become available again when a cluster is released: then those that were told so must be told to ask again.
        """
        self._check_cluster(cluster)
        if want < 1:
            raise self._broken(f"cluster {cluster} asks for {want} leases")
        if cluster in self._released:
            return (), True
        given: list[Lease] = []
        while len(given) < want and self._available():
            epoch = min(self._queues)
            start, stop = self._queues[epoch].take(cluster)
            if not self._queues[epoch]:
                del self._queues[epoch]
            lease = Lease(lease_id=self._next_lease, training=self.phase is LeasePhase.TRAINING, epoch=epoch, start=start, stop=stop)
            self._leased[lease.lease_id] = (cluster, lease)
            self._next_lease += 1
            given.append(lease)
        return tuple(given), not self._available()

    def done(self, cluster: int, lease_ids: Sequence[int]) -> None:
        """Record that a cluster has applied these leases; what it reported before is ignored.

        Raises ProtocolError, and records none, if one is not its own.
        """
        self._check_cluster(cluster)
        for lease_id in lease_ids:
            owner, _ = self._leased.get(lease_id) or self._done.get(lease_id) or (None, None)
            if owner != cluster:
                what = "is unknown or already done" if owner is None else f"belongs to cluster {owner}"
                raise self._broken(f"cluster {cluster} reports lease {lease_id}, which {what}")
        if len(set(lease_ids)) != len(lease_ids):
            raise self._broken(f"cluster {cluster} reports a lease twice: {list(lease_ids)}")
        for lease_id in lease_ids:
            if lease_id not in self._leased:
                continue
            _, lease = self._leased.pop(lease_id)
            if lease.training:
                self._done[lease_id] = (cluster, lease)
                self._samples_done += lease.samples
                self._batches_done += 1

    def mark(self) -> LeaseMark:
        """Return what is done now, at a synchronisation point: a checkpoint of it may take long to be written."""
        return LeaseMark(epoch=self._next_epoch, done=frozenset(self._done))

    def kept(self, mark: LeaseMark) -> None:
        """Everything done until `mark` is in a checkpoint: the job goes back no further."""
        self._kept_epoch = mark.epoch
        self._done = {lease_id: owned for lease_id, owned in self._done.items() if lease_id not in mark.done}

    def release(self, cluster: int, reason: str = "the cluster was lost") -> tuple[Lease, ...]:
        """Give the unfinished leases of a lost cluster to the others, and return them; it gets no more."""
        self._check_cluster(cluster)
        self._released.add(cluster)
        freed = tuple(lease for owner, lease in self._leased.values() if owner == cluster)
        self._note_replay((self._leased.pop(lease.lease_id) for lease in freed), reason)
        for lease in freed:
            if not (self._stopped and lease.training):
                self._queues.setdefault(lease.epoch, RangeQueue()).put_back((lease.start, lease.stop))
        return freed

    def set_clusters(self, shares: Mapping[int, float]) -> None:
        """Lease to these clusters from now on, by these shares. Raises ProtocolError if one was released or still has leases."""
        gone = {owner for owner, _ in self._leased.values()} - set(shares)
        if gone or not shares or self._released & set(shares):
            raise self._broken(f"clusters {sorted(shares)} cannot be leased to: {sorted(self._released)} are released, {sorted(gone)} busy")
        self._shares = dict(shares)
        for queue in self._queues.values():
            queue.divide_again(self._shares)

    def go_back(self, reason: str) -> None:
        """Make everything that no checkpoint holds available again: nobody holds the weights that it went into any more."""
        self._note_replay((*self._done.values(), *self._leased.values()), reason)
        self._samples_done -= sum(lease.samples for _, lease in self._done.values())
        self._batches_done -= len(self._done)
        self._done.clear()
        self._leased.clear()
        self._queues.clear()
        self._next_epoch = self._kept_epoch
        if self.phase is LeasePhase.EVALUATION:
            self._machine.move(EvaluationDropped())

    def drop_evaluation(self) -> None:
        """Give up an evaluation, if one is under way: it can be opened again."""
        if self.phase is not LeasePhase.EVALUATION:
            return
        self._machine.move(EvaluationDropped())
        self._queues.clear()
        self._leased.clear()

    def record(self) -> LeaseRecord:
        """Return everything that `restore` needs."""
        return LeaseRecord(
            phase=self.phase,
            clusters=tuple(self._shares),
            shares=tuple(self._shares.values()),
            released=tuple(sorted(self._released)),
            next_epoch=self._next_epoch,
            sync_epoch=self._sync_epoch,
            kept_epoch=self._kept_epoch,
            next_lease=self._next_lease,
            samples_done=self._samples_done,
            batches_done=self._batches_done,
            stopped=self._stopped,
            ranges=tuple(queue.record(epoch) for epoch, queue in self._queues.items()),
            leased=tuple(OwnedLease(cluster=cluster, lease=lease) for cluster, lease in self._leased.values()),
            done=tuple(OwnedLease(cluster=cluster, lease=lease) for cluster, lease in self._done.values()),
            replayed=tuple(self._replayed),
        )

    def restore(self, record: LeaseRecord) -> None:
        """Go on from where the book was that `record` was taken of; it was made with the same arguments."""
        self._machine = StateMachine("leases", LeasePhase(record.phase), TRANSITIONS)
        self._shares = dict(zip(record.clusters, record.shares, strict=True))
        self._released = set(record.released)
        self._next_epoch, self._sync_epoch, self._kept_epoch = record.next_epoch, record.sync_epoch, record.kept_epoch
        self._next_lease, self._samples_done, self._batches_done = record.next_lease, record.samples_done, record.batches_done
        self._stopped = record.stopped
        self._queues = {}
        for ranges in record.ranges:
            self._queues[ranges.epoch] = RangeQueue()
            self._queues[ranges.epoch].restore(ranges)
        self._leased = {owned.lease.lease_id: (owned.cluster, owned.lease) for owned in record.leased}
        self._done = {owned.lease.lease_id: (owned.cluster, owned.lease) for owned in record.done}
        self._replayed = list(record.replayed)

    def _note_replay(self, leases: Iterable[tuple[int, Lease]], reason: str) -> None:
        self._replayed += [ReplayedLease(lease=lease, cluster=cluster, reason=reason) for cluster, lease in leases if lease.training]

    def _available(self) -> bool:
        """Return True if something can be leased; cuts the next epoch once those before it are all leased."""
        training = self.phase is LeasePhase.TRAINING and not self._stopped
        if not self._queues and training and self._next_epoch < self._sync_epoch:
            queue = RangeQueue()
            queue.fill(self._samples, self._batch_size, self._shares)
            self._queues[self._next_epoch] = queue
            self._next_epoch += 1
        return bool(self._queues)

    def _check_phase_done(self) -> None:
        if not self.all_done:
            raise self._broken(f"the phase {self.phase} is not done: {len(self._leased)} leases are out")

    def _check_cluster(self, cluster: int) -> None:
        if cluster not in self._shares and cluster not in self._released:
            raise self._broken(f"cluster {cluster} is not one of the clusters {sorted(self._shares)} of the plan")

    def _broken(self, what: str) -> ProtocolError:
        return ProtocolError(f"leases: {what}", hint="Run the same version of roost everywhere, then report this.")
