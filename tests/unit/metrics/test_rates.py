from __future__ import annotations

from roost.metrics.rates import ClusterProgress, RateMeter
from roost.types import StageMetrics


def stage(cluster: int = 0, index: int = 0, **counts) -> StageMetrics:
    fields = {
        "node_id": f"node-{cluster}-{index}",
        "cluster": cluster,
        "stage": index,
        "updates": 0,
        "micro_batches": 0,
        "samples": 0,
        "loss_sum": 0.0,
        "loss_samples": 0,
        "staleness_max": 0,
        "staleness_sum": 0,
        "compute_s": 0.0,
        "cpu_s": 0.0,
        "bytes_sent": 0,
        "bytes_received": 0,
        "rounds": 0,
    }
    return StageMetrics(**{**fields, **counts})


def test_rate_and_loss_cover_the_window_and_counts_those_of_the_slowest_stage():
    meter = RateMeter(10.0)
    meter.progress([stage(), stage(index=1)], 0.0)
    last = stage(index=1, samples=140, updates=14, loss_sum=300.0, loss_samples=150, staleness_sum=0, micro_batches=15)
    (progress,) = meter.progress([stage(samples=100, updates=10, staleness_sum=15, staleness_max=3, micro_batches=15), last], 5.0)
    assert progress == ClusterProgress(
        cluster=0, samples_per_s=20.0, loss=2.0, staleness_mean=0.5, staleness_max=3, updates=10, samples=100
    )


def test_the_first_observation_has_no_rate_yet():
    (progress,) = RateMeter().progress([stage(samples=10, loss_sum=5.0, loss_samples=10)], 3.0)
    assert (progress.samples_per_s, progress.loss) == (0.0, 0.5)


def test_a_cluster_without_losses_has_none():
    (progress,) = RateMeter().progress([stage()], 3.0)
    assert (progress.loss, progress.staleness_mean) == (None, 0.0)


def test_observations_older_than_the_window_no_longer_count():
    meter = RateMeter(2.0)
    for second in range(11):
        fast = 100 * max(0, second - 5)
        (progress,) = meter.progress([stage(samples=fast, loss_sum=float(fast), loss_samples=fast)], float(second))
    assert progress.samples_per_s == 100.0
    for second in range(11, 14):
        (progress,) = meter.progress([stage(samples=500, loss_sum=500.0, loss_samples=500)], float(second))
    assert (progress.samples_per_s, progress.loss) == (0.0, None)


def test_clusters_are_told_apart_and_forgotten_when_they_are_gone():
    meter = RateMeter()
    meter.progress([stage(1), stage(0)], 0.0)
    both = meter.progress([stage(1, samples=20), stage(0, samples=10)], 1.0)
    assert [(progress.cluster, progress.samples_per_s) for progress in both] == [(0, 10.0), (1, 20.0)]
    assert [progress.cluster for progress in meter.progress([stage(1, samples=40)], 2.0)] == [1]


def test_counters_that_fall_start_the_window_anew():
    meter = RateMeter()
    meter.progress([stage(samples=1000, loss_sum=900.0, loss_samples=1000)], 0.0)
    (progress,) = meter.progress([stage(samples=10, loss_sum=20.0, loss_samples=10)], 1.0)
    assert (progress.samples_per_s, progress.loss) == (0.0, 2.0)
