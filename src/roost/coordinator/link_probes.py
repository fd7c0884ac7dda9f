"""Measures the links between the nodes of a job before it is planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from roost import messages as m
from roost.coordinator.node_calls import NodeCalls
from roost.errors import EmptyPoolError, MalformedMessageError, NodeLostError
from roost.types import LinkProfile, NodeProfile, Peer

PROBE_BYTES = 8 << 20
"""The most that is sent at once to measure a link; a node sends less over a slow one."""


async def measure_links(
    nodes: Sequence[NodeProfile], calls: NodeCalls, *, deadline_s: float, least_nodes: int, on_lost: Callable[[str, str], None]
) -> tuple[tuple[NodeProfile, ...], list[LinkProfile]]:
    """Return the nodes that are there, and every link that could be measured; nodes that have gone without a word are left out.

    Raises EmptyPoolError if fewer than `least_nodes` are left.
    """
    links: list[LinkProfile] = []
    left = tuple(nodes)
    # One node at a time: probes that run together would measure each other.
    for node in nodes:
        others = calls.peers(other.node_id for other in left if other.node_id != node.node_id)
        try:
            links.extend(await _probe(node.node_id, others, calls, deadline_s))
        except NodeLostError as error:
            on_lost(node.node_id, error.message)
            left = tuple(other for other in left if other.node_id != node.node_id)
            if len(left) < max(1, least_nodes):
                raise EmptyPoolError(
                    f"{len(left)} of {least_nodes} nodes are left: {error.message}",
                    hint="Start that node again, or ask for fewer nodes.",
                ) from error
    return left, links


async def _probe(node_id: str, others: tuple[Peer, ...], calls: NodeCalls, deadline_s: float) -> tuple[LinkProfile, ...]:
    request = m.ProbeLinks(targets=others, payload_bytes=PROBE_BYTES)
    reply = await calls.call(node_id, request, deadline_s)
    if not isinstance(reply, m.LinkReport):
        raise MalformedMessageError(f"node {node_id} answered a link probe with {type(reply).__name__}")
    return reply.links
