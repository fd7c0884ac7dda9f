"""The records that flow through Roost: profiles in, a plan out. Standard library only.

Units: bytes, seconds, samples, and floating-point operations (FLOP). All records are frozen and checked on construction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from roost.errors import InvalidConfigError

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Every dtype that may cross the wire, with its bytes per element."""

SAFETENSORS_DTYPES: dict[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""What a safetensors file calls each of these dtypes."""

MAX_SECONDS, MAX_BYTES = 1e9, 2**60
MIN_FLOP_PER_S, MAX_FLOP_PER_S = 1.0, 1e24
MIN_RATE, MAX_RATE = 1e-9, 1e18
"""Bytes per second."""
MIN_RELIABILITY = 1e-6
MAX_UNITS = 1024
"""What profiles may say: within these bounds no cost of a plan overflows, and its tables stay small."""
MAX_DIMENSIONS = 16
MAX_ELEMENTS = 2**40


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise InvalidConfigError(what)


def _check_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise InvalidConfigError for an unknown dtype, too many dimensions, a negative size, or more than MAX_ELEMENTS elements."""
    _require(len(shape) <= MAX_DIMENSIONS, f"tensor {name!r}: {len(shape)} dimensions, at most {MAX_DIMENSIONS}")
    _require(dtype in DTYPE_BYTES, f"tensor {name!r}: dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    elements = 1
    if any(size < 0 for size in shape):
        raise InvalidConfigError(f"tensor {name!r}: negative size in shape {shape}")
    for size in (0,) if 0 in shape else shape:
        # Stops at the first product that is too large: huge integers are never multiplied.
        if size > MAX_ELEMENTS or elements * size > MAX_ELEMENTS:
            raise InvalidConfigError(f"tensor {name!r}: shape {shape} is too large")
        elements *= size


def _finite(value: float) -> bool:
    return math.isfinite(value)


class Role(StrEnum):
    """What a certificate lets its holder be."""

    COORDINATOR = "coordinator"
    NODE = "node"
    REQUESTER = "requester"


class TensorKind(StrEnum):
    """What a named tensor of the model is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, dtype and shape of one tensor; describes a buffer that travels beside a message."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    """The dimensions from the outermost in memory to the innermost; empty for row-major order."""

    def __post_init__(self) -> None:
        _check_tensor(self.name, self.dtype, self.shape)
        known = not self.order or sorted(self.order) == list(range(len(self.shape)))
        _require(known, f"tensor {self.name!r}: {self.order} is not an order of {len(self.shape)} dimensions")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """A named tensor of the model (parameter or buffer), under the name the user's model gives it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: TensorKind
    trainable: bool
    """True for a parameter that the optimizer updates."""

    def __post_init__(self) -> None:
        _check_tensor(self.name, self.dtype, self.shape)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(name=self.name, dtype=self.dtype, shape=self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def averaged(self) -> bool:
        """True if clusters average it: trainable parameters and float buffers (batch-norm statistics)."""
        floating = self.dtype in ("float64", "float32", "float16", "bfloat16")
        return floating and (self.trainable or self.kind is TensorKind.BUFFER)


@dataclass(frozen=True, kw_only=True)
class UnitProfile:
    """A slice of the graph between two neighbouring legal cuts: the smallest piece a node can hold.

    Costs are for one micro-batch of `ModelProfile.micro_batch_size` samples.
    """

    start: int
    """First graph position of the slice."""
    stop: int
    """Graph position after the last one; slices are contiguous, and `stop` is a legal cut."""
    label: str
    """The module path a person would recognise, for example 'layers.0.attention'."""
    forward_s: float
    """Seconds of forward on the reference machine, one thread."""
    backward_s: float
    """Seconds of backward on the reference machine, one thread."""
    forward_flop: float
    """Floating-point operations of the forward (matmul, convolution, attention)."""
    tensors: tuple[TensorRecord, ...]
    """Parameters and buffers owned here: those that are used here first."""
    saved_bytes: int
    """Activation bytes kept from the forward for the backward."""
    crossing_bytes: int
    """Bytes of all values alive at `stop` (produced before it, used after it)."""
    update_s: float = 0.0
    """Seconds of the job's optimizer step on the reference machine, one thread; once per batch. 0: not measured."""

    def __post_init__(self) -> None:
        _require(0 <= self.start < self.stop, f"unit {self.label!r}: empty range {self.start}..{self.stop}")
        costs = (self.forward_s, self.backward_s, self.forward_flop, self.update_s)
        _require(all(_finite(cost) and cost >= 0 for cost in costs), f"unit {self.label!r}: costs must be finite and not negative")
        seconds = (self.forward_s, self.backward_s, self.update_s)
        _require(max(seconds) <= MAX_SECONDS, f"unit {self.label!r}: {max(seconds):g} s is not possible")
        sizes = (self.saved_bytes, self.crossing_bytes)
        _require(all(0 <= size <= MAX_BYTES for size in sizes), f"unit {self.label!r}: bytes out of range")

    @cached_property
    def tensor_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def trainable_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors if tensor.trainable)

    @cached_property
    def largest_bytes(self) -> int:
        """Bytes of the largest trainable tensor, 0 if there is none."""
        return max((tensor.nbytes for tensor in self.tensors if tensor.trainable), default=0)


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """What a model costs, unit by unit, measured for one micro-batch size on one reference machine."""

    name: str
    micro_batch_size: int
    reference_flop_per_s: float
    """Speed of the reference machine by the same probe that nodes run; times scale by the ratio of speeds."""
    units: tuple[UnitProfile, ...]
    input_bytes: int
    """Bytes of one micro-batch of inputs and labels, as the first stage receives it."""
    stage_s: float = 0.0
    """Seconds that a stage takes on the reference machine beside its units, per micro-batch: starting its forward and its backward."""
    stage_update_s: float = 0.0
    """The same for its optimizer step, per batch."""

    def __post_init__(self) -> None:
        _require(0 < len(self.units) <= MAX_UNITS, f"model {self.name!r} has {len(self.units)} units, not 1..{MAX_UNITS}")
        _require(0 <= self.input_bytes <= MAX_BYTES, f"model {self.name!r}: input bytes out of range")
        _require(self.micro_batch_size > 0, f"model {self.name!r}: micro-batch size {self.micro_batch_size}")
        possible = MIN_FLOP_PER_S <= self.reference_flop_per_s <= MAX_FLOP_PER_S
        _require(possible, f"the reference speed {self.reference_flop_per_s:g} FLOP/s is not possible")
        times = (self.stage_s, self.stage_update_s)
        _require(all(0 <= seconds <= MAX_SECONDS for seconds in times), f"the times of a stage must be in 0..{MAX_SECONDS:g} s")
        for before, after in zip(self.units, self.units[1:], strict=False):
            _require(before.stop == after.start, f"units {before.label!r} and {after.label!r} are not contiguous")
        names = [tensor.name for unit in self.units for tensor in unit.tensors]
        _require(len(names) == len(set(names)), f"model {self.name!r}: a tensor has two owners")


@dataclass(frozen=True, kw_only=True)
class NodeProfile:
    """What a node can do: measured by its own probe, or declared by its owner."""

    node_id: str
    address: str
    """host:port where its peers reach it."""
    memory_bytes: int
    """Memory it lends to a job: parameters, gradients, optimizer state, versions, activations."""
    flop_per_s: float
    """Probe speed (geometric mean of a timed matmul and a timed convolution)."""
    matmul_flop_per_s: float
    convolution_flop_per_s: float
    device: str
    """cpu, cuda or mps."""
    threads: int
    """CPU threads it computes with."""
    emulated: bool = False
    """True if memory or speed was declared instead of measured."""
    relative_speed: float = 1.0
    """Below 1 if a slower machine is emulated: the fraction of this machine's speed it computes at; the rest of the time it sleeps."""
    memory_bytes_per_s: float = 0.0
    """Bytes an optimizer step reads and writes per second; 0: not measured, and updates count as free."""
    message_s: float = 0.0
    """CPU seconds to send or receive one small message; 0: not measured, and messages count as free."""
    wire_s_per_byte: float = 0.0
    """CPU seconds to send or receive one byte; 0: not measured."""
    reliability: float = 1.0
    """Fraction of the time it is there, at least MIN_RELIABILITY: observed, or declared by its owner."""
    up_bytes_per_s: float = 0.0
    """What it can, or its owner lets it, send in all; 0: the best that any of its links was measured to carry."""
    down_bytes_per_s: float = 0.0
    """What it can, or its owner lets it, receive in all; 0: the best that any of its links was measured to carry."""
    bf16_flop_per_s: float = 0.0
    """The same probe where products and convolutions are in bfloat16; 0: its device cannot, and jobs with that precision leave it out."""
    host: str = ""
    """Nodes with the same name here share one machine's cores; empty: it has a machine of its own."""
    host_cores: int = 0
    """Cores of that machine; 0: unknown."""

    def __post_init__(self) -> None:
        _require(self.memory_bytes > 0, f"node {self.node_id}: memory must be positive")
        _require(self.memory_bytes <= MAX_BYTES, f"node {self.node_id}: memory must be at most {MAX_BYTES} bytes")
        speeds = (self.flop_per_s, self.bf16_flop_per_s or self.flop_per_s)
        possible = all(MIN_FLOP_PER_S <= speed <= MAX_FLOP_PER_S for speed in speeds)
        _require(possible, f"node {self.node_id}: speed {min(speeds):g} FLOP/s is not possible")
        _require(self.threads > 0, f"node {self.node_id}: threads must be positive")
        costs = (self.message_s, self.wire_s_per_byte)
        _require(all(0 <= cost <= MAX_SECONDS for cost in costs), f"node {self.node_id}: costs must be in 0..{MAX_SECONDS:g} s")
        rates = (self.memory_bytes_per_s, self.up_bytes_per_s, self.down_bytes_per_s)
        _require(all(rate == 0 or MIN_RATE <= rate <= MAX_RATE for rate in rates), f"node {self.node_id}: a rate is not possible: {rates}")
        _require(0 < self.relative_speed <= 1, f"node {self.node_id}: relative speed {self.relative_speed} must be in (0, 1]")
        in_range = MIN_RELIABILITY <= self.reliability <= 1
        _require(in_range, f"node {self.node_id}: reliability {self.reliability} must be in {MIN_RELIABILITY:g}..1")
        _require(self.host_cores >= 0, f"node {self.node_id}: cores must not be negative")


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """One direction of the network between two nodes."""

    source: str
    target: str
    latency_s: float
    """Half the measured round trip."""
    bytes_per_s: float

    def __post_init__(self) -> None:
        name = f"link {self.source}->{self.target}"
        _require(0 <= self.latency_s <= MAX_SECONDS, f"{name}: latency {self.latency_s:g} s must be in 0..{MAX_SECONDS:g}")
        possible = MIN_RATE <= self.bytes_per_s <= MAX_RATE
        _require(possible, f"{name}: bandwidth {self.bytes_per_s:g} bytes/s must be in {MIN_RATE:g}..{MAX_RATE:g}")


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage: which node runs which consecutive units, and what that needs."""

    cluster: int
    index: int
    """Position in the cluster, 0 first."""
    node_id: str
    first_unit: int
    last_unit: int
    """Half-open: units first_unit .. last_unit - 1."""
    start: int
    stop: int
    """Graph positions of those units, half-open."""
    max_in_flight: int
    """Micro-batches that may have gone forward here and not yet backward: bounds the staleness and the stash."""
    memory_needed_bytes: int
    memory_available_bytes: int
    compute_s: float
    """Predicted seconds of compute per micro-batch on that node."""
    send_s: float
    """Predicted seconds to send one micro-batch to the next stage (0 for the last)."""
    versions: int = 1
    """Weight versions it may hold at once, the current one included; versions - 1 bounds the staleness."""
    busy: float = 0.0
    """Predicted fraction of the time that it computes."""
    sent_bytes_per_s: float = 0.0
    """Predicted: values, gradients and averaging."""
    received_bytes_per_s: float = 0.0
    """Predicted: values, gradients, averaging, and at stage 0 the data."""
    recompute: bool = False
    """True: a micro-batch in flight keeps the values it came with; its forward runs again before its backward."""
    binding: str = ""
    """What keeps this node from doing more: 'compute', 'uplink', 'downlink', 'memory', 'round trip' or 'cores'; else another node binds."""


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """Nodes that together hold one replica of the model."""

    index: int
    stages: tuple[StagePlan, ...]
    share: float
    """Fraction of the data it is expected to consume; the shares of a plan add up to 1."""
    samples_per_s: float
    """Predicted."""
    bottleneck: str
    """What binds its rate, for people: 'compute of node-2' or 'link node-1 -> node-2'."""
    staleness: int = 0
    """Largest staleness at any of its stages, in updates."""


@dataclass(frozen=True, kw_only=True)
class SegmentPlan:
    """Tensors that are averaged together, and the ring of their owners (one per cluster)."""

    index: int
    tensors: tuple[str, ...]
    """Names, in the order of the graph."""
    nbytes: int
    members: tuple[str, ...]
    """Node ids in ring order, each from a different cluster; one member means no averaging."""


@dataclass(frozen=True, kw_only=True)
class BackupPlan:
    """A node without a stage, and the stage that it should be ready to take over."""

    node_id: str
    cluster: int
    stage: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The planner's answer."""

    clusters: tuple[ClusterPlan, ...]
    segments: tuple[SegmentPlan, ...]
    backups: tuple[str, ...]
    """Nodes without a stage."""
    samples_per_s: float
    """Predicted, all clusters together."""
    notes: tuple[str, ...]
    """Sentences for people: why a node is left out, what binds."""
    round_s: float = 0.0
    """Predicted seconds of an averaging round on the slowest ring; 0 with one cluster."""
    round_updates: float = 0.0
    """Predicted updates between two rounds: the interval asked for, or more where the links cannot keep up; 0 with one cluster."""
    backup_stages: tuple[BackupPlan, ...] = ()
    """For each backup that can hold one: the least reliable stage it can hold that has no backup yet."""

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        return tuple(stage for cluster in self.clusters for stage in cluster.stages)

    @property
    def rings(self) -> tuple[SegmentPlan, ...]:
        """The segments that have somebody to average with."""
        return tuple(segment for segment in self.segments if len(segment.members) > 1)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Where a peer is reached; its identity is the certificate for `peer_id`, the address is a hint."""

    peer_id: str
    address: str


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The header every micro-batch carries through the pipeline of its cluster."""

    number: int
    """Counts up within the cluster, over training and evaluation."""
    batch: int
    """Update this micro-batch belongs to, counting up within the cluster; -1 in evaluation."""
    position: int
    """Its place in the batch, 0 first."""
    count: int
    """Micro-batches in the batch."""
    samples: int
    batch_samples: int
    """Samples in the whole batch: the gradient is weighted by samples / batch_samples."""
    training: bool
    """False: evaluation with the current weights, nothing is kept."""
    seed: int
    """Seeds the random numbers (dropout) of the whole forward; the generator's state travels from stage to stage."""
    lease: int
    """The data lease it came from."""

    def __post_init__(self) -> None:
        _require(self.number >= 0, "micro-batch number must not be negative")
        _require(0 <= self.position < self.count, f"micro-batch {self.number}: position {self.position} of {self.count}")
        _require(0 < self.samples <= self.batch_samples, f"micro-batch {self.number}: {self.samples} of {self.batch_samples} samples")


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A range of samples, given to one cluster until it reports it done."""

    lease_id: int
    training: bool
    """True: training samples; False: validation samples."""
    epoch: int
    start: int
    stop: int
    """Positions in the epoch's order, half-open."""

    @property
    def samples(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class ReplayedLease:
    """A training lease whose samples were given out again: what a fault cost, by id."""

    lease: Lease
    cluster: int
    """The cluster that had it."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class OwnedLease:
    """A lease and the cluster that has it, or has done it."""

    cluster: int
    lease: Lease


@dataclass(frozen=True, kw_only=True)
class RangesRecord:
    """What of an epoch nobody has leased."""

    epoch: int
    clusters: tuple[int, ...]
    own: tuple[tuple[tuple[int, int], ...], ...]
    """Per cluster, the ranges that are its own, in order."""
    returned: tuple[tuple[int, int], ...]
    """Ranges that somebody gave back."""


@dataclass(frozen=True, kw_only=True)
class LeaseRecord:
    """Everything a lease book knows, to go on from."""

    phase: str
    clusters: tuple[int, ...]
    shares: tuple[float, ...]
    """Of the clusters, in the same order."""
    released: tuple[int, ...]
    next_epoch: int
    sync_epoch: int
    kept_epoch: int
    next_lease: int
    samples_done: int
    batches_done: int
    stopped: bool
    ranges: tuple[RangesRecord, ...]
    leased: tuple[OwnedLease, ...]
    done: tuple[OwnedLease, ...]
    """Since the last checkpoint."""
    replayed: tuple[ReplayedLease, ...]


@dataclass(frozen=True, kw_only=True)
class StageMetrics:
    """What a stage has done so far; counts only grow."""

    node_id: str
    cluster: int
    stage: int
    updates: int
    micro_batches: int
    samples: int
    """Training samples whose update this stage has applied."""
    loss_sum: float
    """Sum over samples of the training loss (last stage; 0 elsewhere)."""
    loss_samples: int
    staleness_max: int
    staleness_sum: int
    """Sum over micro-batches; the mean is staleness_sum / micro_batches."""
    compute_s: float
    """Seconds of compute, pacing (emulated slowness) included."""
    cpu_s: float
    """CPU seconds of the node's process since the job started."""
    bytes_sent: int
    bytes_received: int
    rounds: int
    """Averaging rounds finished, over all its rings."""
    number: int = 0
    """The number of its cluster."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Sums over the validation samples of one lease."""

    lease_id: int
    samples: int
    loss_sum: float
    metric_sum: float
    """Sum over samples of the metric; 0 without a metric."""

    def __post_init__(self) -> None:
        _require(self.samples > 0, f"an evaluation of {self.samples} samples")


@dataclass(frozen=True, kw_only=True)
class EpochResult:
    """One line of history: what was reached at a synchronisation point."""

    epoch: int
    """Epochs finished."""
    train_loss: float
    validation_loss: float | None
    metric: float | None
    samples: int
    """Training samples consumed so far by all clusters."""
    seconds: float
    """Since training started."""
    checkpoint: str | None = field(default=None)


class CheckpointState(StrEnum):
    """What has become of a checkpoint."""

    BEGUN = "begun"
    COMPLETE = "complete"
    ABANDONED = "abandoned"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent:
    """A checkpoint was begun, is complete, or came to nothing."""

    name: str
    attempt: int
    """Which attempt to write one; grows over the whole job."""
    epoch: int
    """Epochs finished when it was begun."""
    state: CheckpointState
    background: bool
    """True if training goes on while it is uploaded."""
    detail: str = ""
    """Where it is, once it is complete; why it came to nothing."""
