"""How faithful capture is: `python -m benchmarks.capture [model ...]` (about 25 minutes on one core; `--small` for two).

- Every model of benchmarks.zoo is captured, and trained for two steps with dropout on: eager, as the whole graph, and cut at random
  places into 2 to 6 stages. Losses, all gradients, and parameters and buffers after each step are compared with the eager model's
  (benchmarks.zoo.comparison says how).
- Graphs and files from strangers: how many of the hostile ones are refused (benchmarks.hostile).
- A Llama of 6.7 billion parameters is built without weights, captured, its costs counted, and planned for a pool of mixed PCs, in
  a fresh process: its seconds from start to end, and the most memory it has had.

Progress goes to the error stream; the last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time

import torch

from benchmarks.zoo.catalogue import ZOO, build
from benchmarks.zoo.comparison import Comparison, compare

CHOICES = 10
"""Random choices of cuts for each model, two for each number of stages."""


def note(text: str) -> None:
    """Write a line of progress."""
    print(text, file=sys.stderr, flush=True)


def measure(name: str, *, full: bool, choices: int) -> dict[str, object]:
    """Return what the JSON says of one model."""
    began = time.perf_counter()
    note(f"{name}:")
    case = build(name, full=full)
    parameters = sum(parameter.numel() for parameter in case.model.parameters())
    found = compare(case, choices=choices, note=lambda text: note(f"  {text}"))
    note(f"  {parameters / 1e6:.1f} million parameters, {time.perf_counter() - began:.0f} s")
    return figures_of(found) | {"parameters": parameters}


def figures_of(found: Comparison) -> dict[str, object]:
    """Return the figures of one comparison."""
    return {
        "capture_s": round(found.capture_s, 2),
        "graph_bytes": found.graph_bytes,
        "cuts": found.legal_cuts,
        "cuts_compared": len(found.pieces),
        "max_relative_gradient_error": max([found.whole.relative_error, *(piece.relative_error for piece in found.pieces)]),
        "whole_bit_equal": found.whole.bit_equal,
        "share_of_cuts_bit_equal": share_equal([found]),
        "evaluation_error": found.evaluation_error,
    }


def share_equal(comparisons: list[Comparison]) -> float:
    """Return the share of all compared cuts whose every bit is the eager model's."""
    pieces = [piece for comparison in comparisons for piece in comparison.pieces]
    return sum(piece.bit_equal for piece in pieces) / max(1, len(pieces))


def measure_zoo(names: list[str], *, full: bool, choices: int) -> dict[str, object]:
    """Return the figures of all models, and over all of them."""
    models: dict[str, dict[str, object]] = {}
    for name in names:
        models[name] = measure(name, full=full, choices=choices)
        # A captured model, its eager twin and their gradients are large, and what traced them has cycles.
        gc.collect()
    errors = [figures["max_relative_gradient_error"] for figures in models.values()]
    compared = [int(str(figures["cuts_compared"])) for figures in models.values()]
    equal = [float(str(figures["share_of_cuts_bit_equal"])) for figures in models.values()]
    return {
        "models": models,
        "max_relative_gradient_error": max(float(str(error)) for error in errors),
        "share_of_cuts_bit_equal": sum(count * share for count, share in zip(compared, equal, strict=True)) / sum(compared),
    }


def measure_hostile() -> dict[str, object]:
    """Return how many hostile inputs there are and how many of them are refused with a typed error."""
    from benchmarks.hostile import run_hostile

    results = run_hostile()
    for result in results:
        if not result.rejected:
            note(f"hostile input {result.name!r} is not refused")
    return {"hostile_rejected": sum(result.rejected for result in results), "hostile_total": len(results)}


def measure_meta() -> dict[str, object]:
    """Return the seconds and gigabytes of planning the model that is larger than any machine."""
    from benchmarks.capture_meta import measure_in_child

    seconds, resident_gb, summary = measure_in_child()
    note(f"llama-7b on meta: {seconds:.1f} s, {resident_gb:.2f} GB; {summary}")
    return {"meta_7b_seconds": round(seconds, 1), "meta_7b_rss_gb": round(resident_gb, 2)}


def main() -> None:
    """Run the parts and print their figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*ZOO, []], help="models to compare; all without one")
    parser.add_argument("--small", action="store_true", help="the small models of the tests instead of the published sizes")
    parser.add_argument("--choices", type=int, default=CHOICES, help=f"random choices of cuts for each model ({CHOICES})")
    parser.add_argument("--only-models", action="store_true", help="without hostile inputs and the model on meta")
    options = parser.parse_args()
    # Sums over threads are rounded by how the work was divided.
    torch.set_num_threads(1)
    figures: dict[str, object] = {"torch": str(torch.__version__)}
    if not options.only_models:
        # First: both start processes, and this one is still small.
        figures |= measure_hostile() | measure_meta()
    figures |= measure_zoo(options.names or list(ZOO), full=not options.small, choices=options.choices)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
