"""The rings of one stage: made for a plan, started when rounds are due, made anew when the plan changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from torch import Tensor

from roost import messages as m
from roost.agent.assignment import Assignment
from roost.agent.compute import ComputeThread
from roost.agent.ring_driver import RingDriver
from roost.averaging.segment_average import AveragingOptions
from roost.config import OuterOptimizer
from roost.pipeline.stage_runner import StageRunner
from roost.protocol.averaging_pace import AveragingPace
from roost.transport.interface import Buffer, Transport

REPEATED = 2
"""What is trained again after a fault counts again: a member's samples can be more than the job's, but hardly twice as many."""

Start = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class StageRings:
    """One RingDriver per segment that this node averages with others."""

    def __init__(
        self,
        *,
        assignment: Assignment,
        parameters: frozenset[str],
        runner: StageRunner,
        compute: ComputeThread,
        transport: Transport,
        samples: Callable[[], int],
        start_task: Start,
        suspect: Callable[[str], None],
    ) -> None:
        """`parameters` are the tensors that are trained; `samples` tells how many this stage has applied; `start_task` runs a task
        whose failure is the stage's; `suspect` is told of members that keep rounds waiting."""
        self._assignment = assignment
        self._parameters = parameters
        self._runner = runner
        self._compute = compute
        self._transport = transport
        self._samples = samples
        self._start_task = start_task
        self._suspect = suspect
        self._drivers: dict[int, RingDriver] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._paces: dict[int, AveragingPace] = {}
        self._held_s: dict[int, float] = {}  # compute time of each ring's last snapshot and average
        self._rounds_before = 0
        self._open = False
        self._interrupted = False  # a round was given up for another plan, or before it

    @property
    def rounds_done(self) -> int:
        """Rounds finished, over all rings that this stage has had."""
        return self._rounds_before + sum(driver.rounds_done for driver in self._drivers.values())

    def start(self) -> None:
        """Make the rings of the plan; rounds begin with `go`, or when others open them."""
        self._make(samples_before=0)

    def go(self) -> None:
        """All members have their rings: open rounds from now on."""
        self._open = True
        if self._interrupted:
            # What it was about should not wait until the next one is due.
            self._interrupted = False
            for driver in self._drivers.values():
                driver.start_round()

    async def ready(self) -> None:
        """Wait until training may begin: what rings keep of the initial weights has been copied."""
        await asyncio.gather(*(driver.ready.wait() for driver in self._drivers.values()))

    async def change(self, assignment: Assignment) -> None:
        """Average in the rings of another plan; a round that is under way is given up, and what it was about counts in the next."""
        self._open = False
        await self.stop()
        self._interrupted |= any(driver.unfinished for driver in self._drivers.values())
        before = [driver.samples_before for driver in self._drivers.values()]
        self._rounds_before = self.rounds_done
        self._assignment = assignment
        self._make(samples_before=min(before, default=self._samples()))

    async def stop(self) -> None:
        """End all rings."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for driver in self._drivers.values():
            await driver.close()

    def _make(self, *, samples_before: int) -> None:
        job = self._assignment
        self._drivers, self._paces, self._held_s = {}, {}, {}
        for segment in job.rings:
            self._drivers[segment.index] = RingDriver(
                job_id=job.job_id,
                segment=segment,
                node_id=job.node_id,
                peers=job.peers,
                transport=self._transport,
                snapshot=partial(self._snapshot, segment.index, segment.tensors),
                apply=partial(self._apply_average, segment.index),
                options=self._options(),
                shares={stage.node_id: cluster.share for cluster in job.plan.clusters for stage in cluster.stages},
                generation=job.generation,
                orders=job.order,
                samples_before=samples_before,
                suspect=self._suspect,
            )
            self._paces[segment.index] = AveragingPace(job.config.averaging_interval)
        self._tasks = [self._start_task(driver.run(), "ring") for driver in self._drivers.values()]

    def _options(self) -> AveragingOptions:
        config = self._assignment.config
        steps = config.outer_optimizer is OuterOptimizer.NESTEROV
        return AveragingOptions(
            codec=config.averaging_compression,
            outer_learning_rate=config.outer_learning_rate if steps else 0.0,
            outer_momentum=config.outer_momentum if steps else 0.0,
            parameters=self._parameters,
            robust=config.robust_averaging,
            most_samples=float(REPEATED * config.samples * config.epochs),
        )

    # ------------------------------------------------------------ rounds

    def opened(self, sender: str, message: m.OpenRound) -> bool:
        """Take word of a round; False if it is of no ring of this node, or of another plan's."""
        driver = self._driver(message.segment, message.generation)
        if driver is not None:
            driver.opened(sender, message)
        return driver is not None

    def chunk_arrived(self, sender: str, message: m.RingChunk, buffer: Buffer) -> bool:
        """Take a piece of a chunk; False if it is of no ring of this node, or of another plan's."""
        driver = self._driver(message.segment, message.generation)
        if driver is not None:
            driver.chunk_arrived(sender, message, buffer)
        return driver is not None

    def peer_lost(self, peer_id: str) -> None:
        """What was sent to a member may be lost: rounds that need it are given up now, not when their deadline has passed."""
        for driver in self._drivers.values():
            driver.peer_lost(peer_id)

    def _driver(self, segment: int, generation: int) -> RingDriver | None:
        return self._drivers.get(segment) if generation == self._assignment.generation else None

    def updated(self) -> None:
        """Ask for a background round in every ring where one is due after this update."""
        if not self._open:
            return
        now = time.monotonic()
        for index, ring in self._drivers.items():
            times = ring.times
            held_s = self._held_s.get(index, 0.0)
            if self._paces[index].updated(now=now, idle=ring.idle, began_at=times.began_at, round_s=times.round_s, held_s=held_s):
                ring.start_round()

    async def average_exactly(self, order: int) -> None:
        """Take part in the ordered round of every ring and wait for its result. Raises DeadlineError, JobRefusedError."""
        await asyncio.gather(*(driver.average_exactly(order) for driver in self._drivers.values()))

    async def _snapshot(self, segment: int, names: tuple[str, ...]) -> tuple[dict[str, Tensor], int]:
        """Return copies of the named tensors and the samples applied to them so far."""

        def copy() -> tuple[dict[str, Tensor], int]:
            began = time.perf_counter()
            copies = self._runner.snapshot(names)
            self._held_s[segment] = time.perf_counter() - began
            return copies, self._samples()

        return await self._compute.run(copy)

    async def _apply_average(self, segment: int, average: dict[str, Tensor], snapshot: dict[str, Tensor]) -> None:
        def apply() -> None:
            began = time.perf_counter()
            self._runner.apply_average(average, snapshot)
            self._held_s[segment] = self._held_s.get(segment, 0.0) + time.perf_counter() - began

        await self._compute.run(apply)
