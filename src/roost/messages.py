"""Every message of the wire protocol. Standard library only.

A message is a frozen dataclass that is sent as JSON (codec.py), with tensors beside it as raw buffers. Each message says
which roles may send it; the transport refuses it from anybody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from roost.config import JobConfig, TensorCodec
from roost.types import (
    CheckpointEvent,
    EpochResult,
    EvaluationResult,
    Lease,
    LinkProfile,
    MicroBatch,
    ModelProfile,
    NodeProfile,
    Peer,
    Plan,
    ReplayedLease,
    Role,
    StageMetrics,
    TensorSpec,
)

PROTOCOL_VERSION = 1

_NODE = frozenset({Role.NODE})
_REQUESTER = frozenset({Role.REQUESTER})
_COORDINATOR = frozenset({Role.COORDINATOR})
TENSORS = 1 << 62
"""Tensors travel beside the message: only the receiver's own limit counts."""
MAX_PING_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages."""

    senders: ClassVar[frozenset[Role]] = frozenset(Role)
    """Roles it is taken from."""
    max_buffer_bytes: ClassVar[int] = 0
    """Bytes of all buffers beside it; most messages have none."""


# ---------------------------------------------------------------- replies


@dataclass(frozen=True, kw_only=True)
class Done(Message):
    """The call was carried out."""


@dataclass(frozen=True, kw_only=True)
class Failed(Message):
    """The call failed; the caller raises the error again."""

    code: str
    message: str
    hint: str


# ---------------------------------------------------------------- node or requester -> coordinator


@dataclass(frozen=True, kw_only=True)
class RegisterNode(Message):
    """A node is ready to take part. Answered with Registered."""

    senders = _NODE
    protocol_version: int
    roost_version: str
    torch_version: str
    profile: NodeProfile
    paused: bool = False
    """Its owner has paused it: it takes no stage until a heartbeat says otherwise."""
    job_id: str = ""
    """The job whose stage it holds; empty if it holds none."""
    cluster: int = -1
    """The cluster number of that stage."""
    generation: int = 0
    """Of the plan that it knows."""
    granted: int = 0
    """The number of its last lease request that was given leases; 0 if there was none, or it has no first stage."""
    reported: int = 0
    """Leases of its cluster that it has reported done, and the coordinator has taken note of."""


@dataclass(frozen=True, kw_only=True)
class Registered(Message):
    """How often to send heartbeats."""

    senders = _COORDINATOR
    heartbeat_s: float
    keep: bool = False
    """The stage that the node holds is still its own; otherwise it drops it."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Message):
    """A node lives; `metrics` while it runs a stage. Answered with Done, or Failed if it must register again."""

    senders = _NODE
    job_id: str
    metrics: StageMetrics | None
    paused: bool = False
    """Its owner has paused it: it keeps its stage and computes nothing."""


@dataclass(frozen=True, kw_only=True)
class LeaseRequest(Message):
    """The first stage of a cluster wants up to `want` more leases. Answered with LeaseGrant."""

    senders = _NODE
    job_id: str
    cluster: int
    """The cluster's number, as in PrepareStage."""
    want: int
    number: int = 0
    """Counts the requests of this cluster: one that is repeated, as its answer was lost, is given the same leases again."""
    granted: int = 0
    """The last one that was given leases, 0 if none was: a coordinator that does not know of it has lost some of its state."""
    reported: int = 0
    """Leases reported done of which the coordinator has taken note."""


@dataclass(frozen=True, kw_only=True)
class LeaseGrant(Message):
    """The leases; `drained` means there is nothing more until the coordinator sends ContinueJob."""

    senders = _COORDINATOR
    leases: tuple[Lease, ...]
    drained: bool


@dataclass(frozen=True, kw_only=True)
class LeaseDone(Message):
    """Every stage of the cluster has applied these leases. Answered with Done; repeated until it is."""

    senders = _NODE
    job_id: str
    cluster: int
    lease_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EvaluationDone(Message):
    """The last stage of a cluster has evaluated a micro-batch of a validation lease. Answered with Done; repeated until it is."""

    senders = _NODE
    job_id: str
    cluster: int
    result: EvaluationResult
    number: int = 0
    """Of the micro-batch: one that is reported again counts once."""


@dataclass(frozen=True, kw_only=True)
class StageFailed(Message):
    """A node cannot go on with its stage. Answered with Done; what becomes of the stage follows."""

    senders = _NODE
    job_id: str
    code: str
    message: str
    hint: str
    cluster: int = 0
    peer: str = ""
    """Whom it could not reach; empty if that is not the reason."""


@dataclass(frozen=True, kw_only=True)
class StageSaved(Message):
    """A node has uploaded its part of a checkpoint in the background, or could not. Answered with Done."""

    senders = _NODE
    job_id: str
    checkpoint: str
    attempt: int
    failed: Failed | None = None
    """Why it could not."""


@dataclass(frozen=True, kw_only=True)
class PeerSuspected(Message):
    """A node's stream to another node of its job broke, and it goes on without it for now. Answered with Done."""

    senders = _NODE
    job_id: str
    peer: str


@dataclass(frozen=True, kw_only=True)
class LeaveRequest(Message):
    """The owner wants the node back. Answered with Done once another has its stage, or it has none."""

    senders = _NODE


@dataclass(frozen=True, kw_only=True)
class SubmitJob(Message):
    """The requester asks for a job. Answered with JobAccepted or Failed."""

    senders = _REQUESTER
    protocol_version: int
    torch_version: str
    config: JobConfig
    profile: ModelProfile
    requester: Peer
    wait_nodes: int
    """Plan once so many nodes have joined."""
    wait_s: float
    """Deadline for them to join."""
    resume: bool
    """True: stages load optimizer state from the requester too."""


@dataclass(frozen=True, kw_only=True)
class JobAccepted(Message):
    """The plan that will be carried out, and the nodes it is for."""

    senders = _COORDINATOR
    plan: Plan
    nodes: tuple[NodeProfile, ...]


@dataclass(frozen=True, kw_only=True)
class PlanRequest(Message):
    """The requester asks what would be planned for a job; nothing is started. Answered with PoolPlan or Failed."""

    senders = _REQUESTER
    protocol_version: int
    torch_version: str
    """Empty if the requester does not train: then the nodes' versions are not compared with it."""
    config: JobConfig
    profile: ModelProfile
    wait_nodes: int
    """Measure and plan once so many nodes have joined."""
    wait_s: float
    """Deadline for them to join."""


@dataclass(frozen=True, kw_only=True)
class PoolPlan(Message):
    """The nodes that are free, the links between them as measured now, and the plan, or why there is none."""

    senders = _COORDINATOR
    nodes: tuple[NodeProfile, ...]
    links: tuple[LinkProfile, ...]
    plan: Plan | None
    refusal: Failed | None
    """Set if there is no plan."""


@dataclass(frozen=True, kw_only=True)
class RequesterHeartbeat(Message):
    """The requester lives. Answered with Done."""

    senders = _REQUESTER
    job_id: str


@dataclass(frozen=True, kw_only=True)
class CancelJob(Message):
    """Stop leasing, average, save a checkpoint, end."""

    senders = _REQUESTER
    job_id: str


@dataclass(frozen=True, kw_only=True)
class RenewCertificate(Message):
    """A peer asks for a new certificate for the key it enrolled with, before the old one runs out. Answered with CertificateReply."""

    senders = frozenset({Role.REQUESTER, Role.NODE})
    csr_pem: str


@dataclass(frozen=True, kw_only=True)
class CertificateReply(Message):
    """The certificate, as PEM."""

    senders = _COORDINATOR
    certificate_pem: str


@dataclass(frozen=True, kw_only=True)
class StatusRequest(Message):
    """Answered with Status."""

    senders = frozenset({Role.REQUESTER, Role.NODE})


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """A line of `roost status`."""

    profile: NodeProfile
    state: str
    """joined, active, lost or left; paused if its owner has paused it."""
    last_heard_s: float
    """Seconds since its last heartbeat."""
    cluster: int
    """-1 if it runs no stage."""
    stage: int


@dataclass(frozen=True, kw_only=True)
class Status(Message):
    """What the coordinator knows."""

    senders = _COORDINATOR
    nodes: tuple[NodeStatus, ...]
    job_id: str
    """Empty if no job runs."""
    job_state: str
    plan: Plan | None
    metrics: tuple[StageMetrics, ...]
    epochs_done: float


# ---------------------------------------------------------------- coordinator -> node


@dataclass(frozen=True, kw_only=True)
class ProbeLinks(Message):
    """Measure the way to each of these peers. Answered with LinkReport."""

    senders = _COORDINATOR
    targets: tuple[Peer, ...]
    payload_bytes: int


@dataclass(frozen=True, kw_only=True)
class LinkReport(Message):
    """What was measured."""

    senders = _NODE
    links: tuple[LinkProfile, ...]


@dataclass(frozen=True, kw_only=True)
class StateSource:
    """A node that holds tensors, and the optimizer state of those that are trained."""

    node_id: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PrepareStage(Message):
    """Fetch the graph and the weights from the requester and build your stage. Answered with Done or Failed."""

    senders = _COORDINATOR
    config: JobConfig
    plan: Plan
    cluster: int
    stage: int
    peers: tuple[Peer, ...]
    """Every node of the plan."""
    requester: Peer
    resume: bool
    number: int = 0
    """Of the cluster: never used again in this job, so that nothing of a cluster that was lost is taken for one that replaces it."""
    generation: int = 0
    """Counts the plans of the job."""
    order: int = 0
    """Synchronisation points so far."""
    sources: tuple[StateSource, ...] = ()
    """Who has the stage's tensors as they are now; what no source has comes from the requester."""
    checkpoint: str = ""
    """The requester's checkpoint with what no source has; empty: as the job was submitted."""


@dataclass(frozen=True, kw_only=True)
class HoldStage(Message):
    """Stop training and averaging, but keep the stage's state for whoever fetches it. Answered with StageReport."""

    senders = _COORDINATOR
    job_id: str
    borrowers: tuple[str, ...] = ()
    """The nodes that may fetch it."""


@dataclass(frozen=True, kw_only=True)
class FollowStage(Message):
    """Keep a copy of another node's stage, to take it over. Answered with Done once there is one; it is renewed until EndJob."""

    senders = _COORDINATOR
    job_id: str
    source: Peer
    tensors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ChangePlan(Message):
    """Your stage stays as it is, other clusters change: average in the rings of this plan from now on. Answered with Done."""

    senders = _COORDINATOR
    job_id: str
    plan: Plan
    cluster: int
    """Index of the node's cluster in the plan."""
    peers: tuple[Peer, ...]
    generation: int
    order: int
    borrowers: tuple[str, ...] = ()
    """The nodes that may fetch the stage's state."""


@dataclass(frozen=True, kw_only=True)
class ContinueJob(Message):
    """Start, or go on after a synchronisation point or a change: average in the background, and ask for leases."""

    senders = _COORDINATOR
    job_id: str


@dataclass(frozen=True, kw_only=True)
class AverageNow(Message):
    """All clusters are drained: take part in the exact round of this order. Answered with StageReport when it is applied."""

    senders = _COORDINATOR
    job_id: str
    order: int
    """Counts the synchronisation points of the job from 1: every ring knows the round's number from it."""


@dataclass(frozen=True, kw_only=True)
class SaveStage(Message):
    """Upload your tensors (and optimizer state) to the requester. Answered with Done once training may go on."""

    senders = _COORDINATOR
    job_id: str
    checkpoint: str
    segments: tuple[int, ...]
    """The segments whose tensors this node uploads."""
    attempt: int = 0
    """Which attempt to write the checkpoint: after a node was lost in the middle of one, all upload again to the next."""
    background: bool = False
    """Copy them now, and upload the copies while training goes on; StageSaved says when that is done."""
    rest: bool = True
    """Also upload what is in no segment."""


@dataclass(frozen=True, kw_only=True)
class EndJob(Message):
    """Drop the stage and become free. Answered with StageReport, or Done if the node runs no stage of the job."""

    senders = _COORDINATOR
    job_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class StageReport(Message):
    """The counters of a stage, now."""

    senders = _NODE
    metrics: StageMetrics


# ---------------------------------------------------------------- coordinator -> requester


class JobState(StrEnum):
    """Where a job is (protocol/job_lifecycle.py has the transitions)."""

    SUBMITTED = "submitted"
    PROBING = "probing"
    PREPARING = "preparing"
    TRAINING = "training"
    AVERAGING = "averaging"
    EVALUATING = "evaluating"
    SAVING = "saving"
    REPAIRING = "repairing"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class JobUpdate(Message):
    """Progress, about once a second and at every change."""

    senders = _COORDINATOR
    job_id: str
    state: JobState
    epochs_done: float
    elapsed_s: float
    """Since training started."""
    metrics: tuple[StageMetrics, ...]
    history: tuple[EpochResult, ...]
    cancelled: bool
    error: Failed | None
    repairs: int = 0
    """Times that the plan was changed because a node was lost."""
    paused: tuple[str, ...] = ()
    """Nodes of the job that their owners have paused: the job waits for them."""
    checkpoints: tuple[CheckpointEvent, ...] = ()
    """The last things that have become of checkpoints, in order."""


@dataclass(frozen=True, kw_only=True)
class JobEnded(Message):
    """Answers the heartbeat of a requester whose job ended without its hearing of it, in the time of a coordinator that is no more."""

    senders = _COORDINATOR
    state: JobState
    history: tuple[EpochResult, ...]
    error: Failed | None


@dataclass(frozen=True, kw_only=True)
class FinishCheckpoint(Message):
    """All parts of a checkpoint are uploaded: assemble it. Answered with CheckpointWritten."""

    senders = _COORDINATOR
    job_id: str
    checkpoint: str
    epoch: int
    updates: int
    """Schedule steps taken so far."""
    plan: Plan
    attempt: int = 0
    """The attempt whose parts it is made of."""


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(Message):
    """Where it is on the requester's machine."""

    senders = _REQUESTER
    path: str


@dataclass(frozen=True, kw_only=True)
class PlanChanged(Message):
    """The plan of the running job is another from now on: let its nodes fetch. Answered with Done."""

    senders = _COORDINATOR
    job_id: str
    plan: Plan
    nodes: tuple[NodeProfile, ...]
    generation: int
    reason: str
    """A sentence for people."""
    replayed: tuple[ReplayedLease, ...]
    """What has to be trained again because of the change."""
    checkpoint: str
    """The checkpoint that the job goes back to; empty if it does not."""


# ---------------------------------------------------------------- node -> requester


@dataclass(frozen=True, kw_only=True)
class FetchGraph(Message):
    """Answered with GraphReply and one buffer: the graph's JSON."""

    senders = _NODE
    job_id: str


@dataclass(frozen=True, kw_only=True)
class GraphReply(Message):
    """The graph is the only buffer."""

    senders = _REQUESTER
    max_buffer_bytes = TENSORS


@dataclass(frozen=True, kw_only=True)
class FetchTensors(Message):
    """Answered with TensorsReply: the named parameters and buffers."""

    senders = _NODE
    job_id: str
    names: tuple[str, ...]
    checkpoint: str = ""
    """As they are in this checkpoint; empty: as they were when the job was submitted."""


@dataclass(frozen=True, kw_only=True)
class FetchOptimizer(Message):
    """Answered with TensorsReply: saved optimizer state of the named parameters, as 'PARAMETER/KEY' tensors."""

    senders = _NODE
    job_id: str
    names: tuple[str, ...]
    checkpoint: str = ""
    """As in FetchTensors."""


@dataclass(frozen=True, kw_only=True)
class FetchSamples(Message):
    """Answered with TensorsReply: the graph's inputs for a lease's samples, in the graph's order of inputs."""

    senders = _NODE
    job_id: str
    lease: Lease


@dataclass(frozen=True, kw_only=True)
class TensorsReply(Message):
    """One buffer per spec."""

    senders = frozenset({Role.REQUESTER, Role.NODE})
    max_buffer_bytes = TENSORS
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, kw_only=True)
class TensorPiece:
    """Consecutive bytes of a tensor that is too large for one message; they are one buffer."""

    spec: TensorSpec
    """The whole tensor, in row-major order."""
    optimizer: bool
    """True: it is optimizer state."""
    start: int
    """The place of the first of these bytes in the tensor. Pieces of a tensor come in order; one that starts at 0 begins it anew."""


@dataclass(frozen=True, kw_only=True)
class UploadState(Message):
    """A part of a checkpoint: model tensors by their names, optimizer state as 'PARAMETER/KEY'. Answered with Done."""

    senders = _NODE
    max_buffer_bytes = TENSORS
    job_id: str
    checkpoint: str
    segment: int
    tensors: tuple[TensorSpec, ...]
    optimizer: tuple[TensorSpec, ...]
    """Their buffers follow those of `tensors`."""
    attempt: int = 0
    """As in SaveStage: parts of different attempts never mix."""
    part: int = 0
    """Counts the messages of the segment in this attempt; a part that comes again replaces the first."""
    pieces: tuple[TensorPiece, ...] = ()
    """Their buffers follow those of `optimizer`."""


# ---------------------------------------------------------------- node <-> node


@dataclass(frozen=True, kw_only=True)
class FetchState(Message):
    """The tensors of a stage as they are now. Answered with StateReply, by the node that holds them."""

    senders = _NODE
    job_id: str
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StateReply(Message):
    """Parameters and buffers by their names; optimizer state as 'PARAMETER/KEY', its buffers after theirs."""

    senders = _NODE
    max_buffer_bytes = TENSORS
    tensors: tuple[TensorSpec, ...]
    optimizer: tuple[TensorSpec, ...]


@dataclass(frozen=True, kw_only=True)
class Activation(Message):
    """Values of a micro-batch for a later stage; `rng` says that the first buffer is the generator's state."""

    senders = _NODE
    max_buffer_bytes = TENSORS
    job_id: str
    source_stage: int
    cluster: int = 0
    """The cluster's number, as in PrepareStage."""
    micro_batch: MicroBatch
    values: tuple[TensorSpec, ...]
    """Named by the graph's value numbers."""
    rng: bool
    codecs: tuple[TensorCodec, ...] = ()
    """How the buffer of each value is encoded; empty: none is."""


@dataclass(frozen=True, kw_only=True)
class Gradient(Message):
    """Gradients for values an earlier stage sent; sent (perhaps empty) to every stage that sent an Activation."""

    senders = _NODE
    max_buffer_bytes = TENSORS
    job_id: str
    source_stage: int
    cluster: int = 0
    """The cluster's number, as in PrepareStage."""
    micro_batch: int
    values: tuple[TensorSpec, ...]
    evaluation: bool
    """True: nothing but word from the last stage to the first that an evaluation micro-batch is through."""
    codecs: tuple[TensorCodec, ...] = ()
    """As in Activation."""


@dataclass(frozen=True, kw_only=True)
class GradientNorm(Message):
    """The squared norm of a stage's gradient of a batch, to every other stage of the cluster: they clip by the norm of all."""

    senders = _NODE
    job_id: str
    source_stage: int
    cluster: int = 0
    """The cluster's number, as in PrepareStage."""
    batch: int
    square: float


@dataclass(frozen=True, kw_only=True)
class OpenRound(Message):
    """A ring member has started a round of its ring; the others join at their next update."""

    senders = _NODE
    job_id: str
    segment: int
    generation: int = 0
    """Of the plan whose rings these are."""
    round: int
    base: int = -1
    """The round whose mean the members' values are differences to (0: the initial weights); -1 for the values themselves."""
    codec: TensorCodec = TensorCodec.NONE
    """How chunks of the round are encoded."""


@dataclass(frozen=True, kw_only=True)
class RingChunk(Message):
    """A piece of one step of a ring: part of a chunk of the flattened segment, with one buffer."""

    senders = _NODE
    max_buffer_bytes = TENSORS
    job_id: str
    segment: int
    generation: int = 0
    """Of the plan whose rings these are."""
    round: int
    step: int
    """0 .. 2(C-1)-1: reduce-scatter steps first, then all-gather steps; in a guarded round values first, then means."""
    chunk: int
    weight: float
    """Reduce-scatter: samples that went into the sum so far. All-gather: their total. In a guarded round the sender's own samples."""
    dtype: str
    """float32 or float64: what the members sum in."""
    piece: int = 0
    """Which piece of the chunk this is: chunks travel in pieces, so that the next member need not wait for the whole."""
    base: int = -1
    """As in OpenRound."""
    codec: TensorCodec = TensorCodec.NONE
    """How the buffer is encoded."""
    norms: tuple[float, ...] = ()
    """With the values of a guarded round: how far the sender's are from the last mean, in this piece of every chunk."""


@dataclass(frozen=True, kw_only=True)
class Ping(Message):
    """Answered with Done; carries one buffer when bandwidth is measured."""

    senders = frozenset({Role.NODE, Role.REQUESTER})
    max_buffer_bytes = MAX_PING_BYTES
