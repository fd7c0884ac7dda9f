"""Snapshots on the disk of a node."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roost.agent.spool import Spool


def test_what_was_written_comes_back_as_it_was_then_with_nothing_left_in_the_folder(tmp_path: Path) -> None:
    weights = {
        "a": torch.randn(3, 5),
        "flag": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
        "half": torch.ones(3).bfloat16(),
    }
    state = {"a/exp_avg": torch.randn(5, 3).t(), "a/step": torch.tensor(7.0)}
    expected = {name: tensor.clone() for name, tensor in (weights | state).items()}
    spool = Spool(str(tmp_path))
    spool.add(4, weights, {})
    spool.add(-1, {}, state)
    for tensor in (*weights.values(), *state.values()):
        tensor.zero_()
    found = list(spool.segments())
    assert [(segment, sorted(tensors), sorted(optimizer)) for segment, tensors, optimizer in found] == [
        (4, ["a", "empty", "flag", "half"], []),
        (-1, [], ["a/exp_avg", "a/step"]),
    ]
    spool.forget_pages()
    for _, tensors, optimizer in found:
        for name, tensor in (tensors | optimizer).items():
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor, expected[name])
    assert list(tmp_path.iterdir()) == []
    spool.close()


def test_a_folder_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Spool(str(tmp_path / "nowhere"))
