"""Which columns of the data the model gets, and how, and which are labels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roost.capture.tracing import CallLayout
from roost.errors import InvalidDataError
from roost.requester.data import DataExample


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """The columns in the order of the graph's data inputs."""

    names: tuple[str, ...] | None
    """Their names, if the samples are dicts."""
    layout: CallLayout
    batch: tuple[Tensor, ...]
    """An example: inputs, then labels."""
    varying: tuple[frozenset[int], ...]
    """For each the dimensions beyond the first whose size varies."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The model's part of the example."""
        return self.batch[: self.layout.inputs]

    @property
    def labels(self) -> tuple[Tensor, ...]:
        """The labels' part of the example."""
        return self.batch[self.layout.inputs :]


def arrange(example: DataExample, *, label_names: tuple[str, ...], has_loss: bool) -> Columns:
    """Return the columns of `example` as the job needs them.

    Of a tuple the last element is the label; of a dict, `label_names` are. Without a loss of its own (`has_loss`) the job's model is
    given the labels as well. Raises InvalidDataError if a label, or everything else, is missing.
    """
    if example.names is None:
        inputs = len(example.batch) - has_loss
        return Columns(names=None, layout=CallLayout(positional=inputs), batch=example.batch, varying=example.varying)
    found = [name for name in label_names if name in example.names]
    missing = [name for name in label_names if name not in example.names]
    if has_loss and missing:
        raise InvalidDataError(
            f"the samples have no {missing[0]!r} for the loss; they have {', '.join(example.names)}",
            hint="Name the labels among them: Job(label_names=(...)).",
        )
    keywords = tuple(name for name in example.names if not (has_loss and name in found))
    if not keywords:
        raise InvalidDataError("the samples have labels and nothing for the model", hint="Leave the inputs out of Job(label_names=(...)).")
    order = keywords + (tuple(found) if has_loss else ())
    positions = [example.names.index(name) for name in order]
    layout = CallLayout(positional=0, keywords=keywords, label_keywords=() if has_loss else tuple(found))
    return Columns(
        names=order,
        layout=layout,
        batch=tuple(example.batch[position] for position in positions),
        varying=tuple(example.varying[position] for position in positions),
    )
