"""Which correction a job gets whose correction is "auto": what the measurements in docs/staleness.md say is best for its plan."""

from __future__ import annotations

from roost.config import AUTO_CORRECTION, JobConfig
from roost.types import Plan

MEASURED_OPTIMIZERS = frozenset({"Adam", "AdamW"})
"""Those that 'nesterov' was measured with."""
MEASURED_ARGUMENTS = frozenset({"lr", "weight_decay", "eps", "foreach", "betas"})
"""Arguments that 'nesterov' keeps; whoever sets others has chosen an optimizer for its own sake."""
USUAL_BETAS = (0.9, 0.999)
"""torch's own, which 'nesterov' replaces the first of."""


def chosen_correction(config: JobConfig, plan: Plan) -> str:
    """Return the job's correction; for "auto" the one to use with `plan`: 'nesterov' where gradients can be stale and it can work."""
    if config.correction != AUTO_CORRECTION:
        return config.correction
    optimizer = config.optimizer
    given = optimizer.as_dict()
    betas = given.get("betas", USUAL_BETAS)
    usual_momentum = isinstance(betas, tuple) and betas[:1] == USUAL_BETAS[:1]
    measured = optimizer.name in MEASURED_OPTIMIZERS and given.keys() <= MEASURED_ARGUMENTS and usual_momentum
    stale = config.mode == "async" and any(stage.versions > 1 for stage in plan.stages)
    return "nesterov" if stale and measured and not config.moves_momentum else "none"
