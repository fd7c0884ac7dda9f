"""Nodes that share one machine: together they cannot compute more than its cores do (docs/planning.md, shared machines)."""

from __future__ import annotations

from collections.abc import Sequence

from roost.planning.stages import ClusterCut, StageCutter
from roost.planning.tables import messages_of
from roost.types import NodeProfile

USABLE = 0.9
"""Fraction of a machine's cores that its nodes get: the rest goes to the coordinator, the requester and the system."""
MESSAGES_OF_CPU = 15
"""CPU per micro-batch and stage beside computing, in small messages: measured over whole processes; most of it overlaps with
computation, so it costs time only where cores are short."""


def shares_of_cores(cutter: StageCutter, clusters: Sequence[ClusterCut]) -> list[float]:
    """Return for every cluster the fraction of its predicted rate that the cores of its nodes' machines allow: at most 1.

    Nodes without a host, or whose cores are not known, are taken to have a machine of their own.
    """
    demand: dict[str, float] = {}
    cores: dict[str, int] = {}
    for cut in clusters:
        for k, node in enumerate(cut.nodes):
            if node.host and node.host_cores:
                cores[node.host] = node.host_cores
                demand[node.host] = demand.get(node.host, 0.0) + _cpu_s(cutter, cut, k, node) / cut.period_s
    allowed = {host: min(1.0, USABLE * cores[host] / needed) if needed else 1.0 for host, needed in demand.items()}
    return [min(allowed.get(node.host, 1.0) for node in cut.nodes) for cut in clusters]


def _cpu_s(cutter: StageCutter, cut: ClusterCut, k: int, node: NodeProfile) -> float:
    """Return the CPU seconds per micro-batch of a stage: a paced node sleeps for the rest of its compute time."""
    first, last = cut.cuts[k], cut.cuts[k + 1]
    sent, received, _ = cutter.maker.line_bytes(first, last, 1)
    wire = (sent + received) * node.wire_s_per_byte
    computing = cut.compute_s[k] - float(messages_of(first, last, cutter.costs.units)) * node.message_s - wire
    return computing * node.relative_speed * node.threads + MESSAGES_OF_CPU * node.message_s + wire
