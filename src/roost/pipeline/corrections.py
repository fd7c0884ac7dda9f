"""What a stage does against staleness, behind one interface: hooks around its forward, backward and update.

The delay of a micro-batch is measured: the updates of this stage between its forward and its own update. With delay 0 (the
last stage, and mode "sync") rate_by_delay, rate_warmup, prediction and compensation change nothing; nesterov and rotation change
the optimizer itself, whatever the delay. All are deterministic: the same order of computations gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from roost.config import JobConfig, NamedArguments
from roost.errors import InvalidConfigError

MOMENTUM = 0.99
"""First moment's decay of the Nesterov method for asynchronous pipelines (arXiv 2505.01099, section 5)."""
WARMUP_SHARE = 0.25
"""Share of a job's updates during which rate_warmup works: the first phase of the schedule, as in PipeMare (section 3.1)."""
COMPENSATION = 2.0
MEAN_SQUARE_DECAY = 0.95
"""Lambda_0 and the decay m of the adaptive delay compensation (arXiv 1609.08326, section 6)."""
TINY = 1e-7
"""Keeps a division by a root mean square finite; the paper's constant."""


class Correction:
    """A correction of staleness for one stage; this one does nothing. Others override the hooks that they need."""

    predicts = False
    """True: forwards run on the weights that `predicted` returns."""
    compensates = False
    """True: `compensated` changes gradients of micro-batches whose weights have changed since their forward."""
    state_keys: frozenset[str] = frozenset()
    """Tensors kept per parameter, which checkpoints hold beside the optimizer's own state."""

    def arguments(self, given: NamedArguments) -> NamedArguments:
        """Return the optimizer to build instead of the job's. Raises InvalidConfigError if the correction cannot work with it."""
        return given

    def predicted(self, weights: Mapping[str, Tensor], delay: float) -> dict[str, Tensor]:
        """Return new tensors for those of `weights` that `delay` updates would change; {} to use the current ones."""
        return {}

    def compensated(self, name: str, gradient: Tensor, moved: Tensor, fraction: float) -> Tensor:
        """Return the gradient to use for parameter `name`, which has `moved` since the forward.

        `gradient` is that of the micro-batch's mean loss times `fraction`, its share of the batch.
        """
        return gradient

    def rate_factor(self, delay: float, steps: int) -> float:
        """Return what the learning rate of this update is multiplied by: mean delay of its micro-batches, schedule steps so far."""
        return 1.0

    def before_step(self, parameters: Mapping[str, Parameter], optimizer: Optimizer) -> None:
        """Prepare the optimizer's step on `parameters`, which have a gradient; parameters and gradients may change in place."""

    def after_step(self, parameters: Mapping[str, Parameter], optimizer: Optimizer) -> None:
        """Finish what before_step began."""

    def state(self, name: str) -> dict[str, Tensor]:
        """Return what is kept for parameter `name`, by key; it shares storage."""
        return {}

    def load(self, name: str, key: str, tensor: Tensor) -> None:
        """Set what is kept for parameter `name`; the tensor becomes the correction's own."""


class RateByDelay(Correction):
    """Learning rate over the delay: staleness-aware asynchronous SGD (arXiv 1511.05950, equation 6). Keeps nothing."""

    def arguments(self, given: NamedArguments) -> NamedArguments:
        return _with_rate(given, "rate_by_delay")

    def rate_factor(self, delay: float, steps: int) -> float:
        return 1.0 / max(1.0, delay)


class RateWarmup(Correction):
    """Learning rate over delay^(1 - k/K) until schedule step K: rescheduling, T1 of PipeMare (arXiv 1910.05124, section 3.1).

    K is WARMUP_SHARE of the job's batches. Keeps nothing.
    """

    def __init__(self, total_steps: int) -> None:
        """`total_steps` are the schedule steps of the whole job."""
        self._warmup = max(1.0, WARMUP_SHARE * total_steps)

    def arguments(self, given: NamedArguments) -> NamedArguments:
        return _with_rate(given, "rate_warmup")

    def rate_factor(self, delay: float, steps: int) -> float:
        return float(max(1.0, delay) ** -(1.0 - min(steps / self._warmup, 1.0)))


class Nesterov(Correction):
    """Nesterov's method with a slow first moment, whose look-ahead acts as a correction of the delay (arXiv 2505.01099).

    Adam and AdamW become NAdam with beta1 = MOMENTUM (AdamW's decoupled weight decay is kept), SGD gets momentum MOMENTUM with
    nesterov, its learning rate multiplied so that the sum of a gradient's steps stays what the job asks for. Keeps no more than
    those optimizers keep.
    """

    def __init__(self) -> None:
        self._factor = 1.0

    def arguments(self, given: NamedArguments) -> NamedArguments:
        asked = given.as_dict()
        if given.name == "SGD":
            if asked.get("dampening"):
                raise InvalidConfigError("correction 'nesterov' needs SGD without dampening")
            self._factor = (1.0 - MOMENTUM) / (1.0 - min(_number(asked.get("momentum"), 0.0), MOMENTUM))
            return _arguments("SGD", {**asked, "momentum": MOMENTUM, "nesterov": True})
        if given.name not in ("Adam", "AdamW", "NAdam") or asked.get("amsgrad"):
            raise InvalidConfigError(f"correction 'nesterov' works with SGD, Adam, AdamW and NAdam, without amsgrad, not with {given.name}")
        betas = asked.get("betas")
        second = float(betas[1]) if isinstance(betas, tuple) and len(betas) == 2 else 0.999
        kept = {key: value for key, value in asked.items() if key not in ("amsgrad", "fused", "betas")}
        if given.name == "AdamW":
            kept = {"weight_decay": 0.01, **kept, "decoupled_weight_decay": True}
        return _arguments("NAdam", {"lr": 0.001, **kept, "betas": (MOMENTUM, second)})

    def rate_factor(self, delay: float, steps: int) -> float:
        return self._factor


class Prediction(Correction):
    """Forwards run on the weights expected at the time of their update: w + delay * (what the last update changed).

    SpecTrain (arXiv 1809.02839, equation 4) and XPipe (arXiv 1911.04610) predict from SGD's and Adam's first moment; what the last
    update changed is that, and holds for every optimizer, its weight decay and its learning rate. The delay expected is the one
    last measured at this stage. Keeps one tensor per parameter, and one more weight version per update that is still in flight.
    """

    predicts = True
    state_keys = frozenset({"displacement"})

    def __init__(self) -> None:
        self._displacement: dict[str, Tensor] = {}

    def predicted(self, weights: Mapping[str, Tensor], delay: float) -> dict[str, Tensor]:
        if delay == 0:
            return {}
        return {name: torch.add(weights[name], moved, alpha=delay) for name, moved in self._displacement.items() if name in weights}

    def before_step(self, parameters: Mapping[str, Parameter], optimizer: Optimizer) -> None:
        for name, parameter in parameters.items():
            if name in self._displacement:
                self._displacement[name].copy_(parameter.detach())
            else:
                self._displacement[name] = parameter.detach().clone()

    def after_step(self, parameters: Mapping[str, Parameter], optimizer: Optimizer) -> None:
        for name, parameter in parameters.items():
            torch.sub(parameter.detach(), self._displacement[name], out=self._displacement[name])

    def state(self, name: str) -> dict[str, Tensor]:
        return {"displacement": self._displacement[name]} if name in self._displacement else {}

    def load(self, name: str, key: str, tensor: Tensor) -> None:
        self._displacement[name] = tensor


class Compensation(Correction):
    """First-order Taylor term of the gradient, with the diagonal g*g for the Hessian: delay compensation (arXiv 1609.08326).

    g + lambda * g * g * (w_now - w_forward), with the paper's adaptive lambda = COMPENSATION / root mean square of g (DC-ASGD-a).
    Keeps one tensor per parameter.
    """

    compensates = True
    state_keys = frozenset({"mean_square"})

    def __init__(self) -> None:
        self._mean_square: dict[str, Tensor] = {}

    def compensated(self, name: str, gradient: Tensor, moved: Tensor, fraction: float) -> Tensor:
        square = gradient * gradient / fraction**2
        mean = self._mean_square.setdefault(name, square.clone())
        mean.lerp_(square, 1 - MEAN_SQUARE_DECAY)
        return gradient + fraction * COMPENSATION * square.div_((mean + TINY).sqrt_()).mul_(moved)

    def state(self, name: str) -> dict[str, Tensor]:
        return {"mean_square": self._mean_square[name]} if name in self._mean_square else {}

    def load(self, name: str, key: str, tensor: Tensor) -> None:
        self._mean_square[name] = tensor


class JoinedCorrections(Correction):
    """Several corrections at once; in an update the last one is the innermost."""

    def __init__(self, parts: Sequence[Correction]) -> None:
        self._parts = tuple(parts)
        self.predicts = any(part.predicts for part in parts)
        self.compensates = any(part.compensates for part in parts)
        self.state_keys = frozenset(key for part in parts for key in part.state_keys)

    def arguments(self, given: NamedArguments) -> NamedArguments:
        for part in self._parts:
            given = part.arguments(given)
        return given

    def predicted(self, weights: Mapping[str, Tensor], delay: float) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part in self._parts:
            found.update(part.predicted({**weights, **found}, delay))
        return found

    def compensated(self, name: str, gradient: Tensor, moved: Tensor, fraction: float) -> Tensor:
        for part in self._parts:
            gradient = part.compensated(name, gradient, moved, fraction)
        return gradient

    def rate_factor(self, delay: float, steps: int) -> float:
        factor = 1.0
        for part in self._parts:
            factor *= part.rate_factor(delay, steps)
        return factor

    def before_step(self, parameters: Mapping[str, Parameter], optimizer: Optimizer) -> None:
        for part in self._parts:
            part.before_step(parameters, optimizer)

    def after_step(self, parameters: Mapping[str, Parameter], optimizer: Optimizer) -> None:
        for part in reversed(self._parts):
            part.after_step(parameters, optimizer)

    def state(self, name: str) -> dict[str, Tensor]:
        return {key: tensor for part in self._parts for key, tensor in part.state(name).items()}

    def load(self, name: str, key: str, tensor: Tensor) -> None:
        for part in self._parts:
            if key in part.state_keys:
                part.load(name, key, tensor)


def total_steps(config: JobConfig) -> int:
    """Return the schedule steps of the whole job: one per batch, over all epochs and clusters."""
    return config.epochs * -(-config.samples // config.batch_size)


def _with_rate(given: NamedArguments, correction: str) -> NamedArguments:
    if given.name in ("Rprop", "ASGD"):
        raise InvalidConfigError(f"correction {correction!r} scales the learning rate, which {given.name} reads once only")
    return given


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


def _arguments(name: str, values: Mapping[str, object]) -> NamedArguments:
    return NamedArguments(name=name, arguments=tuple(values.items()))  # type: ignore[arg-type]


def mean_delay(delays: Iterable[int]) -> float:
    """Return the mean of the micro-batches' delays, 0.0 for none."""
    found = list(delays)
    return sum(found) / len(found) if found else 0.0
