"""Pools that differ from a given one in one respect: more memory, faster links, a node more or a node less."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from roost.types import LinkProfile, NodeProfile

LIKENESS = 1.25
"""Nodes whose memory, speed and line differ by less than about this factor count as one kind."""


@dataclass(frozen=True, kw_only=True)
class PoolView:
    """The nodes and links of a pool."""

    nodes: tuple[NodeProfile, ...]
    links: tuple[LinkProfile, ...]

    def node(self, node_id: str) -> NodeProfile:
        """Return the node of that name; it must be there."""
        return next(node for node in self.nodes if node.node_id == node_id)

    def up_bytes_per_s(self, node_id: str) -> float:
        """Return what the node can send in all: declared, or else the most that any of its links carries; 0 if none is known."""
        links = (link.bytes_per_s for link in self.links if link.source == node_id)
        return self.node(node_id).up_bytes_per_s or max(links, default=0.0)

    def down_bytes_per_s(self, node_id: str) -> float:
        """Return what the node can receive in all: declared, or else the most that any of its links carries; 0 if none is known."""
        links = (link.bytes_per_s for link in self.links if link.target == node_id)
        return self.node(node_id).down_bytes_per_s or max(links, default=0.0)

    # ------------------------------------------------------------ changed pools

    def with_memory(self, node_id: str, memory_bytes: int) -> PoolView:
        """Return the pool in which that node lends `memory_bytes`."""
        changed = (dataclasses.replace(node, memory_bytes=memory_bytes) if node.node_id == node_id else node for node in self.nodes)
        return dataclasses.replace(self, nodes=tuple(changed))

    def with_faster_links_from(self, node_id: str, factor: float) -> PoolView:
        """Return the pool in which that node's uplink, and every link from it, carries `factor` times as much."""
        node = self.node(node_id)
        return self._with_rates(lambda link: link.source == node_id, factor)._with_line(
            dataclasses.replace(node, up_bytes_per_s=node.up_bytes_per_s * factor)
        )

    def with_faster_links_to(self, node_id: str, factor: float) -> PoolView:
        """Return the pool in which that node's downlink, and every link to it, carries `factor` times as much."""
        node = self.node(node_id)
        return self._with_rates(lambda link: link.target == node_id, factor)._with_line(
            dataclasses.replace(node, down_bytes_per_s=node.down_bytes_per_s * factor)
        )

    def with_faster_link_between(self, one: str, other: str, factor: float) -> PoolView:
        """Return the pool in which the link between two nodes carries `factor` times as much, both ways."""
        return self._with_rates(lambda link: {link.source, link.target} == {one, other}, factor)

    def without(self, node_id: str) -> PoolView:
        """Return the pool without that node and its links."""
        return PoolView(
            nodes=tuple(node for node in self.nodes if node.node_id != node_id),
            links=tuple(link for link in self.links if node_id not in (link.source, link.target)),
        )

    def alone(self, node_id: str) -> PoolView:
        """Return the pool of that node only; its links still tell what its line carries."""
        return PoolView(nodes=(self.node(node_id),), links=tuple(link for link in self.links if node_id in (link.source, link.target)))

    def with_twins(self, node_id: str, count: int) -> PoolView:
        """Return the pool with `count` more nodes like that one, each on a machine of its own, with links like its links."""
        pool = self
        for _ in range(count):
            pool = pool._with_twin(self.node(node_id))
        return pool

    def _with_twin(self, node: NodeProfile) -> PoolView:
        name = self._free_name(node.node_id)
        own = [link for link in self.links if node.node_id in (link.source, link.target)]
        links = [_renamed(link, node.node_id, name) for link in own]
        if own:
            rate = min(self.up_bytes_per_s(node.node_id) or math.inf, self.down_bytes_per_s(node.node_id) or math.inf)
            latency = statistics.median(link.latency_s for link in own)
            ends = ((node.node_id, name), (name, node.node_id))
            links += [LinkProfile(source=a, target=b, latency_s=latency, bytes_per_s=rate) for a, b in ends]
        twin = dataclasses.replace(node, node_id=name, host="", host_cores=0)
        return PoolView(nodes=(*self.nodes, twin), links=(*self.links, *links))

    def _free_name(self, name: str) -> str:
        taken = {node.node_id for node in self.nodes}
        number = 2
        while f"{name}-{number}" in taken:
            number += 1
        return f"{name}-{number}"

    def _with_line(self, changed: NodeProfile) -> PoolView:
        nodes = tuple(changed if node.node_id == changed.node_id else node for node in self.nodes)
        return dataclasses.replace(self, nodes=nodes)

    def _with_rates(self, applies: Callable[[LinkProfile], bool], factor: float) -> PoolView:
        changed = (dataclasses.replace(link, bytes_per_s=link.bytes_per_s * factor) if applies(link) else link for link in self.links)
        return dataclasses.replace(self, links=tuple(changed))

    # ------------------------------------------------------------ kinds of nodes

    def kinds(self) -> tuple[NodeProfile, ...]:
        """Return one node of every kind, those of the commonest kind first, then the fastest."""
        members: dict[tuple[object, ...], list[NodeProfile]] = {}
        for node in sorted(self.nodes, key=lambda node: node.node_id):
            members.setdefault(self._kind(node), []).append(node)
        groups = sorted(members.values(), key=lambda group: (-len(group), -group[0].flop_per_s, group[0].node_id))
        return tuple(group[0] for group in groups)

    def _kind(self, node: NodeProfile) -> tuple[object, ...]:
        sizes = (node.memory_bytes, node.flop_per_s, self.up_bytes_per_s(node.node_id))
        return (node.device, *(round(math.log(size) / math.log(LIKENESS)) if size else None for size in sizes))


def _renamed(link: LinkProfile, old: str, new: str) -> LinkProfile:
    if link.source == old:
        return dataclasses.replace(link, source=new)
    return dataclasses.replace(link, target=new)
