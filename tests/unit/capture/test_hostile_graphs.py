"""Whatever a stranger sends is refused with an error of Roost's own, in bounded time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.hostile import MAX_MEGABYTES, hostile_cases
from benchmarks.hostile_graphs import SHAPES, as_bytes, sample_graph

from roost.capture.cut import cut, legal_cuts
from roost.capture.graph_format import from_bytes, to_bytes
from roost.capture.sizes import check_sizes

ROOT = Path(__file__).parents[3]
CASES = [f"{case.loader}: {case.name}" for case in hostile_cases()]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Return what became of every case: loaded in a process that has no other threads, each case in one of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.hostile", "--all"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    return {f"{case['loader']}: {case['name']}": case for case in report["cases"]}


def test_there_are_many_kinds_of_hostile_input_and_each_has_its_name() -> None:
    assert len(CASES) == len(set(CASES)) >= 60


@pytest.mark.parametrize("case", CASES)
def test_hostile_input_is_refused_without_taking_memory(case: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[case]
    assert result["rejected"], result["error"]
    assert result["megabytes"] < MAX_MEGABYTES


def test_the_graph_that_hostile_ones_are_made_of_is_accepted() -> None:
    graph = from_bytes(as_bytes(sample_graph()))
    assert from_bytes(to_bytes(graph)) == graph
    assert check_sizes(graph, SHAPES, 10**6).values[graph.loss] == 4
    assert len(cut(graph, [0, legal_cuts(graph)[0], len(graph.nodes)])) == 2
