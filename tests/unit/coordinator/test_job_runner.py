from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coordinator_kit import MB, WAIT_S, FakeNode, Scene, config, profile, refusal, scene

from roost import messages as m
from roost.errors import (
    CheckpointError,
    ForbiddenError,
    JobRefusedError,
    ProtocolError,
    RequesterLostError,
    StageFailedError,
)
from roost.transport.interface import Sender
from roost.types import EpochResult, EvaluationResult, Lease, Role


def sender(name: str) -> Sender:
    return Sender(peer_id=name, role=Role.NODE)


async def started(stage: Scene, **fields: Any) -> m.JobAccepted:
    """Submit a job for every node of the scene and wait until it trains."""
    accepted = await stage.requester.submit(config(**fields), wait_nodes=len(stage.nodes))
    await stage.requester.until(m.JobState.TRAINING)
    return accepted


def firsts(stage: Scene, accepted: m.JobAccepted) -> dict[int, FakeNode]:
    """Return the first node of every cluster, by cluster."""
    return {cluster.index: stage.nodes[cluster.stages[0].node_id] for cluster in accepted.plan.clusters}


# ---------------------------------------------------------------- a whole life


def test_a_job_trains_averages_evaluates_saves_and_goes_on_to_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            node = stage.nodes["a"]
            await started(stage, epochs=2, validation_samples=6)
            for epoch in (1, 2):
                leases = await node.train()
                assert sorted((lease.start, lease.stop) for lease in leases) == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 22)]
                assert {lease.epoch for lease in leases} == {epoch - 1}
                await node.go.wait()
                grant = await node.lease(want=9)
                assert [(lease.training, lease.start, lease.stop) for lease in grant.leases] == [(False, 0, 4), (False, 4, 6)]
                node.go.clear()
                for lease, metric in zip(grant.leases, (1.0, 0.25), strict=True):
                    await node.evaluated(lease, loss=0.5 * epoch, metric=metric)
            done = await stage.requester.until(m.JobState.DONE)
            assert [(result.epoch, result.samples, result.validation_loss, result.metric) for result in done.history] == [
                (1, 22, 0.5, 0.75),
                (2, 44, 1.0, 0.75),
            ]
            assert [result.checkpoint for result in done.history] == ["/checkpoints/epoch-0001", "/checkpoints/epoch-0002"]
            assert (done.epochs_done, done.cancelled, done.error) == (2.0, False, None)
            finished = [message for message in stage.requester.asked if isinstance(message, m.FinishCheckpoint)]
            assert [(message.epoch, message.updates) for message in finished] == [(1, 6), (2, 12)]
            stored = stage.store.job("job")
            assert stored is not None
            assert stored.state is m.JobState.DONE
            assert stored.plan == finished[0].plan
            assert stage.store.history("job") == done.history

    asyncio.run(main())


def test_training_goes_on_while_a_checkpoint_is_uploaded_and_it_counts_once_it_is_whole(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            node = stage.nodes["a"]
            node.line.clear()
            await started(stage, epochs=2)
            await node.train()
            grant = await trained_further(node)
            assert not stage.requester.was_asked(m.FinishCheckpoint)
            assert stage.store.history("job")[0].checkpoint is None
            node.line.set()
            while not stage.store.history("job")[0].checkpoint:
                await stage.requester.changed()
            (finished,) = (message for message in stage.requester.asked if isinstance(message, m.FinishCheckpoint))
            assert (finished.checkpoint, finished.epoch, finished.updates) == ("epoch-0001", 1, 6)
            await node.done(*grant)
            await node.train()
            done = await stage.requester.until(m.JobState.DONE)
            assert [result.checkpoint for result in done.history] == ["/checkpoints/epoch-0001", "/checkpoints/epoch-0002"]
            told = [(event.name, event.state, event.background, event.detail) for event in done.checkpoints]
            assert told == [
                ("epoch-0001", "begun", True, ""),
                ("epoch-0001", "complete", True, "/checkpoints/epoch-0001"),
                ("epoch-0002", "begun", False, ""),
                ("epoch-0002", "complete", False, "/checkpoints/epoch-0002"),
            ]

    asyncio.run(main())


async def trained_further(node: FakeNode) -> tuple[Lease, ...]:
    """Return leases of the next epoch: they are given once training goes on."""
    async with asyncio.timeout(WAIT_S):
        await node.go.wait()
    return (await node.lease(want=2)).leases


def test_a_checkpoint_that_is_still_being_uploaded_at_the_next_point_leaves_that_one_out_and_the_last_is_always_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            node = stage.nodes["a"]
            node.line.clear()
            await started(stage, epochs=3)
            for _ in range(3):
                await node.train()
            done = await stage.requester.until(m.JobState.DONE)
            assert [result.checkpoint for result in done.history] == [None, None, "/checkpoints/epoch-0003"]
            asked = [message for message in node.asked if isinstance(message, m.SaveStage)]
            assert [(message.checkpoint, message.background) for message in asked] == [("epoch-0001", True), ("epoch-0003", False)]
            told = [(event.epoch, event.state) for event in done.checkpoints]
            assert told == [(1, "begun"), (2, "skipped"), (1, "abandoned"), (3, "begun"), (3, "complete")]

    asyncio.run(main())
    assert "checkpoint_skipped job=job epoch=2" in caplog.text


def test_a_checkpoint_that_a_node_could_not_upload_is_given_up_and_the_job_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            node = stage.nodes["a"]
            node.line.clear()
            await started(stage, epochs=2)
            await node.train()
            grant = await trained_further(node)
            (asked,) = (message for message in node.asked if isinstance(message, m.SaveStage))
            failed = m.Failed(code="R501", message="the requester cannot be reached", hint="")
            await node.send(m.StageSaved(job_id="job", checkpoint=asked.checkpoint, attempt=asked.attempt, failed=failed))
            await node.done(*grant)
            await node.train()
            done = await stage.requester.until(m.JobState.DONE)
            assert [result.checkpoint for result in done.history] == [None, "/checkpoints/epoch-0002"]
            assert [(event.epoch, event.state) for event in done.checkpoints[:2]] == [(1, "begun"), (1, "abandoned")]
            assert done.checkpoints[1].detail == "node a: the requester cannot be reached"

    asyncio.run(main())
    assert "checkpoint_abandoned job=job checkpoint=epoch-0001 reason=node a: the requester cannot be reached" in caplog.text


def test_exact_rounds_are_counted_from_one_and_every_stage_takes_part(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("b")) as stage:
            accepted = await started(stage, epochs=2, min_clusters=2)
            for _ in range(2):
                await asyncio.gather(*(node.train(cluster=cluster) for cluster, node in firsts(stage, accepted).items()))
            await stage.requester.until(m.JobState.DONE)
            for node in stage.nodes.values():
                assert [message.order for message in node.asked if isinstance(message, m.AverageNow)] == [1, 2]

    asyncio.run(main())


def test_every_segment_of_a_checkpoint_is_uploaded_once_and_the_clusters_take_turns(tmp_path: Path) -> None:
    async def main() -> None:
        names = ("a", "b", "c", "d")
        async with scene(tmp_path, *(profile(name, memory=11 * MB) for name in names)) as stage:
            accepted = await started(stage, min_clusters=2)
            assert [len(cluster.stages) for cluster in accepted.plan.clusters] == [2, 2]
            await asyncio.gather(*(node.train(cluster=cluster) for cluster, node in firsts(stage, accepted).items()))
            await stage.requester.until(m.JobState.DONE)
            asked = {name: [ask for ask in stage.nodes[name].asked if isinstance(ask, m.SaveStage)] for name in names}
            segments = [s for asks in asked.values() for ask in asks for s in ask.segments]
            assert sorted(segments) == [segment.index for segment in accepted.plan.segments]
            for cluster in accepted.plan.clusters:
                assert any(ask.segments for saving in cluster.stages for ask in asked[saving.node_id])
            rest = {name for name in names if any(ask.rest for ask in asked[name])}
            assert rest in [{saving.node_id for saving in cluster.stages} for cluster in accepted.plan.clusters]

    asyncio.run(main())


@pytest.mark.parametrize("pattern", ["in turn", "the slow cluster idles", "the fast cluster idles"])
def test_with_unequal_clusters_every_sample_is_consumed_once_per_epoch(tmp_path: Path, pattern: str) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("fast", speed=3e9), profile("slow", speed=1e9)) as stage:
            accepted = await started(stage, epochs=3, samples=203, min_clusters=2, sync_interval=3)
            assert sorted(round(cluster.share, 2) for cluster in accepted.plan.clusters) == [0.25, 0.75]
            clusters = firsts(stage, accepted)
            by_speed = sorted(clusters, key=lambda cluster: clusters[cluster].name)
            turns = {"in turn": by_speed, "the slow cluster idles": by_speed[:1], "the fast cluster idles": by_speed[1:]}[pattern]
            seen: Counter[tuple[int, int]] = Counter()
            for cluster in itertools.cycle(turns):
                grant = await clusters[cluster].lease(cluster=cluster)
                seen.update((lease.epoch, sample) for lease in grant.leases for sample in range(lease.start, lease.stop))
                await clusters[cluster].done(*grant.leases, cluster=cluster)
                if grant.drained:
                    break
            done = await stage.requester.until(m.JobState.DONE)
            assert seen == {(epoch, sample): 1 for epoch in range(3) for sample in range(203)}
            assert done.history[-1].samples == 3 * 203
            firsts_samples = {metrics.node_id: metrics.samples for metrics in done.metrics}
            assert sum(firsts_samples.values()) == 3 * 203
            if pattern == "in turn":
                # Both asked equally often: then what each got first follows its share, and the rest is taken from the other.
                assert firsts_samples["fast"] > 0 < firsts_samples["slow"]

    asyncio.run(main())


def test_the_training_loss_of_an_epoch_is_the_mean_over_its_own_samples(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            node = stage.nodes["a"]
            await started(stage, epochs=2, samples=8)
            for loss in (2.0, 1.0):
                await node.go.wait()
                node.metrics = replace(node.metrics, loss_sum=node.metrics.loss_sum + 8 * loss, loss_samples=node.metrics.loss_samples + 8)
                await node.train()
            done = await stage.requester.until(m.JobState.DONE)
            assert [result.train_loss for result in done.history] == [2.0, 1.0]

    asyncio.run(main())


# ---------------------------------------------------------------- who may say what


def test_only_the_first_stage_of_a_cluster_leases_and_reports(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a", memory=7 * MB), profile("b", memory=7 * MB), profile("tiny", memory=1000)) as stage:
            accepted = await started(stage)
            first, second = (stage.nodes[planned.node_id] for planned in accepted.plan.clusters[0].stages)
            for node in (second, stage.nodes["tiny"]):
                with pytest.raises(ForbiddenError, match="does not run the first stage of cluster 0"):
                    await node.lease()
            with pytest.raises(ForbiddenError, match="does not run the first stage of cluster 1"):
                await first.lease(cluster=1)
            (lease,) = (await first.lease()).leases
            with pytest.raises(ForbiddenError, match="does not run the first stage"):
                await on_message(stage, second, m.LeaseDone(job_id="job", cluster=0, lease_ids=(lease.lease_id,)))
            with pytest.raises(ProtocolError, match="unknown or already done"):
                await on_message(stage, first, m.LeaseDone(job_id="job", cluster=0, lease_ids=(lease.lease_id + 1,)))
            with pytest.raises(JobRefusedError, match="job other is not running"):
                await first.lease(job_id="other")

    asyncio.run(main())


async def on_message(stage: Scene, node: FakeNode, message: m.Message) -> None:
    """Hand a one-way message to the coordinator so that its refusal is seen."""
    await stage.coordinator.on_call(sender(node.name), message, [])


def test_one_cluster_does_not_report_the_leases_of_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("b")) as stage:
            accepted = await started(stage, min_clusters=2)
            clusters = firsts(stage, accepted)
            (lease,) = (await clusters[0].lease(cluster=0)).leases
            with pytest.raises(ProtocolError, match="belongs to cluster 0"):
                await on_message(stage, clusters[1], m.LeaseDone(job_id="job", cluster=1, lease_ids=(lease.lease_id,)))

    asyncio.run(main())


def evaluation(lease_id: int, samples: int, cluster: int = 0, number: int = 0) -> m.EvaluationDone:
    result = EvaluationResult(lease_id=lease_id, samples=samples, loss_sum=1.0, metric_sum=1.0)
    return m.EvaluationDone(job_id="job", cluster=cluster, result=result, number=number)


def test_evaluations_are_taken_only_when_asked_for_and_for_no_more_samples_than_were_leased(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("tiny", memory=1000)) as stage:
            node = stage.nodes["a"]
            await started(stage, validation_samples=4)
            with pytest.raises(ForbiddenError, match="not asked for"):
                await on_message(stage, node, evaluation(0, 1))
            await node.train()
            await node.go.wait()
            (lease,) = (await node.lease()).leases
            for message in (evaluation(lease.lease_id, 5), evaluation(lease.lease_id + 1, 1)):
                with pytest.raises(ForbiddenError, match="more evaluation samples"):
                    await on_message(stage, node, message)
            with pytest.raises(ForbiddenError, match="not asked for"):
                await on_message(stage, stage.nodes["tiny"], evaluation(lease.lease_id, 1))
            for _ in range(2):
                # A report that is repeated counts once.
                await on_message(stage, node, evaluation(lease.lease_id, 3))
            with pytest.raises(ForbiddenError, match="more evaluation samples"):
                await on_message(stage, node, evaluation(lease.lease_id, 2, number=1))
            await on_message(stage, node, evaluation(lease.lease_id, 1, number=1))
            done = await stage.requester.until(m.JobState.DONE)
            assert done.history[0].validation_loss == 0.5

    asyncio.run(main())


def test_a_node_without_a_stage_cannot_fail_a_job(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("tiny", memory=1000)) as stage:
            await started(stage)
            report = m.StageFailed(job_id="job", code="R603", message="x", hint="x")
            with pytest.raises(ForbiddenError, match="tiny runs no stage"):
                await on_message(stage, stage.nodes["tiny"], report)

    asyncio.run(main())


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        ("R601", "the loss of micro-batch 3 is nan", "R601"),
        ("R103", "the training data: sample 3 raised ValueError", "R103"),
        ("R999", "of a later version", "R000"),
    ],
)
def test_a_failed_stage_ends_the_job_with_the_error_that_fits(tmp_path: Path, code: str, message: str, expected: str) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            await started(stage)
            await stage.nodes["a"].send(m.StageFailed(job_id="job", code=code, message=message, hint="hint"))
            failed = await stage.requester.until(m.JobState.FAILED)
            assert failed.error is not None
            assert failed.error.code == expected
            assert message in failed.error.message
            stored = stage.store.job("job")
            assert stored is not None
            assert stored.error == failed.error

    asyncio.run(main())


def test_a_stage_that_cannot_reach_a_peer_is_built_anew_from_what_it_holds(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            node = stage.nodes["a"]
            await started(stage)
            (lease,) = (await node.lease()).leases
            node.go.clear()
            await node.send(m.StageFailed(job_id="job", code="R501", message="b cannot be reached", hint="x", peer="b"))
            await node.go.wait()
            first, again = [message for message in node.asked if isinstance(message, m.PrepareStage)]
            assert (first.number, first.generation, first.sources) == (0, 0, ())
            assert (again.number, again.generation, again.checkpoint) == (1, 1, "")
            (source,) = again.sources
            assert source.node_id == "a"
            assert set(source.tensors) == {f"layers.{index}.weight" for index in range(4)}
            (change,) = [message for message in stage.requester.asked if isinstance(message, m.PlanChanged)]
            assert [replayed.lease for replayed in change.replayed] == [lease]
            with pytest.raises(ForbiddenError):
                await node.lease()
            await node.train(cluster=1)
            done = await stage.requester.until(m.JobState.DONE)
            assert done.history[-1].samples == 22
            assert done.repairs == 1

    asyncio.run(main())


def test_a_stage_that_fails_again_and_again_fails_the_job(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            node = stage.nodes["a"]
            await started(stage)
            for number in range(4):
                await node.go.wait()
                node.go.clear()
                await node.send(m.StageFailed(job_id="job", code="R603", message="out of memory", hint="x", cluster=number))
            failed = await stage.requester.until(m.JobState.FAILED)
            assert failed.error is not None
            assert (failed.error.code, failed.error.message) == ("R603", "out of memory")

    asyncio.run(main())


@pytest.mark.parametrize("kind", [m.PrepareStage, m.ContinueJob, m.AverageNow, m.SaveStage])
def test_a_node_that_refuses_a_step_fails_the_job_with_its_own_error(tmp_path: Path, kind: type[m.Message]) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("b")) as stage:
            for node in stage.nodes.values():
                node.answers[kind] = refusal(StageFailedError)
            accepted = await stage.requester.submit(config(min_clusters=2), wait_nodes=2)
            training = asyncio.gather(*(node.train(cluster=cluster) for cluster, node in firsts(stage, accepted).items()))
            failed = await stage.requester.until(m.JobState.FAILED)
            training.cancel()
            assert failed.error is not None
            assert (failed.error.code, failed.error.message) == ("R603", f"{kind.__name__} fails in this test")
            assert all(node.was_asked(m.EndJob) for node in stage.nodes.values())

    asyncio.run(main())


def test_a_checkpoint_that_cannot_be_written_fails_the_job_with_the_requesters_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            stage.requester.answers[m.FinishCheckpoint] = refusal(CheckpointError)
            await started(stage)
            await stage.nodes["a"].train()
            failed = await stage.requester.until(m.JobState.FAILED)
            assert failed.error is not None
            assert failed.error.code == "R700"

    asyncio.run(main())


def test_a_requester_that_is_gone_when_the_checkpoint_is_finished_is_called_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), heartbeat_s=0.02, requester_away_s=0.3) as stage:

            def killing(message: Any) -> m.Message:
                stage.network.kill("requester")
                return m.Done()

            stage.nodes["a"].answers[m.SaveStage] = killing
            await started(stage)
            ended = stage.nodes["a"].answers[m.EndJob] = Called(m.Done())
            await stage.nodes["a"].train()
            async with asyncio.timeout(20):
                await ended.happened.wait()
            stored = stage.store.job("job")
            assert stored is not None
            assert stored.error is not None
            assert stored.error.code == RequesterLostError.code

    asyncio.run(main())


class Called:
    """An answer that says when it was given."""

    def __init__(self, reply: m.Message) -> None:
        self.happened = asyncio.Event()
        self._reply = reply

    def __call__(self, message: Any) -> m.Message:
        self.happened.set()
        return self._reply


# ---------------------------------------------------------------- stopping


def test_a_cancelled_job_finishes_what_was_leased_saves_and_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            node = stage.nodes["a"]
            await started(stage, epochs=5, validation_samples=4)
            leases: tuple[Lease, ...] = (await node.lease(want=2)).leases
            await stage.requester.call(m.CancelJob(job_id="job"))
            await stage.requester.call(m.CancelJob(job_id="job"))
            grant = await node.lease()
            assert (grant.leases, grant.drained) == ((), True)
            assert not node.was_asked(m.AverageNow)
            await node.done(*leases)
            done = await stage.requester.until(m.JobState.DONE)
            assert done.cancelled
            assert [(result.epoch, result.samples, result.checkpoint) for result in done.history] == [(0, 8, "/checkpoints/stopped-0000")]
            assert done.history[0].validation_loss is None

    asyncio.run(main())


def test_a_job_cancelled_while_its_stages_are_built_ends_without_a_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            await stage.requester.submit()
            await stage.requester.call(m.CancelJob(job_id="job"))
            done = await stage.requester.until(m.JobState.DONE)
            assert (done.cancelled, done.history) == (True, ())
            assert (await stage.requester.submit(config("second"))).plan.stages

    asyncio.run(main())


def test_a_job_cancelled_before_it_is_planned_never_gets_a_plan(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("b")) as stage:
            probed = stage.nodes["a"].answers[m.ProbeLinks] = Called(m.LinkReport(links=()))
            submitted = asyncio.create_task(stage.requester.submit(wait_nodes=2))
            await probed.happened.wait()
            await stage.requester.call(m.CancelJob(job_id="job"))
            with pytest.raises(StageFailedError, match="job job was cancelled before it was planned"):
                await submitted
            await stage.requester.until(m.JobState.DONE)
            status = await stage.requester.call(m.StatusRequest())
            assert isinstance(status, m.Status)
            assert status.plan is None
            assert not any(node.was_asked(m.PrepareStage) for node in stage.nodes.values())

    asyncio.run(main())


def test_a_requester_that_missed_the_end_hears_it_from_the_next_coordinator_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            await started(stage)
            await stage.nodes["a"].train()
            await stage.requester.until(m.JobState.DONE)
        async with scene(tmp_path) as stage:
            end = await stage.requester.call(m.RequesterHeartbeat(job_id="job"))
            assert isinstance(end, m.JobEnded)
            assert (end.state, end.error) == (m.JobState.DONE, None)
            assert [result.epoch for result in end.history] == [1]
            with pytest.raises(JobRefusedError, match="job other is not running"):
                await stage.requester.call(m.RequesterHeartbeat(job_id="other"))

    asyncio.run(main())


@pytest.mark.parametrize("ahead", [{"granted": 5}, {"reported": 5}])
def test_a_job_that_has_come_further_than_the_coordinator_knows_ends(tmp_path: Path, ahead: dict[str, int]) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            await started(stage)
            grant = await stage.nodes["a"].call(m.LeaseRequest(job_id="job", cluster=0, want=1, number=6, **ahead))
            assert grant == m.LeaseGrant(leases=(), drained=True)
            failed = await stage.requester.until(m.JobState.FAILED)
            assert failed.error is not None
            assert failed.error.code == "R607"
            assert "shows an earlier state of the job" in failed.error.message

    asyncio.run(main())


def test_a_requester_that_missed_the_end_hears_it_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            await started(stage)
            await stage.nodes["a"].train()
            await stage.requester.until(m.JobState.DONE)
            await stage.requester.call(m.StatusRequest())
            stage.requester.updates.clear()
            await stage.requester.call(m.RequesterHeartbeat(job_id="job"))
            done = await stage.requester.until(m.JobState.DONE)
            assert isinstance(done.history[0], EpochResult)

    asyncio.run(main())
