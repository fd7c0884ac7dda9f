"""`roost chaos`: a job on a local pool that is broken on purpose, and what became of it."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch.nn import functional

from roost.api import Defaults, Job, train
from roost.chaos.findings import Recovery, percentile
from roost.chaos.injector import Incident
from roost.chaos.schedule import FaultKind, draw
from roost.chaos.session import ChaosResult, ChaosSession
from roost.cli.lifetime import stop_on_sigterm
from roost.cli.train import run_up_to_train
from roost.config import NodeOptions, require
from roost.demo.digits import DigitsCNN, accuracy, load_digits
from roost.requester.pools import local

DEMO = "demo"
DEMO_NODES = tuple(
    NodeOptions(name=name, memory="4.5MB", relative_speed=0.12) for name in ("desk", "laptop", "attic", "kitchen", "shed", "barn")
)
"""Two of them hold the digits CNN together, none holds it alone: three clusters, and enough nodes when some are away."""
ENDLESS = 100_000
"""Epochs of the demo, which is stopped when the last fault is over."""


@dataclass(frozen=True, kw_only=True)
class ChaosCommand:
    """What was asked for."""

    script: str
    """Path of a training script, or "demo"."""
    arguments: tuple[str, ...]
    faults: int
    seed: int
    minutes: float
    kinds: tuple[FaultKind, ...]
    nodes: int
    memory: str
    directory: Path | None
    """Where logs and checkpoints are kept; None removes them at the end."""
    compare: bool
    json_output: bool


def parse_kinds(text: str) -> tuple[FaultKind, ...]:
    """Return the kinds of faults that a list with commas names; empty names all. Raises InvalidConfigError."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    known = [kind.value for kind in FaultKind]
    unknown = [name for name in names if name not in known]
    require(not unknown, f"{', '.join(unknown)} is no kind of fault; there are {', '.join(known)}")
    return tuple(kind for kind in FaultKind if not names or kind in names)


def run(command: ChaosCommand) -> None:
    """Train, break, print what happened; exits with 1 if the job failed, or a sample was lost or applied twice."""
    require(command.minutes > 0, f"minutes must be positive, not {command.minutes}")
    console = Console(highlight=False, stderr=command.json_output)
    faults = draw(seed=command.seed, faults=command.faults, seconds=60 * command.minutes, kinds=command.kinds)
    job, nodes = _demo() if command.script == DEMO else _scripted(command)
    console.print(
        f"{len(nodes)} nodes [bold]emulated[/] as processes of this machine; {len(faults)} faults over {command.minutes:g} min, "
        f"seed {command.seed}",
        soft_wrap=True,
    )
    with stop_on_sigterm(), _kept(command.directory) as directory:
        result = ChaosSession(job, nodes, directory, faults, on_incident=Teller(console)).run()
        undisturbed = _undisturbed(job, nodes, directory, result, console) if command.compare else None
        _print(console, result, undisturbed, command.directory)
    if command.json_output:
        print(json.dumps(_summary(result, undisturbed)), flush=True)
    if not result.finished or result.data.lost or result.data.applied_twice:
        raise SystemExit(1)


def _demo() -> tuple[Job, Sequence[NodeOptions]]:
    training, validation = load_digits()
    torch.manual_seed(0)
    job = Job(
        model=DigitsCNN(),
        loss=functional.cross_entropy,
        data=training,
        validation=validation,
        metric=accuracy,
        optimizer_args={"lr": 2e-3},
        batch_size=64,
        epochs=ENDLESS,
        averaging_interval=8,
        sync_interval=4,
        name="digits",
    )
    return job, DEMO_NODES


def _scripted(command: ChaosCommand) -> tuple[Job, Sequence[NodeOptions]]:
    require(command.nodes >= 2, f"faults need at least 2 nodes, not {command.nodes}")
    defaults = Defaults(job_only=True)
    run_up_to_train(Path(command.script), command.arguments, defaults)
    return defaults.jobs[0], [NodeOptions(name=f"node-{index + 1}", memory=command.memory) for index in range(command.nodes)]


@contextlib.contextmanager
def _kept(directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="roost-chaos-") as temporary:
        yield Path(temporary)


def _undisturbed(job: Job, nodes: Sequence[NodeOptions], directory: Path, result: ChaosResult, console: Console) -> float | None:
    """Return the loss that a run without faults has at the last evaluation of the other one; None if that had none."""
    if (found := result.validation_loss) is None:
        return None
    console.print(f"training {found[0]} epochs again, undisturbed ...")
    again = replace(job, epochs=found[0], checkpoint_dir=str(directory / "undisturbed"))
    return train(again, local(nodes)).wait().metrics().history[-1].validation_loss


class Teller:
    """Prints faults as they come."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.time()

    def __call__(self, incident: Incident) -> None:
        what = f"{incident.kind} {incident.node}{' - ' + incident.other if incident.other else ''}".strip()
        over = "" if incident.ended is None else f", over after {incident.ended - incident.began:.1f} s"
        self._console.print(f"  {time.time() - self._began:6.1f} s  {what}{over}", soft_wrap=True)


def _print(console: Console, result: ChaosResult, undisturbed: float | None, directory: Path | None) -> None:
    console.print()
    for recovery in result.recoveries:
        console.print(f"  {recovery.incident.kind:<12}{_outcome(recovery)}", soft_wrap=True)
    times = result.recovery_s
    data = result.data
    console.print(
        f"\n[bold]{'finished' if result.finished else 'FAILED'}[/] after {len(result.incidents)} faults in {result.seconds:.0f} s"
    )
    if result.error:
        console.print(f"  {result.error}", markup=False, soft_wrap=True)
    if times:
        console.print(f"  clusters repaired       {len(times)}; median {percentile(times, 0.5):.1f} s, worst {times[-1]:.1f} s")
    console.print(f"  samples trained         {data.trained}")
    console.print(f"  samples lost            {data.lost}")
    console.print(f"  samples applied twice   {data.applied_twice}")
    console.print(f"  given out again         {data.replayed}, all of them in the run's report")
    if result.crashes:
        console.print(
            f"  ended by themselves     {len(result.crashes)} processes; the first: {result.crashes[0]}", markup=False, soft_wrap=True
        )
    if (found := result.validation_loss) is not None and undisturbed is not None:
        console.print(f"  validation loss         {found[1]:.4f} after {found[0]} epochs; undisturbed {undisturbed:.4f}")
    if directory is not None:
        console.print(f"  logs and checkpoints    {directory}", soft_wrap=True)


def _outcome(recovery: Recovery) -> str:
    if recovery.seconds is None:
        return "nothing had to change"
    what = "trained again" if not recovery.incident.node else "repaired"
    return f"{what} after {recovery.seconds:.1f} s"


def _summary(result: ChaosResult, undisturbed: float | None) -> dict[str, object]:
    found = result.validation_loss
    return {
        "emulated": "all nodes are processes of one machine",
        "finished": result.finished,
        "error": result.error,
        "faults": [
            {
                "kind": recovery.incident.kind,
                "node": recovery.incident.node,
                "other": recovery.incident.other,
                "replanned": recovery.replanned,
                "recovery_s": recovery.seconds,
            }
            for recovery in result.recoveries
        ],
        "recovery_s_p50": percentile(result.recovery_s, 0.5),
        "recovery_s_max": max(result.recovery_s, default=None),
        "samples_trained": result.data.trained,
        "samples_lost": result.data.lost,
        "samples_applied_twice": result.data.applied_twice,
        "samples_given_out_again": result.data.replayed,
        "validation_loss": found[1] if found is not None else None,
        "undisturbed_validation_loss": undisturbed,
        "crashes": len(result.crashes),
        "seconds": result.seconds,
    }
