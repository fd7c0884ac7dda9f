from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_kit import MARK, Machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine whose processes, and those of pools entered in this process, must all have ended after the test."""
    machine = Machine(tmp_path / "home")
    for name, value in machine.environment.items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    assert os.environ[MARK] == machine.mark
    yield machine
    machine.assert_nothing_runs()
