from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_kit import MARK, Machine


@pytest.fixture(autouse=True, scope="session")
def _commands_can_be_interrupted() -> None:
    """A shell that starts the tests in the background ignores Ctrl+C for all that they start; a terminal does not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
