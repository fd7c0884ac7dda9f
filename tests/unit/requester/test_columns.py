from __future__ import annotations

import pytest
import torch

from roost.errors import InvalidDataError
from roost.requester.columns import arrange
from roost.requester.data import DataExample

BATCH = (torch.zeros(2, 3), torch.ones(2), torch.full((2,), 2.0))
VARYING = (frozenset({1}), frozenset(), frozenset[int]())


def example(*names: str) -> DataExample:
    return DataExample(names=names or None, batch=BATCH, varying=VARYING)


def test_the_last_element_of_a_tuple_is_the_label() -> None:
    columns = arrange(example(), label_names=("labels",), has_loss=True)
    assert (len(columns.inputs), len(columns.labels)) == (2, 1)
    assert (columns.layout.positional, columns.layout.keywords) == (2, ())


def test_a_model_with_its_own_loss_gets_the_whole_tuple() -> None:
    columns = arrange(example(), label_names=("labels",), has_loss=False)
    assert (len(columns.inputs), len(columns.labels)) == (3, 0)


def test_named_labels_go_to_the_loss_and_everything_else_to_the_model_by_name() -> None:
    columns = arrange(example("b", "labels", "a"), label_names=("labels",), has_loss=True)
    assert columns.names == ("b", "a", "labels")
    assert columns.layout.keywords == ("b", "a")
    assert torch.equal(columns.labels[0], BATCH[1])
    assert columns.varying == (VARYING[0], VARYING[2], VARYING[1])


def test_a_model_with_its_own_loss_gets_the_labels_and_the_metric_gets_them_too() -> None:
    columns = arrange(example("x", "labels", "mask"), label_names=("labels",), has_loss=False)
    assert columns.layout.keywords == ("x", "labels", "mask")
    assert columns.labels == ()
    assert columns.layout.labels(columns.batch) == (columns.batch[1],)


def test_labels_that_the_samples_do_not_have_are_named_with_what_they_have() -> None:
    with pytest.raises(InvalidDataError, match=r"no 'labels' for the loss; they have x, y, z"):
        arrange(example("x", "y", "z"), label_names=("labels",), has_loss=True)


def test_samples_of_labels_alone_are_refused() -> None:
    with pytest.raises(InvalidDataError, match="nothing for the model"):
        arrange(example("x", "y", "z"), label_names=("x", "y", "z"), has_loss=True)
