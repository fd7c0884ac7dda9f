"""What a job has done so far: counters of its stages, evaluations, and one line of history per synchronisation point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from roost.errors import ForbiddenError
from roost.types import EpochResult, EvaluationResult, Lease, StageMetrics

PAST = "past"
"""In place of a node's name: the counters of all stages that are no more."""


class JobProgress:
    """Counters of stages that run, the sum of those of stages that have ended, and the sums of an evaluation."""

    def __init__(self) -> None:
        self.metrics: dict[str, StageMetrics] = {}
        """By node, of the stage that it has now."""
        self.history: list[EpochResult] = []
        self.past: StageMetrics | None = None
        """The sum over the stages that have ended; its samples are those of first stages."""
        self._loss_before = (0.0, 0)
        self._to_evaluate: dict[int, tuple[int, int]] = {}
        self._counted: set[tuple[int, int]] = set()
        self._samples = 0
        self._loss = 0.0
        self._metric = 0.0

    @property
    def every(self) -> tuple[StageMetrics, ...]:
        """All counters, those of the past included."""
        return (*self.metrics.values(), *((self.past,) if self.past is not None else ()))

    def keep_only(self, is_current: Callable[[StageMetrics], bool]) -> None:
        """Add the counters of stages that are not current any more to the past."""
        for node_id, metrics in list(self.metrics.items()):
            if not is_current(metrics):
                del self.metrics[node_id]
                self.past = _added(self.past, metrics)

    # ------------------------------------------------------------ evaluation

    def open_evaluation(self) -> None:
        """Begin to count an evaluation."""
        self._to_evaluate.clear()
        self._counted.clear()
        self._samples, self._loss, self._metric = 0, 0.0, 0.0

    def lease_given(self, cluster: int, lease: Lease) -> None:
        """A cluster evaluates this lease."""
        self._to_evaluate[lease.lease_id] = (cluster, lease.samples)

    def evaluated(self, cluster: int, number: int, result: EvaluationResult) -> bool:
        """Take the sums over micro-batch `number` of a lease; return True if that was the last of it.

        What came before is ignored. Raises ForbiddenError for samples that the cluster has not leased.
        """
        if (cluster, number) in self._counted:
            return False
        owner, left = self._to_evaluate.get(result.lease_id, (-1, 0))
        if owner != cluster or result.samples > left:
            raise ForbiddenError(f"cluster {cluster} reports more evaluation samples than it has in lease {result.lease_id}")
        self._counted.add((cluster, number))
        self._samples += result.samples
        self._loss += result.loss_sum
        self._metric += result.metric_sum
        self._to_evaluate[result.lease_id] = (owner, left - result.samples)
        return left == result.samples

    # ------------------------------------------------------------ history

    def saved(self, epoch: int, path: str) -> None:
        """The checkpoint of an epoch is whole."""
        self.history = [replace(line, checkpoint=path) if line.epoch == epoch else line for line in self.history]

    def record(self, *, epoch: int, samples: int, seconds: float) -> None:
        """Add a line to the history, and forget the evaluation that it contains."""
        loss_sum = sum(metrics.loss_sum for metrics in self.every)
        loss_samples = sum(metrics.loss_samples for metrics in self.every)
        before_sum, before_samples = self._loss_before
        new_samples = loss_samples - before_samples
        self._loss_before = (loss_sum, loss_samples)
        evaluated = self._samples > 0
        self.history.append(
            EpochResult(
                epoch=epoch,
                train_loss=(loss_sum - before_sum) / new_samples if new_samples else 0.0,
                validation_loss=self._loss / self._samples if evaluated else None,
                metric=self._metric / self._samples if evaluated else None,
                samples=samples,
                seconds=seconds,
            )
        )
        self.open_evaluation()


def _added(past: StageMetrics | None, metrics: StageMetrics) -> StageMetrics:
    first = metrics.stage == 0
    own = replace(metrics, node_id=PAST, cluster=-1, stage=0, number=-1, samples=metrics.samples if first else 0)
    if past is None:
        return own
    return replace(
        past,
        updates=past.updates + (own.updates if first else 0),
        micro_batches=past.micro_batches + own.micro_batches,
        samples=past.samples + own.samples,
        loss_sum=past.loss_sum + own.loss_sum,
        loss_samples=past.loss_samples + own.loss_samples,
        staleness_max=max(past.staleness_max, own.staleness_max),
        staleness_sum=past.staleness_sum + own.staleness_sum,
        compute_s=past.compute_s + own.compute_s,
        cpu_s=past.cpu_s + own.cpu_s,
        bytes_sent=past.bytes_sent + own.bytes_sent,
        bytes_received=past.bytes_received + own.bytes_received,
        rounds=past.rounds + own.rounds,
    )
