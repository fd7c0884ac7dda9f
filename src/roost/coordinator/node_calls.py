"""Calls from the coordinator to the nodes of a job."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from roost import messages as m
from roost.errors import DeadlineError, NodeLostError, PeerUnreachableError
from roost.transport.interface import Transport
from roost.types import NodeProfile, Peer


def peer_of(node: NodeProfile) -> Peer:
    """Return where a node is reached."""
    return Peer(peer_id=node.node_id, address=node.address)


async def together(works: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Await all; the first failure cancels the rest and is raised as itself.

    Not a TaskGroup: in Python 3.11 one whose task is cancelled while a call fails raises the failure, and the cancellation is lost.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    if not tasks:
        return
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task.done() and not task.cancelled() and task.exception() is not None]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in failed:
        task.result()


def first_error(error: BaseException) -> BaseException:
    """Return the error itself, or the first one in an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class NodeCalls:
    """Knows where the nodes of a job are, and says which one is lost if a call does not get through."""

    def __init__(self, transport: Transport, nodes: Iterable[NodeProfile]) -> None:
        self._transport = transport
        self.nodes = {node.node_id: node for node in nodes}

    def peers(self, node_ids: Iterable[str]) -> tuple[Peer, ...]:
        """Return where these nodes are reached, each once."""
        return tuple(peer_of(self.nodes[node_id]) for node_id in dict.fromkeys(node_ids))

    async def call(self, node_id: str, message: m.Message, deadline_s: float) -> m.Message:
        """Return a node's reply. Raises NodeLostError if it cannot be reached or is silent, and whatever error it reports."""
        try:
            return (await self._transport.call(peer_of(self.nodes[node_id]), message, deadline_s=deadline_s)).message
        except (PeerUnreachableError, DeadlineError) as error:
            raise NodeLostError(f"node {node_id} is lost: {error.message}", node=node_id) from error
