"""Faults on real processes: `python -m benchmarks.faults`.

Six nodes that are emulated on this machine (declared memory, paced computation) form three clusters of two and train a small model of
the characters of Python's help topics, while faults drawn from a seed come: nodes are killed, frozen, cut off, the coordinator is
killed, everything is killed and resumed (`roost chaos` does the same to a job of yours). Then the same job runs undisturbed for as many
epochs. Last, five clusters of one node, on lines of 100 Mbit/s, lose a member in the middle of an averaging round. `--hivemind PYTHON`
does that to hivemind's averager, run by an interpreter that has it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import roost
from benchmarks.convergence_model import text, windows
from benchmarks.faults_rounds import Stall, hivemind_stall, measure_stalls
from roost.chaos.findings import Recovery, percentile
from roost.chaos.injector import Incident
from roost.chaos.schedule import FaultKind, draw
from roost.chaos.session import ChaosResult, ChaosSession
from roost.config import NodeOptions

CONTEXT, SAMPLES, VALIDATION = 16, 65_536, 4_096
"""An epoch takes about a minute: with less the model begins to know the text by heart, and losses say nothing."""
WIDTH, HIDDEN = 256, 6
NODES = tuple(NodeOptions(name=f"node-{index}", memory="10MB", relative_speed=0.08) for index in range(6))
"""Two nodes hold the training state of the model, none holds it alone."""
WINDOW_S = 2.5
"""Before a fault, to compare the rates of other clusters with."""
SYNCHRONISING = frozenset({"averaging", "evaluating", "saving"})
GROWN_UP_S = 60.0
"""The memory of a process is compared with what it was at this age, or half its life if that is less."""
LEAST_LIFE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Length:
    """How much is done."""

    faults: int
    minutes: float
    rounds: tuple[str, ...]
    """How members of a round are lost, one after the other."""


FULL = Length(faults=60, minutes=11.0, rounds=("kill", "freeze", "kill"))
QUICK = Length(faults=4, minutes=0.5, rounds=("kill", "freeze"))


def characters_job(directory: Path, *, epochs: int) -> roost.Job:
    """Return the job: the character after 16 others, by an MLP of half a million parameters."""
    torch.manual_seed(0)
    training, held_out, vocabulary = text()
    hidden = [layer for _ in range(HIDDEN) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    embedding = (nn.Embedding(vocabulary, 16), nn.Flatten())
    model = nn.Sequential(*embedding, nn.Linear(16 * CONTEXT, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, vocabulary))
    return roost.Job(
        model=model,
        loss=functional.cross_entropy,
        data=examples(training, SAMPLES),
        validation=examples(held_out, VALIDATION),
        optimizer_args={"lr": 1e-3},
        batch_size=64,
        epochs=epochs,
        averaging_interval=8,
        name="characters",
        checkpoint_dir=str(directory),
    )


def examples(codes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return contexts (count, CONTEXT) and the character after each (count,), spread evenly over the text."""
    starts = torch.linspace(0, len(codes) - CONTEXT - 2, count).long()
    contexts, targets = windows(codes, starts, CONTEXT)
    return contexts, targets[:, -1].contiguous()


# ---------------------------------------------------------------- what the records say


def cluster_samples(event: dict[str, Any]) -> dict[int, int]:
    """Return by number how many samples the first stage of each cluster has applied at a progress event."""
    return {stage["number"]: stage["samples"] for stage in event["stages"] if stage["stage"] == 0 and stage["number"] >= 0}


def at(events: Sequence[dict[str, Any]], when: float) -> dict[str, Any] | None:
    """Return the last progress event that is not after a time."""
    return next((event for event in reversed(events) if event["time"] <= when), None)


def slowdown(result: ChaosResult) -> tuple[float | None, int]:
    """Return the rate of clusters that were not touched before faults over that while another was repaired, and from how many faults.

    Faults at a synchronisation point, or soon after another, are left out. None without any.
    """
    progress = [event for event in result.records if event["event"] == "progress"]
    before = during = 0.0
    used = 0
    for recovery in result.recoveries:
        began = recovery.incident.began
        if recovery.seconds is None or not recovery.incident.node or disturbed(result, recovery):
            continue
        ended = began + max(recovery.seconds, WINDOW_S / 2)
        spans = [at(progress, began - WINDOW_S), at(progress, began), at(progress, ended)]
        between = [event for event in progress if began - WINDOW_S <= event["time"] <= ended]
        if any(event["state"] in SYNCHRONISING for event in between) or any(span is None for span in spans):
            continue
        first, middle, last = (cluster_samples(span) for span in spans if span is not None)
        kept = first.keys() & middle.keys() & last.keys()
        times = [span["time"] for span in spans if span is not None]
        if not kept or times[0] >= times[1] or times[1] >= times[2]:
            continue
        used += 1
        before += sum(middle[number] - first[number] for number in kept) / (times[1] - times[0]) * (times[2] - times[1])
        during += sum(last[number] - middle[number] for number in kept)
    return (before / during if during else None), used


def disturbed(result: ChaosResult, recovery: Recovery) -> bool:
    """Return whether another fault, or the change of the plan after one, was too near."""
    began = recovery.incident.began
    others = [other.began for other in result.incidents if other is not recovery.incident]
    changes = [event["time"] for event in result.records if event["event"] == "plan_changed"]
    return any(began - WINDOW_S < when < began for when in (*others, *changes))


def memory_growth(result: ChaosResult) -> tuple[float | None, float]:
    """Return the most that a process that lived LEAST_LIFE_S or more has grown, in MB, and the longest of these lives in seconds."""
    grown, longest = [], 0.0
    for curve in result.memory.values():
        life = curve[-1][0] - curve[0][0]
        if life < LEAST_LIFE_S:
            continue
        adult = curve[0][0] + min(GROWN_UP_S, life / 2)
        grown.append((curve[-1][1] - next(size for when, size in curve if when >= adult)) / 1e6)
        longest = max(longest, life)
    return max(grown, default=None), longest


def undisturbed_loss(epochs: int, directory: Path) -> float | None:
    """Return the validation loss of the same job without faults after so many epochs."""
    run = roost.train(characters_job(directory, epochs=epochs), roost.local(NODES)).wait()
    return run.metrics().history[-1].validation_loss


# ---------------------------------------------------------------- the command


def chaos(length: Length, kinds: Sequence[FaultKind], seed: int, directory: Path) -> ChaosResult:
    """Return what became of the job under so many faults."""
    faults = draw(seed=seed, faults=length.faults, seconds=60 * length.minutes, kinds=kinds)
    began = time.time()

    def told(incident: Incident) -> None:
        over = f", over after {incident.ended - incident.began:.1f} s" if incident.ended is not None else ""
        print(f"{time.time() - began:7.1f} s  {incident.kind} {incident.node} {incident.other}{over}", flush=True)

    return ChaosSession(characters_job(directory, epochs=100_000), NODES, directory, faults, on_incident=told).run()


def report(result: ChaosResult, stalls: Sequence[Stall], undisturbed: float | None) -> dict[str, Any]:
    """Return the figures."""
    slower, used = slowdown(result)
    grown, longest = memory_growth(result)
    reached = result.validation_loss
    kinds = Counter(incident.kind.value for incident in result.incidents)
    by_kind = {
        kind: percentile([found.seconds for found in result.recoveries if found.incident.kind == kind and found.seconds is not None], 0.5)
        for kind in kinds
    }
    return {
        "emulated": "all nodes are processes of one machine; memory is declared, computation paced",
        "faults": len(result.incidents),
        "kinds": dict(kinds),
        "minutes": round(result.seconds / 60, 2),
        "finished": result.finished,
        "error": result.error,
        "repaired": len(result.recovery_s),
        "recovery_s_p50": percentile(result.recovery_s, 0.5),
        "recovery_s_p99": percentile(result.recovery_s, 0.99),
        "recovery_s_p50_by_kind": by_kind,
        "round_stall_s_max": max((stall.seconds for stall in stalls), default=None),
        "round_stalls": [vars(stall) for stall in stalls],
        "survivors_agree": all(stall.agreed for stall in stalls),
        "other_clusters_slowdown": slower,
        "other_clusters_slowdown_faults": used,
        "samples_trained": result.data.trained,
        "samples_lost": result.data.lost,
        "samples_applied_twice": result.data.applied_twice,
        "samples_given_out_again": result.data.replayed,
        "final_loss": reached[1] if reached is not None else None,
        "undisturbed_loss": undisturbed,
        "final_loss_over_undisturbed": reached[1] / undisturbed if reached is not None and undisturbed else None,
        "rss_growth_mb": grown,
        "rss_longest_life_s": longest,
        "crashes": list(result.crashes),
    }


def main() -> None:
    """Run it; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few faults, for about two minutes in all")
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0, help="of training under faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=[kind.value for kind in FaultKind], default=[kind.value for kind in FaultKind])
    parser.add_argument("--directory", type=Path, default=None, help="keep logs and checkpoints in this new directory")
    parser.add_argument("--hivemind", default="", help="an interpreter that has hivemind")
    options = parser.parse_args()
    length = QUICK if options.quick else FULL
    length = replace(length, faults=options.faults or length.faults, minutes=options.minutes or length.minutes)
    with tempfile.TemporaryDirectory(prefix="roost-faults-") as temporary:
        root = options.directory or Path(temporary)
        result = chaos(length, [FaultKind(kind) for kind in options.kinds], options.seed, root / "chaos")
        reached = result.validation_loss
        undisturbed = undisturbed_loss(reached[0], root / "undisturbed") if reached is not None else None
        stalls = measure_stalls(length.rounds, root / "rounds")
    figures = report(result, stalls, undisturbed)
    if options.hivemind:
        try:
            figures["hivemind_round_stalls"] = [vars(hivemind_stall(options.hivemind, kind)) for kind in ("kill", "freeze")]
        except TimeoutError as error:
            figures["hivemind_error"] = str(error)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
