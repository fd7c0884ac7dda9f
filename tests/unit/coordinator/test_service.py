from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from coordinator_kit import MB, WAIT_S, FakeNode, FakeRequester, Scene, config, metrics, profile, refusal, scene

from roost import messages as m
from roost.coordinator.job_record import LeaseOperation, replay
from roost.errors import (
    EmptyPoolError,
    ForbiddenError,
    InvalidConfigError,
    JobRefusedError,
    MalformedMessageError,
    NodeTooSmallError,
    PoolTooSmallError,
    RequesterLostError,
    StageFailedError,
    VersionMismatchError,
)
from roost.protocol.data_leases import LeaseBook
from roost.transport.interface import Sender
from roost.types import Peer, Role

# ---------------------------------------------------------------- nodes


def test_a_node_is_told_how_often_to_send_heartbeats(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, heartbeat_s=0.5) as stage:
            node = FakeNode(profile("a"), stage.network)
            await stage.add(node)
            assert await node.register() == m.Registered(heartbeat_s=0.5)
            assert await node.heartbeat() == m.Done()

    asyncio.run(main())


def test_a_node_cannot_register_under_another_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("b")) as stage:
            thief = FakeNode(profile("a"), stage.network)
            await stage.add(thief)
            thief.profile = profile("b", memory=1)
            with pytest.raises(ForbiddenError, match="a registers as b"):
                await thief.register()

    asyncio.run(main())


def test_a_node_that_speaks_another_protocol_is_told_both_versions(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as stage:
            node = FakeNode(profile("a"), stage.network)
            await stage.add(node)
            with pytest.raises(VersionMismatchError, match=rf"protocol 99 .* speaks {m.PROTOCOL_VERSION}"):
                await node.register(protocol_version=99)

    asyncio.run(main())


def test_a_node_that_never_registered_is_asked_to(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as stage:
            node = FakeNode(profile("a"), stage.network)
            await stage.add(node)
            with pytest.raises(JobRefusedError, match="a is not registered"):
                await node.heartbeat()

    asyncio.run(main())


def test_a_node_reports_only_its_own_metrics(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("b")) as stage:
            await stage.requester.submit()
            with pytest.raises(ForbiddenError, match="a reports metrics of b"):
                await stage.nodes["a"].heartbeat("job", metrics("b"))

    asyncio.run(main())


def test_messages_that_a_coordinator_does_not_take_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            with pytest.raises(MalformedMessageError, match="does not answer FetchGraph"):
                await stage.nodes["a"].call(m.FetchGraph(job_id="job"))
            with pytest.raises(MalformedMessageError, match="does not answer OpenRound"):
                await stage.coordinator.on_call(Sender(peer_id="a", role=Role.NODE), m.OpenRound(job_id="job", segment=0, round=0), [])

    asyncio.run(main())


# ---------------------------------------------------------------- submissions


def test_a_job_waits_for_as_many_nodes_as_it_asks_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            submitted = asyncio.create_task(stage.requester.submit(config(min_clusters=2), wait_nodes=2))
            await stage.requester.call(m.StatusRequest())
            assert not submitted.done()
            await stage.join(profile("b"))
            accepted = await submitted
            assert {node.node_id for node in accepted.nodes} == {"a", "b"}
            assert {stage.node_id for stage in accepted.plan.stages} == {"a", "b"}

    asyncio.run(main())


def test_a_pool_that_stays_too_empty_refuses_the_job_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            with pytest.raises(EmptyPoolError, match="1 of 3 nodes have joined after"):
                await stage.requester.submit(wait_nodes=3, wait_s=0.05)
            assert (await stage.requester.submit()).plan.stages

    asyncio.run(main())


def test_a_pool_without_memory_for_the_model_says_how_many_bytes_are_missing(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a", memory=4 * MB), profile("b", memory=4 * MB)) as stage:
            with pytest.raises(PoolTooSmallError, match=r"[0-9]+ bytes\) short"):
                await stage.requester.submit(wait_nodes=2)

    asyncio.run(main())


def test_nodes_that_are_all_too_small_for_the_smallest_piece_are_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a", memory=MB)) as stage:
            with pytest.raises(NodeTooSmallError, match=r"layers.0.* cannot be cut further .*a, lends 1.0 MB .*bytes\) short"):
                await stage.requester.submit()

    asyncio.run(main())


def test_a_node_too_small_for_any_stage_is_left_out_with_a_note(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("tiny", memory=1000)) as stage:
            accepted = await stage.requester.submit(wait_nodes=2)
            assert [stage.node_id for stage in accepted.plan.stages] == ["a"]
            assert accepted.plan.backups == ("tiny",)
            assert any("tiny" in note and "short" in note for note in accepted.plan.notes)

    asyncio.run(main())


def test_a_second_job_is_refused_while_the_first_waits_for_nodes_or_runs(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as stage:
            other = FakeRequester("other", stage.network)
            await stage.add(other)
            first = asyncio.create_task(stage.requester.submit())
            await stage.requester.call(m.StatusRequest())
            with pytest.raises(JobRefusedError, match="busy: job job waits for nodes"):
                await other.submit(config("second"))
            await stage.join(profile("a"))
            await first
            with pytest.raises(JobRefusedError, match="busy with job job of requester"):
                await other.submit(config("second"))

    asyncio.run(main())


def test_a_requester_withdraws_its_submission_and_the_pool_is_free_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as stage:
            submitted = asyncio.create_task(stage.requester.submit())
            await stage.requester.call(m.StatusRequest())
            await stage.requester.call(m.CancelJob(job_id="job"))
            with pytest.raises(JobRefusedError, match="job job was withdrawn"):
                await submitted
            await stage.join(profile("a"))
            assert (await stage.requester.submit()).plan.stages

    asyncio.run(main())


def test_a_requester_that_falls_silent_while_it_waits_withdraws_its_submission(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, heartbeat_s=0.02, lost_after_s=0.1) as stage:
            with pytest.raises(JobRefusedError, match="job job was withdrawn"):
                await stage.requester.submit()

    asyncio.run(main())


def test_nobody_else_withdraws_or_cancels_a_job_or_keeps_it_alive(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as stage:
            other = FakeRequester("other", stage.network)
            await stage.add(other)
            submitted = asyncio.create_task(stage.requester.submit())
            await stage.requester.call(m.StatusRequest())
            for message in (m.CancelJob(job_id="job"), m.RequesterHeartbeat(job_id="job")):
                with pytest.raises(ForbiddenError, match="job job belongs to requester, not to other"):
                    await other.call(message)
            await stage.join(profile("a"))
            await submitted
            for message in (m.CancelJob(job_id="job"), m.RequesterHeartbeat(job_id="job")):
                with pytest.raises(ForbiddenError, match="job job belongs to requester, not to other"):
                    await other.call(message)
            with pytest.raises(JobRefusedError, match="job nothing is not running"):
                await other.call(m.CancelJob(job_id="nothing"))

    asyncio.run(main())


def test_nobody_submits_a_job_for_another_requester(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            with pytest.raises(ForbiddenError, match="requester submits a job for other"):
                await stage.requester.submit(requester=Peer(peer_id="other", address="inproc:other"))

    asyncio.run(main())


def test_other_versions_of_protocol_and_torch_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            with pytest.raises(VersionMismatchError, match="protocol 99"):
                await stage.requester.submit(protocol_version=99)
            with pytest.raises(VersionMismatchError, match=r"node a has torch 2\.13\.0, the requester 2\.12\.1"):
                await stage.requester.submit(torch_version="2.12.1")
            assert (await stage.requester.submit(torch_version="2.13.1+cu128")).plan.stages

    asyncio.run(main())


def test_a_job_id_that_was_used_before_is_refused_and_blocks_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            stage.store.add_job(config("job"), now=0.0)
            with pytest.raises(InvalidConfigError, match="there was a job 'job' before"):
                await stage.requester.submit()
            assert (await stage.requester.submit(config("fresh"))).plan.stages

    asyncio.run(main())


# ---------------------------------------------------------------- what is lost


async def running(stage: Scene, *, min_clusters: int = 2) -> None:
    """Submit a job of two clusters, one node each, and wait until it trains."""
    accepted = await stage.requester.submit(config(min_clusters=min_clusters), wait_nodes=2)
    assert len(accepted.plan.clusters) == 2
    await stage.requester.until(m.JobState.TRAINING)


async def goes_on_without_b(stage: Scene) -> None:
    """Wait until node a has the job to itself, and train it to its end."""
    async with asyncio.timeout(WAIT_S):
        while not (changes := [message for message in stage.requester.asked if isinstance(message, m.PlanChanged)]):
            await stage.requester.changed()
        await stage.nodes["a"].go.wait()
    assert {planned.node_id for planned in changes[-1].plan.stages} == {"a"}
    assert stage.requester.updates[-1].state in (m.JobState.REPAIRING, m.JobState.TRAINING)
    stage.nodes["a"].go.set()
    leased = await stage.nodes["a"].train()
    done = await stage.requester.until(m.JobState.DONE)
    assert sum(lease.samples for lease in leased) == done.history[-1].samples == 22


def test_a_job_goes_on_without_a_node_that_has_fallen_silent(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("b"), heartbeat_s=0.02, lost_after_s=0.3) as stage:
            await running(stage, min_clusters=1)

            async def live() -> None:
                while True:
                    await stage.nodes["a"].heartbeat()
                    await stage.requester.call(m.RequesterHeartbeat(job_id="job"))
                    await asyncio.sleep(0.05)

            alive = asyncio.create_task(live())
            await goes_on_without_b(stage)
            alive.cancel()

    asyncio.run(main())


def test_a_node_that_was_started_again_has_lost_its_stage_and_may_get_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("b")) as stage:
            await running(stage)
            stage.nodes["b"].go.clear()
            await stage.nodes["b"].register()
            await stage.nodes["b"].go.wait()
            first, again = [message for message in stage.nodes["b"].asked if isinstance(message, m.PrepareStage)]
            assert first.number < again.number == 2
            assert [source.node_id for source in again.sources] == ["a"]

    asyncio.run(main())


def test_a_silent_requester_fails_its_job_and_frees_the_nodes(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), heartbeat_s=0.02, lost_after_s=0.3, requester_away_s=0.3) as stage:
            await stage.requester.submit()

            async def live() -> None:
                while True:
                    await stage.nodes["a"].heartbeat()
                    await asyncio.sleep(0.05)

            alive = asyncio.create_task(live())
            failed = await stage.requester.until(m.JobState.FAILED)
            assert failed.error is not None
            assert failed.error.code == RequesterLostError.code
            assert stage.nodes["a"].was_asked(m.EndJob)
            assert (await stage.requester.submit(config("second"))).plan.stages
            alive.cancel()

    asyncio.run(main())


def test_a_node_that_is_gone_before_the_links_are_measured_is_left_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("b")) as stage:
            stage.network.kill("b")
            accepted = await stage.requester.submit(wait_nodes=1)
            assert [node.node_id for node in accepted.nodes] == ["a"]
            assert [stage.node_id for stage in accepted.plan.stages] == ["a"]
            status = await stage.requester.call(m.StatusRequest())
            assert isinstance(status, m.Status)
            assert [node.profile.node_id for node in status.nodes] == ["a"]

    asyncio.run(main())


def test_a_job_that_waited_for_a_node_that_is_gone_is_refused_with_its_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("b")) as stage:
            stage.network.kill("b")
            with pytest.raises(EmptyPoolError, match="1 of 2 nodes are left: node b"):
                await stage.requester.submit(wait_nodes=2)

    asyncio.run(main())


def test_a_job_goes_on_without_a_node_that_was_killed(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("b")) as stage:
            await running(stage, min_clusters=1)
            number = stage.nodes["a"].metrics.number
            stage.network.kill("b")
            lost = m.StageFailed(
                job_id="job", code="R501", message="b at inproc:b cannot be reached from a", hint="x", cluster=number, peer="b"
            )
            await stage.nodes["a"].send(lost)
            await goes_on_without_b(stage)

    asyncio.run(main())


def test_a_node_that_cannot_build_its_stage_fails_the_job_and_the_pool_takes_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("b")) as stage:
            stage.nodes["b"].answers[m.PrepareStage] = refusal(StageFailedError)
            await stage.requester.submit(config(min_clusters=2), wait_nodes=2)
            failed = await stage.requester.until(m.JobState.FAILED)
            assert failed.error is not None
            assert (failed.error.code, failed.error.message) == ("R603", "PrepareStage fails in this test")
            assert stage.nodes["a"].was_asked(m.EndJob)
            del stage.nodes["b"].answers[m.PrepareStage]
            await stage.requester.submit(config("second", min_clusters=2), wait_nodes=2)
            await stage.requester.until(m.JobState.TRAINING, job_id="second")

    asyncio.run(main())


def test_a_coordinator_that_is_stopped_leaves_its_job_to_the_next_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            await stage.requester.submit()
            await stage.requester.until(m.JobState.TRAINING)
            (lease,) = (await stage.nodes["a"].lease()).leases
            await stage.coordinator.close()
            assert not stage.nodes["a"].was_asked(m.EndJob)
            found = stage.store.running("job")
            assert found is not None
            request, record, operations = found
            assert request.config.job_id == "job"
            assert record.built and record.numbers == (0,)
            assert operations == (LeaseOperation(cluster=0, want=1),)
            book = LeaseBook(22, 0, (1.0,), 4, 1, 0, 1, evaluate=False)
            book.restore(record.leases)
            assert replay(book, operations)[0][1].leases == (lease,)
            assert book.outstanding == (lease,)

    asyncio.run(main())


def test_a_coordinator_that_is_stopped_ends_the_wait_for_nodes(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as stage:
            submitted = asyncio.create_task(stage.requester.submit())
            await stage.requester.call(m.StatusRequest())
            await stage.coordinator.close()
            with pytest.raises(JobRefusedError, match="withdrawn"):
                await submitted

    asyncio.run(main())


# ---------------------------------------------------------------- status


def test_status_shows_nodes_and_what_they_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("tiny", memory=1000)) as stage:
            status = await stage.requester.call(m.StatusRequest())
            assert isinstance(status, m.Status)
            assert (status.job_id, status.plan, status.metrics) == ("", None, ())
            await stage.requester.submit(wait_nodes=2)
            await stage.requester.until(m.JobState.TRAINING)
            await stage.nodes["a"].heartbeat("job", metrics("a", samples=8))
            status = await stage.requester.call(m.StatusRequest())
            assert isinstance(status, m.Status)
            runs = {node.profile.node_id: (node.state, node.cluster, node.stage) for node in status.nodes}
            assert runs == {"a": ("active", 0, 0), "tiny": ("joined", -1, -1)}
            assert (status.job_id, status.job_state) == ("job", "training")
            assert [stage.samples for stage in status.metrics] == [8]

    asyncio.run(main())


# ---------------------------------------------------------------- paused nodes


async def states(stage: Scene) -> dict[str, str]:
    status = await stage.requester.call(m.StatusRequest())
    assert isinstance(status, m.Status)
    return {node.profile.node_id: node.state for node in status.nodes}


def test_a_paused_node_is_shown_as_such_and_gets_no_stage_until_it_is_resumed(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            node = stage.nodes["a"]
            await node.heartbeat(paused=True)
            assert await states(stage) == {"a": "paused"}
            with pytest.raises(EmptyPoolError, match="0 of 1 nodes have joined after 0 s, and 1 that their owners have paused"):
                await stage.requester.submit(wait_s=0.05)
            waiting = asyncio.create_task(stage.requester.submit())
            await node.heartbeat(paused=False)
            assert (await waiting).plan.clusters[0].stages[0].node_id == "a"

    asyncio.run(main())


def test_a_job_waits_for_a_paused_node_and_its_requester_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), lost_after_s=0.5, heartbeat_s=0.05) as stage:
            node = stage.nodes["a"]
            await stage.requester.submit()
            update = await stage.requester.until(m.JobState.TRAINING)
            assert update.paused == ()
            # Longer than a node may be silent, but it is not silent.
            for _ in range(15):
                await node.heartbeat("job", paused=True)
                await stage.requester.call(m.RequesterHeartbeat(job_id="job"))
                await asyncio.sleep(0.05)
            assert await states(stage) == {"a": "paused"}
            assert stage.requester.updates[-1].paused == ("a",)
            assert stage.requester.updates[-1].state is m.JobState.TRAINING
            await node.heartbeat("job", paused=False)
            assert await states(stage) == {"a": "active"}
            await node.train()
            assert (await stage.requester.until(m.JobState.DONE)).paused == ()

    asyncio.run(main())


def test_a_paused_node_that_falls_silent_is_lost_as_any_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), lost_after_s=0.2, heartbeat_s=0.05) as stage:
            await stage.nodes["a"].heartbeat(paused=True)
            for _ in range(100):
                if not await states(stage):
                    break
                await asyncio.sleep(0.05)
            await stage.nodes["a"].register()
            assert await states(stage) == {"a": "joined"}

    asyncio.run(main())
