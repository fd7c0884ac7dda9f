"""What a requester imports: Job, train() and the Run it returns."""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor, nn

from roost.capture.arguments import DTYPES
from roost.capture.check import CheckReport, check_against_eager, check_batch_sizes, check_precision
from roost.capture.cut import tensor_positions
from roost.capture.export import Captured, capture
from roost.capture.graph_format import to_bytes
from roost.capture.profiling import estimate, profile
from roost.capture.tracing import own_loss
from roost.checkpoint.reader import Checkpoint, load_from
from roost.checkpoint.writer import check_writable
from roost.config import AUTO_CORRECTION, ArgumentValue, JobConfig, NamedArguments, OuterOptimizer, RobustMethod, TensorCodec, require
from roost.errors import CheckpointMismatchError, InvalidConfigError, InvalidDataError
from roost.pipeline.allocator import keep_freed_memory
from roost.pipeline.optimizer import build_optimizer, check_optimizer
from roost.pipeline.precision import computing
from roost.pipeline.probe import measure, update_bytes_per_s
from roost.pipeline.tensor_bytes import spec_of
from roost.requester.columns import Columns, arrange
from roost.requester.data import SampleSource
from roost.requester.huggingface import collator_for
from roost.requester.pools import Pool, RemotePool
from roost.requester.run import JobPackage, Observer, Run, new_job_id
from roost.types import ModelProfile
from roost.weights.source import MemoryTensors, TensorSource, source_of

logger = logging.getLogger(__name__)

WAIT_S = 120.0
"""How long nodes have to join unless the caller says otherwise."""
PACED_REST_S = 0.05
"""Slept before each piece of work while a job for paced nodes is measured: about what such nodes sleep."""
WHOLE_NUMBERS = ("batch_size", "epochs", "averaging_interval", "sync_interval", "seed", "min_clusters", "max_clusters", "max_in_flight")
"""Fields of a Job that count something."""


@dataclass(frozen=True, kw_only=True)
class PreparedJob:
    """A job that was captured and measured, to be planned and not trained."""

    package: JobPackage
    pool: Pool | None
    """The pool that the script named."""


@dataclass(frozen=True, kw_only=True)
class CheckedJob:
    """A job that was captured and compared with the eager model, and neither measured nor trained."""

    rehearsed: RehearsedJob
    config: JobConfig
    capture_s: float
    """Seconds that capturing and comparing took."""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What `roost train` and `roost plan` set for the script they run."""

    pool: Pool | None = None
    observer: Observer | None = None
    wait_s: float = WAIT_S
    runs: list[Run] = field(default_factory=list)
    """Every run the script starts is added here."""
    plan_only: bool = False
    """True: train() starts nothing; it adds the job to `prepared` and ends the script as sys.exit() does."""
    prepared: list[PreparedJob] = field(default_factory=list)
    check_only: bool = False
    """True: train() starts nothing; it adds the job to `checked` and ends the script as sys.exit() does."""
    checked: list[CheckedJob] = field(default_factory=list)
    job_only: bool = False
    """True: train() starts nothing; it adds the job to `jobs` and ends the script as sys.exit() does."""
    jobs: list[Job] = field(default_factory=list)


Choice = TypeVar("Choice", bound=StrEnum)

DEFAULTS: contextvars.ContextVar[Defaults | None] = contextvars.ContextVar("roost_defaults", default=None)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything about one training: model, loss, data, and how to optimise."""

    model: nn.Module
    """Any module torch.export takes; it is captured as it is and not changed."""
    data: Any
    """Training data: a tuple of equally long tensors (inputs..., label), or a dict of them, or a map-style dataset of such tuples or
    dicts. A tuple's last element is the label; a dict's elements are passed to the model by their names, but for `label_names`."""
    loss: Callable[..., Tensor] | None = None
    """loss(output, *labels) -> scalar, the mean over the samples of a batch. None: the model is given the labels as well and returns
    its loss, as its output's `loss` or first item."""
    validation: Any = None
    """Validation data in the same form; None means no evaluation."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes the tuple or dict of a batch's tensors from a list of samples, for example by padding them to one length; None: samples
    are stacked."""
    label_names: tuple[str, ...] = ("labels",)
    """Of data whose samples are dicts, the elements that are labels: the loss and the metric get them, in this order."""
    metric: Callable[..., Tensor] | None = None
    """metric(output, *labels) -> scalar mean over samples, for the validation data; for example an accuracy."""
    weights: str | Path | None = None
    """Initial weights: a safetensors file, or a folder with model.safetensors or its shards and their index; None: those the model
    has, or would have been given had it not been built inside `roost.deferred_init()`."""
    weights_cast: bool = False
    """Convert floating-point tensors of `weights` to the model's dtype; otherwise another dtype is an error."""
    weights_strict: bool = True
    """Refuse `weights` with tensors that the model has not."""
    optimizer: str = "AdamW"
    """A class of torch.optim by name."""
    optimizer_args: Mapping[str, ArgumentValue] = field(default_factory=dict)
    """Its keyword arguments, for example {"lr": 1e-3}."""
    schedule: str | None = None
    """A class of torch.optim.lr_scheduler by name; it steps once per `batch_size` samples, over all clusters."""
    schedule_args: Mapping[str, ArgumentValue] = field(default_factory=dict)
    """Its keyword arguments."""
    batch_size: int = 32
    """Samples per update of a cluster."""
    micro_batch_size: int | None = None
    """Samples that travel together; None means the whole batch. Smaller ones accumulate gradients: a batch's micro-batches add theirs,
    weighted by their samples, before the one update."""
    epochs: int = 1
    """Times every training sample is consumed."""
    averaging_interval: int = 16
    """Updates between two averaging rounds; 0: nodes choose from what rounds and updates take (docs/averaging.md)."""
    averaging_compression: str = "none"
    """What clusters send when they average: "none", "fp16" or "int8"; synchronisation points are exact in any case."""
    activation_compression: str = "none"
    """What the stages of a cluster send each other for values and their gradients: "none", "fp16" or "int8"; evaluation is exact."""
    outer_optimizer: str = "mean"
    """What clusters make of an average: "mean" takes it, "nesterov" steps towards it with momentum (DiLoCo)."""
    outer_learning_rate: float = 0.7
    """Of the outer optimizer "nesterov"."""
    outer_momentum: float = 0.9
    """Of the outer optimizer "nesterov"."""
    robust_averaging: str = "none"
    """What keeps one bad cluster of three or more from ruining an average: "none", "clipped" or "trimmed" (docs/averaging.md)."""
    sync_interval: int = 1
    """Epochs between synchronisation points (exact average, evaluation, checkpoint)."""
    seed: int = 0
    """Seeds the order of samples and dropout."""
    name: str = "job"
    """Names the checkpoint folder."""
    checkpoint_dir: str = "roost-checkpoints"
    """Where checkpoints go, on the requester's machine."""
    min_clusters: int = 1
    """Refuse a pool that cannot form so many clusters."""
    max_clusters: int = 0
    """At most so many clusters; 0 lets the planner choose."""
    max_in_flight: int = 0
    """At most so many micro-batches in flight per stage; 0 lets the planner choose."""
    mode: str = "async"
    """"async": no stage ever waits for a batch to end; "sync": every update uses current gradients, as one device would."""
    correction: str = "auto"
    """What stages do against staleness: a name of roost.config.CORRECTIONS, or several joined with '+'; "auto" is 'nesterov' if gradients
    can be stale in the plan and the optimizer is a plain Adam or AdamW, else 'none' (docs/staleness.md)."""
    clip_norm: float = 0.0
    """Largest norm of a batch's gradient; 0 means no clipping (docs/staleness.md says how stages share it)."""
    precision: str = "float32"
    """"float32": forwards compute as the model is; "bf16": under torch.autocast in bfloat16, on nodes whose device can
    (docs/memory-and-precision.md)."""

    def __post_init__(self) -> None:
        require(isinstance(self.model, nn.Module), f"model must be a torch.nn.Module, not a {type(self.model).__name__}")
        require(self.weights is None or isinstance(self.weights, str | Path), f"weights must be a path, not {self.weights!r}")
        for name in ("loss", "metric"):
            value = getattr(self, name)
            require(value is None or callable(value), f"{name} must be callable: {name}(output, label) -> scalar tensor")
        require(
            self.collate is None or callable(self.collate), "collate must be callable: collate(list of samples) -> dict or tuple of tensors"
        )
        require(
            not isinstance(self.label_names, str) and all(isinstance(name, str) for name in self.label_names),
            f"label_names must be a tuple of names, not {self.label_names!r}",
        )
        require(self.micro_batch_size is None or _is_whole(self.micro_batch_size), "micro_batch_size must be a whole number or None")
        for name in WHOLE_NUMBERS:
            require(_is_whole(getattr(self, name)), f"{name} must be a whole number, not {getattr(self, name)!r}")
        require(isinstance(self.clip_norm, int | float), f"clip_norm must be a number, not {self.clip_norm!r}")
        for name in ("optimizer_args", "schedule_args"):
            require(isinstance(getattr(self, name), Mapping), f'{name} must be a dict of keyword arguments, such as {{"lr": 1e-3}}')

    @classmethod
    def from_transformers(
        cls,
        model: nn.Module,
        data: Any,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        **fields: Any,
    ) -> Job:
        """Return the job of training a model of the transformers library with the loss it computes itself.

        `data` is a tokenised dataset of the datasets library or a list of dicts, with `labels`; columns that the model does not take
        are left out. Rows of different lengths are padded, on the right, by `collate` (for example a data collator of transformers)
        or with the model's padding token, label -100 and a matching attention mask. `fields` are those of Job.
        """
        require("loss" not in fields, "a transformers model computes its own loss; for another one, use Job(model=..., loss=...)")
        return cls(model=model, data=data, collate=collator_for(model, collate), **fields)


def train(
    job: Job,
    pool: Pool | str | None = None,
    *,
    resume: str | Path | None = None,
    wait_s: float | None = None,
    observer: Observer | None = None,
) -> Run:
    """Start training `job` on `pool` and return its Run once the plan is made.

    `pool` is roost.local(...), a coordinator's "host:port", or None for the pool `roost train` was given. `resume` is a
    checkpoint to go on from, or the directory of a run, whose newest checkpoint is taken. Nodes have `wait_s` seconds
    (default: two minutes) to join. Raises RoostError: everything that can be refused is refused here, before anything is
    trained.
    """
    defaults = DEFAULTS.get() or Defaults()
    chosen = RemotePool(address=pool) if isinstance(pool, str) else pool if pool is not None else defaults.pool
    if defaults.job_only:
        defaults.jobs.append(job)
        raise SystemExit(0)
    if defaults.check_only:
        defaults.checked.append(check(job))
        raise SystemExit(0)
    if defaults.plan_only:
        defaults.prepared.append(PreparedJob(package=prepare(job, resume=resume, saves=False, paced=_paced(chosen)), pool=chosen))
        raise SystemExit(0)
    if chosen is None:
        raise InvalidConfigError(
            "train() was given no pool",
            hint="Pass pool=roost.local(nodes=2) or pool='host:port', or run the script with 'roost train SCRIPT --pool HOST:PORT'.",
        )
    require(hasattr(chosen, "enter"), f"pool must be roost.local(...), roost.RemotePool(...) or 'host:port', not {chosen!r}")
    package = prepare(job, resume=resume, paced=_paced(chosen))
    run = Run(package, chosen, observer=observer or defaults.observer, wait_s=defaults.wait_s if wait_s is None else wait_s)
    run.start()
    defaults.runs.append(run)
    return run


def check(job: Job) -> CheckedJob:
    """Capture `job` and compare it with the eager model. Raises RoostError, as train() would, for a job that cannot be trained."""
    training = SampleSource(job.data, what="the training data", collate=job.collate)
    config = _config(job, len(training), 0, None)
    check_optimizer(config)
    begin = time.perf_counter()
    rehearsed = rehearse(job, training, config)
    took = time.perf_counter() - begin
    _validation(job, rehearsed)
    _weights(job, rehearsed.captured, None)
    return CheckedJob(rehearsed=rehearsed, config=config, capture_s=took)


def _validation_samples(job: Job) -> int:
    return 0 if job.validation is None else len(SampleSource(job.validation, what="the validation data", collate=job.collate))


def _validation(job: Job, rehearsed: RehearsedJob) -> SampleSource | None:
    """Return the validation data, whose first sample fits the captured model; None if the job has none."""
    if job.validation is None:
        return None
    validation = SampleSource(job.validation, what="the validation data", collate=job.collate)
    require(len(validation) > 0, "the validation data is empty; leave it out to train without evaluation")
    if rehearsed.columns.names is not None:
        validation.select(rehearsed.columns.names)
    validation.expect([(DTYPES[record.dtype], record.shape) for record in rehearsed.captured.graph.data])
    validation.batch([0])
    return validation


def _paced(pool: Pool | None) -> bool:
    return bool(getattr(pool, "paced", False))


def prepare(job: Job, *, resume: str | Path | None = None, saves: bool = True, paced: bool = False) -> JobPackage:
    """Return the captured, checked and measured job. Raises RoostError for anything that cannot be trained.

    `paced` says that its nodes emulate slower machines by sleeping: it is measured as they will find it.

    With `saves` the job's checkpoint directory is made, if it cannot be written to that is an error.
    """
    training = SampleSource(job.data, what="the training data", collate=job.collate)
    checkpoint = load_from(Path(resume)) if resume is not None else None
    config = _config(job, len(training), _validation_samples(job), checkpoint)
    check_optimizer(config)
    if saves:
        check_writable(Path(job.checkpoint_dir))
    rehearsed = rehearse(job, training, config)
    captured = rehearsed.captured
    training.expect([(DTYPES[record.dtype], record.shape) for record in captured.graph.data])
    validation = _validation(job, rehearsed)
    model_profile = measure_costs(rehearsed, config, rest_s=PACED_REST_S if paced else 0.0)
    return JobPackage(
        config=config,
        graph=to_bytes(captured.graph),
        positions=tensor_positions(captured.graph),
        weights=_weights(job, captured, checkpoint),
        extras=frozenset(captured.extras),
        aliases=captured.aliases,
        optimizer=checkpoint.optimizer if checkpoint is not None else {},
        profile=model_profile,
        training=training,
        validation=validation,
        has_metric=job.metric is not None,
        directory=Path(job.checkpoint_dir) / config.job_id,
        resume=checkpoint is not None,
    )


@dataclass(frozen=True, kw_only=True)
class RehearsedJob:
    """A captured job, compared with the eager model where that can be run here."""

    captured: Captured
    columns: Columns
    report: CheckReport | None
    """None if the model is too large to be run here, or has no weights here."""


def rehearse(job: Job, training: SampleSource, config: JobConfig) -> RehearsedJob:
    """Capture `job` for batches of `training`, which gives the columns it needs from now on, and compare graph and eager model.

    Raises RoostError for a job whose model or loss cannot be captured, or does not survive it unchanged.
    """
    columns = arrange(training.example(config.micro_batch_size), label_names=job.label_names, has_loss=job.loss is not None)
    if columns.names is not None:
        training.select(columns.names)
    loss = own_loss if job.loss is None else job.loss
    captured = capture(
        job.model,
        loss,
        columns.inputs,
        columns.labels,
        layout=columns.layout,
        dynamic=columns.varying,
        metric=job.metric,
        name=job.name,
    )
    if not _can_run_here(captured):
        return RehearsedJob(captured=captured, columns=columns, report=None)
    try:
        report = check_against_eager(job.model, loss, captured, columns.inputs, columns.labels, layout=columns.layout, seed=job.seed)
        smaller = [size for size in micro_batch_sizes(config) if size < len(columns.batch[0])]
        check_batch_sizes(job.model, loss, captured, columns.batch, smaller, layout=columns.layout, seed=job.seed)
        if config.precision != "float32":
            check_precision(captured, columns.batch, config.precision, computing(config.precision, torch.device("cpu")), seed=job.seed)
    # What a model raises on real values that it did not raise when it was traced, such as a label that is out of range.
    except (RuntimeError, TypeError, ValueError, ArithmeticError, AssertionError, LookupError) as error:
        raise InvalidDataError(
            f"model and loss fail on the first {len(columns.batch[0])} training samples: {type(error).__name__}: {error}",
            hint="Call loss(model(inputs), labels) on these samples in plain PyTorch; look for labels that are out of range.",
        ) from error
    return RehearsedJob(captured=captured, columns=columns, report=report)


def micro_batch_sizes(config: JobConfig) -> tuple[int, ...]:
    """Return the sizes that an epoch's training micro-batches have, ascending; one cluster, or several, give the same ones."""
    batches = {min(config.batch_size, config.samples), config.samples % config.batch_size} - {0}
    sizes = {size for batch in batches for size in (min(batch, config.micro_batch_size), batch % config.micro_batch_size)}
    return tuple(sorted(sizes - {0}))


def _can_run_here(captured: Captured) -> bool:
    """Return whether model, copies and gradients fit in this machine's memory; False for a model without weights."""
    if any(tensor.is_meta for tensor in captured.tensors.values()):
        return False
    # The model itself and its captured copy are in memory already; running both adds another copy and two sets of gradients.
    further = 3 * sum(tensor.nbytes for tensor in captured.tensors.values())
    fits = further <= psutil.virtual_memory().available
    if not fits:
        logger.warning("check_skipped model=%s reason='comparing graph and eager model needs %d more bytes'", captured.graph.name, further)
    return fits


def measure_costs(rehearsed: RehearsedJob, config: JobConfig, *, rest_s: float = 0.0) -> ModelProfile:
    """Return what the job's model costs: measured, or estimated if it cannot be run here. `rest_s` is slept before each piece of work."""
    keep_freed_memory()
    speed = measure(threads=1, device="cpu", budget_s=0.5, precision=config.precision)
    here = partial(computing, config.precision, torch.device("cpu"))
    captured, columns = rehearsed.captured, rehearsed.columns
    if rehearsed.report is None:
        logger.info("costs_estimated model=%s reason='not run on this machine'", captured.graph.name)
        return estimate(
            captured,
            columns.inputs,
            columns.labels,
            reference_flop_per_s=speed.flop_per_s,
            bytes_per_s=update_bytes_per_s(threads=1),
            computing=here,
        )
    return profile(
        captured,
        columns.inputs,
        columns.labels,
        reference_flop_per_s=speed.flop_per_s,
        rest_s=rest_s,
        make_optimizer=lambda parameters: build_optimizer(parameters, config.optimizer),
        computing=here,
    )


def _config(job: Job, samples: int, validation_samples: int, checkpoint: Checkpoint | None) -> JobConfig:
    start_epoch = checkpoint.manifest.contents.epoch if checkpoint is not None else 0
    start_updates = checkpoint.manifest.contents.updates if checkpoint is not None else 0
    if checkpoint is not None and start_epoch >= job.epochs:
        raise InvalidConfigError(f"the checkpoint has done {start_epoch} epochs, the job asks for {job.epochs}", hint="Raise epochs.")
    if checkpoint is not None and (saved := checkpoint.manifest.contents.config.optimizer.name) != job.optimizer:
        raise CheckpointMismatchError(f"the checkpoint has the state of {saved}, the job asks for {job.optimizer}")
    require(samples > 0, "the training data is empty")
    micro_batch_size = job.batch_size if job.micro_batch_size is None else job.micro_batch_size
    require(micro_batch_size <= job.batch_size, f"micro_batch_size {micro_batch_size} is larger than batch_size {job.batch_size}")
    return JobConfig(
        job_id=new_job_id(job.name),
        optimizer=_named(job.optimizer, job.optimizer_args),
        schedule=_named(job.schedule, job.schedule_args) if job.schedule is not None else None,
        batch_size=min(job.batch_size, samples),
        micro_batch_size=min(micro_batch_size, samples),
        epochs=job.epochs,
        averaging_interval=job.averaging_interval,
        averaging_compression=_choice(TensorCodec, job.averaging_compression, "averaging_compression"),
        activation_compression=_choice(TensorCodec, job.activation_compression, "activation_compression"),
        outer_optimizer=_choice(OuterOptimizer, job.outer_optimizer, "outer_optimizer"),
        outer_learning_rate=job.outer_learning_rate,
        outer_momentum=job.outer_momentum,
        robust_averaging=_choice(RobustMethod, job.robust_averaging, "robust_averaging"),
        sync_interval=job.sync_interval,
        samples=samples,
        validation_samples=validation_samples,
        seed=job.seed,
        min_clusters=job.min_clusters,
        max_clusters=job.max_clusters,
        max_in_flight=job.max_in_flight,
        start_epoch=start_epoch,
        start_updates=start_updates,
        mode=job.mode,
        correction=_correction(job, checkpoint),
        clip_norm=float(job.clip_norm),
        precision=job.precision,
    )


def _correction(job: Job, checkpoint: Checkpoint | None) -> str:
    """Return the job's correction; one that is to be chosen stays what it was in the run that is resumed: the state is that one's."""
    if checkpoint is None or job.correction != AUTO_CORRECTION:
        return job.correction
    return checkpoint.manifest.contents.config.correction


def _choice(kind: type[Choice], value: str, what: str) -> Choice:
    """Return the member of `kind` called `value`. Raises InvalidConfigError."""
    names = [member.value for member in kind]
    require(value in names, f"{what} {value!r} is not one of {names}")
    return kind(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _named(name: str, arguments: Mapping[str, ArgumentValue | list[float]]) -> NamedArguments:
    items = tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in arguments.items())
    return NamedArguments(name=name, arguments=items)


def _weights(job: Job, captured: Captured, checkpoint: Checkpoint | None) -> TensorSource:
    """Return where the nodes' initial weights come from: the checkpoint that is resumed, the job's `weights`, or the model."""
    if checkpoint is None:
        return source_of(
            job.model,
            captured.tensors,
            checkpoint=None if job.weights is None else Path(job.weights),
            cast=job.weights_cast,
            strict=job.weights_strict,
        )
    kept = {name: tensor for name, tensor in captured.tensors.items() if name not in captured.extras}
    checkpoint.check_model(spec_of(name, tensor) for name, tensor in kept.items())
    return MemoryTensors({**captured.tensors, **{name: checkpoint.model[name] for name in kept}})
