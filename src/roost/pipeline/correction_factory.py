"""Corrections by the name a job gives."""

from __future__ import annotations

from collections.abc import Callable

from roost.config import AUTO_CORRECTION, JobConfig
from roost.errors import InvalidConfigError
from roost.pipeline.corrections import (
    Compensation,
    Correction,
    JoinedCorrections,
    Nesterov,
    Prediction,
    RateByDelay,
    RateWarmup,
    total_steps,
)
from roost.pipeline.rotation import Rotation

# Joined corrections are applied in this order: rotation last, so that the others see weights in their own coordinates.
_KINDS: dict[str, Callable[[JobConfig], Correction]] = {
    "none": lambda config: Correction(),
    "rate_by_delay": lambda config: RateByDelay(),
    "rate_warmup": lambda config: RateWarmup(total_steps(config)),
    "nesterov": lambda config: Nesterov(),
    "prediction": lambda config: Prediction(),
    "compensation": lambda config: Compensation(),
    "rotation": lambda config: Rotation(),
}


def make_correction(config: JobConfig) -> Correction:
    """Return the job's correction, new. Raises InvalidConfigError if it cannot work with the job's optimizer or schedule."""
    if config.correction == AUTO_CORRECTION:
        raise InvalidConfigError("correction 'auto' stands for one that is chosen with the plan, which has not been made")
    names = config.correction.split("+")
    parts = [_KINDS[name](config) for name in _KINDS if name in names]
    correction = parts[0] if len(parts) == 1 else JoinedCorrections(parts)
    correction.arguments(config.optimizer)
    if "nesterov" in names and config.moves_momentum:
        raise InvalidConfigError("correction 'nesterov' sets the momentum: give the schedule cycle_momentum=False")
    return correction
