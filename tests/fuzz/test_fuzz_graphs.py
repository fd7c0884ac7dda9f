"""Damaged and made-up graphs: refused with a typed error, or good for everything a node does with them.

ROOST_FUZZ_MINUTES makes the run longer and random; without it, it is short and always the same.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import corpus
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated
from random_calls import OPS, SHAPES, RandomGraph
from sandbox import data_shapes_of, run_in_sandbox

from roost.capture.cut import cut, legal_cuts
from roost.capture.graph import Graph
from roost.capture.graph_format import from_bytes, to_bytes
from roost.capture.sizes import check_sizes
from roost.errors import GraphFormatError

MINUTES = float(os.environ.get("ROOST_FUZZ_MINUTES", "0"))
PARTS = 4
"""Kinds of fuzzing that share the minutes, those of test_fuzz_files.py included."""
EXAMPLES_PER_S = 100
SAMPLES = 4
LIMIT_BYTES = 64 << 20
BATCH = 40
"""Graphs that go through one child process."""
KEPT = Path(os.environ.get("ROOST_FUZZ_KEEP", "roost-fuzz"))
"""Where graphs that ended a process are kept."""

SHARE_S = MINUTES * 60 / PARTS
LONG = MINUTES > 0
FUZZING = settings(
    max_examples=max(100, int(SHARE_S * EXAMPLES_PER_S)),
    derandomize=not LONG,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def seeds(short: int) -> Iterator[int]:
    """Yield the numbers below `short`, or in a long run random ones until this part's time is over."""
    end = time.monotonic() + SHARE_S
    yield from range(short)
    source = random.Random()
    while time.monotonic() < end:
        yield source.getrandbits(48)


def examine(data: bytes, rng: random.Random) -> Graph | None:
    """Load a graph and do with it what a node does. Return it if it may run; None if it is refused."""
    try:
        graph = from_bytes(data)
    except GraphFormatError:
        return None
    assert from_bytes(to_bytes(graph)) == graph
    cuts = legal_cuts(graph)
    chosen = sorted(rng.sample(cuts, min(len(cuts), rng.randrange(4))))
    programs = cut(graph, [0, *chosen, len(graph.nodes)])
    assert [program.stop for program in programs] == [*chosen, len(graph.nodes)]
    try:
        check_sizes(graph, data_shapes_of(graph, SAMPLES), LIMIT_BYTES)
    except GraphFormatError:
        return None
    return graph


def survives(graphs: list[bytes], shapes: list[tuple[int, ...]], seed: int) -> int:
    """Run graphs in child processes; fail, keeping the graph, if one of them ends its process. Return how many ran to the end."""
    endings = run_in_sandbox(graphs, shapes, seed)
    for ending in endings:
        if ending.killed:
            KEPT.mkdir(exist_ok=True)
            (KEPT / f"graph-{seed}-{ending.position}.json").write_bytes(graphs[ending.position])
    killed = [ending for ending in endings if ending.killed]
    assert not killed, f"{killed}: see {KEPT}"
    return sum(ending.outcome == "ran" for ending in endings)


@pytest.mark.timeout(max(300, 120 * MINUTES))
@FUZZING
@given(st.integers(0, 2), st.data())
def test_damaged_bytes_are_refused_or_are_a_graph(which: int, data: st.DataObject) -> None:
    content = bytearray(corpus.graphs()[which])
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        length = data.draw(st.integers(0, 8))
        noise = data.draw(st.binary(max_size=8) | st.sampled_from([b"-", b"0", b"e9", b"null", b"[", b"]", b"{}", b",", b'"', b"1"]))
        content[position : position + length] = noise
    examine(bytes(content), random.Random(0))


@pytest.mark.timeout(max(300, 120 * MINUTES))
def test_changed_graphs_are_refused_or_run_without_ending_the_process() -> None:
    accepted: list[tuple[bytes, list[tuple[int, ...]]]] = []
    ran = 0
    for seed in seeds(400):
        rng = random.Random(seed)
        data = json.dumps(mutated(corpus.parsed(rng.choice(corpus.graphs())), rng)).encode()
        graph = examine(data, rng)
        if graph is not None:
            accepted.append((data, data_shapes_of(graph, SAMPLES)))
        if len(accepted) >= BATCH:
            ran += run_all(accepted, seed)
            accepted.clear()
    assert ran + run_all(accepted, 0) > 0


def run_all(accepted: list[tuple[bytes, list[tuple[int, ...]]]], seed: int) -> int:
    """Run graphs whose data may have different shapes."""
    ran = 0
    for shapes in {tuple(shapes) for _, shapes in accepted}:
        ran += survives([data for data, other in accepted if tuple(other) == shapes], list(shapes), seed)
    return ran


@pytest.mark.timeout(max(300, 120 * MINUTES))
def test_made_up_calls_that_pass_the_check_do_not_end_the_process() -> None:
    made: list[bytes] = []
    ran, queue = 0, list[str]()
    for seed in seeds(80):
        rng = random.Random(seed)
        graph = RandomGraph(rng)
        grown = False
        for _ in range(rng.choice((1, 1, 2))):
            if not queue:
                queue = rng.sample(OPS, len(OPS))
            grown = graph.grow(queue.pop()) or grown
        if grown:
            made.append(graph.data())
        if len(made) >= BATCH:
            ran += survives(made, list(SHAPES), seed)
            made.clear()
    assert ran + survives(made, list(SHAPES), 0) > 0
