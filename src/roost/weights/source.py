"""Where nodes get the initial tensors of a model: one interface, whatever holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from roost.errors import MissingWeightsError
from roost.types import TensorSpec
from roost.weights.checkpoint_tensors import open_checkpoint
from roost.weights.deferred import Origin, check_unchanged, origin_of


class TensorSource(Protocol):
    """The initial tensors of one model, by name. Every method may be called from several threads at once."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        ...

    def spec(self, name: str) -> TensorSpec:
        """Return dtype and shape of one tensor without making it. Raises MissingWeightsError for an unknown name."""
        ...

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors named, contiguous on the CPU, made or read now. Raises MissingWeightsError for an unknown name.

        Uses the memory of these tensors and of the largest single one. Do not change them in place.
        """
        ...


class MemoryTensors:
    """Tensors that are in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple(self._tensors)

    def spec(self, name: str) -> TensorSpec:
        """Return dtype and shape of one tensor. Raises MissingWeightsError for an unknown name."""
        return spec_of_tensor(name, self._tensors[_known(name, self._tensors)])

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors named. Raises MissingWeightsError for an unknown name."""
        return {name: self._tensors[_known(name, self._tensors)].detach().cpu().contiguous() for name in names}


class RecordedTensors:
    """Tensors of a model that was built inside roost.deferred_init(): each is made when it is asked for."""

    def __init__(self, origins: Mapping[str, Origin]) -> None:
        self._origins = origins

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple(self._origins)

    def spec(self, name: str) -> TensorSpec:
        """Return dtype and shape of one tensor. Raises MissingWeightsError for an unknown name."""
        ref = self._origins[_known(name, self._origins)].ref
        return TensorSpec(name=name, dtype=str(ref.dtype).removeprefix("torch."), shape=ref.shape)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors named, with the bits of an eager build. Raises MissingWeightsError for an unknown name."""
        origins = {name: self._origins[_known(name, self._origins)] for name in names}
        replays = {id(origin.replay): origin.replay for origin in origins.values()}
        made: dict[str, Tensor] = {}
        for key, replay in replays.items():
            of_replay = [name for name, origin in origins.items() if id(origin.replay) == key]
            made.update(zip(of_replay, replay.tensors([origins[name].ref for name in of_replay]), strict=True))
        return {name: _alone(made.pop(name)) for name in list(origins)}


class JoinedTensors:
    """Several sources as one."""

    def __init__(self, homes: Mapping[str, TensorSource]) -> None:
        self._homes = homes

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple(self._homes)

    def spec(self, name: str) -> TensorSpec:
        """Return dtype and shape of one tensor. Raises MissingWeightsError for an unknown name."""
        return self._homes[_known(name, self._homes)].spec(name)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors named. Raises MissingWeightsError for an unknown name."""
        homes = {name: self._homes[_known(name, self._homes)] for name in names}
        made: dict[str, Tensor] = {}
        for source in {id(home): home for home in homes.values()}.values():
            made.update(source.read([name for name, home in homes.items() if home is source]))
        return {name: made[name] for name in homes}


def source_of(
    model: nn.Module, tensors: Mapping[str, Tensor], *, checkpoint: Path | None = None, cast: bool = False, strict: bool = True
) -> TensorSource:
    """Return where the initial values of `tensors` come from: the model's tensors by their first name, real or on meta.

    With `checkpoint`, every tensor of the model's state_dict is read from it, the others (non-persistent buffers, tensors of the
    loss) as without one: from memory, or as recorded by roost.deferred_init(). `cast` and `strict` are those of open_checkpoint.
    Raises MissingWeightsError for a tensor on meta that nothing describes, and CheckpointError for a checkpoint that does not fit.
    """
    kept = set(model.state_dict().keys()) if checkpoint is not None else set()
    stored = {name: spec_of_tensor(name, tensor) for name, tensor in tensors.items() if name in kept}
    rest = {name: tensor for name, tensor in tensors.items() if name not in stored}
    if checkpoint is None:
        check_unchanged(model)
    sources: list[TensorSource] = []
    if stored and checkpoint is not None:
        sources.append(open_checkpoint(checkpoint, stored, aliases=_aliases(model, tensors), cast=cast, strict=strict))
    real = {name: tensor for name, tensor in rest.items() if tensor.device.type != "meta"}
    if real:
        sources.append(MemoryTensors(real))
    recorded = {name: _origin(name, tensor) for name, tensor in rest.items() if name not in real}
    if recorded:
        sources.append(RecordedTensors(recorded))
    homes = {name: source for source in sources for name in source.names}
    return JoinedTensors({name: homes[name] for name in tensors})


def spec_of_tensor(name: str, tensor: Tensor) -> TensorSpec:
    """Return name, dtype and shape of a tensor, real or on meta."""
    return TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def _aliases(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return every further name of a tied tensor of the model, with its first name."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        known = first.setdefault(id(tensor), name)
        if known != name and known in tensors:
            aliases[name] = known
    return aliases


def _origin(name: str, tensor: Tensor) -> Origin:
    origin = origin_of(tensor)
    if origin is None:
        raise MissingWeightsError(f"nothing says what {name!r} holds: it is on the meta device and was not built in a deferred block")
    return origin


def _known(name: str, tensors: Mapping[str, object]) -> str:
    if name not in tensors:
        raise MissingWeightsError(f"the model has no tensor {name!r}")
    return name


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and in memory of its own: a part of a larger one would keep all of it."""
    owns_all = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
    return tensor if owns_all else tensor.clone(memory_format=torch.contiguous_format)
