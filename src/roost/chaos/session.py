"""Trains a job on a pool that is broken while it trains, and says what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roost.api import Job, train
from roost.chaos.account import DataAccount, TrainedPart, account
from roost.chaos.findings import LoggedEvent, Recovery, logged, recorded, recoveries
from roost.chaos.injector import ChaosPool, Incident
from roost.chaos.pool import COORDINATOR, BreakablePool, MemoryCurve
from roost.chaos.schedule import Fault
from roost.checkpoint.reader import load_newest
from roost.config import NodeOptions, require
from roost.errors import CheckpointError, RoostError
from roost.requester.data import SampleSource
from roost.requester.run import Run
from roost.types import EpochResult

CALM_S = 10.0
"""After the last fault it trains on for so long before it is stopped."""
POLL_S = 0.5
LOGGED_EVENTS = frozenset({"first_update", "round_applied", "plan_installed", "round_abandoned", "registered"})


@dataclass(frozen=True, kw_only=True)
class ChaosResult:
    """What was found."""

    finished: bool
    """True if the job reached its end, or was stopped once all faults were over; False if it failed."""
    error: str
    """Why it failed; empty if it did not."""
    incidents: tuple[Incident, ...]
    recoveries: tuple[Recovery, ...]
    data: DataAccount
    history: tuple[EpochResult, ...]
    """One line per synchronisation point, of all runs, without what a restart went back on."""
    seconds: float
    """From the first sample to the end, restarts included."""
    crashes: tuple[str, ...]
    """Processes that ended though nobody had killed them, and the ends of their logs."""
    logs: tuple[LoggedEvent, ...]
    records: tuple[dict[str, Any], ...]
    """The requester's events, of all runs."""
    memory: dict[tuple[str, int], MemoryCurve]
    """What every process held, by name and process id."""

    @property
    def recovery_s(self) -> list[float]:
        """Seconds of the recoveries from faults that broke a cluster, ascending; full restarts are not among them."""
        times = (found.seconds for found in self.recoveries if found.seconds is not None and found.incident.node)
        return sorted(times)

    @property
    def validation_loss(self) -> tuple[int, float] | None:
        """Return epoch and loss of the last evaluation, None if there was none."""
        found = [(line.epoch, line.validation_loss) for line in self.history if line.validation_loss is not None]
        return found[-1] if found else None


class ChaosSession:
    """One job, its pool and its faults."""

    def __init__(
        self,
        job: Job,
        nodes: Sequence[NodeOptions],
        directory: Path,
        faults: Sequence[Fault],
        *,
        on_incident: Callable[[Incident], None],
        module: str = "roost",
    ) -> None:
        """Everything is kept in `directory`; `module` is what Python runs for a node; `on_incident` hears of faults on another thread."""
        self._directory = directory
        self._job = replace(job, checkpoint_dir=str(directory / "checkpoints"))
        self._pool = BreakablePool(nodes, directory / "pool", module=module)
        self._chaos = ChaosPool(self._pool, faults, on_incident=on_incident)
        self._runs: list[Run] = []
        self._parts: list[TrainedPart] = []
        self._history: list[EpochResult] = []

    def run(self) -> ChaosResult:
        """Train until the job is over, or stop it once all faults are.

        Raises RoostError if it cannot even be started, InvalidConfigError if the directory is not empty: an earlier session would go on.
        """
        empty = not self._directory.exists() or not any(self._directory.iterdir())
        require(empty, f"{self._directory} must be a new or an empty directory")
        error, resume = "", None
        while True:
            try:
                run = train(self._job, self._chaos, resume=resume, observer=self._chaos)
            except RoostError as raised:
                if not self._runs:
                    raise
                return self._result(f"it could not be started again: {raised}")
            self._runs.append(run)
            try:
                self._wait(run)
            except RoostError as raised:
                error = "" if self._chaos.restarting else str(raised)
            resume = self._newest() if self._chaos.restarting else None
            self._close_part(run, resume)
            if not self._chaos.restarting:
                return self._result(error)

    def _wait(self, run: Run) -> None:
        while True:
            try:
                run.wait(POLL_S)
            except TimeoutError:
                over = self._chaos.over_since
                if over is not None and time.time() - over > CALM_S and not run.stopping:
                    run.stop()
                continue
            return

    def _newest(self) -> Path | None:
        """Return where the job goes on from: the newest whole checkpoint of any of its runs, None without one."""
        for one in reversed(self._runs):
            directory = Path(self._job.checkpoint_dir) / one.job_id
            try:
                load_newest(directory)
            except CheckpointError:
                continue
            return directory
        return None

    def _close_part(self, run: Run, resume: Path | None) -> None:
        metrics, watch = run.metrics(), self._pool.watch
        start = self._parts[-1].end if self._parts else 0
        end = metrics.epochs_done
        if self._chaos.restarting:
            end = load_newest(resume).manifest.contents.epoch if resume is not None else 0
        self._parts.append(
            TrainedPart(
                start_epoch=int(start),
                end=max(end, start),
                served=tuple(watch.served.values()) if watch is not None else (),
                replayed=frozenset(found.lease.lease_id for found in run.replayed),
            )
        )
        self._history += [line for line in metrics.history if line.epoch <= max(end, start)]

    def _result(self, error: str) -> ChaosResult:
        samples = len(SampleSource(self._job.data, what="the training data", collate=self._job.collate))
        logs = logged([self._pool.log_of(name) for name in (*self._pool.names, COORDINATOR)], LOGGED_EVENTS)
        records = [event for run in self._runs for event in recorded(Path(self._job.checkpoint_dir) / run.job_id / "events.jsonl")]
        changes = [float(event["time"]) for event in records if event["event"] in ("plan_changed", "planned")]
        updates = [line.at for line in logs if line.event == "first_update"]
        trained = [float(event["time"]) for event in records if event["event"] == "progress" and event["samples"]]
        return ChaosResult(
            finished=not error,
            error=error,
            incidents=tuple(self._chaos.incidents),
            recoveries=tuple(recoveries(self._chaos.incidents, changes, updates)),
            data=account(self._parts, samples=samples),
            history=tuple(self._history),
            seconds=trained[-1] - trained[0] if trained else 0.0,
            crashes=tuple(self._pool.crashes),
            logs=tuple(logs),
            records=tuple(records),
            memory=self._pool.memory,
        )
