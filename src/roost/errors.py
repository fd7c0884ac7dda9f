"""Every error Roost raises, as one tree.

RoostError
├── ConfigError            R1xx  what the user wrote
│   ├── InvalidConfigError     R101
│   ├── ScriptError            R102
│   ├── InvalidDataError       R103
│   ├── DeferredInitError      R104
│   └── MissingWeightsError    R105
├── CaptureError           R2xx  the model cannot be turned into a graph
│   ├── NotCapturableError     R201
│   ├── UnsupportedOpError     R202
│   ├── GraphFormatError       R203
│   └── CaptureMismatchError   R204
├── PlanningError          R3xx  the pool cannot hold or run the model
│   ├── PoolTooSmallError      R301
│   ├── NodeTooSmallError      R302
│   └── EmptyPoolError         R303
├── SecurityError          R4xx  who may talk to whom
│   ├── TokenRejectedError     R401
│   ├── TokenExpiredError      R402
│   ├── FingerprintError       R403
│   ├── ForbiddenError         R404
│   └── CredentialsError       R405
├── TransportError         R5xx  the network
│   ├── PeerUnreachableError   R501
│   ├── DeadlineError          R502
│   ├── MessageTooLargeError   R503
│   ├── MalformedMessageError  R504
│   └── VersionMismatchError   R505
├── JobError               R6xx  a running job
│   ├── NonFiniteLossError     R601
│   ├── NodeLostError          R602
│   ├── StageFailedError       R603
│   ├── JobRefusedError        R604
│   ├── RequesterLostError     R605
│   ├── OutOfBudgetError       R606
│   └── StaleCoordinatorError  R607
├── CheckpointError        R7xx  files
│   ├── CheckpointDamagedError R701
│   └── CheckpointMismatchError R702
└── ProtocolError          R8xx  a bug in Roost or a peer that does not follow the protocol
    └── IllegalTransitionError R801

`docs/errors.md` has a section for every code.
"""

from __future__ import annotations

from collections.abc import Sequence


class RoostError(Exception):
    """The root. `message` says what happened and to whom; `hint` says what to do next."""

    code = "R000"
    default_hint = "Run the command again with --verbose and read the last events of the log."

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint if hint is not None else self.default_hint
        super().__init__(message)

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}\n  What to do: {self.hint}"


class ConfigError(RoostError):
    """Something the user wrote cannot be right."""

    code = "R100"


class InvalidConfigError(ConfigError):
    """A field of a configuration has a value that cannot work."""

    code = "R101"
    default_hint = "Correct the field that is named and start again; nothing has been started."


class ScriptError(ConfigError):
    """The user's training script raised, or did not call roost.train."""

    code = "R102"
    default_hint = "Run the script with plain Python first; Roost starts once it defines and trains a Job."


class InvalidDataError(ConfigError):
    """The dataset cannot be read, is empty, or its samples cannot be made into tensors."""

    code = "R103"
    default_hint = "Give a sequence of (input, label) pairs of tensors, or a tuple of equally long tensors."


class DeferredInitError(ConfigError):
    """What a roost.deferred_init() block does cannot be recorded."""

    code = "R104"
    default_hint = "Build the model on the CPU with torch's default generator; docs/large-models.md lists what cannot be recorded."


class MissingWeightsError(ConfigError):
    """Nothing says what a parameter on the meta device holds at the start."""

    code = "R105"
    default_hint = "Build the model inside roost.deferred_init(), or give the path of a checkpoint as weights=."


class CaptureError(RoostError):
    """The model and its loss cannot be turned into a graph that nodes may run."""

    code = "R200"


class NotCapturableError(CaptureError):
    """torch.export refuses the model, or capture would silently change what it computes."""

    code = "R201"
    default_hint = "Change the line that is named; docs/models.md lists what cannot be captured and why."


class UnsupportedOpError(CaptureError):
    """The model uses an operation that is not on the list nodes agree to run."""

    code = "R202"
    default_hint = "Replace the operation, or ask for it to be added to the list of allowed operations."


class GraphFormatError(CaptureError):
    """A graph that was received is malformed, unsafe, or of another version."""

    code = "R203"
    default_hint = "Check that every machine runs the same versions of roost and torch."


class CaptureMismatchError(CaptureError):
    """The captured graph does not compute what the eager model computes."""

    code = "R204"
    default_hint = "The parameter that is named differs; look for custom autograd functions on its path."


class PlanningError(RoostError):
    """No plan can be made for this model on this pool."""

    code = "R300"


class PoolTooSmallError(PlanningError):
    """All nodes together have too little memory for one replica of the model."""

    code = "R301"
    default_hint = "Add a node, raise the memory a node may use, or make the micro-batch smaller."

    def __init__(self, message: str, *, short_bytes: int = 0, hint: str | None = None) -> None:
        self.short_bytes = short_bytes
        super().__init__(message, hint=hint)


class NodeTooSmallError(PlanningError):
    """A piece of the model that cannot be cut further fits on no node."""

    code = "R302"
    default_hint = "Raise that node's memory budget (--memory), add a larger node, or shrink the micro-batch."

    def __init__(self, message: str, *, short_bytes: int = 0, hint: str | None = None) -> None:
        self.short_bytes = short_bytes
        super().__init__(message, hint=hint)


class EmptyPoolError(PlanningError):
    """No node, or fewer nodes than asked for, has joined."""

    code = "R303"
    default_hint = "Run the printed 'roost join' command on each machine, then look at 'roost status'."


class SecurityError(RoostError):
    """A peer is not who it should be, or asks for what it may not have."""

    code = "R400"


class TokenRejectedError(SecurityError):
    """The token is unknown, malformed, or was used before."""

    code = "R401"
    default_hint = "Get a fresh token with 'roost token' on the coordinator's machine; each works once."


class TokenExpiredError(SecurityError):
    """The token's time is over."""

    code = "R402"
    default_hint = "Get a fresh token with 'roost token' on the coordinator's machine."


class FingerprintError(SecurityError):
    """The coordinator's certificate is not the one the token names."""

    code = "R403"
    default_hint = "Check the address. If it is right, somebody may be answering in the coordinator's place."


class ForbiddenError(SecurityError):
    """A peer sent a message that its role may not send, or asked for another node's part."""

    code = "R404"
    default_hint = "Join with a token for the right role ('roost token --role node' or '--role requester')."


class CredentialsError(SecurityError):
    """This machine has no certificate for that coordinator, or it is damaged."""

    code = "R405"
    default_hint = "Enrol once with a token: 'roost train SCRIPT --pool ADDRESS --token TOKEN'."


class TransportError(RoostError):
    """A message could not be carried."""

    code = "R500"


class PeerUnreachableError(TransportError):
    """A peer cannot be connected to, or its connection broke."""

    code = "R501"
    default_hint = "Check that the process runs there and that a firewall lets its port through."


class DeadlineError(TransportError):
    """A peer did not answer in time."""

    code = "R502"
    default_hint = "The machine or its link is overloaded or frozen; look at 'roost status'."


class MessageTooLargeError(TransportError):
    """A message is over the size limit of its receiver."""

    code = "R503"
    default_hint = "Make the micro-batch smaller, or raise the receiver's message limit."


class MalformedMessageError(TransportError):
    """Bytes that are not a message of this protocol."""

    code = "R504"
    default_hint = "Check that every machine runs the same version of roost."


class VersionMismatchError(TransportError):
    """Two machines run versions that do not speak the same protocol."""

    code = "R505"
    default_hint = "Install the same version of roost and torch on every machine."


class JobError(RoostError):
    """A job ended before it was finished."""

    code = "R600"


class NonFiniteLossError(JobError):
    """The loss became NaN or infinite."""

    code = "R601"
    default_hint = "Lower the learning rate, check the inputs for NaN, and start from the last checkpoint."


class NodeLostError(JobError):
    """A node that runs a stage went away."""

    code = "R602"
    default_hint = "Start the node again, or train without it; resume from the last checkpoint."

    def __init__(self, message: str, *, hint: str | None = None, node: str = "") -> None:
        """`node` is the one that went away, where that is known."""
        super().__init__(message, hint=hint)
        self.node = node


class StageFailedError(JobError):
    """A node could not run its stage."""

    code = "R603"
    default_hint = "Read that node's log; resume from the last checkpoint once it is mended."


class JobRefusedError(JobError):
    """The coordinator does not take the job now."""

    code = "R604"
    default_hint = "Wait until the running job ends ('roost status'), then submit again."


class RequesterLostError(JobError):
    """The requester, who serves the data, went away."""

    code = "R605"
    default_hint = "Start the script again; it resumes from the last checkpoint if you pass resume=."


class OutOfBudgetError(JobError):
    """A node was given a stage that needs more memory than its owner lends."""

    code = "R606"
    default_hint = "Submit the job again; if it comes back, the plan is wrong: raise that node's --memory, or report it."


class StaleCoordinatorError(JobError):
    """The coordinator was started with an older copy of its state than the job has come to."""

    code = "R607"
    default_hint = "Resume from the last checkpoint; never put an older copy in the place of the coordinator's state directory."


class CheckpointError(RoostError):
    """A checkpoint cannot be written or read."""

    code = "R700"


class CheckpointDamagedError(CheckpointError):
    """A file of a checkpoint is missing, cut short, or has the wrong checksum."""

    code = "R701"
    default_hint = "Use the checkpoint before it; each is a directory of its own."


class CheckpointMismatchError(CheckpointError):
    """A checkpoint belongs to another model."""

    code = "R702"
    default_hint = "Resume with the model and optimizer the checkpoint was made with."


class ProtocolError(RoostError):
    """A peer, or Roost itself, does not follow the protocol."""

    code = "R800"


class IllegalTransitionError(ProtocolError):
    """A state machine got an event its state does not allow; `history` has its last moves."""

    code = "R801"
    default_hint = "This is a bug in Roost: please report it with the history that is printed."

    def __init__(self, message: str, *, history: Sequence[str] = (), hint: str | None = None) -> None:
        self.history = tuple(history)
        recent = "".join(f"\n    {line}" for line in self.history)
        super().__init__(f"{message}; recent history:{recent}" if recent else message, hint=hint)


def all_error_types() -> dict[str, type[RoostError]]:
    """Return every class of the tree by its code; codes are unique."""
    found: dict[str, type[RoostError]] = {}
    pending: list[type[RoostError]] = [RoostError]
    while pending:
        kind = pending.pop()
        found[kind.code] = kind
        pending.extend(kind.__subclasses__())
    return found


def error_from_code(code: str, message: str, hint: str) -> RoostError:
    """Return the error a peer reported, as its own class; an unknown code becomes a RoostError."""
    kind = all_error_types().get(code, RoostError)
    return kind(message, hint=hint)
