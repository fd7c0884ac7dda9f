"""Basis rotation: Adam in the eigenbasis of the gradients' covariance, where a delayed step still points the right way."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from roost.config import NamedArguments
from roost.errors import InvalidConfigError
from roost.pipeline.corrections import Correction

COVARIANCE_DECAY = 0.99
REFRESH_INTERVAL = 10
"""Updates between two steps of the power iteration that follows the eigenbasis, SOAP's default (arXiv 2409.11321)."""
ROTATED = ("Adam", "AdamW", "NAdam", "RAdam")
"""Optimizers with a first moment, which turns with the basis, and a second one per coordinate."""


class Rotation(Correction):
    """Runs the optimizer in rotated coordinates (basis rotation, arXiv 2602.03515, with one side rotated).

    Delay hurts Adam most where the axes of the loss are not those of the parameters: its steps along them oscillate. For a matrix
    W (m, n) with gradient G the basis Q holds the eigenvectors of the decayed mean of G Gt (of Gt G if n < m), followed by one
    step of the power iteration and QR every REFRESH_INTERVAL updates; Adam sees Qt G and Qt W, and what it changes is turned
    back. Convolutions count as (out, rest), 3-dimensional parameters as a stack of matrices; vectors are left as they are. Keeps
    two square matrices of the smaller side per matrix: never more than twice the parameter.
    """

    state_keys = frozenset({"basis", "covariance"})

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Tensor]] = {}
        self._original: dict[str, Tensor] = {}

    def arguments(self, given: NamedArguments) -> NamedArguments:
        if given.name not in ROTATED or given.as_dict().get("amsgrad"):
            raise InvalidConfigError(f"correction 'rotation' works with {', '.join(ROTATED)} without amsgrad, not with {given.name}")
        return given

    def before_step(self, parameters: Mapping[str, Parameter], optimizer: Optimizer) -> None:
        for name, parameter in parameters.items():
            if parameter.grad is None or parameter.dim() < 2 or 1 in _matrices(parameter).shape[-2:]:
                continue
            gradient = _matrices(parameter.grad)
            basis = self._follow(name, gradient, optimizer.state.get(parameter, {}))
            self._original[name] = parameter.detach().clone()
            parameter.grad = _turned(gradient, basis.mT).reshape(parameter.shape)
            parameter.data.copy_(_turned(_matrices(self._original[name]), basis.mT).reshape(parameter.shape))

    def after_step(self, parameters: Mapping[str, Parameter], optimizer: Optimizer) -> None:
        for name, original in self._original.items():
            basis, weights = self._kept[name]["basis"], _matrices(original)
            # Only the change is turned back: turning the weights there and back would round them at every update.
            changed = _matrices(parameters[name].detach()) - _turned(weights, basis.mT)
            parameters[name].data.copy_((weights + _turned(changed, basis)).reshape(original.shape))
        self._original.clear()

    def state(self, name: str) -> dict[str, Tensor]:
        return dict(self._kept.get(name, {}))

    def load(self, name: str, key: str, tensor: Tensor) -> None:
        self._kept.setdefault(name, {})[key] = tensor

    def _follow(self, name: str, gradient: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Take `gradient` into the covariance; return the basis, with the first moment in `state` turned to it if it changed."""
        outer = gradient @ gradient.mT if gradient.shape[-2] <= gradient.shape[-1] else gradient.mT @ gradient
        kept = self._kept.get(name)
        if kept is None:
            basis = torch.linalg.eigh(_computable(outer)).eigenvectors.to(outer)
            self._kept[name] = {"basis": basis, "covariance": outer}
            self._turn_moment(state, basis.mT)
            return basis
        covariance, basis = kept["covariance"], kept["basis"]
        covariance.lerp_(outer, 1 - COVARIANCE_DECAY)
        # The optimizer's own count is saved with its state, so a resumed stage refreshes when this one would have.
        if "step" in state and (int(state["step"]) + 1) % REFRESH_INTERVAL == 0:
            kept["basis"] = torch.linalg.qr(_computable(covariance @ basis)).Q.to(basis)
            self._turn_moment(state, kept["basis"].mT @ basis)
        return kept["basis"]

    @staticmethod
    def _turn_moment(state: Mapping[str, Tensor], by: Tensor) -> None:
        # A stage that goes on from a checkpoint made without rotation has a moment before it has a basis.
        moment = state.get("exp_avg")
        if moment is not None:
            moment.copy_(_turned(_matrices(moment), by).reshape(moment.shape))


def _computable(square: Tensor) -> Tensor:
    # torch decomposes no half-precision matrices, and none at all on Apple's GPUs.
    return square.float().cpu() if square.device.type == "mps" else square.float()


def _matrices(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() in (2, 3) else tensor.reshape(tensor.shape[0], -1)


def _turned(matrices: Tensor, by: Tensor) -> Tensor:
    """Return `by` applied to the smaller side of `matrices`, the left one if they are square."""
    return by @ matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices @ by.mT
