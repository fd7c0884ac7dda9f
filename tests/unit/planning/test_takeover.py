from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic import even_model

from roost.planning.takeover import Holder, holders_of, state_of, transition, without_clusters
from roost.types import ClusterPlan, Plan, SegmentPlan, StagePlan


def cluster(index: int, *nodes: str, cuts: tuple[int, ...]) -> ClusterPlan:
    stages = tuple(
        StagePlan(
            cluster=index,
            index=place,
            node_id=name,
            first_unit=first,
            last_unit=last,
            start=first,
            stop=last,
            max_in_flight=1,
            memory_needed_bytes=1,
            memory_available_bytes=1,
            compute_s=0.1,
            send_s=0.0,
        )
        for place, (name, first, last) in enumerate(zip(nodes, cuts, cuts[1:], strict=False))
    )
    return ClusterPlan(index=index, stages=stages, share=0.5, samples_per_s=1.0, bottleneck="")


def plan(*clusters: ClusterPlan) -> Plan:
    rings = [tuple(stage.node_id for stage in stages) for stages in zip(*(one.stages for one in clusters), strict=False)]
    segments = tuple(SegmentPlan(index=index, tensors=(f"t{index}",), nbytes=4, members=members) for index, members in enumerate(rings))
    return Plan(clusters=clusters, segments=segments, backups=(), samples_per_s=2.0, notes=())


CURRENT = plan(cluster(0, "a", "b", cuts=(0, 2, 4)), cluster(1, "c", "d", cuts=(0, 2, 4)))


def test_a_cluster_with_the_same_nodes_and_cuts_stays_with_the_stages_it_had() -> None:
    richer = replace(CURRENT.clusters[1].stages[0], max_in_flight=9, cluster=0)
    following = plan(
        replace(cluster(0, "c", "d", cuts=(0, 2, 4)), stages=(richer, CURRENT.clusters[1].stages[1])), cluster(1, "a", "e", cuts=(0, 2, 4))
    )
    way = transition(CURRENT, (3, 8), {3}, following)
    assert dict(way.kept) == {0: 8}
    assert way.plan.clusters[0].stages == tuple(replace(stage, cluster=0) for stage in CURRENT.clusters[1].stages)
    assert [changed.index for changed in way.changed] == [1]


def test_a_broken_cluster_is_built_anew_though_its_plan_is_the_same() -> None:
    way = transition(CURRENT, (3, 8), {8}, CURRENT)
    assert dict(way.kept) == {0: 3}


def test_those_that_are_left_go_on_at_once_in_rings_without_the_others() -> None:
    way = without_clusters(CURRENT, (3, 8), {3})
    assert way is not None
    assert dict(way.kept) == {0: 8}
    (left,) = way.plan.clusters
    assert left.share == pytest.approx(1.0)
    assert {stage.cluster for stage in left.stages} == {0}
    assert [segment.members for segment in way.plan.segments] == [("c",), ("d",)]
    assert [segment.tensors for segment in way.plan.segments] == [segment.tensors for segment in CURRENT.segments]


@pytest.mark.parametrize("broken", [set(), {3, 8}])
def test_there_is_nothing_to_go_on_with_if_all_clusters_are_broken_or_none(broken: set[int]) -> None:
    assert without_clusters(CURRENT, (3, 8), broken) is None


def names(*units: int) -> tuple[str, ...]:
    profile = even_model(4)
    return tuple(tensor.name for unit in units for tensor in profile.units[unit].tensors)


def test_a_stage_gets_its_state_from_itself_then_its_own_cluster_then_one_that_trains_on() -> None:
    holders = holders_of(CURRENT, (3, 8), {8}, {"a", "c", "d"})
    again = cluster(0, "a", "e", cuts=(0, 3, 4))
    first = state_of(again.stages[0], again, holders, even_model(4))
    assert dict(first.tensors) == {"a": names(0, 1), "d": names(2)}
    second = state_of(again.stages[1], again, holders, even_model(4))
    assert dict(second.tensors) == {"d": names(3)}
    assert not first.missing and not second.missing


def test_what_no_node_holds_is_missing_and_a_copy_is_better_than_nothing() -> None:
    holders = holders_of(CURRENT, (3, 8), set(), {"a"})
    again = cluster(0, "a", "e", cuts=(0, 2, 4))
    assert state_of(again.stages[1], again, holders, even_model(4)).missing == names(2, 3)
    copy = Holder(node_id="e", number=3, first_unit=2, last_unit=4, kept=False, copy=True)
    found = state_of(again.stages[1], again, (*holders, copy), even_model(4))
    assert dict(found.tensors) == {"e": names(2, 3)}
