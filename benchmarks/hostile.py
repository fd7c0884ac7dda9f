"""Every kind of hostile input the loaders must refuse, and what refusing it takes: `python -m benchmarks.hostile`.

Each case is loaded in a process of its own. A good refusal is an error of Roost's own, at once, without memory worth
mentioning; a process that dies, hangs, or raises anything else is a defect.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks import hostile_files, hostile_graphs
from roost.capture.cut import cut, legal_cuts
from roost.capture.graph_format import from_bytes
from roost.capture.sizes import check_sizes
from roost.checkpoint.reader import load
from roost.errors import RoostError
from roost.weights.checkpoint_tensors import open_checkpoint

LIMIT_BYTES = 1 << 30
"""Memory of the imagined node that is sent the graphs."""
MAX_SECONDS = 2.0
MAX_MEGABYTES = 200.0
DEADLINE_S = 30.0
"""After this a process is ended and counts as hung."""
_KIB_PER_MB = 1000.0


@dataclass(frozen=True, kw_only=True)
class HostileCase:
    """One kind of hostile input."""

    name: str
    loader: str
    """Which door it knocks at: graph, sizes, tensors, checkpoint or shards."""
    make: Callable[[Path], bytes | Path]
    """Returns the input; a directory is given for what must be files."""


@dataclass(frozen=True, kw_only=True)
class HostileResult:
    """What happened to one case."""

    name: str
    loader: str
    rejected: bool
    """True if an error of Roost's own was raised."""
    error: str
    """Its type and message, or what happened instead."""
    seconds: float
    """Of the processor: other work on the machine does not count. Waiting is what the deadline is for."""
    megabytes: float
    """Most memory taken above what the process had before."""

    @property
    def good(self) -> bool:
        """True if it was refused in bounded time and memory."""
        return self.rejected and self.seconds < MAX_SECONDS and self.megabytes < MAX_MEGABYTES


def load_graph(data: bytes | Path) -> None:
    """Load a graph as a node does before it knows its stage: parse, check, find the cuts, cut."""
    assert isinstance(data, bytes)
    graph = from_bytes(data)
    cut(graph, [0, *legal_cuts(graph)[:1], len(graph.nodes)])


def load_sizes(data: bytes | Path) -> None:
    """Load a graph and look at what it takes, as a node does before it fetches tensors."""
    assert isinstance(data, bytes)
    graph = from_bytes(data)
    cut(graph, [0, *legal_cuts(graph)[:1], len(graph.nodes)])
    check_sizes(graph, hostile_graphs.SHAPES, LIMIT_BYTES)


def load_checkpoint(path: bytes | Path) -> None:
    """Load a checkpoint as for resuming."""
    assert isinstance(path, Path)
    load(path)


def load_shards(path: bytes | Path) -> None:
    """Open the initial weights in a file or folder and read them."""
    assert isinstance(path, Path)
    wanted = {spec.name: spec for spec in hostile_files.SPECS}
    open_checkpoint(path, wanted).read(tuple(wanted))


LOADERS: dict[str, Callable[[bytes | Path], None]] = {
    "graph": load_graph,
    "sizes": load_sizes,
    "tensors": load_checkpoint,
    "checkpoint": load_checkpoint,
    "shards": load_shards,
}


def hostile_cases() -> tuple[HostileCase, ...]:
    """Return every case, with names that are unique for each loader."""
    graphs = {
        "text: ": hostile_graphs.OF_TEXT,
        "header: ": hostile_graphs.OF_HEADER,
        "tensor: ": hostile_graphs.OF_TENSORS,
        "node: ": hostile_graphs.OF_NODES,
    }
    found = [
        HostileCase(name=prefix + name, loader="graph", make=_ignoring_directory(make))
        for prefix, makers in graphs.items()
        for name, make in makers.items()
    ]
    found += [HostileCase(name=name, loader="sizes", make=_ignoring_directory(make)) for name, make in hostile_graphs.OF_SIZES.items()]
    for name, content in hostile_files.OF_TENSOR_FILES.items():
        found.append(HostileCase(name=name, loader="tensors", make=hostile_files.with_file(content)))
    found += [HostileCase(name=name, loader="checkpoint", make=make) for name, make in hostile_files.OF_CHECKPOINTS.items()]
    found += [HostileCase(name=name, loader="shards", make=make) for name, make in hostile_files.OF_SHARDS.items()]
    return tuple(found)


def _ignoring_directory(make: Callable[[], bytes]) -> Callable[[Path], bytes]:
    return lambda directory: make()


def run_hostile(cases: Sequence[HostileCase] | None = None) -> list[HostileResult]:
    """Return what happened to every case, each loaded in a forked process of its own. Call it from a process with one thread."""
    _warm_up()
    return [_run(case) for case in (hostile_cases() if cases is None else cases)]


def _warm_up() -> None:
    """Load what loaders import at first use, so that no case pays for it."""
    load_sizes(hostile_graphs.as_bytes(hostile_graphs.sample_graph()))
    with tempfile.TemporaryDirectory() as directory:
        load(hostile_files.sample_checkpoint(Path(directory)))


def _run(case: HostileCase) -> HostileResult:
    with tempfile.TemporaryDirectory() as directory:
        content = case.make(Path(directory))
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_load_and_tell, args=(case, content, sender), daemon=True)
        process.start()
        sender.close()
        try:
            result: HostileResult | None = receiver.recv() if receiver.poll(DEADLINE_S) else None
        except EOFError:
            result = None
        alive = process.is_alive() and result is None and not receiver.closed
        process.join(1.0 if not alive else 0.0)
        if process.is_alive():
            process.kill()
            process.join()
        if result is not None:
            return result
        what = f"the process ended with {process.exitcode}" if process.exitcode != -9 else f"no answer within {DEADLINE_S:.0f} s"
        return HostileResult(name=case.name, loader=case.loader, rejected=False, error=what, seconds=DEADLINE_S, megabytes=0.0)


def _load_and_tell(case: HostileCase, content: bytes | Path, sender: Connection) -> None:
    before = _reset_peak()
    started = time.process_time()
    rejected, error = False, "it was accepted"
    try:
        LOADERS[case.loader](content)
    except RoostError as refusal:
        rejected, error = True, f"{type(refusal).__name__}: {refusal.message[:200]}"
    except Exception as untyped:  # noqa: BLE001 - whatever else is raised is what this looks for
        error = f"{type(untyped).__name__}: {str(untyped)[:200]}"
    seconds = time.process_time() - started
    megabytes = (_memory("VmHWM") - before) / _KIB_PER_MB
    sender.send(
        HostileResult(name=case.name, loader=case.loader, rejected=rejected, error=error, seconds=seconds, megabytes=max(0.0, megabytes))
    )


def _reset_peak() -> float:
    """Make the peak count from now on and return the memory that the process has, in KiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field))


def summary(results: Sequence[HostileResult]) -> dict[str, object]:
    """Return the figures: how many kinds, how many were refused well, and the worst of each measure."""
    slowest = max(results, key=lambda result: result.seconds)
    largest = max(results, key=lambda result: result.megabytes)
    return {
        "hostile_total": len(results),
        "hostile_rejected": sum(result.good for result in results),
        "slowest_s": round(slowest.seconds, 3),
        "slowest": f"{slowest.loader}: {slowest.name}",
        "largest_mb": round(largest.megabytes, 1),
        "largest": f"{largest.loader}: {largest.name}",
        "not_refused": [asdict(result) for result in results if not result.good],
    }


def main() -> None:
    """Print every case to stderr and the figures as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--all", action="store_true", help="put every case into the JSON, not just the figures")
    options = parser.parse_args()
    results = run_hostile([case for case in hostile_cases() if options.only in f"{case.loader}: {case.name}"])
    for result in results:
        mark = "refused" if result.good else "NOT REFUSED"
        line = f"{mark:12} {result.seconds:6.2f} s {result.megabytes:6.1f} MB  {result.loader}: {result.name}: {result.error[:110]}"
        print(ascii(line)[1:-1], file=sys.stderr)
    report = {**summary(results), **({"cases": [{**asdict(result), "good": result.good} for result in results]} if options.all else {})}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
