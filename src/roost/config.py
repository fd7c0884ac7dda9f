"""Configurations: frozen, keyword-only, checked on construction. Standard library only."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum

from roost.errors import InvalidConfigError

Scalar = str | int | float | bool | None
"""What an optimizer or schedule argument may be."""
ArgumentValue = Scalar | tuple[float, ...]

IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

OPTIMIZERS = frozenset({"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"})
"""Optimizers of torch.optim that nodes build by name."""
SCHEDULES = frozenset(
    {
        "ConstantLR",
        "LinearLR",
        "ExponentialLR",
        "StepLR",
        "MultiStepLR",
        "PolynomialLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "OneCycleLR",
        "CyclicLR",
    }
)
"""Schedules of torch.optim.lr_scheduler that nodes build by name."""
MODES = frozenset({"async", "sync"})
"""Ways to schedule a pipeline: without flush, or flushed after every batch (docs/staleness.md)."""
PRECISIONS = frozenset({"float32", "bf16"})
"""What forwards compute in: as the model is, or mixed with bfloat16 (torch.autocast)."""
CORRECTIONS = frozenset({"none", "rate_by_delay", "rate_warmup", "nesterov", "prediction", "compensation", "rotation"})
"""What a stage can do against staleness; several are joined with '+' (docs/staleness.md)."""
MOVES_MOMENTUM = frozenset({"OneCycleLR", "CyclicLR"})
"""Schedules that move the first moment's decay unless told not to."""
AUTO_CORRECTION = "auto"
"""The correction that the plan and the optimizer call for; the coordinator puts its name in its place when it has planned."""


AUTOMATIC_INTERVAL = 16
"""Updates between two averaging rounds that the planner counts with where nodes choose the interval from what they measure."""


class TensorCodec(StrEnum):
    """What is sent in place of float32 numbers: values of a segment in rings, values and gradients between stages (docs/averaging.md)."""

    NONE = "none"
    """The number as it is."""
    FP16 = "fp16"
    """Half precision, with a common power of two per block."""
    INT8 = "int8"
    """A signed byte, with a scale per block; in rings with error feedback."""


class OuterOptimizer(StrEnum):
    """What clusters make of the average of a round (docs/averaging.md)."""

    MEAN = "mean"
    """They take it."""
    NESTEROV = "nesterov"
    """They take a step with Nesterov momentum from the last average towards it."""


class RobustMethod(StrEnum):
    """What keeps one bad cluster of several from ruining an average (docs/averaging.md)."""

    NONE = "none"
    """Nothing: every cluster's values go into the mean as they are."""
    CLIPPED = "clipped"
    """No cluster counts for more than one that has moved as far from the last mean as the median one."""
    TRIMMED = "trimmed"
    """Value by value, the largest and the smallest of the clusters' are left out."""


ONE_SAMPLE = 1.0
"""A member of a ring with less has consumed nothing since the last round: what it has says nothing of how far one moves."""


def bad_members(members: int) -> int:
    """Return how many bad ones of so many members robust averaging allows for: one of five, and one of three or four."""
    return max(1, members // 5)


def robust_quorum(members: int) -> int:
    """Return how many of so many members must have consumed samples to tell what is usual: most of them are good, whichever those are."""
    return 2 * bad_members(members) + 1


BYTES_PER_ENCODED_BYTE = {TensorCodec.NONE: 1.0, TensorCodec.FP16: 0.5003, TensorCodec.INT8: 0.254}
"""Bytes on the wire per byte of float32 numbers, scales included."""


def require(condition: bool, what: str) -> None:
    """Raise InvalidConfigError with `what` unless `condition` holds."""
    if not condition:
        raise InvalidConfigError(what)


def check_identifier(value: str, what: str) -> None:
    """Raise InvalidConfigError unless `value` is a plain name (letters, digits, '_', '.', '-')."""
    require(IDENTIFIER.fullmatch(value) is not None, f"{what} {value!r} must be 1 to 64 letters, digits, '_', '.' or '-'")


@dataclass(frozen=True, kw_only=True)
class NamedArguments:
    """A class of torch.optim by name, with its keyword arguments."""

    name: str
    """For example 'AdamW'."""
    arguments: tuple[tuple[str, ArgumentValue], ...] = ()
    """Keyword arguments, for example (('lr', 0.001), ('betas', (0.9, 0.99)))."""

    def __post_init__(self) -> None:
        for key, value in self.arguments:
            require(key.isidentifier(), f"{self.name}: argument name {key!r} is not an identifier")
            numbers = value if isinstance(value, tuple) else (value,)
            for number in numbers:
                finite = not isinstance(number, float) or math.isfinite(number)
                require(finite, f"{self.name}: argument {key}={value!r} must be finite")

    def as_dict(self) -> dict[str, ArgumentValue]:
        return dict(self.arguments)


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What coordinator and nodes must know of a job; the model and the data stay with the requester."""

    job_id: str
    """Unique name of this run."""
    optimizer: NamedArguments
    """The optimizer every stage builds for its own parameters."""
    schedule: NamedArguments | None = None
    """Learning-rate schedule; it steps once per `batch_size` samples that all clusters together have consumed."""
    batch_size: int = 32
    """Samples per update of a cluster."""
    micro_batch_size: int = 32
    """Samples that travel through the pipeline together; a batch is one or more micro-batches."""
    epochs: int = 1
    """Times every training sample is consumed."""
    averaging_interval: int = 16
    """Updates of a stage between the starts of two averaging rounds; 0 lets nodes choose from what rounds and updates take them."""
    averaging_compression: TensorCodec = TensorCodec.NONE
    """What rings send between synchronisation points; the rounds at those points are exact."""
    activation_compression: TensorCodec = TensorCodec.NONE
    """What stages send each other in training; in evaluation values are exact."""
    outer_optimizer: OuterOptimizer = OuterOptimizer.MEAN
    """What is made of the average of a round."""
    outer_learning_rate: float = 0.7
    """Of the outer optimizer; the mean has none."""
    outer_momentum: float = 0.9
    """Of the outer optimizer; the mean has none."""
    robust_averaging: RobustMethod = RobustMethod.NONE
    """What keeps one bad cluster from ruining the average of three or more."""
    sync_interval: int = 1
    """Epochs between synchronisation points, where clusters average exactly, evaluate and save; the last epoch always has one."""
    samples: int
    """Training samples."""
    validation_samples: int = 0
    """Validation samples; 0 means no evaluation."""
    seed: int = 0
    """Seeds the order of samples and dropout."""
    max_clusters: int = 0
    """Upper bound on clusters; 0 lets the planner choose."""
    min_clusters: int = 1
    """Lower bound on clusters; the job is refused if the pool cannot form so many."""
    max_in_flight: int = 0
    """Upper bound on in-flight micro-batches per stage; 0 lets the planner choose."""
    start_epoch: int = 0
    """Epochs already done by the run this one resumes."""
    start_updates: int = 0
    """Schedule steps already taken by the run this one resumes."""
    mode: str = "async"
    """"async": no flush, gradients may be stale; "sync": a stage starts a batch when it has applied the one before it."""
    correction: str = "none"
    """What stages do against staleness: names of CORRECTIONS, joined with '+'; before planning also "auto"."""
    clip_norm: float = 0.0
    """Largest norm of a batch's gradient over all stages; 0 means no clipping. Stages apply it each to its part (docs/staleness.md)."""
    precision: str = "float32"
    """"float32": forwards compute as the model is; "bf16": under torch.autocast, with parameters and optimizer in float32."""

    def __post_init__(self) -> None:
        check_identifier(self.job_id, "job id")
        require(self.optimizer.name in OPTIMIZERS, f"optimizer {self.optimizer.name!r} is not one of {sorted(OPTIMIZERS)}")
        if self.schedule is not None:
            require(self.schedule.name in SCHEDULES, f"schedule {self.schedule.name!r} is not one of {sorted(SCHEDULES)}")
        require(self.batch_size > 0, f"batch_size must be positive, not {self.batch_size}")
        require(
            0 < self.micro_batch_size <= self.batch_size,
            f"micro_batch_size {self.micro_batch_size} must be in 1..batch_size={self.batch_size}",
        )
        require(self.epochs > 0, f"epochs must be positive, not {self.epochs}")
        require(self.averaging_interval >= 0, f"averaging_interval must not be negative, but it is {self.averaging_interval}")
        require(0 < self.outer_learning_rate <= 10, f"outer_learning_rate {self.outer_learning_rate} must be in (0, 10]")
        require(0 <= self.outer_momentum < 1, f"outer_momentum {self.outer_momentum} must be in [0, 1)")
        require(
            self.robust_averaging is RobustMethod.NONE or self.averaging_compression is not TensorCodec.INT8,
            f"robust_averaging {self.robust_averaging.value!r} does not go with averaging_compression 'int8', whose rounding errors only "
            "sums make good: use 'fp16' or 'none'",
        )
        require(self.sync_interval > 0, f"sync_interval must be positive, not {self.sync_interval}")
        require(self.samples > 0, "the training data is empty")
        require(self.validation_samples >= 0, "validation_samples must not be negative")
        require(0 <= self.seed < 2**63, "seed must be in 0 .. 2**63 - 1")
        require(self.min_clusters >= 1, "min_clusters must be at least 1")
        require(self.max_clusters == 0 or self.max_clusters >= self.min_clusters, "max_clusters must be 0 or at least min_clusters")
        require(self.max_in_flight >= 0, "max_in_flight must not be negative")
        require(0 <= self.start_epoch < self.epochs, f"start_epoch {self.start_epoch} must be before epochs={self.epochs}")
        require(self.start_updates >= 0, "start_updates must not be negative")
        require(self.mode in MODES, f"mode {self.mode!r} is not one of {sorted(MODES)}")
        require(self.precision in PRECISIONS, f"precision {self.precision!r} is not one of {sorted(PRECISIONS)}")
        _check_correction(self.correction)
        require(math.isfinite(self.clip_norm) and self.clip_norm >= 0, f"clip_norm must not be negative, not {self.clip_norm}")

    @property
    def planned_interval(self) -> int:
        """Updates between two averaging rounds that the planner counts with."""
        return self.averaging_interval or AUTOMATIC_INTERVAL

    @property
    def moves_momentum(self) -> bool:
        """True if the schedule moves the first moment's decay, which the correction 'nesterov' cannot work with."""
        schedule = self.schedule
        return schedule is not None and schedule.name in MOVES_MOMENTUM and bool(schedule.as_dict().get("cycle_momentum", True))

    @property
    def averaging_copies(self) -> int:
        """Copies of its averaged tensors that a node keeps for averaging: the snapshot, the sum, and what is kept between rounds.

        That is the last mean if rounds average differences to it, the rounding errors of int8, the outer momentum, and what robust
        averaging holds until the slowest member's values of a piece have come.
        """
        outer = self.outer_optimizer is not OuterOptimizer.MEAN
        robust = self.robust_averaging is not RobustMethod.NONE
        differences = outer or robust or self.averaging_compression is not TensorCodec.NONE
        return 2 + differences + outer + robust + (self.averaging_compression is TensorCodec.INT8)


def _check_correction(correction: str) -> None:
    if correction == AUTO_CORRECTION:
        return
    parts = correction.split("+")
    unknown = [part for part in parts if part not in CORRECTIONS]
    require(not unknown, f"correction {correction!r}: {', '.join(map(repr, unknown))} is not one of {sorted(CORRECTIONS)}")
    require(len(set(parts)) == len(parts), f"correction {correction!r} names a correction twice")
    require(parts == ["none"] or "none" not in parts, f"correction {correction!r}: 'none' cannot be joined with others")


@dataclass(frozen=True, kw_only=True)
class PlanningConfig:
    """What the planner assumes and how long it may search (docs/planning.md)."""

    staleness_cost: float = 0.005
    """Fraction by which one update of staleness lowers what a sample is worth: an assumption, it decides between near equals."""
    headroom: float = 1.25
    """Micro-batches in flight, relative to the least that keeps every stage busy if all steps take their mean time."""
    slowest_cluster: float = 0.02
    """A cluster slower than this fraction of the fastest is left out: every averaging round would wait for it."""
    activation_compression: float = 1.0
    """Bytes on the wire per byte of values and gradients between stages."""
    averaging_compression: float = 1.0
    """Bytes on the wire per byte of averaged parameters."""
    effort: float = 1.0
    """Scales the fixed amount of work a search may do; the plan depends on it, never on the speed of the machine that plans."""

    def __post_init__(self) -> None:
        require(0 <= self.staleness_cost < 1, f"staleness_cost {self.staleness_cost} must be in [0, 1)")
        require(1 <= self.headroom <= 4, f"headroom {self.headroom} must be in [1, 4]")
        require(0 <= self.slowest_cluster < 1, f"slowest_cluster {self.slowest_cluster} must be in [0, 1)")
        factors = (self.activation_compression, self.averaging_compression)
        require(all(0 < factor <= 1 for factor in factors), "compression must be in (0, 1]: bytes sent per byte")
        require(0 < self.effort <= 100, f"effort {self.effort} must be in (0, 100]")


LEAVE_FILE = "leaving"
"""In a node's state directory: made by `roost leave`; the node gives its stage to another, removes the file and ends."""
PAUSE_FILE = "paused"
"""In a node's state directory: while it is there, the node computes nothing (`roost pause`)."""
BYTES_PER_S_OF_MBIT = 1e6 / 8
SLOWEST_LINE = 1e3
"""Bytes per second: over a slower line not even heartbeats meet their deadlines."""


def check_line(bytes_per_s: float, what: str) -> None:
    """Raise InvalidConfigError unless a limit on a line is 0, for none, or at least SLOWEST_LINE."""
    possible = math.isfinite(bytes_per_s) and (bytes_per_s == 0 or bytes_per_s >= SLOWEST_LINE)
    require(possible, f"{what}: {bytes_per_s:g} bytes/s must be 0, for no limit, or at least {SLOWEST_LINE:g}")


MAX_LATENCY_S = 5.0
"""The longest distance that is emulated; deadlines are longer."""


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """Limits and deadlines of one endpoint."""

    max_message_bytes: int = 1 << 30
    """Largest message (all buffers together) it accepts."""
    max_header_bytes: int = 8 << 20
    """Largest message header it accepts."""
    frame_bytes: int = 1 << 20
    """Bytes per frame on a stream."""
    connect_s: float = 10.0
    """Deadline for a connection to a peer."""
    send_s: float = 30.0
    """Deadline for one message to be taken by the network."""
    call_s: float = 30.0
    """Default deadline for a call's reply."""
    keepalive_s: float = 5.0
    """Seconds between keepalive pings, and to wait for their answer."""
    uplink_bytes_per_s: float = 0.0
    """Limit on what this endpoint sends; 0 means none."""
    downlink_bytes_per_s: float = 0.0
    """Limit on what this endpoint receives: it reads no faster, and its peers have to wait; 0 means none."""
    latency_s: float = 0.0
    """Emulated seconds by which everything arrives later here."""
    idle_s: float = 60.0
    """A peer that sends nothing for so long in the middle of a message, or does not take a reply, is cut off."""
    message_s: float = 600.0
    """A message must be complete so long after it began: no sender waits longer for one to be taken."""
    peer_messages_per_s: float = 8000.0
    """One-way messages of one peer that are read per second; more have to wait. One core takes about 4,000 (docs/security.md)."""
    peer_calls_per_s: float = 1000.0
    """Calls of one peer that are read per second; more have to wait."""
    peer_streams: int = 32
    """Streams of one-way messages that one peer may have open; it needs two."""
    peer_calls: int = 256
    """Calls of one peer that may be open at a time."""

    @property
    def peer_bytes(self) -> int:
        """Bytes of one peer's messages that may have arrived and not be dealt with: a message in each lane."""
        return 2 * (self.max_message_bytes + self.max_header_bytes)

    def __post_init__(self) -> None:
        require(self.max_message_bytes > 0 and self.max_header_bytes > 0, "message limits must be positive")
        require(1024 <= self.frame_bytes <= 3 << 20, "frame_bytes must be in 1 KiB .. 3 MiB")
        deadlines = (self.connect_s, self.send_s, self.call_s, self.keepalive_s)
        require(all(math.isfinite(d) and d > 0 for d in (*deadlines, self.idle_s, self.message_s)), "deadlines must be positive")
        rates = (self.peer_messages_per_s, self.peer_calls_per_s)
        require(all(math.isfinite(rate) and rate > 0 for rate in rates), "rates must be positive")
        require(min(self.peer_streams, self.peer_calls) > 0, "what a peer may have open must be positive")
        check_line(self.uplink_bytes_per_s, "uplink")
        check_line(self.downlink_bytes_per_s, "downlink")
        require(0 <= self.latency_s <= MAX_LATENCY_S, f"latency_s must be in 0..{MAX_LATENCY_S:.0f}")


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """How a coordinator listens and watches."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 7700
    """Port for enrolment; 0 picks a free one. Peers talk to the coordinator on a second port that enrolment names."""
    advertise: str = ""
    """Host name or address that nodes use; empty means `host`."""
    state_dir: str = ""
    """Directory for keys, certificates and the database."""
    token_ttl_s: float = 86_400.0
    """Seconds a token is valid."""
    heartbeat_s: float = 0.5
    """Seconds between a node's heartbeats."""
    lost_after_s: float = 15.0
    """Seconds without a heartbeat after which a node counts as lost; once its heartbeats are known to be regular, it is less."""
    requester_away_s: float = 600.0
    """Seconds without a heartbeat after which a requester counts as lost, and its job fails."""
    rejoin_s: float = 600.0
    """Seconds that a job waits for nodes when those that are left cannot hold its model."""
    prepare_s: float = 180.0
    """Deadline for all nodes to fetch and build their stages."""
    sync_s: float = 120.0
    """Deadline for an averaging, evaluating or saving step at a synchronisation point."""

    def __post_init__(self) -> None:
        require(0 <= self.port < 65535, f"port {self.port} must be in 0..65534: peers use the port after it")
        durations = (
            self.token_ttl_s,
            self.heartbeat_s,
            self.lost_after_s,
            self.requester_away_s,
            self.rejoin_s,
            self.prepare_s,
            self.sync_s,
        )
        require(all(math.isfinite(d) and d > 0 for d in durations), "durations must be positive")
        require(self.lost_after_s > self.heartbeat_s, "lost_after_s must be longer than heartbeat_s")


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """What a node's owner lends, and how the node is reached."""

    node_id: str
    """Name of this node."""
    host: str = ""
    """Address to listen on and to tell peers; empty means the address the coordinator is reached from."""
    port: int = 0
    """Port to listen on; 0 picks a free one."""
    advertise: str = ""
    """Host, or host:port, that peers are told instead: that of a router that forwards a port to this machine."""
    state_dir: str = ""
    """Directory for the node's key and certificate."""
    threads: int = 0
    """CPU threads for compute; 0 means all cores."""
    device: str = "cpu"
    """cpu, cuda or mps."""
    memory_bytes: int = 0
    """Memory it lends; 0 means measured: 80% of what is free."""
    relative_speed: float = 1.0
    """Emulated slowness: compute is paced by sleeping so that it runs at this fraction of the machine's speed."""
    uplink_bytes_per_s: float = 0.0
    """The most it sends, averaging included; 0 means as fast as the network is."""
    downlink_bytes_per_s: float = 0.0
    """The most it receives; 0 means as fast as the network is."""
    latency_s: float = 0.0
    """Emulated distance: seconds by which everything arrives later at this node."""

    def __post_init__(self) -> None:
        check_identifier(self.node_id, "node name")
        require(0 <= self.port < 65536, f"port {self.port} is not a port")
        require(self.threads >= 0, "threads must not be negative")
        require(self.device in ("cpu", "cuda", "mps"), f"device {self.device!r} must be cpu, cuda or mps")
        require(self.memory_bytes >= 0, "memory must not be negative")
        require(0 < self.relative_speed <= 1, f"relative_speed must be in (0, 1], not {self.relative_speed}")
        check_line(self.uplink_bytes_per_s, "uplink")
        check_line(self.downlink_bytes_per_s, "downlink")
        require(0 <= self.latency_s <= MAX_LATENCY_S, f"latency must be in 0..{MAX_LATENCY_S:.0f} s")


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """A node of a local pool: a process on this machine with declared memory and speed."""

    name: str = ""
    """Its name; empty means node-1, node-2, ..."""
    memory: int | str = 0
    """Bytes, or text such as '64MB'; 0 means measured."""
    relative_speed: float = 1.0
    """Emulated fraction of this machine's speed."""
    threads: int = 1
    """CPU threads."""
    uplink_mbit: float = 0.0
    """The most it sends, in Mbit/s; 0 means as fast as this machine is."""
    downlink_mbit: float = 0.0
    """The most it receives, in Mbit/s; 0 means as fast as this machine is."""
    latency_ms: float = 0.0
    """Emulated distance: milliseconds by which everything arrives later at this node."""
    extra: tuple[str, ...] = field(default=())
    """Further arguments for 'roost join'."""

    def __post_init__(self) -> None:
        if self.name:
            check_identifier(self.name, "node name")
        parse_bytes(self.memory)
        require(0 < self.relative_speed <= 1, f"relative_speed must be in (0, 1], not {self.relative_speed}")
        require(self.threads > 0, "threads must be positive")
        check_line(self.uplink_mbit * BYTES_PER_S_OF_MBIT, "uplink")
        check_line(self.downlink_mbit * BYTES_PER_S_OF_MBIT, "downlink")
        require(0 <= self.latency_ms <= 1e3 * MAX_LATENCY_S, f"latency_ms must be in 0..{1e3 * MAX_LATENCY_S:.0f}")


_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(size: int | str) -> int:
    """Return a size in bytes from a number or text such as '512MB', '1.5 GiB'. Raises InvalidConfigError."""
    if isinstance(size, int):
        require(size >= 0, f"size {size} must not be negative")
        return size
    match = re.match(r"^\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)\s*$", size)
    if match is None or match[2].upper() not in _SIZES:
        raise InvalidConfigError(f"size {size!r} is not a number of bytes such as '512MB' or '2GiB'")
    return int(float(match[1]) * _SIZES[match[2].upper()])


def format_bytes(size: float) -> str:
    """Return a size for people: '1.5 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
