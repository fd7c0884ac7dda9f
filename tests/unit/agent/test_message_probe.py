"""A node measures its own messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from roost import messages as m
from roost.agent import message_probe
from roost.agent.message_probe import LARGE_BYTES, MessageCost, MessageProbe
from roost.transport.inproc import InprocNetwork, InprocTransport
from roost.transport.interface import Buffer, Sender
from roost.types import Role


class Ear:
    """The handler of the endpoint: hands what arrives to the probe, unless it is deaf."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.probe: MessageProbe | None = None
        self.deaf = deaf
        self.sizes: list[int] = []

    async def on_message(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> None:
        self.sizes.append(sum(len(memoryview(buffer)) for buffer in buffers))
        if self.probe is not None and not self.deaf:
            self.probe.arrived()

    async def on_call(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> tuple[m.Message, Sequence[Buffer]]:
        return m.Done(), []


async def measured(ear: Ear, line_bytes_per_s: float = 0.0) -> MessageCost:
    transport = InprocTransport("me", Role.NODE, InprocNetwork())
    await transport.start(ear)
    ear.probe = MessageProbe(transport, line_bytes_per_s=line_bytes_per_s)
    try:
        return await ear.probe.measure()
    finally:
        await transport.stop()


def test_messages_cost_something() -> None:
    cost = asyncio.run(measured(Ear()))
    assert cost.message_s > 0
    assert cost.wire_s_per_byte >= 0


def test_over_a_slow_uplink_the_large_messages_are_smaller() -> None:
    ear = Ear()
    asyncio.run(measured(ear, line_bytes_per_s=1_000_000))
    assert 0 < max(ear.sizes) < LARGE_BYTES / 10


def test_a_node_that_does_not_hear_itself_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_probe, "DEADLINE_S", 0.05)
    assert asyncio.run(measured(Ear(deaf=True))) == MessageCost(message_s=0.0, wire_s_per_byte=0.0)
