"""One node of `python -m benchmarks.averaging`: a real transport and real rings; it is told what to do line by line on stdin.

Every line is a JSON object with a "do"; every answer is a JSON line on stdout.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roost import messages as m
from roost.agent.ring_driver import RingDriver
from roost.averaging.segment_average import AveragingOptions
from roost.config import TensorCodec, TransportConfig
from roost.transport.credentials import Credentials
from roost.transport.grpc_transport import GrpcTransport
from roost.transport.interface import Buffer, Sender
from roost.types import Peer, SegmentPlan

JOB = "averaging"
STEP = 0.01
"""How far a node's weights move before a round, in standard deviations of the weights."""


class Node:
    """Holds a slice of the model as one tensor per segment, and runs its rings; nothing trains."""

    def __init__(self, index: int, transport: GrpcTransport, peers: dict[str, Peer]) -> None:
        self._index = index
        self._transport = transport
        self._peers = peers
        self._rings: dict[int, RingDriver] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._weights: dict[int, Tensor] = {}
        self._moves: dict[int, Tensor] = {}
        self._means: dict[int, float] = {}
        self._opens: list[int] = []

    async def on_message(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> None:
        """Hand a ring's message to it; what comes too early or too late is dropped, as an agent does."""
        ring = self._rings.get(getattr(message, "segment", -1))
        if ring is None:
            return
        if isinstance(message, m.OpenRound):
            ring.opened(sender.peer_id, message)
        elif isinstance(message, m.RingChunk):
            ring.chunk_arrived(sender.peer_id, message, buffers[0])

    async def on_call(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> tuple[m.Message, Sequence[Buffer]]:
        """Nothing calls."""
        return m.Done(), []

    async def setup(self, segments: list[dict[str, Any]], codec: str, nodes: list[str]) -> None:
        """Hold these segments and start their rings."""
        me = nodes[self._index]
        for spec in segments:
            plan = SegmentPlan(
                index=spec["index"], tensors=("w",), nbytes=spec["nbytes"], members=tuple(nodes[member] for member in spec["members"])
            )
            if me not in plan.members:
                continue
            if me == plan.members[0]:
                self._opens.append(plan.index)
            self._means[plan.index] = sum(member + 1 for member in spec["members"]) / len(plan.members)
            generator = torch.Generator().manual_seed(spec["index"])
            self._weights[plan.index] = torch.randn(plan.nbytes // 4, generator=generator)
            self._moves[plan.index] = STEP * torch.randn(plan.nbytes // 4, generator=generator)
            self._rings[plan.index] = RingDriver(
                job_id=JOB,
                segment=plan,
                node_id=me,
                peers=self._peers,
                transport=self._transport,
                snapshot=lambda index=plan.index: self._snapshot(index),  # type: ignore[misc]
                apply=lambda average, _, index=plan.index: self._apply(index, average),  # type: ignore[misc]
                options=AveragingOptions(codec=TensorCodec(codec)),
            )
        self._tasks = [asyncio.create_task(ring.run()) for ring in self._rings.values()]

    async def _snapshot(self, index: int) -> tuple[dict[str, Tensor], int]:
        samples = (self._rings[index].rounds_done + 1) * 100
        return {"w": self._weights[index].clone()}, samples

    async def _apply(self, index: int, average: dict[str, Tensor]) -> None:
        self._weights[index].copy_(average["w"])

    def move(self) -> None:
        """Change the weights as training would: every node in the same direction, the later ones further."""
        for index, weights in self._weights.items():
            weights.add_(self._moves[index], alpha=self._index + 1)

    async def round(self, number: int) -> dict[str, float]:
        """Take part in round `number` of every ring, which its first member opens.

        Returns the seconds of the slowest ring and of everything, the bytes sent, the CPU seconds, and the error relative to the mean
        change.
        """
        before = {index: weights - (self._index + 1) * self._moves[index] for index, weights in self._weights.items()}
        sent, cpu, began = self._transport.traffic.bytes_sent, time.process_time(), time.perf_counter()
        for index in self._opens:
            self._rings[index].start_round()
        for ring in self._rings.values():
            async with asyncio.timeout(300), ring.moved:
                await ring.moved.wait_for(lambda ring=ring: ring.rounds_done >= number)  # type: ignore[misc]
        seconds = time.perf_counter() - began
        cpu = time.process_time() - cpu
        # Until everything that was sent has left, and everybody has noticed.
        await asyncio.sleep(0.3)
        changes = {index: self._means[index] * moves for index, moves in self._moves.items()}
        missed = sum(float((weights - before[index] - changes[index]).square().sum()) for index, weights in self._weights.items())
        moved = sum(float(change.square().sum()) for change in changes.values())
        return {
            "seconds": max(ring.times.reduce_s for ring in self._rings.values()),
            "round_seconds": seconds,
            "sent": self._transport.traffic.bytes_sent - sent,
            "cpu_s": cpu,
            "error": (missed / moved) ** 0.5 if moved else 0.0,
        }

    async def clear(self) -> None:
        """Stop the rings and drop the weights."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        self._rings.clear()
        self._opens.clear()
        self._weights.clear()
        self._moves.clear()


def gloo_group(options: dict[str, Any]) -> None:
    """Join the process group of all nodes."""
    os.environ["GLOO_SOCKET_IFNAME"] = options["interface"]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{options['addresses'][0]}:{options['gloo_port']}",
        rank=options["index"],
        world_size=len(options["addresses"]),
        timeout=timedelta(seconds=120),
    )


def gloo_round(nbytes: int, index: int) -> dict[str, float]:
    """All-reduce one tensor of so many bytes; return seconds and CPU seconds."""
    values = torch.full((nbytes // 4,), float(index + 1))
    dist.barrier()
    cpu, began = time.process_time(), time.perf_counter()
    dist.all_reduce(values)
    return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


async def serve(options: dict[str, Any]) -> None:
    """Do what stdin says until it ends."""
    torch.set_num_threads(1)
    index, nodes = options["index"], options["nodes"]
    credentials = Credentials.load(Path(options["credentials"]))
    config = TransportConfig(uplink_bytes_per_s=options["uplink_bytes_per_s"])
    transport = GrpcTransport(credentials, config=config, host=options["addresses"][index], port=options["port"] + index)
    places = zip(nodes, options["addresses"], strict=True)
    peers = {name: Peer(peer_id=name, address=f"{address}:{options['port'] + at}") for at, (name, address) in enumerate(places)}
    node = Node(index, transport, peers)
    await transport.start(node)
    if options["gloo_port"]:
        await asyncio.to_thread(gloo_group, options)
    loop = asyncio.get_running_loop()
    answer({"ready": True})
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        match order["do"]:
            case "setup":
                await node.setup(order["segments"], order["codec"], nodes)
                answer({})
            case "move":
                await asyncio.to_thread(node.move)
                answer({})
            case "round":
                answer(await node.round(order["number"]))
            case "gloo":
                answer(await asyncio.to_thread(gloo_round, order["nbytes"], index))
            case "clear":
                await node.clear()
                answer({})
    await transport.stop()
    if options["gloo_port"]:
        dist.destroy_process_group()


def answer(record: dict[str, Any]) -> None:
    """Print one line."""
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
