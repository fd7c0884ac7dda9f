"""How a stage is saved: at once, or copied first and uploaded beside training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from roost import messages as m
from roost.agent.assignment import Assignment
from roost.agent.compute import ComputeThread
from roost.agent.reporter import Reporter
from roost.agent.saver import StageSaver
from roost.errors import CheckpointError, RoostError
from roost.pipeline.tensor_bytes import from_buffer
from roost.transport.inproc import InprocNetwork, InprocTransport
from roost.transport.interface import Buffer, Lane, Reply, Sender
from roost.types import Peer, Role


class Sink:
    """A requester that takes uploads while its line is open, and a coordinator that hears of them."""

    def __init__(self) -> None:
        self.line = asyncio.Event()
        self.uploads: dict[str, Tensor] = {}
        self.asked = asyncio.Event()
        self.reports: asyncio.Queue[m.StageSaved] = asyncio.Queue()
        self.error: RoostError | None = None

    async def on_call(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> tuple[m.Message, Sequence[Buffer]]:
        if isinstance(message, m.StageSaved):
            self.reports.put_nowait(message)
            return m.Done(), []
        assert isinstance(message, m.UploadState)
        self.asked.set()
        await self.line.wait()
        if self.error is not None:
            raise self.error
        for spec, buffer in zip((*message.tensors, *message.optimizer), buffers, strict=True):
            self.uploads[spec.name] = from_buffer(spec, bytearray(buffer))
        return m.Done(), []

    async def on_message(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> None:
        raise AssertionError("nothing is sent one way")


class NotedLanes(InprocTransport):
    """A node's endpoint that notes on which lanes it uploads."""

    def __init__(self, peer_id: str, role: Role, network: InprocNetwork) -> None:
        super().__init__(peer_id, role, network)
        self.lanes: list[Lane] = []

    async def call(
        self,
        peer: Peer,
        message: m.Message,
        buffers: Sequence[Buffer] = (),
        *,
        lane: Lane = Lane.TRAINING,
        deadline_s: float | None = None,
    ) -> Reply:
        if isinstance(message, m.UploadState):
            self.lanes.append(lane)
        return await super().call(peer, message, buffers, lane=lane, deadline_s=deadline_s)


class Stage:
    """A stage with one parameter, and its saver."""

    def __init__(self, saver: StageSaver, sink: Sink, weight: Tensor, lanes: list[Lane]) -> None:
        self.saver = saver
        self.sink = sink
        self.weight = weight
        self.lanes = lanes
        """Of the uploads."""

    async def save(self, attempt: int = 1, *, background: bool) -> None:
        message = m.SaveStage(job_id="job", checkpoint="epoch-0001", segments=(0,), attempt=attempt, background=background)
        requester = Peer(peer_id="requester", address="inproc:requester")
        assignment = cast(Assignment, SimpleNamespace(job_id="job", node_id="attic", requester=requester))
        await self.saver.save(message, assignment, {0: ("w",)})


@asynccontextmanager
async def stage(directory: str) -> AsyncIterator[Stage]:
    network, sink, tasks = InprocNetwork(), Sink(), []
    hub = InprocTransport("requester", Role.REQUESTER, network)
    node = NotedLanes("attic", Role.NODE, network)
    await hub.start(sink)
    await node.start(sink)
    compute = ComputeThread(threads=1, relative_speed=1.0)
    compute.start()
    weight = torch.ones(4)

    def start(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(work))
        return tasks[-1]

    # Reports go to the same endpoint.
    reporter = Reporter(node, Peer(peer_id="requester", address="inproc:requester"))
    start(reporter.run(), "reporter")
    saver = StageSaver(
        transport=node,
        reporter=reporter,
        compute=compute,
        state=lambda names: ({name: weight for name in names}, {"w/step": torch.tensor(3.0)}),
        directory=directory,
        start_task=start,
    )
    try:
        yield Stage(saver, sink, weight, node.lanes)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        compute.stop()
        await node.stop()
        await hub.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20.0):
            await test()

    asyncio.run(limited())


def test_in_the_background_training_goes_on_at_once_and_what_is_uploaded_is_what_was_there_then(tmp_path: Path) -> None:
    async def test() -> None:
        async with stage(str(tmp_path)) as saved:
            await saved.save(background=True)
            saved.weight.zero_()
            assert saved.sink.uploads == {}
            saved.sink.line.set()
            report = await saved.sink.reports.get()
            assert (report.checkpoint, report.attempt, report.failed) == ("epoch-0001", 1, None)
            assert saved.sink.uploads["w"].tolist() == [1.0] * 4
            assert saved.sink.uploads["w/step"].item() == 3.0

    run(test)


def test_if_the_disk_does_not_take_it_training_waits_for_the_upload(tmp_path: Path) -> None:
    async def test() -> None:
        async with stage(str(tmp_path / "nowhere")) as saved:
            saving = asyncio.create_task(saved.save(background=True))
            await saved.sink.asked.wait()
            assert not saving.done()
            saved.sink.line.set()
            await saving
            assert saved.sink.uploads["w"].tolist() == [1.0] * 4
            assert (await saved.sink.reports.get()).failed is None

    run(test)


def test_an_upload_that_is_refused_is_reported_with_its_reason(tmp_path: Path) -> None:
    async def test() -> None:
        async with stage(str(tmp_path)) as saved:
            saved.sink.error = CheckpointError("the disk is full")
            saved.sink.line.set()
            await saved.save(background=True)
            failed = (await saved.sink.reports.get()).failed
            assert failed is not None
            assert (failed.code, failed.message) == ("R700", "the disk is full")
            with pytest.raises(CheckpointError, match="the disk is full"):
                await saved.save(attempt=2, background=False)

    run(test)


def test_an_upload_beside_training_gives_way_to_it_and_one_that_training_waits_for_does_not(tmp_path: Path) -> None:
    async def test() -> None:
        async with stage(str(tmp_path)) as saved:
            saved.sink.line.set()
            await saved.save(background=True)
            await saved.sink.reports.get()
            await saved.save(attempt=2, background=False)
            assert saved.lanes == [Lane.AVERAGING, Lane.TRAINING]

    run(test)


def test_when_a_checkpoint_is_given_up_its_upload_ends_and_the_next_one_is_whole(tmp_path: Path) -> None:
    async def test() -> None:
        async with stage(str(tmp_path)) as saved:
            await saved.save(background=True)
            await saved.sink.asked.wait()
            await saved.saver.abandon()
            saved.sink.line.set()
            saved.weight.fill_(2.0)
            await saved.save(attempt=2, background=True)
            assert (await saved.sink.reports.get()).attempt == 2
            assert saved.sink.uploads["w"].tolist() == [2.0] * 4
            assert saved.sink.reports.empty()

    run(test)


def test_a_new_snapshot_ends_the_upload_of_the_one_before(tmp_path: Path) -> None:
    async def test() -> None:
        async with stage(str(tmp_path)) as saved:
            await saved.save(background=True)
            saved.weight.fill_(2.0)
            await saved.save(attempt=2, background=True)
            saved.sink.line.set()
            assert (await saved.sink.reports.get()).attempt == 2
            assert saved.sink.uploads["w"].tolist() == [2.0] * 4
            assert saved.sink.reports.empty()

    run(test)
