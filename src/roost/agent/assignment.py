"""What a node was asked to run, with the questions its parts ask of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roost.config import JobConfig
from roost.errors import MalformedMessageError
from roost.messages import ChangePlan, PrepareStage, StateSource
from roost.types import ClusterPlan, Peer, Plan, SegmentPlan, StagePlan


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One stage of one job on this node."""

    node_id: str
    config: JobConfig
    plan: Plan
    cluster: ClusterPlan
    stage: StagePlan
    peers: dict[str, Peer]
    """Every node of the plan by its id."""
    requester: Peer
    coordinator: Peer
    resume: bool
    number: int = 0
    """Of the cluster, never used again in the job."""
    generation: int = 0
    """Of the plan."""
    order: int = 0
    """Synchronisation points of the job before this plan."""
    sources: tuple[StateSource, ...] = ()
    """Who has the stage's tensors as they are now."""
    checkpoint: str = ""
    """The requester's checkpoint with those that no source has."""

    @property
    def job_id(self) -> str:
        return self.config.job_id

    @property
    def is_first(self) -> bool:
        return self.stage.index == 0

    @property
    def is_last(self) -> bool:
        return self.stage.index == len(self.cluster.stages) - 1

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Graph positions where this cluster is cut, both ends included."""
        return (self.cluster.stages[0].start, *(stage.stop for stage in self.cluster.stages))

    @property
    def rings(self) -> tuple[SegmentPlan, ...]:
        """The rings this node belongs to."""
        return tuple(ring for ring in self.plan.rings if self.node_id in ring.members)

    @property
    def segments(self) -> tuple[SegmentPlan, ...]:
        """The segments this node owns, whether or not there is a ring for them."""
        return tuple(segment for segment in self.plan.segments if self.node_id in segment.members)

    def peer_of_stage(self, index: int) -> Peer:
        """Return the peer that runs stage `index` of this cluster."""
        return self.peers[self.cluster.stages[index].node_id]


def assignment_from(message: PrepareStage, *, node_id: str, coordinator: Peer) -> Assignment:
    """Return the assignment in `message`. Raises MalformedMessageError if the plan does not place this node there."""
    peers = {peer.peer_id: peer for peer in message.peers}
    clusters = {cluster.index: cluster for cluster in message.plan.clusters}
    cluster = clusters.get(message.cluster)
    if cluster is None or not 0 <= message.stage < len(cluster.stages) or cluster.stages[message.stage].node_id != node_id:
        raise MalformedMessageError(f"the plan has no stage {message.stage} of cluster {message.cluster} for node {node_id}")
    missing = [stage.node_id for stage in message.plan.stages if stage.node_id not in peers]
    if missing:
        raise MalformedMessageError(f"the plan names node {missing[0]}, whose address was not sent")
    return Assignment(
        node_id=node_id,
        config=message.config,
        plan=message.plan,
        cluster=cluster,
        stage=cluster.stages[message.stage],
        peers=peers,
        requester=message.requester,
        coordinator=coordinator,
        resume=message.resume,
        number=message.number,
        generation=message.generation,
        order=message.order,
        sources=message.sources,
        checkpoint=message.checkpoint,
    )


def changed_assignment(assignment: Assignment, message: ChangePlan) -> Assignment:
    """Return the same stage in another plan. Raises MalformedMessageError if the plan does not have it."""
    clusters = {cluster.index: cluster for cluster in message.plan.clusters}
    cluster = clusters.get(message.cluster)
    stages = cluster.stages if cluster is not None else ()
    if cluster is None or [stage.node_id for stage in stages] != [stage.node_id for stage in assignment.cluster.stages]:
        raise MalformedMessageError(f"the plan does not leave cluster {assignment.cluster.index} of node {assignment.node_id} as it is")
    peers = {peer.peer_id: peer for peer in message.peers}
    missing = [stage.node_id for stage in message.plan.stages if stage.node_id not in peers]
    if missing:
        raise MalformedMessageError(f"the plan names node {missing[0]}, whose address was not sent")
    return replace(
        assignment,
        plan=message.plan,
        cluster=cluster,
        stage=stages[assignment.stage.index],
        peers=peers,
        generation=message.generation,
        order=message.order,
    )
