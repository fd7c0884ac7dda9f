"""The optimizer and learning-rate schedule of one stage, built by name from torch.optim."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from roost.config import AUTO_CORRECTION, OPTIMIZERS, SCHEDULES, JobConfig, NamedArguments
from roost.errors import CheckpointMismatchError, InvalidConfigError
from roost.pipeline.correction_factory import make_correction

logger = logging.getLogger(__name__)

_ROUNDING = 1e-9
"""Updates / share is a whole number in theory; this keeps its rounding from losing a schedule step."""

_TORCH_ERRORS = (TypeError, ValueError, RuntimeError, ArithmeticError, KeyError)
"""What torch.optim raises for arguments it does not take."""

CLIP_EPSILON = 1e-6
"""Added to the norm that gradients are divided by, as torch.nn.utils.clip_grad_norm_ does."""


class StageOptimizer:
    """Updates the trainable parameters of a stage and steps their schedule.

    The schedule counts data, not a stage's own updates: after u own updates it has taken
    start_updates + floor(u / share) steps, so with one cluster (share 1) this is optimizer.step(); scheduler.step().
    """

    def __init__(self, parameters: Mapping[str, Parameter], config: JobConfig, share: float, *, parameter_share: float = 1.0) -> None:
        """Build for `parameters` by name, which are `parameter_share` of the model's trainable elements.

        Raises InvalidConfigError with torch's own message for a bad argument.
        """
        if not 0 < share <= 1:
            raise InvalidConfigError(f"a cluster's share of the data must be in (0, 1], not {share}")
        self.updates = 0
        """Own updates in this run."""
        self.schedule_steps = 0
        """Schedule steps taken, those of the run that was resumed included."""
        self._parameters = dict(parameters)
        self._share = share
        self._base_updates = 0  # own updates, and schedule steps, when the share was set
        self._base_steps = config.start_updates
        self._config = config
        self.correction = make_correction(config)
        """What this stage does against staleness."""
        self._arguments = self.correction.arguments(config.optimizer)
        # Where no gradient stands out, a stage's part of the whole norm is the root of its share of the elements.
        self._clip_norm = config.clip_norm * math.sqrt(parameter_share)
        self._optimizer = build_optimizer(list(self._parameters.values()), self._arguments)
        self._schedule = None if config.schedule is None else _build_schedule(self._optimizer, config.schedule)
        with warnings.catch_warnings():
            # Replaying the schedule of a resumed run steps it before the first optimizer step, which torch warns of.
            warnings.simplefilter("ignore", UserWarning)
            self._step_schedule(config.start_updates)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self, gradients: Mapping[str, Tensor], delay: float = 0.0, norm: float | None = None) -> None:
        """Update the parameters with `gradients` (by name; a parameter without one is skipped), then step the schedule.

        `gradients` must share no memory with each other, and are this object's now: clipping changes them in place. `delay` is the
        mean delay of the batch's micro-batches, in updates. Gradients are clipped by `norm`, that of the whole model's, or where it
        is None to this stage's part of the job's clip_norm.
        """
        self._clip(gradients, norm)
        for name, gradient in gradients.items():
            self._parameters[name].grad = gradient
        changing = {name: self._parameters[name] for name in gradients}
        self.correction.before_step(changing, self._optimizer)
        with self._scaled_rate(self.correction.rate_factor(delay, self.schedule_steps)):
            self._optimizer.step()
        self.correction.after_step(changing, self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        done = self.updates - self._base_updates
        self._step_schedule(self._base_steps + math.floor(done / self._share + _ROUNDING))

    def set_share(self, share: float) -> None:
        """From now on this cluster consumes that fraction of the data."""
        self._share, self._base_updates, self._base_steps = share, self.updates, self.schedule_steps

    def state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the state of optimizer and correction for the parameters `names` as 'PARAMETER/KEY' tensors; they share its storage."""
        return {
            f"{name}/{key}": value.detach()
            for name in names
            if name in self._parameters
            for key, value in (
                *self._optimizer.state.get(self._parameters[name], {}).items(),
                *self.correction.state(name).items(),
            )
            if isinstance(value, Tensor)
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the optimizer state from what state() returned; tensors are copied.

        Raises CheckpointMismatchError if the state is not that of this optimizer and these parameters.
        """
        known = _state_keys(self._arguments)
        for full_name, tensor in tensors.items():
            name, _, key = full_name.rpartition("/")
            parameter = self._parameters.get(name)
            if parameter is None:
                raise CheckpointMismatchError(f"optimizer state {full_name!r} belongs to no trainable parameter of this stage")
            if key in self.correction.state_keys:
                self.correction.load(name, key, tensor.detach().clone().to(parameter.device))
                continue
            if key not in known:
                raise CheckpointMismatchError(f"optimizer state {full_name!r} is not of {self._arguments.name}: it keeps {sorted(known)}")
            if tensor.dim() > 0 and tensor.shape != parameter.shape:
                raise CheckpointMismatchError(
                    f"optimizer state {full_name!r} has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}"
                )
            self._optimizer.state[parameter][key] = tensor.detach().clone().to(self._state_device(key, parameter))
        for name in {full_name.rpartition("/")[0] for full_name in tensors}:
            missing = known - self._optimizer.state[self._parameters[name]].keys()
            if missing:
                raise CheckpointMismatchError(
                    f"the optimizer state of {name!r} lacks {sorted(missing)}, which {self._arguments.name} keeps",
                    hint="Resume with the optimizer and the correction that the checkpoint was made with.",
                )

    def _clip(self, gradients: Mapping[str, Tensor], norm: float | None) -> None:
        if self._config.clip_norm == 0 or not gradients:
            return
        if norm is None:
            own = get_total_norm(gradients.values())
            factor: Tensor | float = torch.clamp(self._clip_norm / (own + CLIP_EPSILON), max=1.0)
        else:
            factor = min(self._config.clip_norm / (norm + CLIP_EPSILON), 1.0)
        for gradient in gradients.values():
            gradient.mul_(factor)

    @contextmanager
    def _scaled_rate(self, factor: float) -> Iterator[None]:
        if factor == 1.0:
            yield
            return
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        yield
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _state_device(self, key: str, parameter: Parameter) -> torch.device:
        # torch keeps step counts in host memory unless the optimizer reads them on the device.
        defaults = self._optimizer.defaults
        on_device = key != "step" or defaults.get("capturable") or defaults.get("fused")
        return parameter.device if on_device else torch.device("cpu")

    def _step_schedule(self, target: int) -> None:
        if self._schedule is None:
            self.schedule_steps = target
            return
        if isinstance(self._schedule, OneCycleLR):
            # Torch raises beyond the last step, but a cluster that turns out faster than its share may get there early.
            target = min(target, self._schedule.total_steps)
        while self.schedule_steps < target:
            self._schedule.step()
            self.schedule_steps += 1


def check_optimizer(config: JobConfig) -> None:
    """Raise InvalidConfigError, with torch's own message, if optimizer or schedule cannot be built and stepped."""
    parameter = Parameter(torch.zeros(1))
    arguments = config.optimizer if config.correction == AUTO_CORRECTION else make_correction(config).arguments(config.optimizer)
    optimizer = build_optimizer([parameter], arguments)
    schedule = None if config.schedule is None else _build_schedule(optimizer, config.schedule)
    parameter.grad = torch.zeros(1)
    _call(config.optimizer, optimizer.step)
    if config.schedule is not None and schedule is not None:
        _call(config.schedule, schedule.step)


def _state_keys(arguments: NamedArguments) -> frozenset[str]:
    """Return the keys of the state the optimizer keeps per parameter."""
    parameter = Parameter(torch.zeros(1))
    optimizer = build_optimizer([parameter], arguments)
    parameter.grad = torch.zeros(1)
    optimizer.step()
    return frozenset(optimizer.state[parameter])


def build_optimizer(parameters: list[Parameter], arguments: NamedArguments) -> Optimizer:
    """Return the optimizer of torch.optim that `arguments` name. Raises InvalidConfigError with torch's own message."""
    if arguments.name not in OPTIMIZERS:
        raise InvalidConfigError(f"optimizer {arguments.name!r} is not one of {sorted(OPTIMIZERS)}")
    if arguments.as_dict().get("differentiable"):
        raise InvalidConfigError(f"optimizer {arguments.name}: a stage cannot differentiate through its updates (differentiable=True)")
    optimizer: Optimizer = _call(arguments, getattr(torch.optim, arguments.name), parameters, **arguments.as_dict())
    return optimizer


def _build_schedule(optimizer: Optimizer, arguments: NamedArguments) -> LRScheduler:
    if arguments.name not in SCHEDULES:
        raise InvalidConfigError(f"schedule {arguments.name!r} is not one of {sorted(SCHEDULES)}")
    schedule: LRScheduler = _call(arguments, getattr(lr_scheduler, arguments.name), optimizer, **arguments.as_dict())
    return schedule


def _call(arguments: NamedArguments, function: Any, *positional: Any, **named: Any) -> Any:
    try:
        return function(*positional, **named)
    except _TORCH_ERRORS as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in arguments.arguments)
        raise InvalidConfigError(f"{arguments.name}({shown}): {error}") from error
