"""Requests for a plan: what they give, what they refuse, and that nothing is started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coordinator_kit import MB, WAIT_S, FakeRequester, Scene, config, model, profile, refusal, scene

from roost import messages as m
from roost.coordinator import pool_planner
from roost.errors import (
    DeadlineError,
    EmptyPoolError,
    ForbiddenError,
    InvalidConfigError,
    JobRefusedError,
    MalformedMessageError,
    NodeLostError,
    PeerUnreachableError,
    VersionMismatchError,
)
from roost.types import LinkProfile


def request(**fields: Any) -> m.PlanRequest:
    settings = {
        "protocol_version": m.PROTOCOL_VERSION,
        "torch_version": "2.13.0",
        "config": config(),
        "profile": model(),
        "wait_nodes": 1,
        "wait_s": WAIT_S,
        **fields,
    }
    return m.PlanRequest(**settings)


async def ask(stage: Scene, **fields: Any) -> m.PoolPlan:
    reply = await stage.requester.call(request(**fields))
    assert isinstance(reply, m.PoolPlan)
    return reply


def reports(source: str, *targets: str) -> Callable[[m.Message], m.Message]:
    links = tuple(LinkProfile(source=source, target=target, latency_s=0.001, bytes_per_s=1e6) for target in targets)
    return lambda message: m.LinkReport(links=links)


def test_a_plan_is_answered_with_the_nodes_and_the_links_as_measured(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("b")) as stage:
            stage.nodes["a"].answers[m.ProbeLinks] = reports("a", "b")
            stage.nodes["b"].answers[m.ProbeLinks] = reports("b", "a")
            answer = await ask(stage, wait_nodes=2)
            assert {node.node_id for node in answer.nodes} == {"a", "b"}
            assert [(link.source, link.target) for link in answer.links] == [("a", "b"), ("b", "a")]
            assert answer.plan is not None
            assert answer.refusal is None
            probe = next(message for message in stage.nodes["a"].asked if isinstance(message, m.ProbeLinks))
            assert [peer.peer_id for peer in probe.targets] == ["b"]

    asyncio.run(main())


def test_the_plan_is_the_one_the_job_gets_and_asking_starts_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a", memory=6 * MB), profile("b", memory=9 * MB, speed=2e9)) as stage:
            answer = await ask(stage, wait_nodes=2)
            assert not any(node.was_asked(m.PrepareStage) for node in stage.nodes.values())
            status = await stage.requester.call(m.StatusRequest())
            assert isinstance(status, m.Status)
            assert (status.job_id, status.plan) == ("", None)
            assert {node.state for node in status.nodes} == {"joined"}
            accepted = await stage.requester.submit(wait_nodes=2)
            assert accepted.plan == answer.plan

    asyncio.run(main())


def test_a_pool_that_is_too_small_is_answered_with_its_nodes_and_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a", memory=5 * MB)) as stage:
            answer = await ask(stage)
            assert answer.plan is None
            assert [node.node_id for node in answer.nodes] == ["a"]
            assert answer.refusal is not None
            assert answer.refusal.code == "R301"

    asyncio.run(main())


def test_a_request_waits_for_nodes_and_gives_up_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            asked = asyncio.create_task(ask(stage, wait_nodes=2))
            await stage.requester.call(m.StatusRequest())
            # Waiting for nodes keeps nobody from starting a job.
            assert not asked.done()
            await stage.join(profile("b"))
            assert len((await asked).nodes) == 2
            with pytest.raises(EmptyPoolError, match="2 of 3 nodes have joined"):
                await ask(stage, wait_nodes=3, wait_s=0.05)

    asyncio.run(main())


def test_while_a_job_runs_its_links_are_left_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("b")) as stage:
            await stage.requester.submit(config(max_clusters=1))
            with pytest.raises(JobRefusedError, match="busy with job job of requester"):
                await ask(stage)

    asyncio.run(main())


def test_while_links_are_measured_a_job_is_refused_and_taken_afterwards(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            entered, go = asyncio.Event(), asyncio.Event()
            node = stage.nodes["a"]
            usual = node.on_call

            async def slow(sender: Any, message: m.Message, buffers: Any) -> Any:
                if isinstance(message, m.ProbeLinks):
                    entered.set()
                    await go.wait()
                return await usual(sender, message, buffers)

            node.on_call = slow  # type: ignore[method-assign]
            asked = asyncio.create_task(ask(stage))
            await entered.wait()
            with pytest.raises(JobRefusedError, match="it measures links for a plan that requester asked for"):
                await stage.requester.submit()
            with pytest.raises(JobRefusedError, match="measures links"):
                await ask(stage)
            go.set()
            assert (await asked).plan is not None
            assert (await stage.requester.submit()).plan.stages

    asyncio.run(main())


def test_a_node_that_cannot_be_reached_is_named_and_left_out_the_next_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a"), profile("b")) as stage:
            stage.nodes["b"].answers[m.ProbeLinks] = refusal(PeerUnreachableError)
            with pytest.raises(NodeLostError, match="node b is lost"):
                await ask(stage, wait_nodes=2)
            assert [node.node_id for node in (await ask(stage)).nodes] == ["a"]

    asyncio.run(main())


def test_measuring_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_planner, "MEASURE_S", 0.05)

    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:

            async def silent(sender: Any, message: m.Message, buffers: Any) -> Any:
                await asyncio.Event().wait()

            stage.nodes["a"].on_call = silent  # type: ignore[method-assign]
            with pytest.raises(DeadlineError, match="measuring the links between 1 nodes took longer"):
                await ask(stage)
            # The coordinator is free again.
            with pytest.raises(EmptyPoolError):
                await ask(stage, wait_nodes=2, wait_s=0.01)

    asyncio.run(main())


def test_a_node_that_answers_a_probe_with_something_else_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            stage.nodes["a"].answers[m.ProbeLinks] = lambda message: m.Done()
            with pytest.raises(MalformedMessageError, match="node a answered a link probe with Done"):
                await ask(stage)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "error", "reason"),
    [
        ({"protocol_version": 99}, VersionMismatchError, "protocol 99"),
        ({"torch_version": "1.0.0"}, VersionMismatchError, "node a has torch 2.13.0, the requester 1.0.0"),
        ({"wait_s": 0.0}, InvalidConfigError, "wait must be above 0"),
        ({"wait_s": 1e9}, InvalidConfigError, "wait must be above 0 and at most 3600 s"),
        ({"wait_nodes": 10**6}, InvalidConfigError, "nodes must be at most"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(tmp_path: Path, fields: dict[str, Any], error: type[Exception], reason: str) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            with pytest.raises(error, match=reason):
                await ask(stage, **fields)

    asyncio.run(main())


def test_who_does_not_train_need_not_say_which_torch_it_has(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            assert (await ask(stage, torch_version="")).plan is not None

    asyncio.run(main())


def test_nodes_may_not_ask_for_plans(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            with pytest.raises(ForbiddenError, match="a is a node and sent PlanRequest"):
                await stage.nodes["a"].call(request())

    asyncio.run(main())


def test_two_requesters_may_ask_one_after_the_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, profile("a")) as stage:
            other = FakeRequester("other", stage.network)
            await stage.add(other)
            first = await ask(stage)
            assert await other.call(request()) == first

    asyncio.run(main())
