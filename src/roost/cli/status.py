"""`roost status`: the nodes and the running job of a coordinator."""

from __future__ import annotations

import asyncio
import json

from rich import box
from rich.console import Console
from rich.table import Table

from roost import messages as m
from roost.codec import encode_record
from roost.config import format_bytes
from roost.errors import MalformedMessageError
from roost.requester.pools import RemotePool
from roost.transport.interface import Buffer, Sender


class NobodyHome:
    """The handler of an endpoint that only asks."""

    async def on_message(self, sender: Sender, message: m.Message, buffers: list[bytearray | memoryview]) -> None:
        """Refuse: nothing is expected here."""
        raise MalformedMessageError("a status request takes no messages")

    async def on_call(self, sender: Sender, message: m.Message, buffers: list[bytearray | memoryview]) -> tuple[m.Message, list[Buffer]]:
        """Refuse: nothing is expected here."""
        raise MalformedMessageError("a status request takes no calls")


def show(address: str, *, token: str, json_output: bool) -> None:
    """Print the status. Raises CredentialsError if this machine has not enrolled as a requester."""
    status = asyncio.run(_ask(address, token))
    if json_output:
        print(json.dumps(encode_record(status)))
        return
    console = Console(highlight=False)
    console.print(_nodes_table(status))
    if not status.job_id:
        console.print("no job has been submitted")
        return
    console.print(f"job {status.job_id}: {status.job_state}, epoch {status.epochs_done:.1f}")
    for stage in sorted(status.metrics, key=lambda metrics: (metrics.cluster, metrics.stage)):
        loss = f", loss {stage.loss_sum / stage.loss_samples:.4f}" if stage.loss_samples else ""
        console.print(
            f"  {stage.cluster}.{stage.stage} {stage.node_id}: {stage.updates} updates, {stage.samples} samples, "
            f"staleness <= {stage.staleness_max}, {format_bytes(stage.bytes_sent)} sent, {stage.rounds} rounds{loss}",
            soft_wrap=True,
        )


async def _ask(address: str, token: str) -> m.Status:
    async with RemotePool(address=address, token=token).enter(on_failure=lambda error: None) as membership:
        transport = membership.transport
        await transport.start(NobodyHome())
        try:
            reply = (await transport.call(membership.coordinator, m.StatusRequest(), deadline_s=10.0)).message
        finally:
            await transport.stop()
    if not isinstance(reply, m.Status):
        raise MalformedMessageError(f"the coordinator answered a status request with {type(reply).__name__}")
    return reply


def _nodes_table(status: m.Status) -> Table:
    table = Table(title=f"{len(status.nodes)} node(s)", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("node", "state", "heard", "GFLOP/s", "memory", "device", "cluster.stage"):
        table.add_column(name, overflow="fold")
    for node in status.nodes:
        profile = node.profile
        table.add_row(
            f"{profile.node_id}{'*' if profile.emulated else ''}",
            node.state,
            f"{node.last_heard_s:.1f} s ago",
            f"{profile.flop_per_s / 1e9:.1f}",
            format_bytes(profile.memory_bytes),
            f"{profile.device} x{profile.threads}",
            f"{node.cluster}.{node.stage}" if node.stage >= 0 else "-",
        )
    return table
