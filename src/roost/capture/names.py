"""Gives every tensor of a traced model one name: its first name in the user's model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from roost.capture.arguments import DTYPE_NAMES
from roost.capture.lines import user_line_of_stack
from roost.capture.tracing import MODEL_PART, PART_NAMES, TracedTraining
from roost.errors import NotCapturableError
from roost.types import TensorKind, TensorRecord


@dataclass(frozen=True, kw_only=True)
class NamedTensors:
    """The tensors of a traced model."""

    canonical: dict[str, str]
    """For each placeholder of the exported graph that is a tensor, the tensor's name."""
    tensors: dict[str, Tensor]
    """All parameters and buffers by name, the model's own objects."""
    records: dict[str, TensorRecord]
    aliases: dict[str, str]
    extras: frozenset[str]
    of_loss: frozenset[str]
    """Names of tensors that belong to the loss or the metric."""


def name_tensors(wrapped: TracedTraining, exported: ExportedProgram) -> NamedTensors:
    """Return the names of every parameter, buffer and constant. Raises NotCapturableError for a dtype that cannot travel."""
    model = wrapped.model
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            tensors[name] = tensor
        else:
            aliases[name] = first
    own = set(tensors) | set(aliases)
    canonical: dict[str, str] = {}
    of_loss: set[str] = set()
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        target, placeholder = str(spec.target), spec.arg.name
        part, _, rest = target.partition(".")
        if part == MODEL_PART and rest in own:
            canonical[placeholder] = aliases.get(rest, rest)
            continue
        tensor = _tensor_at(wrapped, exported, target, placeholder)
        known = first_names.get(id(tensor))
        if known is None:
            known = _free_name(rest if part == MODEL_PART else f"{PART_NAMES.get(part, 'constant')}.{rest or part}", own)
            first_names[id(tensor)] = known
            tensors[known] = tensor
            own.add(known)
            if part in PART_NAMES:
                of_loss.add(known)
        canonical[placeholder] = known
    saved = set(model.state_dict().keys())
    return NamedTensors(
        canonical=canonical,
        tensors=tensors,
        records={name: _record(name, tensor) for name, tensor in tensors.items()},
        aliases=aliases,
        extras=frozenset(tensors) - saved,
        of_loss=frozenset(of_loss),
    )


def _tensor_at(wrapped: TracedTraining, exported: ExportedProgram, target: str, placeholder: str) -> Tensor:
    tensor = exported.constants.get(target)
    if tensor is None:
        path, _, attribute = target.rpartition(".")
        tensor = getattr(wrapped.get_submodule(path), attribute)
    if not isinstance(tensor, Tensor):
        users = (user for node in exported.graph.nodes if node.name == placeholder for user in node.users)
        where = next((line for user in users if (line := user_line_of_stack(user.stack_trace))), "")
        raise NotCapturableError(
            f"the model uses a {type(tensor).__name__}, and only tensors can be constants of a model{where}",
            hint="Leave generators of your own out: the job's seed decides what is drawn. Keep other numbers in tensors.",
        )
    return tensor


def _free_name(wanted: str, taken: set[str]) -> str:
    name, number = wanted, 1
    while any(other == name or other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in taken):
        number += 1
        head, _, tail = wanted.partition(".")
        name = f"{head}_{number}.{tail}" if tail else f"{head}_{number}"
    return name


def _record(name: str, tensor: Tensor) -> TensorRecord:
    if tensor.dtype not in DTYPE_NAMES:
        raise NotCapturableError(f"tensor {name!r} has dtype {tensor.dtype}; use one of {sorted(DTYPE_NAMES.values())}")
    if tensor.layout is not torch.strided:
        raise NotCapturableError(f"tensor {name!r} is sparse; only dense tensors can be captured")
    is_parameter = isinstance(tensor, nn.Parameter)
    return TensorRecord(
        name=name,
        dtype=DTYPE_NAMES[tensor.dtype],
        shape=tuple(tensor.shape),
        kind=TensorKind.PARAMETER if is_parameter else TensorKind.BUFFER,
        trainable=is_parameter and tensor.requires_grad,
    )
