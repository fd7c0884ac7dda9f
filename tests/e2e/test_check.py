"""`roost check`, and training, of a model that was never in memory as a whole, on data of varying lengths, by name."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import torch
from e2e_kit import Machine, refused
from safetensors.torch import load_file
from torch import Tensor, nn

POOL = """
nodes:
  - {name: desk, memory: 1MB, speed: 2}
  - {name: shed, memory: 1MB, count: 2}
"""

MODEL = """
import contextlib, sys
import roost, torch
from torch import Tensor, nn


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16, padding_idx=0)
        self.mixer = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, *, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(ids)
        x = x + self.mixer(x.cumsum(1) / ids.shape[1])
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0), "logits": logits}


def collate(samples: list[list[int]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(sample) for sample in samples], batch_first=True)
    return {"labels": ids, "ids": ids}


torch.manual_seed(7)
"""

JOB = """
with contextlib.nullcontext() if "eager" in sys.argv else roost.deferred_init():
    model = Reader()
data = [[1 + (row + place) % 29 for place in range(3 + row % 9)] for row in range(40)]
settings = {"batch_size": 8, "micro_batch_size": 4, "epochs": 2, "checkpoint_dir": "out"}
job = roost.Job(model=model, data=data, collate=collate, validation=data[:10], **settings)
roost.train(job, roost.local(2)).wait()
"""


def script(machine: Machine, text: str) -> Path:
    path = machine.home / "reader.py"
    path.write_text(text)
    return path


def test_a_model_that_survives_is_told_so_and_one_that_does_not_is_told_why(machine: Machine) -> None:
    path = script(machine, MODEL + JOB)
    whole = machine.run("check", path, "eager")
    assert whole.code == 0, whole.err
    assert "whole graph     same loss, same gradients, bit for bit" in whole.out
    assert "3 stages" in whole.out
    assert "ids: int64 [any, any]" in whole.out
    without = machine.run("check", path)
    assert without.code == 0, without.err
    assert "has no weights here" in without.out
    pool = machine.home / "pool.yaml"
    pool.write_text(POOL)
    planned = machine.run("check", path, "eager", "--pool-file", pool, "--json")
    assert planned.code == 0, planned.err
    assert json.loads(planned.out)["whole"]["same_loss"] is True

    hooked = script(
        machine, MODEL + JOB.replace("data = [", "model.mixer[0].weight.register_hook(lambda gradient: gradient * 3)\ndata = [", 1)
    )
    refused(machine.run("check", hooked, "eager"), "R201", "mixer.0.weight", "hook")


def test_a_model_that_was_never_whole_trains_and_gives_a_normal_checkpoint(machine: Machine) -> None:
    result = machine.start(script(machine, MODEL + JOB), python=True).wait()
    assert result.code == 0, result.err
    folders = sorted((machine.home / "out").glob("*/epoch-*"))
    assert len(folders) == 2
    saved = load_file(folders[-1] / "model.safetensors")
    torch.manual_seed(7)
    model = runpy.run_path(str(script(machine, MODEL)))["Reader"]()
    assert isinstance(model, nn.Module)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(saved, strict=True)
    moved = {name: float((saved[name] - before[name]).abs().max()) for name in before}
    assert all(0 < distance < 0.1 for distance in moved.values()), "trained from the weights of an eager build with the same seed"
    assert isinstance(saved["embedding.weight"], Tensor)
    assert float(saved["embedding.weight"][0].abs().max()) < 0.1
