"""Answers the nodes of a job: the graph, their tensors, the samples of their leases; takes the parts of checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from roost import messages as m
from roost.checkpoint.manifest import CheckpointContents
from roost.checkpoint.writer import CheckpointWriter
from roost.config import JobConfig
from roost.errors import ForbiddenError, MalformedMessageError
from roost.pipeline.tensor_bytes import from_buffer, spec_of, to_buffer
from roost.protocol.batches import sample_order
from roost.requester.data import SampleSource
from roost.transport.interface import Buffer, Sender
from roost.types import Lease, Plan, Role, TensorSpec
from roost.weights.source import TensorSource

logger = logging.getLogger(__name__)

PLAN_DEADLINE_S = 60.0
UNUSED_SEGMENT = -(10**6)
"""Where tensors that no stage owns go in a checkpoint; stages use -1 - their index for tensors outside all segments."""


class RequesterService:
    """The requester's handler: everything nodes and the coordinator may ask of it."""

    def __init__(
        self,
        *,
        config: JobConfig,
        graph: bytes,
        weights: TensorSource,
        unused: frozenset[str],
        optimizer: Mapping[str, Tensor],
        training: SampleSource,
        validation: SampleSource | None,
        writer: CheckpointWriter,
        contents: Callable[[m.FinishCheckpoint], CheckpointContents],
        on_update: Callable[[m.JobUpdate], None],
    ) -> None:
        self._config = config
        self._graph = graph
        self._weights = weights
        self._unused = unused
        self._optimizer = optimizer
        self._training = training
        self._validation = validation
        self._writer = writer
        self._contents = contents
        self._on_update = on_update
        self._allowed: frozenset[str] = frozenset()
        self._planned = asyncio.Event()
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roost-disk")
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roost-data")
        self._maker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roost-weights")
        self._orders: dict[int, list[int]] = {}

    def set_plan(self, plan: Plan) -> None:
        """Let the nodes of `plan`, and nobody else, fetch; nodes that asked earlier are answered from now on."""
        self._allowed = frozenset(stage.node_id for stage in plan.stages)
        self._planned.set()

    def close(self) -> None:
        """Stop the threads that read data and write files."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._maker.shutdown(wait=False, cancel_futures=True)
        self._disk.shutdown(wait=True)

    async def on_message(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> None:
        """Pass the coordinator's progress reports on."""
        if isinstance(message, m.JobUpdate) and message.job_id == self._config.job_id:
            self._on_update(message)

    async def on_call(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> tuple[m.Message, Sequence[Buffer]]:
        """Answer one call. Raises ForbiddenError for a node that is not in the plan, or a message of another job."""
        await self._check_sender(sender, message)
        if isinstance(message, m.FetchGraph):
            return m.GraphReply(), [self._graph]
        if isinstance(message, m.FetchTensors):
            return self._reply(await self._initial(message.names))
        if isinstance(message, m.FetchOptimizer):
            wanted = set(message.names)
            return self._reply({key: value for key, value in self._optimizer.items() if key.rpartition("/")[0] in wanted})
        if isinstance(message, m.FetchSamples):
            batch = await asyncio.get_running_loop().run_in_executor(self._reader, self._read, message.lease)
            return self._reply({str(number): tensor for number, tensor in enumerate(batch)})
        if isinstance(message, m.UploadState):
            return await self._store(message, buffers), []
        if isinstance(message, m.FinishCheckpoint):
            return await self._finish(message), []
        raise MalformedMessageError(f"the requester does not answer {type(message).__name__}")

    async def _check_sender(self, sender: Sender, message: m.Message) -> None:
        if getattr(message, "job_id", None) != self._config.job_id:
            raise ForbiddenError(f"{sender.peer_id} asks for another job than {self._config.job_id}")
        if sender.role is Role.NODE:
            async with asyncio.timeout(PLAN_DEADLINE_S):
                await self._planned.wait()
            if sender.peer_id not in self._allowed:
                raise ForbiddenError(f"node {sender.peer_id} has no stage in job {self._config.job_id}")

    @staticmethod
    def _reply(tensors: Mapping[str, Tensor]) -> tuple[m.TensorsReply, list[Buffer]]:
        specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
        return m.TensorsReply(tensors=specs), [to_buffer(tensor) for tensor in tensors.values()]

    async def _initial(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return tensors as they are before training; they may have to be read from disk or made first."""
        known = set(self._weights.names)
        missing = [name for name in names if name not in known]
        if missing:
            raise MalformedMessageError(f"the model has no tensor {missing[0]!r}")
        return await asyncio.get_running_loop().run_in_executor(self._maker, self._weights.read, names)

    def _read(self, lease: Lease) -> tuple[Tensor, ...]:
        source = self._training if lease.training else self._validation
        if source is None or not 0 <= lease.start < lease.stop <= len(source):
            raise MalformedMessageError(f"lease {lease.lease_id} asks for samples {lease.start}..{lease.stop} that do not exist")
        positions = range(lease.start, lease.stop)
        if not lease.training:
            return source.batch(positions)
        order = self._epoch_order(lease.epoch)
        return source.batch([order[position] for position in positions])

    def _epoch_order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            self._orders = {kept: order for kept, order in self._orders.items() if kept >= epoch - 1}
            self._orders[epoch] = sample_order(self._config.samples, epoch, self._config.seed)
        return self._orders[epoch]

    async def _store(self, message: m.UploadState, buffers: Sequence[Buffer]) -> m.Done:
        specs = message.tensors + message.optimizer
        if len(specs) != len(buffers):
            raise MalformedMessageError(f"{len(specs)} tensors announced, {len(buffers)} sent")
        named = [from_buffer(spec, buffer) for spec, buffer in zip(specs, buffers, strict=True)]
        split = len(message.tensors)
        tensors = _by_name(message.tensors, named[:split])
        optimizer = _by_name(message.optimizer, named[split:])
        await asyncio.get_running_loop().run_in_executor(
            self._disk, self._writer.add, message.checkpoint, message.segment, tensors, optimizer
        )
        return m.Done()

    async def _finish(self, message: m.FinishCheckpoint) -> m.CheckpointWritten:
        loop = asyncio.get_running_loop()
        if self._unused:
            # Tensors of the model that its graph never touches: no stage has them, they are as they were.
            kept = await self._initial(sorted(self._unused))
            await loop.run_in_executor(self._disk, self._writer.add, message.checkpoint, UNUSED_SEGMENT, kept, {})
        path: Path = await loop.run_in_executor(self._disk, self._writer.finish, message.checkpoint, self._contents(message))
        logger.info("checkpoint_written job=%s path=%s", message.job_id, path)
        return m.CheckpointWritten(path=str(path))


def _by_name(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}
