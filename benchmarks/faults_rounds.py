"""Rounds that lose a member in the middle, for `python -m benchmarks.faults`: five clusters of one node, over limited lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import roost
from roost.chaos.findings import LoggedEvent, logged
from roost.chaos.pool import BreakablePool
from roost.config import NodeOptions
from roost.errors import RoostError
from roost.requester.pools import Membership
from roost.requester.run import RunMetrics
from roost.types import ModelProfile, NodeProfile, Plan

NAMES = tuple(f"member-{index}" for index in range(5))
WIDTH, DEPTH = 512, 8
"""8.4 MB of parameters: a round of five takes about a second."""
UPLINK_MBIT = 100.0
WITHIN_S = 120.0
"""Survivors that have agreed on nothing after that never will."""
POLL_S = 0.05
ROUND_EVENTS = frozenset({"round_begun", "average_applied"})


@dataclass(frozen=True, kw_only=True)
class Stall:
    """What a member that was lost in the middle of a round cost the others."""

    kind: str
    survivors: int
    seconds: float
    """From the fault until all survivors had applied the mean of a round among them."""
    agreed: bool
    """True if all of them applied the same bytes."""
    mid_round: bool
    """True if the one that was lost had begun a round and not finished it."""


class RoundBreaker:
    """Kills and freezes members, one after the other, each in the middle of a round. Implements Pool and Observer."""

    def __init__(self, pool: BreakablePool, kinds: Sequence[str], done: Callable[[], None]) -> None:
        """`done` is called when all faults have been seen through."""
        self._pool = pool
        self._kinds = tuple(kinds)
        self._done = done
        self._training = asyncio.Event()
        self.paced = pool.paced
        self.stalls: list[Stall] = []

    @contextlib.asynccontextmanager
    async def enter(self, *, on_failure: Callable[[RoostError], None]) -> AsyncIterator[Membership]:
        """Start the pool and break it; stop it at the end."""
        self._training = asyncio.Event()
        async with self._pool.enter(on_failure=on_failure) as membership:
            task = asyncio.create_task(self._break())
            try:
                yield membership
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def planned(self, plan: Plan, nodes: tuple[NodeProfile, ...], profile: ModelProfile) -> None:
        """Nothing."""

    def updated(self, metrics: RunMetrics) -> None:
        """Begin once rounds are made."""
        if metrics.averaging_rounds >= 2:
            self._training.set()

    async def _break(self) -> None:
        await self._training.wait()
        there = set(NAMES)
        for index, kind in enumerate(self._kinds):
            victim = NAMES[-1 - index]
            began = await self._middle_of_a_round(there)
            (self._pool.kill if kind == "kill" else self._pool.freeze)(victim)
            there.discard(victim)
            self.stalls.append(await self._survived(kind, victim, there, began))
        self._done()

    def _lines(self, names: set[str], since: float) -> dict[str, list[LoggedEvent]]:
        return {name: [line for line in logged([self._pool.log_of(name)], ROUND_EVENTS) if line.at >= since] for name in names}

    async def _middle_of_a_round(self, names: set[str]) -> float:
        """Wait until everybody has finished a round after now, and half of the next one has passed; return the time."""
        since = time.time()
        while True:
            lines = self._lines(names, since)
            ends = [[line.at for line in found if line.event == "average_applied"] for found in lines.values()]
            if all(len(times) >= 2 for times in ends):
                round_s = min(times[-1] - times[-2] for times in ends)
                begun = max(max((line.at for line in found if line.event == "round_begun"), default=0.0) for found in lines.values())
                if begun > max(times[-1] for times in ends) and time.time() - begun >= 0.4 * round_s:
                    return time.time()
            await asyncio.sleep(POLL_S)

    async def _survived(self, kind: str, victim: str, names: set[str], began: float) -> Stall:
        """Return what the others did: it is over when all of them have applied the mean of one generation that is new."""
        before = self._lines({victim}, 0.0)[victim]
        mid_round = bool(before) and before[-1].event == "round_begun"
        known = {line.fields["generation"] for line in before}
        while time.time() - began < WITHIN_S:
            lines = self._lines(names, began)
            news = {
                name: [line for line in found if line.event == "average_applied" and line.fields["generation"] not in known]
                for name, found in lines.items()
            }
            if all(news.values()):
                firsts = [found[0] for found in news.values()]
                return Stall(
                    kind=kind,
                    survivors=len(names),
                    seconds=max(line.at for line in firsts) - began,
                    agreed=len({(line.fields["generation"], line.fields["digest"]) for line in firsts}) == 1,
                    mid_round=mid_round,
                )
            await asyncio.sleep(POLL_S)
        return Stall(kind=kind, survivors=len(names), seconds=WITHIN_S, agreed=False, mid_round=mid_round)


def measure_stalls(kinds: Sequence[str], directory: Path) -> list[Stall]:
    """Return what the others did when five clusters lost a member in these ways, one after the other; logs stay in `directory`."""
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    job_fields: dict[str, Any] = {
        "model": nn.Sequential(*layers, nn.Linear(WIDTH, 10)),
        "loss": functional.cross_entropy,
        "data": (torch.randn(4096, WIDTH), torch.randint(10, (4096,))),
        "optimizer_args": {"lr": 1e-4},
        "batch_size": 32,
        "epochs": 100_000,
        "sync_interval": 100_000,
        "averaging_interval": 0,
    }
    nodes = [NodeOptions(name=name, relative_speed=0.1, uplink_mbit=UPLINK_MBIT) for name in NAMES]
    pool = BreakablePool(nodes, directory / "pool", module="benchmarks.faults_node")
    over: list[bool] = []
    breaker = RoundBreaker(pool, kinds, lambda: over.append(True))
    job = roost.Job(**job_fields, checkpoint_dir=str(directory / "checkpoints"))
    run = roost.train(job, breaker, observer=breaker)
    assert run.plan is not None and len(run.plan.clusters) == len(NAMES), "every node is a cluster of its own"
    while not over:
        with contextlib.suppress(TimeoutError):
            run.wait(POLL_S)
    run.stop()
    run.wait()
    return breaker.stalls


# ---------------------------------------------------------------- hivemind, beside it

HIVEMIND_PEERS = 4
HIVEMIND_BYTES = 200_000_000
"""On loopback an all-reduce of so much takes about a second, as ours does on its limited lines."""
SETTLED_STEPS = 2
HIVEMIND_START_S = 120.0
HIVEMIND_STALL_S = 150.0


class HivemindPeer:
    """A process that averages again and again, and what it has said so far."""

    def __init__(self, python: str, index: int, first: str) -> None:
        arguments = [
            python,
            str(Path(__file__).with_name("faults_hivemind.py")),
            str(index),
            str(HIVEMIND_PEERS),
            str(HIVEMIND_BYTES),
            first,
        ]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
        self.said: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.said.append(json.loads(line))

    def times(self, event: str, since: float = 0.0) -> list[dict[str, Any]]:
        """Return what it has said of such events since then."""
        return [said for said in list(self.said) if said.get("event") == event and said["at"] >= since]

    def end(self) -> None:
        """Kill it and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def hivemind_stall(python: str, kind: str) -> Stall:
    """Return what the other three of four peers did when one was lost ("kill", "freeze") in the middle of an all-reduce.

    At most HIVEMIND_STALL_S, which then says that they were not done. Raises TimeoutError if they do not average before that.
    """
    peers = [HivemindPeer(python, 0, "")]
    try:
        _wait(lambda: bool(peers[0].said))
        peers += [HivemindPeer(python, index, peers[0].said[0]["address"]) for index in range(1, HIVEMIND_PEERS)]
        _wait(lambda: all(len(peer.times("applied")) >= SETTLED_STEPS for peer in peers))
        victim, others = peers[-1], peers[:-1]
        settled = time.time()
        _wait(lambda: all(peer.times("begun", settled) for peer in peers))
        began = time.time()
        mid_round = not victim.times("applied", victim.times("begun", settled)[-1]["at"])
        os.killpg(victim.process.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        with contextlib.suppress(TimeoutError):
            _wait(lambda: all(peer.times("applied", began) for peer in others), HIVEMIND_STALL_S)
        if not all(peer.times("applied", began) for peer in others):
            return Stall(kind=kind, survivors=len(others), seconds=HIVEMIND_STALL_S, agreed=False, mid_round=mid_round)
        firsts = [peer.times("applied", began)[0] for peer in others]
        return Stall(
            kind=kind,
            survivors=len(others),
            seconds=max(said["at"] for said in firsts) - began,
            agreed=len({said["digest"] for said in firsts}) == 1,
            mid_round=mid_round,
        )
    finally:
        for peer in peers:
            peer.end()


def _wait(holds: Callable[[], bool], within_s: float = HIVEMIND_START_S) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"hivemind's peers did not get there within {within_s:.0f} s")
        time.sleep(POLL_S / 5)
