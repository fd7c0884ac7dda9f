"""Members of rings over the in-process transport, honest ones and liars."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from roost import messages as m
from roost.agent.ring_driver import RingDriver
from roost.averaging.segment_average import AveragingOptions
from roost.transport.inproc import InprocNetwork, InprocTransport
from roost.transport.interface import Buffer, Sender
from roost.types import Peer, Role, SegmentPlan

Lie = Callable[[m.RingChunk, bytes], tuple[m.RingChunk, bytes]]
"""What becomes of a message and its buffer."""


@dataclass
class Member:
    """One node: its tensors, the samples it has applied, and its rings."""

    tensors: dict[str, Tensor]
    samples: int
    moves: Tensor = field(default_factory=lambda: torch.zeros(()))
    rings: dict[int, RingDriver] = field(default_factory=dict)

    async def snapshot(self, names: tuple[str, ...]) -> tuple[dict[str, Tensor], int]:
        return {name: self.tensors[name].clone() for name in names}, self.samples

    async def apply(self, average: dict[str, Tensor], snapshot: dict[str, Tensor]) -> None:
        for name, mean in average.items():
            same = torch.equal(self.tensors[name], snapshot[name])
            # The average is only lent.
            self.tensors[name] = mean.clone() if same else self.tensors[name] + (mean - snapshot[name])

    async def on_message(self, sender: Sender, message: m.Message, buffers: list[bytearray | memoryview]) -> None:
        assert isinstance(message, m.OpenRound | m.RingChunk)
        if isinstance(message, m.OpenRound):
            self.rings[message.segment].opened(sender.peer_id, message)
        else:
            self.rings[message.segment].chunk_arrived(sender.peer_id, message, buffers[0])

    async def on_call(self, sender: Sender, message: m.Message, buffers: list[bytearray | memoryview]) -> tuple[m.Message, list[Buffer]]:
        raise AssertionError("rings make no calls")


class LyingTransport(InprocTransport):
    """Changes the pieces that it sends, if it is told how."""

    lie: Lie | None = None

    async def send(self, peer: Peer, message: m.Message, buffers: Sequence[Buffer] = (), **options: Any) -> None:
        if self.lie is not None and isinstance(message, m.RingChunk):
            message, changed = self.lie(message, bytes(buffers[0]))
            buffers = [changed]
        await super().send(peer, message, buffers, **options)


@contextlib.asynccontextmanager
async def running(
    members: dict[str, Member],
    segments: list[SegmentPlan],
    *,
    drive: bool = True,
    options: AveragingOptions | None = None,
    lies: Mapping[str, Lie] | None = None,
) -> AsyncIterator[None]:
    """Run the rings of `segments`; whoever is in `lies` sends what its function makes of what it should send."""
    network = InprocNetwork()
    transports = {name: LyingTransport(name, Role.NODE, network) for name in members}
    for name, lie in (lies or {}).items():
        transports[name].lie = lie
    for name, transport in transports.items():
        await transport.start(members[name])
    peers = {name: Peer(peer_id=name, address=transport.address) for name, transport in transports.items()}
    tasks = []
    for segment in segments:
        for name in segment.members:
            member = members[name]
            driver = RingDriver(
                job_id="job",
                segment=segment,
                node_id=name,
                peers=peers,
                transport=transports[name],
                snapshot=lambda member=member, segment=segment: member.snapshot(segment.tensors),  # type: ignore[misc]
                apply=member.apply,
                options=options,
            )
            member.rings[segment.index] = driver
            if drive:
                tasks.append(asyncio.create_task(driver.run()))
                await driver.ready.wait()
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(transport.stop() for transport in transports.values()))
