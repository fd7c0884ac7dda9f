"""`roost peers` and `roost revoke`: who may talk to the coordinator whose state directory this is."""

from __future__ import annotations

import dataclasses
import json
import time
from datetime import UTC, datetime
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from roost.cli.coordinator import open_store


def revoke(state_dir: Path, name: str) -> None:
    """Revoke a peer. Raises InvalidConfigError if there is none of that name."""
    with open_store(state_dir) as store:
        peer = store.revoke(name, time.time())
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{peer.role} {name} is revoked: the coordinator refuses it from its next message on, and its key for good.")
    console.print(f"To let its owner back in under that name, with a new key: roost token --role {peer.role} --replace {name}")


def show(state_dir: Path, *, json_output: bool) -> None:
    """Print every peer that has joined, by name."""
    with open_store(state_dir) as store:
        found = store.peers()
    if json_output:
        print(json.dumps([dataclasses.asdict(peer) for peer in found]))
        return
    table = Table(title=f"{len(found)} peer(s)", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("peer", "role", "joined", "certificate until", "revoked"):
        table.add_column(name, overflow="fold")
    for peer in found:
        table.add_row(peer.peer_id, peer.role, _day(peer.joined_at), _day(peer.expires_at), _day(peer.revoked_at))
    Console(highlight=False).print(table)


def _day(seconds: float | None) -> str:
    return "-" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
