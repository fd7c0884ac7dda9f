from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roost import messages as m
from roost.checkpoint.manifest import CheckpointContents
from roost.checkpoint.reader import load
from roost.checkpoint.writer import CheckpointWriter
from roost.config import JobConfig, NamedArguments
from roost.errors import CheckpointDamagedError, CheckpointError, ForbiddenError, InvalidDataError, MalformedMessageError, RoostError
from roost.pipeline.tensor_bytes import from_buffer, spec_of, to_buffer
from roost.protocol.batches import sample_order
from roost.requester.data import SampleSource
from roost.requester.service import RequesterService
from roost.transport.interface import Buffer, Sender
from roost.types import BackupPlan, ClusterPlan, Lease, Plan, Role, SegmentPlan, StagePlan
from roost.weights.source import MemoryTensors

CONFIG = JobConfig(job_id="job", optimizer=NamedArguments(name="SGD", arguments=(("lr", 0.1),)), samples=10, validation_samples=4, seed=7)
TENSORS = {
    "weight": torch.arange(6.0).reshape(2, 3),
    "bias": torch.zeros(2),
    "late": torch.full((2,), 3.0),
    "table": torch.arange(4.0),
    "unused": torch.ones(1),
}
POSITIONS = {"weight": (0,), "bias": (0,), "late": (1,), "table": (0, 1)}
"""The first stage of two owns all but `late`, the second one shares `table`."""
NODE = Sender(peer_id="a", role=Role.NODE)
SECOND = Sender(peer_id="b", role=Role.NODE)
COORDINATOR = Sender(peer_id="coordinator", role=Role.COORDINATOR)


def plan(*nodes: str) -> Plan:
    stages = tuple(
        StagePlan(
            cluster=0,
            index=index,
            node_id=node,
            first_unit=index,
            last_unit=index + 1,
            start=index,
            stop=index + 1,
            max_in_flight=1,
            memory_needed_bytes=1,
            memory_available_bytes=1,
            compute_s=1.0,
            send_s=0.0,
        )
        for index, node in enumerate(nodes)
    )
    return Plan(
        clusters=(ClusterPlan(index=0, stages=stages, share=1.0, samples_per_s=1.0, bottleneck="compute of a"),),
        segments=(
            SegmentPlan(index=0, tensors=("weight", "bias"), nbytes=32, members=nodes[:1]),
            SegmentPlan(index=1, tensors=("late",), nbytes=8, members=nodes[1:2]),
        ),
        backups=(),
        samples_per_s=1.0,
        notes=(),
    )


class Scene:
    def __init__(self, directory: Path) -> None:
        self.updates: list[m.JobUpdate] = []
        self.plans: list[m.PlanChanged] = []
        self.inputs, self.labels = torch.arange(20.0).reshape(10, 2), torch.arange(10)
        self.validation = torch.arange(8.0).reshape(4, 2), torch.arange(4)
        self.service = RequesterService(
            config=CONFIG,
            graph=b"the graph",
            positions=POSITIONS,
            weights=MemoryTensors(TENSORS),
            unused=frozenset({"unused"}),
            optimizer={"weight/momentum_buffer": torch.ones(2, 3), "bias/momentum_buffer": torch.ones(2)},
            training=SampleSource((self.inputs, self.labels), what="the training data"),
            validation=SampleSource(self.validation, what="the validation data"),
            writer=CheckpointWriter(directory, keep=3),
            contents=self.contents,
            on_update=self.updates.append,
            on_plan=self.plans.append,
        )

    @staticmethod
    def contents(message: m.FinishCheckpoint) -> CheckpointContents:
        specs = tuple(spec_of(name, tensor) for name, tensor in TENSORS.items())
        return CheckpointContents(epoch=message.epoch, updates=message.updates, tensors=specs, config=CONFIG, plan=message.plan)

    async def ask(self, message: m.Message, *buffers: Buffer, sender: Sender = NODE) -> tuple[m.Message, list[Any]]:
        reply, sent = await self.service.on_call(sender, message, list(buffers))
        return reply, list(sent)

    async def tensors(self, message: m.Message, sender: Sender = NODE) -> dict[str, Tensor]:
        reply, buffers = await self.ask(message, sender=sender)
        assert isinstance(reply, m.TensorsReply)
        return {spec.name: from_buffer(spec, bytearray(buffer)) for spec, buffer in zip(reply.tensors, buffers, strict=True)}


def in_scene(directory: Path, work: Callable[[Scene], Awaitable[None]], *nodes: str) -> None:
    async def main() -> None:
        scene = Scene(directory)
        scene.service.set_plan(plan(*(nodes or ("a", "b"))))
        try:
            async with asyncio.timeout(20):
                await work(scene)
        finally:
            scene.service.close()

    asyncio.run(main())


def test_nodes_of_the_plan_get_graph_tensors_and_optimizer_state(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        assert await scene.ask(m.FetchGraph(job_id="job")) == (m.GraphReply(), [b"the graph"])
        found = await scene.tensors(m.FetchTensors(job_id="job", names=("bias", "weight")))
        assert list(found) == ["bias", "weight"]
        assert torch.equal(found["weight"], TENSORS["weight"])
        assert list(await scene.tensors(m.FetchOptimizer(job_id="job", names=("bias",)))) == ["bias/momentum_buffer"]

    in_scene(tmp_path, work)


EVERYTHING = [
    m.FetchGraph(job_id="job"),
    m.FetchTensors(job_id="job", names=()),
    m.FetchOptimizer(job_id="job", names=()),
    m.FetchSamples(job_id="job", lease=Lease(lease_id=0, training=True, epoch=0, start=0, stop=1)),
    m.UploadState(job_id="job", checkpoint="c", segment=0, tensors=(), optimizer=()),
]


@pytest.mark.parametrize("message", EVERYTHING, ids=lambda message: type(message).__name__)
def test_a_node_that_is_not_in_the_plan_gets_nothing(tmp_path: Path, message: m.Message) -> None:
    async def work(scene: Scene) -> None:
        with pytest.raises(ForbiddenError, match="node c has no stage in job job"):
            await scene.ask(message, sender=Sender(peer_id="c", role=Role.NODE))

    in_scene(tmp_path, work)


def test_questions_about_another_job_are_refused_even_from_the_coordinator(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        finish = m.FinishCheckpoint(job_id="other", checkpoint="c", epoch=1, updates=1, plan=plan("a"))
        for sender, message in ((NODE, m.FetchGraph(job_id="other")), (COORDINATOR, finish)):
            with pytest.raises(ForbiddenError, match="asks for another job than job"):
                await scene.ask(message, sender=sender)

    in_scene(tmp_path, work)


def test_a_node_that_asks_before_the_plan_is_there_waits_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path)
        early = asyncio.create_task(scene.ask(m.FetchGraph(job_id="job")))
        await asyncio.sleep(0)
        assert not early.done()
        scene.service.set_plan(plan("a"))
        assert (await early)[1] == [b"the graph"]
        scene.service.close()

    asyncio.run(main())


def test_what_a_requester_does_not_have_is_refused(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        with pytest.raises(MalformedMessageError, match="node a asks for a tensor 'nothing', which the model does not have"):
            await scene.ask(m.FetchTensors(job_id="job", names=("weight", "nothing")))
        with pytest.raises(MalformedMessageError, match="does not answer OpenRound"):
            await scene.ask(m.OpenRound(job_id="job", segment=0, round=0))

    in_scene(tmp_path, work)


def test_samples_come_in_the_order_of_their_epoch_and_validation_in_its_own(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        for epoch in (0, 3, 1):
            lease = Lease(lease_id=0, training=True, epoch=epoch, start=2, stop=7)
            found = await scene.tensors(m.FetchSamples(job_id="job", lease=lease))
            order = sample_order(10, epoch, seed=7)[2:7]
            assert torch.equal(found["0"], scene.inputs[order])
            assert torch.equal(found["1"], scene.labels[order])
        found = await scene.tensors(m.FetchSamples(job_id="job", lease=Lease(lease_id=0, training=False, epoch=2, start=1, stop=4)))
        assert torch.equal(found["0"], scene.validation[0][1:4])

    in_scene(tmp_path, work)


@pytest.mark.parametrize(("training", "start", "stop"), [(True, 8, 11), (False, 0, 5), (True, 4, 4), (True, 5, 4), (True, -1, 2)])
def test_samples_that_do_not_exist_are_refused(tmp_path: Path, training: bool, start: int, stop: int) -> None:
    async def work(scene: Scene) -> None:
        with pytest.raises(MalformedMessageError, match="that do not exist"):
            await scene.ask(m.FetchSamples(job_id="job", lease=Lease(lease_id=0, training=training, epoch=0, start=start, stop=stop)))

    in_scene(tmp_path, work)


def test_a_dataset_that_breaks_later_gives_the_reason(tmp_path: Path) -> None:
    class Breaking:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            raise OSError("the disk is gone")

    async def main() -> None:
        scene = Scene(tmp_path)
        scene.service._training = SampleSource(Breaking(), what="the training data")
        scene.service.set_plan(plan("a"))
        with pytest.raises(InvalidDataError, match="the disk is gone"):
            await scene.ask(m.FetchSamples(job_id="job", lease=Lease(lease_id=0, training=True, epoch=0, start=0, stop=1)))
        scene.service.close()

    asyncio.run(main())


async def upload(
    scene: Scene, tensors: dict[str, Tensor], optimizer: dict[str, Tensor] | None = None, segment: int = 0, sender: Sender = NODE
) -> None:
    state = optimizer or {}
    message = m.UploadState(
        job_id="job",
        checkpoint="epoch-0001",
        segment=segment,
        tensors=tuple(spec_of(name, tensor) for name, tensor in tensors.items()),
        optimizer=tuple(spec_of(name, tensor) for name, tensor in state.items()),
    )
    await scene.ask(message, *(to_buffer(tensor) for tensor in (*tensors.values(), *state.values())), sender=sender)


def test_parts_become_a_checkpoint_that_holds_what_no_stage_has_too(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await upload(scene, {"weight": torch.ones(2, 3)}, {"weight/momentum_buffer": torch.full((2, 3), 2.0)})
        await upload(scene, {"bias": torch.ones(2), "table": torch.ones(4)}, segment=-1)
        await upload(scene, {"late": torch.ones(2)}, segment=1, sender=SECOND)
        finish = m.FinishCheckpoint(job_id="job", checkpoint="epoch-0001", epoch=1, updates=3, plan=plan("a", "b"))
        reply, _ = await scene.ask(finish, sender=COORDINATOR)
        assert isinstance(reply, m.CheckpointWritten)
        found = load(Path(reply.path))
        assert {name: tensor.tolist() for name, tensor in found.model.items()} == {
            "weight": [[1.0] * 3] * 2,
            "bias": [1.0, 1.0],
            "late": [1.0, 1.0],
            "table": [1.0] * 4,
            "unused": [1.0],
        }
        assert found.optimizer["weight/momentum_buffer"].tolist() == [[2.0] * 3] * 2
        assert (found.manifest.contents.epoch, found.manifest.contents.updates) == (1, 3)

    in_scene(tmp_path, work)


def test_a_checkpoint_that_lacks_a_part_is_refused_with_its_name(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await upload(scene, {"weight": torch.ones(2, 3)})
        finish = m.FinishCheckpoint(job_id="job", checkpoint="epoch-0001", epoch=1, updates=3, plan=plan("a"))
        with pytest.raises(CheckpointError, match="lacks tensor 'bias'"):
            await scene.ask(finish, sender=COORDINATOR)

    in_scene(tmp_path, work)


def test_an_upload_with_too_few_buffers_is_refused(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        message = m.UploadState(job_id="job", checkpoint="c", segment=0, tensors=(spec_of("bias", TENSORS["bias"]),), optimizer=())
        with pytest.raises(MalformedMessageError, match="node a announced 1 tensors and sent 0"):
            await scene.ask(message)

    in_scene(tmp_path, work)


def test_updates_of_this_job_are_passed_on_and_others_are_not(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        for job_id in ("job", "other"):
            update = m.JobUpdate(
                job_id=job_id,
                state=m.JobState.TRAINING,
                epochs_done=0.0,
                elapsed_s=0.0,
                metrics=(),
                history=(),
                cancelled=False,
                error=None,
            )
            await scene.service.on_message(COORDINATOR, update, [])
        assert [update.job_id for update in scene.updates] == ["job"]

    in_scene(tmp_path, work)


def test_a_node_gets_the_tensors_of_its_own_stage_and_those_it_shares_and_no_others(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        for kind in (m.FetchTensors, m.FetchOptimizer):
            for sender, name in ((NODE, "late"), (SECOND, "weight"), (SECOND, "bias"), (NODE, "unused")):
                with pytest.raises(ForbiddenError, match=f"node {sender.peer_id} asks for tensor '{name}', which its stage does not need"):
                    await scene.ask(kind(job_id="job", names=(name,)), sender=sender)
        for sender, names in ((NODE, ("weight", "bias", "table")), (SECOND, ("late", "table"))):
            assert list(await scene.tensors(m.FetchTensors(job_id="job", names=names), sender)) == list(names)

    in_scene(tmp_path, work)


def test_only_first_stages_get_samples(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        lease = Lease(lease_id=0, training=True, epoch=0, start=0, stop=1)
        with pytest.raises(ForbiddenError, match="node b asks for samples, but runs no first stage"):
            await scene.ask(m.FetchSamples(job_id="job", lease=lease), sender=SECOND)

    in_scene(tmp_path, work)


def test_a_node_uploads_only_what_its_stage_owns_and_only_to_its_own_segments(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        with pytest.raises(ForbiddenError, match="node b uploads tensor 'table', which its stage does not own"):
            await upload(scene, {"table": torch.ones(4)}, segment=1, sender=SECOND)
        with pytest.raises(ForbiddenError, match="node b uploads tensor 'weight'"):
            await upload(scene, {}, {"weight/step": torch.ones(1)}, segment=1, sender=SECOND)
        with pytest.raises(ForbiddenError, match="node b uploads to segment 0, which is not its own"):
            await upload(scene, {"late": torch.ones(2)}, segment=0, sender=SECOND)

    in_scene(tmp_path, work)


def test_a_new_plan_lets_its_nodes_in_and_shuts_the_others_out(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        change = m.PlanChanged(job_id="job", plan=plan("c", "a"), nodes=(), generation=1, reason="b was lost", replayed=(), checkpoint="")
        with pytest.raises(MalformedMessageError, match="does not answer PlanChanged"):
            await scene.ask(change)
        assert await scene.ask(change, sender=COORDINATOR) == (m.Done(), [])
        assert scene.plans == [change]
        with pytest.raises(ForbiddenError, match="node b has no stage"):
            await scene.ask(m.FetchGraph(job_id="job"), sender=SECOND)
        with pytest.raises(ForbiddenError, match="node a asks for tensor 'weight'"):
            await scene.ask(m.FetchTensors(job_id="job", names=("weight",)))
        third = Sender(peer_id="c", role=Role.NODE)
        assert list(await scene.tensors(m.FetchTensors(job_id="job", names=("weight",)), third)) == ["weight"]

    in_scene(tmp_path, work)


def test_a_backup_gets_the_tensors_of_the_stage_it_stands_in_for(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        backed = replace(plan("a", "b"), backups=("c",), backup_stages=(BackupPlan(node_id="c", cluster=0, stage=1),))
        scene.service.set_plan(backed)
        backup = Sender(peer_id="c", role=Role.NODE)
        assert list(await scene.tensors(m.FetchTensors(job_id="job", names=("late", "table")), backup)) == ["late", "table"]
        with pytest.raises(ForbiddenError, match="node c asks for tensor 'weight'"):
            await scene.ask(m.FetchTensors(job_id="job", names=("weight",)), sender=backup)
        with pytest.raises(ForbiddenError, match="node c uploads"):
            await upload(scene, {"late": torch.ones(2)}, segment=1, sender=backup)

    in_scene(tmp_path, work)


async def saved(scene: Scene, name: str = "epoch-0001") -> Path:
    state = {"weight/momentum_buffer": torch.full((2, 3), 5.0)}
    await upload(scene, {"weight": torch.full((2, 3), 4.0), "bias": torch.ones(2), "table": torch.ones(4)}, state)
    await upload(scene, {"late": torch.ones(2)}, segment=1, sender=SECOND)
    finish = m.FinishCheckpoint(job_id="job", checkpoint=name, epoch=1, updates=3, plan=plan("a", "b"))
    reply, _ = await scene.ask(finish, sender=COORDINATOR)
    assert isinstance(reply, m.CheckpointWritten)
    return Path(reply.path)


def test_tensors_and_optimizer_state_come_from_a_checkpoint_that_is_named(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await saved(scene)
        found = await scene.tensors(m.FetchTensors(job_id="job", names=("weight", "bias"), checkpoint="epoch-0001"))
        assert {name: tensor.flatten()[0].item() for name, tensor in found.items()} == {"weight": 4.0, "bias": 1.0}
        state = await scene.tensors(m.FetchOptimizer(job_id="job", names=("weight", "bias"), checkpoint="epoch-0001"))
        assert list(state) == ["weight/momentum_buffer"]
        assert state["weight/momentum_buffer"].tolist() == [[5.0] * 3] * 2

    in_scene(tmp_path, work)


def test_a_damaged_checkpoint_is_not_served(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        file = await saved(scene) / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(CheckpointDamagedError, match="model.safetensors has the wrong checksum"):
            await scene.ask(m.FetchTensors(job_id="job", names=("weight",), checkpoint="epoch-0001"))
        for name in ("../epoch-0001", "epoch-0002"):
            with pytest.raises(RoostError):
                await scene.ask(m.FetchTensors(job_id="job", names=("weight",), checkpoint=name))

    in_scene(tmp_path, work)
