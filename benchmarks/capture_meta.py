"""A model larger than any machine, captured and planned without weights: `python -m benchmarks.capture_meta`."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time

import torch

import roost
from benchmarks.zoo.case import keyword_case
from roost.capture.export import capture
from roost.capture.profiling import estimate
from roost.config import JobConfig, NamedArguments
from roost.planning.planner import make_plan
from roost.types import LinkProfile, NodeProfile

TOKENS = 512
"""Of the one sample of a micro-batch."""
NODES = 32
MEMORIES_GB = (8, 12, 16, 24)
TERAFLOP_PER_S = (0.2, 0.5, 1.0, 2.0)
RATES_MBIT = (100, 300, 1000)
BYTES_PER_S = 1e10
REFERENCE_FLOP_PER_S = 5e11
DEADLINE_S = 600.0


def measure_in_child() -> tuple[float, float, str]:
    """Return the wall seconds of a fresh process from its start to its end, its largest memory in gigabytes, and what it planned."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.capture_meta"], stdout=subprocess.PIPE, timeout=DEADLINE_S, check=True, text=True
    )
    seconds = time.perf_counter() - began
    told = json.loads(done.stdout.splitlines()[-1])
    return seconds, told["rss_gb"], told["summary"]


def plan_llama() -> str:
    """Build, capture, count and plan a Llama of 6.7 billion parameters; return what came out in words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000, hidden_size=4_096, intermediate_size=11_008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32
    )
    with roost.deferred_init(seed=0):
        model = LlamaForCausalLM(config)
    ids = torch.randint(config.vocab_size, (1, TOKENS))
    case = keyword_case(model, {"input_ids": ids, "labels": ids.clone()}, varying=frozenset({1}))
    captured = capture(case.model, case.loss, case.inputs, case.labels, layout=case.layout, dynamic=case.dynamic, name="llama-7b")
    profile = estimate(captured, case.inputs, case.labels, reference_flop_per_s=REFERENCE_FLOP_PER_S, bytes_per_s=BYTES_PER_S)
    job = JobConfig(
        job_id="llama-7b",
        optimizer=NamedArguments(name="AdamW", arguments=(("lr", 1e-4),)),
        batch_size=16,
        micro_batch_size=1,
        samples=1_000_000,
    )
    nodes = mixed_nodes(random.Random(0))
    plan = make_plan(profile, nodes, mixed_links(nodes, random.Random(1)), job, random.Random(0))
    stages = [len(cluster.stages) for cluster in plan.clusters]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{parameters / 1e9:.2f} billion parameters, {len(captured.graph.nodes)} operations, clusters of {stages} stages"


def mixed_nodes(rng: random.Random) -> list[NodeProfile]:
    """Return PCs of several sizes; none holds more than a fraction of the model."""
    nodes = []
    for index in range(NODES):
        speed = rng.choice(TERAFLOP_PER_S) * 1e12
        node = NodeProfile(
            node_id=f"node-{index}",
            address="192.0.2.1:7702",
            memory_bytes=rng.choice(MEMORIES_GB) * 10**9,
            flop_per_s=speed,
            matmul_flop_per_s=speed,
            convolution_flop_per_s=speed,
            device="cpu",
            threads=1,
            reliability=1.0,
        )
        nodes.append(node)
    return nodes


def mixed_links(nodes: list[NodeProfile], rng: random.Random) -> list[LinkProfile]:
    """Return a link of its own rate from every node to every other."""
    return [
        LinkProfile(source=a.node_id, target=b.node_id, latency_s=0.005, bytes_per_s=rng.choice(RATES_MBIT) * 125_000)
        for a in nodes
        for b in nodes
        if a is not b
    ]


def main() -> None:
    """Print one JSON object: what was planned, and the most memory that this process has had."""
    summary = plan_llama()
    print(json.dumps({"summary": summary, "rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}))


if __name__ == "__main__":
    main()
