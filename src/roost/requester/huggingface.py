"""Makes batches for models of the transformers library from tokenised datasets, without importing that library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from roost.config import require
from roost.errors import InvalidDataError

IGNORED_LABEL = -100
"""The label that losses leave out."""
LABELS = "labels"
MASK = "attention_mask"
_LABEL_COLUMNS = ("label", "label_ids")
"""What datasets call the label that models take as `labels`."""


def accepted_columns(model: nn.Module) -> frozenset[str]:
    """Return the names that the model's forward takes: other columns of a dataset are for people and not for the model.

    Adapters that wrap a model take anything and pass it on: the wrapped model is asked. Raises InvalidConfigError for a model
    that names no inputs.
    """
    wrapped = getattr(model, "get_base_model", None)
    base = wrapped() if callable(wrapped) else model
    parameters = inspect.signature(base.forward).parameters.values()
    names = frozenset(item.name for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY))
    require(bool(names), f"the forward of {type(base).__name__} names no inputs; is it a model of the transformers library?")
    return names


class ModelCollator:
    """A collate function: leaves out what the model does not take, then pads and stacks, or lets another collator do it."""

    def __init__(self, *, accepted: frozenset[str], pad_token_id: int, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._accepted = accepted
        self._pad_token_id = pad_token_id
        self._collate = collate

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        """Return the batch of `samples`, dicts of numbers, lists, arrays or tensors, as tensors by name; rows are padded on the right.

        A padded batch gets an attention mask if the model takes one and the samples have none. Raises InvalidDataError.
        """
        kept = [self._for_the_model(sample) for sample in samples]
        if self._collate is not None:
            batch = self._collate(kept)
            return {name: value for name, value in batch.items() if name in self._accepted and isinstance(value, Tensor)}
        names = list(dict.fromkeys(name for sample in kept for name in sample))
        columns = {name: self._column(name, [sample.get(name) for sample in kept]) for name in names}
        if MASK in self._accepted and MASK not in columns and "input_ids" in columns:
            lengths = torch.tensor([len(sample["input_ids"]) for sample in kept])
            columns[MASK] = (torch.arange(columns["input_ids"].shape[1]) < lengths[:, None]).long()
        return columns

    def _for_the_model(self, sample: Any) -> dict[str, Any]:
        if not isinstance(sample, Mapping):
            raise InvalidDataError(f"a sample is a {type(sample).__name__}, not a dict such as a tokenizer gives")
        renamed = {LABELS if name in _LABEL_COLUMNS and LABELS not in sample else name: value for name, value in sample.items()}
        kept = {name: value for name, value in renamed.items() if name in self._accepted and value is not None}
        if not kept:
            raise InvalidDataError(f"a sample has {', '.join(map(str, sample)) or 'nothing'}, and the model takes none of it")
        return kept

    def _column(self, name: str, values: Sequence[Any]) -> Tensor:
        missing = next((index for index, value in enumerate(values) if value is None), None)
        if missing is not None:
            raise InvalidDataError(f"sample {missing} of the batch has no {name!r}, others have", hint=f"Give every sample a {name!r}.")
        tensors = [torch.as_tensor(value) for value in values]
        empty = next((index for index, tensor in enumerate(tensors) if tensor.numel() == 0), None)
        if empty is not None:
            raise InvalidDataError(f"sample {empty} of the batch is empty in {name!r}", hint="Leave such samples out of the dataset.")
        if len({tensor.shape for tensor in tensors}) == 1:
            return torch.stack(tensors)
        if len({tensor.shape[1:] for tensor in tensors}) != 1 or tensors[0].dim() == 0:
            raise InvalidDataError(
                f"{name!r} has rows of shapes {sorted({str(list(tensor.shape)) for tensor in tensors})}: these cannot be padded"
            )
        filler = IGNORED_LABEL if name == LABELS else self._pad_token_id if name.endswith("input_ids") else 0
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filler)


def collator_for(model: nn.Module, collate: Callable[[list[Any]], Any] | None) -> ModelCollator:
    """Return the collate function for `model`; `collate` is another collator to be used for padding, for example one of transformers."""
    pad_token_id = getattr(getattr(model, "config", None), "pad_token_id", None)
    return ModelCollator(
        accepted=accepted_columns(model), pad_token_id=pad_token_id if isinstance(pad_token_id, int) else 0, collate=collate
    )
