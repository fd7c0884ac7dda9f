"""Which nodes are there: joined, active in a job, lost, or left."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from roost.errors import ProtocolError
from roost.protocol.machine import StateMachine

KEPT_GAPS = 64
"""Gaps between heartbeats that are remembered per node."""
SETTLED_GAPS = 8
"""With fewer known gaps nothing is concluded from them."""
GAPS_MISSED = 4.0
"""So many of its longest gaps may pass before a node counts as lost."""


@dataclass(frozen=True, kw_only=True)
class NodeJoined:
    """A node has registered, for the first time or again."""

    node_id: str
    now: float


@dataclass(frozen=True, kw_only=True)
class NodeHeard:
    """A node sent a heartbeat."""

    node_id: str
    now: float


@dataclass(frozen=True, kw_only=True)
class NodeAssigned:
    """A node has been given a stage."""

    node_id: str


@dataclass(frozen=True, kw_only=True)
class NodeFreed:
    """A node runs no stage any more."""

    node_id: str


@dataclass(frozen=True, kw_only=True)
class NodeSilent:
    """A node has not been heard for too long, or its connection broke."""

    node_id: str


@dataclass(frozen=True, kw_only=True)
class NodeGone:
    """A node has said goodbye."""

    node_id: str


MembershipEvent = NodeJoined | NodeHeard | NodeAssigned | NodeFreed | NodeSilent | NodeGone


@dataclass(frozen=True, kw_only=True)
class ReplaceNode:
    """An active node is no longer there: its stage has to go to another, or its job fails."""

    node_id: str


@dataclass(frozen=True, kw_only=True)
class AskToRegister:
    """A node that counts as lost or left still sends heartbeats: it must register again."""

    node_id: str


MembershipInstruction = ReplaceNode | AskToRegister


class NodeState(StrEnum):
    """What a node is to the coordinator."""

    JOINED = "joined"
    ACTIVE = "active"
    LOST = "lost"
    LEFT = "left"


TRANSITIONS: dict[NodeState, dict[type[object], NodeState | tuple[NodeState, ...]]] = {
    NodeState.JOINED: {
        NodeJoined: NodeState.JOINED,
        NodeHeard: NodeState.JOINED,
        NodeAssigned: NodeState.ACTIVE,
        NodeFreed: NodeState.JOINED,
        NodeSilent: NodeState.LOST,
        NodeGone: NodeState.LEFT,
    },
    NodeState.ACTIVE: {
        NodeJoined: NodeState.JOINED,
        NodeHeard: NodeState.ACTIVE,
        NodeFreed: NodeState.JOINED,
        NodeSilent: NodeState.LOST,
        NodeGone: NodeState.LEFT,
    },
    NodeState.LOST: {
        NodeJoined: NodeState.JOINED,
        NodeHeard: NodeState.LOST,
        NodeFreed: NodeState.LOST,
        NodeSilent: NodeState.LOST,
        NodeGone: NodeState.LEFT,
    },
    NodeState.LEFT: {
        NodeJoined: NodeState.JOINED,
        NodeHeard: NodeState.LEFT,
        NodeFreed: NodeState.LEFT,
        NodeSilent: NodeState.LEFT,
        NodeGone: NodeState.LEFT,
    },
}


class NodeTable:
    """Every node that has ever joined, its state, and when it was last heard."""

    def __init__(self, lost_after_s: float, *, least_s: float = math.inf) -> None:
        """A node counts as lost `lost_after_s` seconds after its last heartbeat.

        Once SETTLED_GAPS gaps between heartbeats of a node are known, that is GAPS_MISSED times the longest of its last KEPT_GAPS
        ones, if that is less, but no less than `least_s`: a node whose heartbeats come late is given more time.
        """
        self._lost_after_s = lost_after_s
        self._least_s = min(least_s, lost_after_s)
        self._machines: dict[str, StateMachine[NodeState]] = {}
        self._heard: dict[str, float] = {}
        self._gaps: dict[str, deque[float]] = {}

    def handle(self, event: MembershipEvent) -> list[MembershipInstruction]:
        """Take in `event` and return what must be done about it.

        Raises ProtocolError for a node that never joined, IllegalTransitionError for a stage given to a node that is not free.
        """
        if isinstance(event, NodeJoined) and event.node_id not in self._machines:
            self._machines[event.node_id] = StateMachine(f"node {event.node_id}", NodeState.JOINED, TRANSITIONS)
        machine = self._machine(event.node_id)
        before = machine.state
        after = machine.move(event)
        if isinstance(event, NodeJoined | NodeHeard):
            self._note_heard(event)
        if isinstance(event, NodeHeard) and after in (NodeState.LOST, NodeState.LEFT):
            return [AskToRegister(node_id=event.node_id)]
        # A node that registers again while it runs a stage has restarted: its stage is gone.
        if before is NodeState.ACTIVE and after is not NodeState.ACTIVE and not isinstance(event, NodeFreed):
            return [ReplaceNode(node_id=event.node_id)]
        return []

    def _note_heard(self, event: NodeJoined | NodeHeard) -> None:
        before = self._heard.get(event.node_id, event.now)
        gaps = self._gaps.setdefault(event.node_id, deque(maxlen=KEPT_GAPS))
        if isinstance(event, NodeJoined):
            gaps.clear()
        elif event.now > before:
            gaps.append(event.now - before)
        self._heard[event.node_id] = max(event.now, before)

    def patience(self, node_id: str) -> float:
        """Return the seconds of silence after which a node counts as lost. Raises ProtocolError if it never joined."""
        self._machine(node_id)
        gaps = self._gaps[node_id]
        if len(gaps) < SETTLED_GAPS:
            return self._lost_after_s
        return min(self._lost_after_s, max(self._least_s, GAPS_MISSED * max(gaps)))

    def excuse(self, seconds: float) -> None:
        """Hold no silence of the last `seconds` against anybody: whoever listens was not listening."""
        self._heard = {node_id: heard + seconds for node_id, heard in self._heard.items()}

    def expire(self, now: float) -> list[str]:
        """Declare every node lost that has been silent for longer than its `patience`, and return their names, sorted."""
        silent = [node_id for node_id in self._present() if now >= self._heard[node_id] + self.patience(node_id)]
        for node_id in silent:
            self.handle(NodeSilent(node_id=node_id))
        return silent

    def next_expiry(self) -> float | None:
        """Return when `expire` could next find a lost node if none is heard again; None without nodes."""
        return min((self._heard[node_id] + self.patience(node_id) for node_id in self._present()), default=None)

    def _present(self) -> list[str]:
        return sorted((*self.in_state(NodeState.JOINED), *self.in_state(NodeState.ACTIVE)))

    def state(self, node_id: str) -> NodeState:
        """Return the state of a node. Raises ProtocolError if it never joined."""
        return self._machine(node_id).state

    def last_heard(self, node_id: str) -> float:
        """Return the time a node was last heard. Raises ProtocolError if it never joined."""
        self._machine(node_id)
        return self._heard[node_id]

    def in_state(self, state: NodeState) -> list[str]:
        """Return the names of the nodes in `state`, sorted."""
        return sorted(node_id for node_id, machine in self._machines.items() if machine.state is state)

    def _machine(self, node_id: str) -> StateMachine[NodeState]:
        machine = self._machines.get(node_id)
        if machine is None:
            raise ProtocolError(f"node {node_id} has never joined", hint="Let the node register before it sends anything else.")
        return machine
