from __future__ import annotations

import torch

from roost.pipeline.weight_versions import WeightVersions

CPU = torch.device("cpu")


def build(make, **tensors: torch.Tensor) -> WeightVersions:
    return WeightVersions(make.records(tensors, buffers=("buffer",)), tensors, CPU)


def test_a_version_equal_to_the_current_weights_shares_their_storage(make):
    versions = build(make, w=torch.ones(2))
    first, second = versions.take(), versions.take()
    assert first is second
    assert first.tensors["w"].data_ptr() == versions.parameters["w"].data_ptr()
    assert versions.alive == 1


def test_a_write_moves_the_weights_away_from_the_versions_in_flight(make):
    versions = build(make, w=torch.ones(2), other=torch.ones(2))
    old = versions.take()
    versions.write({"w": torch.zeros(2)})
    assert torch.equal(old.tensors["w"], torch.ones(2))
    assert torch.equal(versions.parameters["w"], torch.zeros(2))
    assert old.tensors["other"] is versions.current.tensors["other"]
    assert versions.alive == 2
    versions.release(old)
    assert versions.alive == 1


def test_a_tensor_that_an_older_version_still_shares_moves_even_if_nothing_uses_the_current_version(make):
    versions = build(make, w=torch.ones(2), other=torch.ones(2))
    old = versions.take()
    versions.write({"w": torch.zeros(2)})
    versions.write({"other": torch.zeros(2)})
    assert torch.equal(old.tensors["other"], torch.ones(2))
    assert versions.alive == 2


def test_a_second_write_before_the_next_forward_copies_nothing(make):
    versions = build(make, w=torch.ones(2))
    versions.take()
    versions.write({"w": torch.zeros(2)})
    place = versions.parameters["w"].data_ptr()
    versions.write({"w": torch.full((2,), 5.0)})
    assert versions.parameters["w"].data_ptr() == place
    assert torch.equal(versions.current.tensors["w"], torch.full((2,), 5.0))


def test_buffers_are_written_without_touching_versions_in_flight(make):
    versions = build(make, buffer=torch.ones(2))
    old = versions.take()
    versions.write({"buffer": torch.zeros(2)})
    assert torch.equal(old.tensors["buffer"], torch.ones(2))
    assert torch.equal(versions.tensor("buffer"), torch.zeros(2))


def test_memory_that_is_not_aligned_like_torchs_own_is_copied(make):
    raw = torch.zeros(64)
    versions = build(make, w=raw[1:3])
    assert versions.parameters["w"].data_ptr() % 64 == 0
