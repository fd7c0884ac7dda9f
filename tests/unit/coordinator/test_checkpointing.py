"""Who saves what, how long it may take, and what is told of it."""

from __future__ import annotations

import asyncio
import random
from typing import cast

import pytest
from coordinator_kit import MB, config, model, profile

from roost import messages as m
from roost.config import CoordinatorConfig
from roost.coordinator.checkpointing import GIVEN_UP, KEPT_EVENTS, UPLOAD_S, Checkpointing, Snapshot, spread
from roost.coordinator.node_calls import NodeCalls
from roost.errors import NodeLostError
from roost.planning.planner import make_plan
from roost.protocol.data_leases import LeaseMark
from roost.transport.inproc import InprocNetwork, InprocTransport
from roost.types import Peer, Plan, Role


class SavingNodes:
    """In place of NodeCalls: notes what nodes are asked, and how long they may take."""

    def __init__(self, error: NodeLostError | None = None) -> None:
        self.deadlines: dict[str, float] = {}
        self.asked = asyncio.Event()
        self.line = asyncio.Event()
        """Set while nodes can answer."""
        self._error = error

    async def call(self, node_id: str, message: m.Message, deadline_s: float) -> m.Message:
        assert isinstance(message, m.SaveStage)
        self.deadlines[node_id] = deadline_s
        self.asked.set()
        await self.line.wait()
        if self._error is not None:
            raise self._error
        return m.Done()


def two_by_two() -> Plan:
    """Return a plan of two clusters of two stages."""
    nodes = [profile(name, memory=11 * MB) for name in ("a", "b", "c", "d")]
    plan = make_plan(model(), nodes, [], config(min_clusters=2), random.Random(0))
    assert [len(cluster.stages) for cluster in plan.clusters] == [2, 2]
    return plan


def snapshot(plan: Plan, attempt: int = 1, *, background: bool) -> Snapshot:
    return Snapshot(
        name=f"epoch-{attempt:04d}",
        attempt=attempt,
        epoch=attempt,
        updates=6,
        plan=plan,
        mark=LeaseMark(epoch=attempt, done=frozenset()),
        background=background,
    )


def checkpointing(nodes: SavingNodes) -> Checkpointing:
    return Checkpointing(
        job_id="job",
        calls=cast(NodeCalls, nodes),
        transport=InprocTransport("coordinator", Role.COORDINATOR, InprocNetwork()),
        requester=Peer(peer_id="requester", address="inproc:requester"),
        settings=CoordinatorConfig(),
    )


def told(checkpoints: Checkpointing) -> list[tuple[int, str, str]]:
    return [(event.attempt, str(event.state), event.detail) for event in checkpoints.events]


def test_every_segment_has_one_saver_that_holds_it_and_both_clusters_save_some() -> None:
    plan = two_by_two()
    saves = spread(plan)
    savers = {segment: save.node_id for save in saves for segment in save.segments}
    assert sorted(savers) == [segment.index for segment in plan.segments]
    assert sum(len(save.segments) for save in saves) == len(plan.segments)
    assert all(savers[segment.index] in segment.members for segment in plan.segments)
    for cluster in plan.clusters:
        assert {stage.node_id for stage in cluster.stages} & set(savers.values())
    best = max(plan.clusters, key=lambda cluster: cluster.share)
    assert {save.node_id for save in saves if save.rest} == {stage.node_id for stage in best.stages}


@pytest.mark.parametrize("background", [True, False])
def test_nodes_may_take_as_long_as_an_upload_over_a_slow_line_takes(background: bool) -> None:
    async def main() -> None:
        nodes = SavingNodes()
        nodes.line.set()
        await checkpointing(nodes).take(snapshot(two_by_two(), background=background))
        assert nodes.deadlines
        assert set(nodes.deadlines.values()) == {UPLOAD_S}
        assert CoordinatorConfig().sync_s < UPLOAD_S

    asyncio.run(main())


def test_a_checkpoint_of_which_a_node_is_lost_is_told_to_be_abandoned_and_why() -> None:
    async def main() -> None:
        nodes = SavingNodes(NodeLostError("node a is lost", node="a"))
        nodes.line.set()
        checkpoints = checkpointing(nodes)
        with pytest.raises(NodeLostError):
            await checkpoints.take(snapshot(two_by_two(), background=False))
        assert told(checkpoints) == [(1, "begun", ""), (1, "abandoned", "node a is lost")]

    asyncio.run(main())


def test_a_checkpoint_in_the_middle_of_which_the_plan_changes_is_told_to_be_abandoned() -> None:
    async def main() -> None:
        nodes = SavingNodes()
        checkpoints = checkpointing(nodes)
        saving = asyncio.create_task(checkpoints.take(snapshot(two_by_two(), background=True)))
        await nodes.asked.wait()
        saving.cancel()
        await asyncio.gather(saving, return_exceptions=True)
        assert saving.cancelled()
        assert told(checkpoints) == [(1, "begun", ""), (1, "abandoned", GIVEN_UP)]

    asyncio.run(main())


def test_only_the_last_events_are_kept() -> None:
    async def main() -> None:
        checkpoints = checkpointing(SavingNodes())
        plan = two_by_two()
        for attempt in range(1, KEPT_EVENTS + 4):
            checkpoints.skip(snapshot(plan, attempt, background=True), "the one before is still being uploaded")
        assert [event.attempt for event in checkpoints.events] == list(range(4, KEPT_EVENTS + 4))

    asyncio.run(main())
