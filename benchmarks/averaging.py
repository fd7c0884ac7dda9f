"""How close averaging comes to the wire, and what it costs training: `python -m benchmarks.averaging`.

(a) Four nodes, each a process of its own with the real ring and the real transport (gRPC, mutual TLS), average 50 MB and 200 MB at
100 Mbit/s: uncompressed, fp16 and int8; then rings between two clusters that are cut at different places. As root on Linux the nodes
live in network namespaces, each limited both ways (tbf on veth); elsewhere on loopback behind the built-in shaper, which counts no
packet headers. Seconds are those of the ring, from the copy of the weights to the last mean, as gloo's all-reduce is timed; "round"
has copying the weights and applying the mean as well. Theory is 2(n-1)/n x bytes / bandwidth, with every bit of the bandwidth for
values. Gloo's all-reduce runs between the rounds, over the same links (the built-in shaper cannot hold it: there it is left out).
(b) Two clusters of two nodes train a small GPT, emulated to be slow and to have an uplink of 100 Mbit/s, with averaging and without.
Hivemind's averager needs an environment of its own: name its interpreter with --hivemind to have it measured beside the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

import roost
from benchmarks.models import SmallGPT, next_token_loss
from benchmarks.namespaces import Namespaces, available
from benchmarks.prediction import Watch
from roost.config import NodeOptions
from roost.transport.authority import create_authority
from roost.types import Role

NODES = 4
MBIT = 100.0
PORT = 29600
GLOO_PORT = 29500
MB = 10**6
HIVEMIND_SCRIPT = Path(__file__).with_name("averaging_hivemind.py")
NO_AVERAGING = 1_000_000
"""An averaging interval that no run reaches."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A segment as the nodes are told of it."""

    index: int
    nbytes: int
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RingCase:
    """What is averaged at once."""

    name: str
    segments: tuple[Segment, ...]
    codec: str = "none"
    gloo_bytes: int = 0
    """Size of an all-reduce that runs between the rounds."""

    def theory_s(self, bytes_per_s: float) -> float:
        """Return the seconds that the busiest node's line needs for the uncompressed values."""
        busy = [0.0] * NODES
        for segment in self.segments:
            for member in segment.members:
                busy[member] += 2 * (len(segment.members) - 1) / len(segment.members) * segment.nbytes / bytes_per_s
        return max(busy)


def cases(sizes: Sequence[int]) -> list[RingCase]:
    """Return what is run for models of these sizes in bytes."""
    everybody = tuple(range(NODES))
    found = []
    for nbytes in sizes:
        for codec in ("none", "fp16", "int8"):
            segments = (Segment(index=0, nbytes=nbytes, members=everybody),)
            gloo = nbytes if codec == "none" else 0
            found.append(RingCase(name=f"{nbytes // MB} MB {codec}", segments=segments, codec=codec, gloo_bytes=gloo))
    # Clusters (0, 1) and (2, 3), cut at 2/5 and at 3/5 of the model: nodes 1 and 2 are in two rings each.
    fifth = sizes[0] // 20 * 4
    cuts = ((2 * fifth, (0, 2)), (fifth, (1, 2)), (2 * fifth, (1, 3)))
    segments = tuple(Segment(index=index, nbytes=nbytes, members=members) for index, (nbytes, members) in enumerate(cuts))
    found.append(RingCase(name=f"{sizes[0] // MB} MB, two clusters cut differently", segments=segments))
    return found


class NodeProcess:
    """A child process that runs one node."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, **order: Any) -> None:
        """Send an order; `hear` has the answer."""
        _pipe(self._process.stdin).write(json.dumps(order) + "\n")
        _pipe(self._process.stdin).flush()

    def hear(self) -> dict[str, Any]:
        """Return the next answer."""
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise SystemExit(f"a node has ended with status {self._process.wait()}; its errors are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """End it."""
        with contextlib.suppress(BrokenPipeError):
            _pipe(self._process.stdin).close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "made with pipes"
    return pipe


@contextlib.contextmanager
def node_processes(directory: Path, network: Namespaces | None) -> Iterator[list[NodeProcess]]:
    """Start the nodes, in namespaces or behind the built-in shaper, and end them."""
    authority = create_authority(directory / "authority")
    names = [f"node-{index}" for index in range(NODES)]
    addresses = ["127.0.0.1" if network is None else network.address(index) for index in range(NODES)]
    processes = []
    try:
        for index, name in enumerate(names):
            folder = directory / name
            authority.create_credentials(name, Role.NODE).save(folder)
            options = {
                "index": index,
                "nodes": names,
                "addresses": addresses,
                "port": PORT,
                "credentials": str(folder),
                "uplink_bytes_per_s": 0.0 if network is not None else MBIT * 1e6 / 8,
                "gloo_port": 0 if network is None else GLOO_PORT,
                "interface": "eth0",
            }
            command = [sys.executable, "-m", "benchmarks.averaging_node", json.dumps(options)]
            processes.append(NodeProcess(command if network is None else network.command(index, command)))
        for process in processes:
            process.hear()
        yield processes
    finally:
        for process in processes:
            process.stop()


def ask(processes: Sequence[NodeProcess], **order: Any) -> list[dict[str, Any]]:
    """Give all nodes an order at once and return their answers."""
    for process in processes:
        process.tell(**order)
    return [process.hear() for process in processes]


def run_case(case: RingCase, processes: Sequence[NodeProcess], repetitions: int, gloo: bool) -> dict[str, Any]:
    """Run a case and gloo beside it, in turn; return medians over the repetitions of the slowest node's figures."""
    segments = [{"index": s.index, "nbytes": s.nbytes, "members": list(s.members)} for s in case.segments]
    ask(processes, do="setup", segments=segments, codec=case.codec)
    rounds, reduces = [], []
    for number in range(1, repetitions + 1):
        ask(processes, do="move")
        rounds.append(ask(processes, do="round", number=number))
        if gloo and case.gloo_bytes:
            reduces.append(ask(processes, do="gloo", nbytes=case.gloo_bytes))
    ask(processes, do="clear")

    def slowest(runs: list[list[dict[str, Any]]], key: str) -> float:
        return statistics.median(max(answer[key] for answer in answers) for answers in runs)

    theory_s = case.theory_s(MBIT * 1e6 / 8)
    figures: dict[str, Any] = {
        "name": case.name,
        "theory_s": round(theory_s, 3),
        "seconds": round(slowest(rounds, "seconds"), 3),
        "over_theory": round(slowest(rounds, "seconds") / theory_s, 4),
        "round_over_theory": round(slowest(rounds, "round_seconds") / theory_s, 4),
        "megabytes_sent": round(slowest(rounds, "sent") / 1e6, 2),
        "cpu_s": round(slowest(rounds, "cpu_s"), 2),
        "error": float(f"{slowest(rounds, 'error'):.3g}"),
    }
    if reduces:
        figures["gloo_seconds"] = round(slowest(reduces, "seconds"), 3)
        figures["gloo_over_theory"] = round(slowest(reduces, "seconds") / theory_s, 4)
        figures["gloo_cpu_s"] = round(slowest(reduces, "cpu_s"), 2)
    print(", ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
    return figures


def hivemind_rounds(python: str, sizes: Sequence[int], repetitions: int, network: Namespaces) -> list[dict[str, Any]]:
    """Run hivemind's averager with that interpreter over the same links; return its median seconds per size."""
    found = []
    for nbytes in sizes:
        first, processes, answers = "", [], []
        try:
            for host in range(NODES):
                arguments = [python, str(HIVEMIND_SCRIPT), network.address(host), str(NODES), str(nbytes), str(repetitions), first]
                process = NodeProcess(network.command(host, arguments))
                processes.append(process)
                first = first or process.hear()["address"]
            answers = [process.hear() for process in processes]
        finally:
            for process in processes:
                process.stop()
        seconds = statistics.median(max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True))
        theory_s = 2 * (NODES - 1) / NODES * nbytes / (MBIT * 1e6 / 8)
        figures = {"bytes": nbytes, "seconds": round(seconds, 3), "over_theory": round(seconds / theory_s, 4)}
        print(f"hivemind: {figures}", flush=True)
        found.append(figures)
    return found


def training_rate(interval: int, compression: str, seconds: float, directory: Path) -> tuple[float, int]:
    """Train on two clusters of two emulated nodes; return samples per second in the steady state, and the averaging rounds."""
    torch.manual_seed(0)
    tokens = torch.randint(256, (512, 65))
    data = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    job = roost.Job(
        model=SmallGPT(layers=4, width=128, heads=4, length=64),
        loss=next_token_loss,
        data=data,
        optimizer_args={"lr": 1e-3},
        batch_size=8,
        micro_batch_size=4,
        epochs=100_000,
        sync_interval=100_000,
        averaging_interval=interval,
        averaging_compression=compression,
        min_clusters=2,
        max_clusters=2,
        checkpoint_dir=str(directory),
    )
    watch = Watch(samples_per_epoch=len(data[1]), measure_s=seconds)
    run = roost.train(job, roost.local([NodeOptions(memory="24MB", relative_speed=0.15, uplink_mbit=MBIT)] * 4), observer=watch)
    watch.enough.wait(120 + seconds)
    rounds = run.metrics().averaging_rounds
    run.stop()
    run.wait()
    return watch.rate(), rounds


def training(seconds: float, repetitions: int) -> dict[str, Any]:
    """Return samples per second without averaging and with it, at the automatic interval, in runs that take turns."""
    rates: dict[str, list[float]] = {"off": [], "automatic": []}
    rounds = 0
    with tempfile.TemporaryDirectory() as directory:
        for repetition in range(repetitions):
            order = list(rates) if repetition % 2 == 0 else list(rates)[::-1]
            for kind in order:
                rate, done = training_rate(NO_AVERAGING if kind == "off" else 0, "none", seconds, Path(directory))
                rates[kind].append(rate)
                rounds = max(rounds, done)
                print(f"training, averaging {kind}: {rate:.2f} samples/s, {done} rounds", flush=True)
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    return {
        "samples_per_s": {kind: [round(value, 2) for value in values] for kind, values in rates.items()},
        "rounds": rounds,
        "training_slowdown": round(medians["off"] / medians["automatic"], 4),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the figures."""
    sizes = [10 * MB] if options.quick else [50 * MB, 200 * MB]
    namespaces = available() and not options.shaper
    how = "network namespaces (veth, tbf both ways)" if namespaces else "the built-in shaper on loopback: no packet headers, no gloo"
    print(f"{NODES} nodes at {MBIT:g} Mbit/s in {how}", flush=True)
    figures: dict[str, Any] = {"network": how, "hivemind": "not measured: no interpreter was named with --hivemind"}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        network = stack.enter_context(Namespaces(count=NODES, mbit=MBIT)) if namespaces else None
        with node_processes(directory, network) as processes:
            # Connections are made, and their windows grow, in a round that does not count.
            run_case(
                RingCase(name="first round", segments=(Segment(index=0, nbytes=4 * MB, members=tuple(range(NODES))),)), processes, 1, False
            )
            rows = [
                run_case(case, processes, options.repetitions if case.segments[0].nbytes <= 50 * MB else 2, gloo=namespaces)
                for case in cases(sizes)
            ]
        if options.hivemind and network is not None:
            figures["hivemind"] = hivemind_rounds(options.hivemind, sizes, 2, network)
    plain = [row for row in rows if row["name"].endswith("none")]
    figures |= {"rings": rows, **{key: max(row[key] for row in plain) for key in ("over_theory", "round_over_theory")}}
    if namespaces:
        figures["gloo_over_theory"] = max(row["gloo_over_theory"] for row in plain)
    if not options.no_training:
        figures |= training(8.0 if options.quick else 25.0, 1 if options.quick else 2)
    figures["emulated"] = "links; in training also the nodes' speed (pacing by sleeping), memory (declared) and uplinks (a token bucket)"
    return figures


def main() -> None:
    """Print the figures; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 MB, and one short training run of each kind")
    parser.add_argument("--shaper", action="store_true", help="use the built-in shaper even where namespaces could be made")
    parser.add_argument("--no-training", action="store_true", help="leave out part (b)")
    parser.add_argument("--repetitions", type=int, default=3, help="rounds per case up to 50 MB; larger ones run twice")
    parser.add_argument("--hivemind", default="", help="a Python interpreter that has hivemind")
    # Namespaces would outlive a process that ends at once.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
