"""`roost demo` from beginning to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from e2e_kit import Machine
from safetensors.torch import load_file

from roost.demo.digits import DigitsCNN, accuracy, load_digits


def test_the_demo_trains_on_five_nodes_and_its_checkpoint_loads_in_plain_pytorch(machine: Machine, tmp_path: Path) -> None:
    result = machine.run("demo", "--json", "--epochs", 8, "--directory", tmp_path / "demo", timeout=240)
    assert result.code == 0, result.err
    summary = json.loads(result.out.splitlines()[-1])
    assert summary["accuracy"] >= 0.9
    assert summary["nodes"] == 5
    assert summary["clusters"] == 2
    assert sorted(summary["stages"]) == [2, 3]
    assert summary["rings"] >= 1
    assert summary["averaging_rounds"] >= 1
    assert summary["samples_per_s"] > 0
    assert summary["single_process_samples_per_s"] > 0
    assert 0 < summary["seconds"] <= result.seconds + 1
    model = DigitsCNN()
    model.load_state_dict(load_file(Path(summary["checkpoint"]) / "model.safetensors"), strict=True)
    model.eval()
    images, labels = load_digits()[1]
    with torch.no_grad():
        reloaded = float(accuracy(model(images), labels))
    assert reloaded == pytest.approx(summary["accuracy"], abs=1e-6)
    assert reloaded == pytest.approx(summary["accuracy_of_checkpoint_in_plain_pytorch"], abs=1e-6)
    shown = result.err.split("from safetensors")[0].replace(str(tmp_path), "")
    assert max(map(len, shown.splitlines())) <= 120
    assert "emulated" in result.err
