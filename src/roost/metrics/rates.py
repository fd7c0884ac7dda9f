"""Rates from counters: what each cluster does now. Pure: the time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from roost.types import StageMetrics

WINDOW_S = 10.0
"""Seconds over which rates and losses are taken."""


@dataclass(frozen=True, kw_only=True)
class ClusterProgress:
    """What one cluster does, over the last window."""

    cluster: int
    samples_per_s: float
    """Training samples that all its stages have applied, per second; 0 until there are two observations."""
    loss: float | None
    """Mean training loss over the samples of the window; None if there were none."""
    staleness_mean: float
    """Updates between a micro-batch's forward and its own update, mean over stages and micro-batches of the whole job."""
    staleness_max: int
    """The largest at any stage in the whole job."""
    updates: int
    """Updates that all its stages have applied."""
    samples: int
    """Training samples that all its stages have applied."""


@dataclass(frozen=True, kw_only=True)
class _Observation:
    """Sums over a cluster's stages at one time."""

    now: float
    samples: int
    updates: int
    loss_sum: float
    loss_samples: int
    staleness_sum: int
    staleness_max: int
    micro_batches: int


class RateMeter:
    """Turns successive snapshots of all stages' counters into rates, cluster by cluster."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._history: dict[int, deque[_Observation]] = {}

    def progress(self, metrics: Iterable[StageMetrics], now: float) -> tuple[ClusterProgress, ...]:
        """Add all stages' counters at time `now` (seconds, not going back) and return every cluster's progress, by index.

        Counters that fall, as those of another job do, start a cluster's window anew; a cluster without counters is forgotten.
        """
        clusters: dict[int, list[StageMetrics]] = {}
        for stage in metrics:
            clusters.setdefault(stage.cluster, []).append(stage)
        self._history = {cluster: self._history.get(cluster, deque()) for cluster in sorted(clusters)}
        return tuple(self._cluster_progress(cluster, _observation(now, clusters[cluster])) for cluster in self._history)

    def _cluster_progress(self, cluster: int, latest: _Observation) -> ClusterProgress:
        history = self._history[cluster]
        if history and (latest.samples < history[-1].samples or latest.loss_samples < history[-1].loss_samples):
            history.clear()
        history.append(latest)
        # The newest observation that is a whole window old stays, so that the window is covered from its start.
        while len(history) > 2 and history[1].now <= latest.now - self._window_s:
            history.popleft()
        oldest = history[0]
        elapsed = latest.now - oldest.now
        counted = latest.loss_samples - oldest.loss_samples
        lost = latest.loss_sum - oldest.loss_sum
        if len(history) == 1:
            counted, lost = latest.loss_samples, latest.loss_sum
        return ClusterProgress(
            cluster=cluster,
            samples_per_s=(latest.samples - oldest.samples) / elapsed if elapsed > 0 else 0.0,
            loss=lost / counted if counted > 0 else None,
            staleness_mean=latest.staleness_sum / latest.micro_batches if latest.micro_batches else 0.0,
            staleness_max=latest.staleness_max,
            updates=latest.updates,
            samples=latest.samples,
        )


def _observation(now: float, stages: list[StageMetrics]) -> _Observation:
    return _Observation(
        now=now,
        samples=min(stage.samples for stage in stages),
        updates=min(stage.updates for stage in stages),
        loss_sum=sum(stage.loss_sum for stage in stages),
        loss_samples=sum(stage.loss_samples for stage in stages),
        staleness_sum=sum(stage.staleness_sum for stage in stages),
        staleness_max=max(stage.staleness_max for stage in stages),
        micro_batches=sum(stage.micro_batches for stage in stages),
    )
