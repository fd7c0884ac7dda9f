"""Segments and their rings: the cuts of all clusters together slice the averaged tensors; each slice has one owner per cluster."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from roost.planning.network import Network
from roost.planning.stages import ClusterCut
from roost.types import ModelProfile, SegmentPlan, TensorRecord

EXHAUSTIVE_RING = 7
"""Rings up to this size are put in the best order by trying all; larger ones by always going on to the nearest."""


def make_segments(profile: ModelProfile, clusters: Sequence[ClusterCut], network: Network) -> tuple[SegmentPlan, ...]:
    """Return the segments in the order of the graph; together they hold every averaged tensor exactly once.

    A slice without averaged tensors makes no segment; one with several dtypes makes one segment per dtype, so that each
    can be flattened.
    """
    cuts = sorted({cut for cluster in clusters for cut in cluster.cuts})
    segments: list[SegmentPlan] = []
    for first, last in itertools.pairwise(cuts):
        groups: dict[str, list[TensorRecord]] = {}
        for unit in profile.units[first:last]:
            for tensor in unit.tensors:
                if tensor.averaged:
                    groups.setdefault(tensor.dtype, []).append(tensor)
        owners = [_owner(cluster, first) for cluster in clusters]
        for tensors in groups.values():
            segments.append(
                SegmentPlan(
                    index=len(segments),
                    tensors=tuple(tensor.name for tensor in tensors),
                    nbytes=sum(tensor.nbytes for tensor in tensors),
                    members=ring_order(owners, network),
                )
            )
    return tuple(segments)


def _owner(cluster: ClusterCut, unit: int) -> str:
    """Return the node of `cluster` that holds `unit`."""
    for node, last in zip(cluster.nodes, cluster.cuts[1:], strict=True):
        if unit < last:
            return node.node_id
    raise IndexError(f"unit {unit} is not in {cluster.cuts}")


def ring_order(owners: Sequence[str], network: Network) -> tuple[str, ...]:
    """Return the owners so that the slowest link from one to the next is as fast as can be; the first stays first."""
    if network.uniform or len(owners) < 3:
        return tuple(owners)
    if len(owners) <= EXHAUSTIVE_RING:
        orders = ((owners[0], *rest) for rest in itertools.permutations(owners[1:]))
        return max(orders, key=lambda order: _ring_speed(order, network))
    places = np.asarray([network.places[owner] for owner in owners], dtype=np.intp)
    rates = network.rate[places][:, places]
    np.fill_diagonal(rates, -1.0)
    rates[:, 0] = -1.0
    ring = [0]
    while len(ring) < len(owners):
        nearest = int(np.argmax(rates[ring[-1]]))
        rates[:, nearest] = -1.0
        ring.append(nearest)
    return tuple(owners[place] for place in ring)


def _ring_speed(order: Sequence[str], network: Network) -> tuple[float, float]:
    """Return what makes a ring good: the bytes per second of its slowest link, then little latency all the way round."""
    hops = list(zip(order, [*order[1:], order[0]], strict=True))
    return min(network.bytes_per_s(*hop) for hop in hops), -sum(network.latency_s(*hop) for hop in hops)
