from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from weights_kit import deferred, source, tensors_of

from roost.errors import CheckpointMismatchError, MissingWeightsError
from roost.weights.source import MemoryTensors, source_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(5), persistent=False)


def test_tensors_in_memory_are_read_as_they_are() -> None:
    held = {"a": torch.ones(2, 3).t(), "b": torch.zeros(2, dtype=torch.int64)}
    found = MemoryTensors(held)
    assert found.names == ("a", "b")
    assert found.spec("a").shape == (3, 2) and found.spec("b").dtype == "int64"
    read = found.read(["a"])["a"]
    assert read.is_contiguous() and torch.equal(read, held["a"])


@pytest.mark.parametrize("make", [Tied, lambda: deferred(Tied)], ids=["eager", "deferred"])
def test_an_unknown_name_is_an_error(make: type[nn.Module]) -> None:
    found = source(make())
    with pytest.raises(MissingWeightsError, match="'none'"):
        found.read(["embedding.weight", "none"])
    with pytest.raises(MissingWeightsError, match="'none'"):
        found.spec("none")


def test_a_source_has_all_tensors_in_their_order_real_and_recorded() -> None:
    model = deferred(Tied)
    found = source(model)
    assert found.names == tuple(tensors_of(model))
    read = found.read(["positions", "embedding.weight", "norm.running_mean"])
    assert list(read) == ["positions", "embedding.weight", "norm.running_mean"]
    assert read["positions"].tolist() == [0, 1, 2, 3, 4]
    spec = found.spec("embedding.weight")
    assert (spec.name, spec.dtype, spec.shape) == ("embedding.weight", "float32", (7, 4))


def test_what_is_read_owns_just_its_own_memory() -> None:
    def make() -> nn.Module:
        fused = torch.randn(100, 10)
        model = nn.Module()
        model.first, model.second = (nn.Parameter(part) for part in fused.split(50))
        model.turned = nn.Parameter(torch.randn(6, 5).t())
        return model

    torch.manual_seed(0)
    wanted = make()
    read = source(deferred(make)).read(["second", "turned"])
    assert torch.equal(read["second"], wanted.second) and torch.equal(read["turned"], wanted.turned)
    assert read["second"].untyped_storage().nbytes() == 50 * 10 * 4
    assert read["turned"].is_contiguous()


@pytest.mark.parametrize("stored_name", ["embedding.weight", "head.weight"])
def test_a_checkpoint_gives_what_the_state_has_and_the_record_the_rest(tmp_path: Path, stored_name: str) -> None:
    torch.manual_seed(5)
    trained = {name: tensor.detach().clone() + 3 for name, tensor in Tied().state_dict().items() if name != "head.weight"}
    trained[stored_name] = trained.pop("embedding.weight")
    save_file(trained, tmp_path / "model.safetensors")
    model = deferred(Tied)
    found = source_of(model, tensors_of(model), checkpoint=tmp_path)
    read = found.read(list(found.names))
    assert torch.equal(read["embedding.weight"], trained[stored_name])
    assert torch.equal(read["norm.running_var"], trained["norm.running_var"])
    assert read["positions"].tolist() == [0, 1, 2, 3, 4]


def test_a_meta_model_may_start_from_a_checkpoint(tmp_path: Path) -> None:
    wanted = nn.Linear(3, 2)
    save_file(dict(wanted.state_dict()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    found = source_of(model, tensors_of(model), checkpoint=tmp_path)
    assert torch.equal(found.read(["weight"])["weight"], wanted.weight)


def test_a_checkpoint_of_another_dtype_is_cast_only_when_asked(tmp_path: Path) -> None:
    wanted = nn.Linear(3, 2)
    save_file({name: tensor.bfloat16() for name, tensor in wanted.state_dict().items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match="'weight' is bfloat16 .* float32"):
        source_of(wanted, tensors_of(wanted), checkpoint=tmp_path)
    found = source_of(wanted, tensors_of(wanted), checkpoint=tmp_path, cast=True)
    assert torch.equal(found.read(["weight"])["weight"], wanted.weight.bfloat16().float())
