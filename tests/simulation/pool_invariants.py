"""What must hold in every run, whatever fails: looked at while the run goes on, from inside the production code."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from whole_pool import WholePool

from roost.agent.feeder import Feeder
from roost.agent.ring_driver import WEIGHT_FLOOR, RingDriver
from roost.checkpoint.writer import CheckpointWriter
from roost.config import OuterOptimizer, TensorCodec
from roost.coordinator.checkpointing import Checkpointing, Snapshot
from roost.coordinator.repairer import Repairer
from roost.messages import Message
from roost.protocol.data_leases import LeaseBook
from roost.types import Lease

Sample = tuple[int, int]
"""Epoch and position in it."""
RoundKey = tuple[int, int, int, tuple[str, ...]]
"""Generation, segment, round and members."""


def samples_of(lease: Lease) -> Iterator[Sample]:
    """Yield what a training lease is about."""
    for position in range(lease.start, lease.stop):
        yield lease.epoch, position


class PoolInvariants:
    """Listens to one pool and tells it of every problem."""

    def __init__(self, pool: WholePool) -> None:
        self._pool = pool
        self._counted: dict[int, Counter[Sample]] = defaultdict(Counter)
        """What a lease book counts as done, by the book's place in `_books`."""
        self._books: list[LeaseBook] = []
        self._leases: dict[tuple[str, int], Lease] = {}
        """What a first stage was given, by its node and the lease's id."""
        self._snapshots: dict[RoundKey, dict[str, tuple[dict[str, torch.Tensor], float]]] = defaultdict(dict)
        self._owners_told: set[Any] = set()
        self._copied: dict[tuple[str, int], frozenset[Sample]] = {}
        """What had been applied when an attempt to write a checkpoint was begun."""
        self._written: dict[str, frozenset[Sample]] = {}
        """The same, of the checkpoints on the requester's disk."""
        self.returns = 0
        """Times that the job went back to a checkpoint, or to its beginning, and that was checked."""
        self.applied: Counter[Sample] = Counter()
        """How often every stage of a cluster has applied a sample, as its first stage knows."""
        self.replayed: Counter[Sample] = Counter()
        """How often the coordinator has recorded that a sample is trained again."""
        self.means = 0
        """Averages that were checked."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look at everything while the context is open."""
        self._pool.network.after_message = self._look
        replacements: list[tuple[Any, str, Any]] = [
            (LeaseBook, "done", self._done),
            (LeaseBook, "go_back", self._go_back),
            (LeaseBook, "_note_replay", self._note_replay),
            (Checkpointing, "take", self._take),
            (CheckpointWriter, "finish", self._finish),
            (Repairer, "_go_back", self._return),
            (Feeder, "batch_applied", self._batch_applied),
            (Feeder, "_fetch", self._fetch),
            (RingDriver, "_take_snapshot", self._take_snapshot),
            (RingDriver, "_apply_average", self._apply_average),
        ]
        with contextlib.ExitStack() as stack:
            for owner, name, wrap in replacements:
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
            yield

    # ------------------------------------------------------------ one owner

    def _look(self, peer_id: str, message: Message) -> None:
        owners: dict[Any, str] = {}
        for host in self._pool.hosts.values():
            driver = host.agent._driver if host.agent is not None and host.up else None
            if driver is None or getattr(driver, "held", False):
                continue
            assignment = driver.assignment
            place = (assignment.job_id, getattr(assignment, "generation", 0), assignment.cluster.index, assignment.stage.index)
            other = owners.setdefault(place, host.name)
            if other != host.name and (place, other, host.name) not in self._owners_told:
                self._owners_told.add((place, other, host.name))
                self._pool.problem(f"{other} and {host.name} both own {place}")

    # ------------------------------------------------------------ every sample once

    def _place_of(self, book: LeaseBook) -> int:
        for place, known in enumerate(self._books):
            if known is book:
                return place
        self._books.append(book)
        return len(self._books) - 1

    def _done(self, original: Any) -> Any:
        def done(book: LeaseBook, cluster: int, lease_ids: Any) -> None:
            before = dict(book._leased)
            original(book, cluster, lease_ids)
            counted = self._counted[self._place_of(book)]
            for lease_id, (_, lease) in before.items():
                if lease_id not in book._leased and lease.training:
                    counted.update(samples_of(lease))
                    self._check_counted(counted, lease)

        return done

    def _check_counted(self, counted: Counter[Sample], lease: Lease) -> None:
        twice = [sample for sample in samples_of(lease) if counted[sample] > 1]
        if twice:
            self._pool.problem(f"samples {twice} are counted twice, the second time in lease {lease.lease_id}")

    def _go_back(self, original: Any) -> Any:
        def go_back(book: LeaseBook, reason: str) -> None:
            undone = [lease for _, lease in book._done.values()]
            original(book, reason)
            for lease in undone:
                self._counted[self._place_of(book)].subtract(samples_of(lease))

        return go_back

    def _note_replay(self, original: Any) -> Any:
        def note_replay(book: LeaseBook, leases: Iterable[tuple[int, Lease]], reason: str) -> None:
            before = len(book.replayed)
            original(book, leases, reason)
            for replay in book.replayed[before:]:
                self.replayed.update(samples_of(replay.lease))
                self._pool.note("replayed", replay.cluster, replay.lease.epoch, replay.lease.start, replay.lease.stop, replay.reason)

        return note_replay

    def _fetch(self, original: Any) -> Any:
        async def fetch(feeder: Feeder, lease: Lease) -> Any:
            self._leases[(feeder._job.node_id, lease.lease_id)] = lease
            return await original(feeder, lease)

        return fetch

    def _batch_applied(self, original: Any) -> Any:
        def batch_applied(feeder: Feeder, batch: int) -> Any:
            lease_id = feeder._lease_of_batch[batch]
            if feeder._open_batches[lease_id] == 1:
                lease = self._leases[(feeder._job.node_id, lease_id)]
                self.applied.update(samples_of(lease))
                self._pool.note("applied", feeder._job.node_id, lease.epoch, lease.start, lease.stop)
            return original(feeder, batch)

        return batch_applied

    # ------------------------------------------------------------ checkpoints

    def _take(self, original: Any) -> Any:
        async def take(checkpoints: Checkpointing, snapshot: Snapshot) -> None:
            self._copied[snapshot.name, snapshot.attempt] = frozenset(self.applied)
            await original(checkpoints, snapshot)

        return take

    def _finish(self, original: Any) -> Any:
        def finish(writer: CheckpointWriter, name: str, contents: Any, *, attempt: int = 0) -> Any:
            path = original(writer, name, contents, attempt=attempt)
            self._written[name] = self._copied[name, attempt]
            return path

        return finish

    def _return(self, original: Any) -> Any:
        def go_back(repairer: Repairer) -> Any:
            states = original(repairer)
            self._check_return(repairer._book, repairer.checkpoint)
            return states

        return go_back

    def _check_return(self, book: LeaseBook, checkpoint: str) -> None:
        """What is not trained again must be in the checkpoint that the job goes back to."""
        assert self._pool.run is not None
        samples = self._pool.run._package.config.samples
        kept = {(epoch, position) for epoch in range(book._next_epoch) for position in range(samples)}
        lost = sorted(kept - (self._written[checkpoint] if checkpoint else frozenset()))
        where = checkpoint or "the beginning"
        if lost:
            self._pool.problem(f"the job went back to {where}: samples {lost[:4]}, {len(lost)} in all, are neither there nor trained again")
        if book.samples_done != len(kept):
            self._pool.problem(f"the job went back to {where}, which has {len(kept)} samples, and counts {book.samples_done} as done")
        self.returns += 1

    # ------------------------------------------------------------ weighted means

    def _key(self, driver: RingDriver, number: int) -> RoundKey:
        return (getattr(driver._sender, "_generation", 0), driver._segment.index, number, driver._segment.members)

    def _take_snapshot(self, original: Any) -> Any:
        async def take_snapshot(driver: RingDriver, instruction: Any) -> None:
            await original(driver, instruction)
            weight = max(float(driver._samples_at_snapshot - driver._samples_before), WEIGHT_FLOOR)
            copies = {name: tensor.clone() for name, tensor in driver._taken.items()}
            self._snapshots[self._key(driver, instruction.round)][driver._node_id] = (copies, weight)

        return take_snapshot

    def _apply_average(self, original: Any) -> Any:
        async def apply_average(driver: RingDriver, number: int) -> None:
            apply = driver._apply

            async def checked(average: dict[str, torch.Tensor], snapshot: dict[str, torch.Tensor]) -> None:
                self._check_mean(driver, number, average)
                await apply(average, snapshot)

            driver._apply = checked
            try:
                await original(driver, number)
            finally:
                driver._apply = apply

        return apply_average

    def _check_mean(self, driver: RingDriver, number: int, average: dict[str, torch.Tensor]) -> None:
        parts = self._snapshots[self._key(driver, number)]
        where = f"round {number} of segment {driver._segment.index} at {driver._node_id}"
        missing = set(driver._segment.members) - set(parts)
        if missing:
            self._pool.problem(f"{where} was finished without the snapshots of {sorted(missing)}")
            return
        assert self._pool.run is not None
        config = self._pool.run._package.config
        if config.averaging_compression is not TensorCodec.NONE or config.outer_optimizer is not OuterOptimizer.MEAN:
            return
        total = sum(weight for _, weight in parts.values())
        for name, mean in average.items():
            exact = sum(copies[name].double() * weight for copies, weight in parts.values()) / total
            if not torch.allclose(mean.double(), exact, rtol=1e-5, atol=1e-6):
                self._pool.problem(f"{where} gave another mean of {name} than that of {sorted(parts)}")
                return
        self.means += 1

    # ------------------------------------------------------------ the end

    def judge(self) -> None:
        """Look at a job that is done: every sample was applied once, or it is on record why more often."""
        assert self._pool.run is not None
        config = self._pool.run._package.config
        everything = {(epoch, position) for epoch in range(config.epochs) for position in range(config.samples)}
        missing = sorted(everything - set(self.applied))
        if missing:
            self._pool.problem(f"the job is done, and nobody applied {missing[:4]} and {len(missing)} samples in all")
        unexplained = sorted(sample for sample, times in self.applied.items() if times > 1 + self.replayed[sample])
        if unexplained:
            self._pool.problem(f"samples {unexplained[:4]}, {len(unexplained)} in all, were applied again, and no report says why")
