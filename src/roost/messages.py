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
    EpochResult,
    EvaluationResult,
    Lease,
    LinkProfile,
    MicroBatch,
    ModelProfile,
    NodeProfile,
    Peer,
    Plan,
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


@dataclass(frozen=True, kw_only=True)
class Registered(Message):
    """How often to send heartbeats."""

    senders = _COORDINATOR
    heartbeat_s: float


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
    want: int


@dataclass(frozen=True, kw_only=True)
class LeaseGrant(Message):
    """The leases; `drained` means there is nothing more until the coordinator sends ContinueJob."""

    senders = _COORDINATOR
    leases: tuple[Lease, ...]
    drained: bool


@dataclass(frozen=True, kw_only=True)
class LeaseDone(Message):
    """Every stage of the cluster has applied these leases."""

    senders = _NODE
    job_id: str
    cluster: int
    lease_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EvaluationDone(Message):
    """The last stage of a cluster has evaluated a whole validation lease."""

    senders = _NODE
    job_id: str
    cluster: int
    result: EvaluationResult


@dataclass(frozen=True, kw_only=True)
class StageFailed(Message):
    """A node cannot go on with its stage; the job fails."""

    senders = _NODE
    job_id: str
    code: str
    message: str
    hint: str


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


@dataclass(frozen=True, kw_only=True)
class ContinueJob(Message):
    """Start, or go on after a synchronisation point: ask for leases."""

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
    """Upload your tensors (and optimizer state) to the requester. Answered with Done."""

    senders = _COORDINATOR
    job_id: str
    checkpoint: str
    segments: tuple[int, ...]
    """The segments whose tensors this node uploads."""


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
    paused: tuple[str, ...] = ()
    """Nodes of the job that their owners have paused: the job waits for them."""


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


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(Message):
    """Where it is on the requester's machine."""

    senders = _REQUESTER
    path: str


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


@dataclass(frozen=True, kw_only=True)
class FetchOptimizer(Message):
    """Answered with TensorsReply: saved optimizer state of the named parameters, as 'PARAMETER/KEY' tensors."""

    senders = _NODE
    job_id: str
    names: tuple[str, ...]


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


# ---------------------------------------------------------------- node <-> node


@dataclass(frozen=True, kw_only=True)
class Activation(Message):
    """Values of a micro-batch for a later stage; `rng` says that the first buffer is the generator's state."""

    senders = _NODE
    max_buffer_bytes = TENSORS
    job_id: str
    source_stage: int
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
    batch: int
    square: float


@dataclass(frozen=True, kw_only=True)
class OpenRound(Message):
    """A ring member has started a round of its ring; the others join at their next update."""

    senders = _NODE
    job_id: str
    segment: int
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
    round: int
    step: int
    """0 .. 2(C-1)-1: reduce-scatter steps first, then all-gather steps."""
    chunk: int
    weight: float
    """Reduce-scatter: samples that went into the sum so far. All-gather: their total."""
    dtype: str
    """float32 or float64: what the members sum in."""
    piece: int = 0
    """Which piece of the chunk this is: chunks travel in pieces, so that the next member need not wait for the whole."""
    base: int = -1
    """As in OpenRound."""
    codec: TensorCodec = TensorCodec.NONE
    """How the buffer is encoded."""


@dataclass(frozen=True, kw_only=True)
class Ping(Message):
    """Answered with Done; carries one buffer when bandwidth is measured."""

    senders = frozenset({Role.NODE, Role.REQUESTER})
    max_buffer_bytes = MAX_PING_BYTES
