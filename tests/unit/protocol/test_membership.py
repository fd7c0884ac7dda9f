"""Which nodes are there."""

from __future__ import annotations

import pytest

from roost.errors import IllegalTransitionError, ProtocolError
from roost.protocol.membership import (
    AskToRegister,
    NodeAssigned,
    NodeFreed,
    NodeGone,
    NodeHeard,
    NodeJoined,
    NodeSilent,
    NodeState,
    NodeTable,
    ReplaceNode,
)


def table_with(*names: str) -> NodeTable:
    table = NodeTable(10.0)
    for name in names:
        table.handle(NodeJoined(node_id=name, now=0.0))
    return table


def test_a_node_that_registers_has_joined() -> None:
    table = table_with("a")
    assert table.state("a") is NodeState.JOINED
    assert table.last_heard("a") == 0.0


def test_a_node_with_a_stage_is_active_until_it_is_freed() -> None:
    table = table_with("a")
    table.handle(NodeAssigned(node_id="a"))
    assert table.in_state(NodeState.ACTIVE) == ["a"]
    assert table.handle(NodeFreed(node_id="a")) == []
    assert table.state("a") is NodeState.JOINED


def test_silent_nodes_are_lost_and_the_others_stay() -> None:
    table = table_with("b", "a", "c")
    table.handle(NodeHeard(node_id="c", now=5.0))
    assert table.expire(9.9) == []
    assert table.expire(10.0) == ["a", "b"]
    assert table.expire(10.0) == []
    assert table.in_state(NodeState.LOST) == ["a", "b"]
    assert table.state("c") is NodeState.JOINED


def test_the_next_expiry_follows_the_node_heard_least_recently() -> None:
    table = table_with("a", "b")
    table.handle(NodeHeard(node_id="a", now=4.0))
    assert table.next_expiry() == 10.0
    table.handle(NodeGone(node_id="b"))
    assert table.next_expiry() == 14.0
    assert NodeTable(10.0).next_expiry() is None


def test_a_node_is_lost_exactly_at_the_next_expiry_whatever_the_rounding() -> None:
    for tenth in range(1, 200):
        table = NodeTable(9.0)
        table.handle(NodeJoined(node_id="a", now=tenth / 10))
        expiry = table.next_expiry()
        assert expiry is not None
        assert table.expire(expiry) == ["a"]


def test_an_active_node_that_falls_silent_must_be_replaced_once() -> None:
    table = table_with("a")
    table.handle(NodeAssigned(node_id="a"))
    assert table.handle(NodeSilent(node_id="a")) == [ReplaceNode(node_id="a")]
    assert table.handle(NodeSilent(node_id="a")) == []


def test_an_active_node_that_registers_again_has_lost_its_stage() -> None:
    table = table_with("a")
    table.handle(NodeAssigned(node_id="a"))
    assert table.handle(NodeJoined(node_id="a", now=1.0)) == [ReplaceNode(node_id="a")]


@pytest.mark.parametrize("farewell", [NodeSilent(node_id="a"), NodeGone(node_id="a")])
def test_a_node_that_was_given_up_must_register_again_and_may(farewell: NodeSilent | NodeGone) -> None:
    table = table_with("a")
    table.handle(farewell)
    assert table.handle(NodeHeard(node_id="a", now=20.0)) == [AskToRegister(node_id="a")]
    assert table.handle(NodeJoined(node_id="a", now=21.0)) == []
    assert table.state("a") is NodeState.JOINED
    assert table.expire(30.0) == []


def test_a_heartbeat_that_arrives_late_does_not_turn_back_the_clock() -> None:
    table = table_with("a")
    table.handle(NodeHeard(node_id="a", now=8.0))
    table.handle(NodeHeard(node_id="a", now=3.0))
    assert table.last_heard("a") == 8.0


def test_a_node_that_never_joined_is_named() -> None:
    with pytest.raises(ProtocolError, match="node x has never joined"):
        NodeTable(10.0).handle(NodeHeard(node_id="x", now=0.0))


def test_a_lost_node_cannot_be_given_a_stage() -> None:
    table = table_with("a")
    table.handle(NodeSilent(node_id="a"))
    with pytest.raises(IllegalTransitionError, match="node a"):
        table.handle(NodeAssigned(node_id="a"))


def test_a_node_has_one_stage_at_most() -> None:
    table = table_with("a")
    table.handle(NodeAssigned(node_id="a"))
    with pytest.raises(IllegalTransitionError):
        table.handle(NodeAssigned(node_id="a"))
