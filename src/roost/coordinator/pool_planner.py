"""Answers what a job would get on the pool as it is now: measures the links between free nodes and plans. Starts nothing."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from roost import messages as m
from roost.config import require
from roost.coordinator.link_probes import PROBE_BYTES
from roost.errors import DeadlineError, MalformedMessageError, NodeLostError, PeerUnreachableError, PlanningError, VersionMismatchError
from roost.planning.planner import make_plan
from roost.transport.dispatch import failed_from
from roost.transport.interface import Transport
from roost.types import LinkProfile, NodeProfile, Peer

logger = logging.getLogger(__name__)

MEASURE_S = 90.0
"""Deadline for measuring all links."""
PROBE_S = 60.0
"""Deadline for one node to measure its links."""
MOST_WAIT_S = 3600.0
MOST_NODES = 4096
"""Waiting for more nodes is refused."""


def check_request(request: m.PlanRequest) -> None:
    """Raise VersionMismatchError or InvalidConfigError for a request that cannot be answered."""
    if request.protocol_version != m.PROTOCOL_VERSION:
        raise VersionMismatchError(f"the requester speaks protocol {request.protocol_version}, this coordinator {m.PROTOCOL_VERSION}")
    require(0 < request.wait_s <= MOST_WAIT_S, f"wait must be above 0 and at most {MOST_WAIT_S:.0f} s, not {request.wait_s}")
    require(request.wait_nodes <= MOST_NODES, f"nodes must be at most {MOST_NODES}, not {request.wait_nodes}")


async def plan_for_pool(
    request: m.PlanRequest, nodes: Sequence[NodeProfile], transport: Transport, *, on_lost: Callable[[str, str], None]
) -> m.PoolPlan:
    """Return nodes, measured links, and the plan or why there is none.

    Raises NodeLostError for a node that does not answer, after telling `on_lost` its name and why, and DeadlineError if
    measuring takes longer than MEASURE_S.
    """
    try:
        async with asyncio.timeout(MEASURE_S):
            links = await _measure_links(nodes, transport, on_lost)
    except TimeoutError:
        raise DeadlineError(f"measuring the links between {len(nodes)} nodes took longer than {MEASURE_S:.0f} s") from None
    config = request.config
    logger.info("plan_asked job=%s nodes=%s links=%s", config.job_id, len(nodes), len(links))
    try:
        # The same seed as the job would use: what is shown is what would be carried out.
        plan = await asyncio.to_thread(make_plan, request.profile, nodes, links, config, random.Random(config.seed))
    except PlanningError as error:
        return m.PoolPlan(nodes=tuple(nodes), links=tuple(links), plan=None, refusal=failed_from(error))
    return m.PoolPlan(nodes=tuple(nodes), links=tuple(links), plan=plan, refusal=None)


async def _measure_links(nodes: Sequence[NodeProfile], transport: Transport, on_lost: Callable[[str, str], None]) -> list[LinkProfile]:
    links: list[LinkProfile] = []
    peers = [Peer(peer_id=node.node_id, address=node.address) for node in nodes]
    # One node at a time: probes that run together would measure each other.
    for peer in peers:
        probe = m.ProbeLinks(targets=tuple(other for other in peers if other != peer), payload_bytes=PROBE_BYTES)
        try:
            reply = (await transport.call(peer, probe, deadline_s=PROBE_S)).message
        except (PeerUnreachableError, DeadlineError) as error:
            on_lost(peer.peer_id, error.message)
            hint = "Start that node again, or plan without it: run the command again."
            raise NodeLostError(f"node {peer.peer_id} is lost: {error.message}", hint=hint) from error
        if not isinstance(reply, m.LinkReport):
            raise MalformedMessageError(f"node {peer.peer_id} answered a link probe with {type(reply).__name__}")
        links.extend(reply.links)
    return links
