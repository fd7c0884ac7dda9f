"""Real `roost` processes on this machine: starting them, reading what they print, and seeing that none is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
import torch
from torch import nn

import roost
from roost.cli.coordinator import DATABASE
from roost.coordinator.enrolment import issue_join_token
from roost.coordinator.store import Store
from roost.transport.authority import open_enrolment_identity
from roost.types import Role

MARK = "ROOST_E2E_MARK"
"""Environment variable by which the processes of a test, their children included, are told from all others."""
START_S = 90.0
"""Importing torch in several processes at once on a busy machine takes long; nothing here waits that long in vain."""
GONE_S = 15.0
"""Processes that should end by themselves have so long."""

SCRIPT = """
import sys, torch, roost
from torch import nn

torch.manual_seed(0)
count, epochs = int(sys.argv[1]), int(sys.argv[2])
data = torch.rand(count, 8), torch.randint(3, (count,))
job = roost.Job(
    model=nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)),
    loss=nn.functional.cross_entropy,
    data=data,
    validation=(data[0][:10], data[1][:10]),
    batch_size=8,
    epochs=epochs,
    optimizer="SGD",
    optimizer_args={"lr": 0.05},
    checkpoint_dir=sys.argv[3],
)
"""


def small_model() -> nn.Sequential:
    """Return the model of SCRIPT."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))


def small_job(checkpoints: Path, *, samples: int = 32, epochs: int = 2, **fields: object) -> roost.Job:
    """Return the job of SCRIPT, for a requester in this process."""
    generator = torch.Generator().manual_seed(1)
    settings: dict[str, object] = {
        "model": small_model(),
        "loss": nn.functional.cross_entropy,
        "data": (torch.rand(samples, 8, generator=generator), torch.randint(3, (samples,), generator=generator)),
        "batch_size": 8,
        "epochs": epochs,
        "optimizer": "SGD",
        "optimizer_args": {"lr": 0.05},
        "checkpoint_dir": str(checkpoints),
    }
    return roost.Job(**{**settings, **fields})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a command left."""

    code: int
    out: str
    err: str
    seconds: float


class Command:
    """A running process; its output is read line by line as it comes."""

    def __init__(self, arguments: list[str], environment: dict[str, str], directory: Path) -> None:
        self.process = subprocess.Popen(
            arguments,
            env=environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Of a group of its own, so that a signal sent to it reaches nobody else.
            start_new_session=True,
        )
        self._lines: dict[str, list[str]] = {"out": [], "err": []}
        self._changed = threading.Condition()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self._lines[name].append(line)
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def text(self, name: str = "out") -> str:
        """Return all that was printed so far."""
        with self._changed:
            return "".join(self._lines[name])

    def until(self, pattern: str, *, timeout: float = START_S) -> str:
        """Return the first line of standard output that matches, waiting for it."""

        def found() -> str | None:
            return next((line for line in self._lines["out"] if re.search(pattern, line)), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or not any(reader.is_alive() for reader in self._readers), timeout)
            line = found()
        assert line is not None, f"no line matches {pattern!r}:\n{self.text()}\n{self.text('err')}"
        return line

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        self.process.send_signal(number)

    def wait(self, timeout: float = START_S) -> Finished:
        """Return exit code and output once it has ended."""
        started = time.monotonic()
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
        return Finished(code=code, out=self.text("out"), err=self.text("err"), seconds=time.monotonic() - started)

    def children(self) -> list[psutil.Process]:
        """Return every process it has started that runs."""
        return psutil.Process(self.process.pid).children(recursive=True)


class Machine:
    """What a person has: a home directory and a shell. Everything it starts carries its mark."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.mark = uuid.uuid4().hex
        home.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its processes."""
        plain = {key: value for key, value in os.environ.items() if key != "ROOST_TOKEN"}
        home = str(self.home)
        # A pool whose requester is killed leaves its temporary directory behind: here it goes with the home.
        return {**plain, "HOME": home, "TMPDIR": home, "OMP_NUM_THREADS": "1", "COLUMNS": "80", MARK: self.mark}

    def start(self, *arguments: object, python: bool = False) -> Command:
        """Start `roost ARGUMENTS`, or `python ARGUMENTS`."""
        command = [sys.executable, *([] if python else ["-m", "roost"])]
        return Command([*command, *map(str, arguments)], self.environment, self.home)

    def run(self, *arguments: object, timeout: float = START_S) -> Finished:
        """Run `roost ARGUMENTS` to its end."""
        command = self.start(*arguments)
        try:
            return command.wait(timeout)
        except subprocess.TimeoutExpired:
            command.process.kill()
            raise

    def script(self, lines: str, name: str = "script.py") -> Path:
        """Write SCRIPT with these lines after it, and return its path."""
        path = self.home / name
        path.write_text(SCRIPT + textwrap.dedent(lines))
        return path

    def processes(self) -> list[psutil.Process]:
        """Return the processes with its mark that run."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def assert_nothing_runs(self, within_s: float = GONE_S) -> None:
        """Fail unless all its processes end by themselves in time; those that did not are killed."""
        left = self.processes()
        _, alive = psutil.wait_procs(left, timeout=within_s)
        lines = [" ".join(process.cmdline()) for process in alive if process.is_running()]
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=GONE_S)
        assert lines == [], f"still running: {lines}"


def fresh_token(state: Path, role: str, *, ttl_s: float = 60.0) -> str:
    """Return a token of the coordinator with this state directory: what `roost token` prints, without starting it."""
    with Store(state / DATABASE) as store:
        return issue_join_token(store, open_enrolment_identity(state), Role(role), now=time.time(), ttl_s=ttl_s)


def refused(result: Finished, code: str, *reasons: str) -> None:
    """Check that a command ended with an error a person can act on."""
    assert result.code == 1, result
    assert f"error [{code}] " in result.err, result.err
    assert "What to do: " in result.err
    assert "Traceback" not in result.err
    for reason in reasons:
        assert reason in result.err, result.err
