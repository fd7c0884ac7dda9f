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
from roost.checkpoint.opened import OpenedCheckpoint, open_files
from roost.checkpoint.writer import CheckpointWriter
from roost.config import JobConfig
from roost.errors import DeadlineError, ForbiddenError, MalformedMessageError
from roost.pipeline.tensor_bytes import spec_of, to_buffer
from roost.protocol.batches import sample_order
from roost.requester.access import Access, AccessTable, TensorPositions
from roost.requester.data import SampleSource
from roost.requester.uploads import UploadReceiver
from roost.transport.interface import Buffer, Sender
from roost.types import Lease, Plan, Role
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
        positions: TensorPositions,
        weights: TensorSource,
        unused: frozenset[str],
        optimizer: Mapping[str, Tensor],
        training: SampleSource,
        validation: SampleSource | None,
        writer: CheckpointWriter,
        contents: Callable[[m.FinishCheckpoint], CheckpointContents],
        on_update: Callable[[m.JobUpdate], None],
        on_plan: Callable[[m.PlanChanged], None],
    ) -> None:
        self._config = config
        self._graph = graph
        self._weights = weights
        self._unused = unused
        self._optimizer = optimizer
        self._training = training
        self._validation = validation
        self._writer = writer
        self._uploads = UploadReceiver(weights, writer)
        self._contents = contents
        self._on_update = on_update
        self._on_plan = on_plan
        self._positions = positions
        self._access: AccessTable | None = None
        self._opened: tuple[str, OpenedCheckpoint] | None = None
        """The checkpoint that was last fetched from."""
        self._planned = asyncio.Event()
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roost-disk")
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roost-data")
        self._maker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roost-weights")
        self._orders: dict[int, list[int]] = {}

    def set_plan(self, plan: Plan) -> None:
        """Let the nodes of `plan`, and nobody else, fetch what their stages need; nodes that asked earlier are answered from now on.

        May be called again while the job runs.
        """
        self._access = AccessTable(self._positions, plan)
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
        """Answer one call.

        Raises ForbiddenError, naming the sender, for a node that is not in the plan or asks for another's part, and for another job.
        """
        if getattr(message, "job_id", None) != self._config.job_id:
            raise ForbiddenError(f"{sender.peer_id} asks for another job than {self._config.job_id}")
        if sender.role is Role.NODE:
            return await self._answer_node(sender.peer_id, await self._access_of(sender.peer_id), message, buffers)
        if isinstance(message, m.FinishCheckpoint):
            return await self._finish(message), []
        if isinstance(message, m.PlanChanged):
            self.set_plan(message.plan)
            self._on_plan(message)
            return m.Done(), []
        raise _unknown(message)

    async def _access_of(self, node_id: str) -> Access:
        try:
            async with asyncio.timeout(PLAN_DEADLINE_S):
                await self._planned.wait()
        except TimeoutError:
            raise DeadlineError(f"job {self._config.job_id} was not planned in {PLAN_DEADLINE_S:.0f} s") from None
        assert self._access is not None
        return self._access.of(node_id, self._config.job_id)

    async def _answer_node(
        self, node_id: str, access: Access, message: m.Message, buffers: Sequence[Buffer]
    ) -> tuple[m.Message, Sequence[Buffer]]:
        loop = asyncio.get_running_loop()
        match message:
            case m.FetchGraph():
                return m.GraphReply(), [self._graph]
            case m.FetchTensors(names=names):
                self._check_reads(node_id, access, names)
                return self._reply(await loop.run_in_executor(self._maker, self._tensors, names, message.checkpoint))
            case m.FetchOptimizer(names=names):
                self._check_reads(node_id, access, names)
                return self._reply(await loop.run_in_executor(self._maker, self._optimizer_state, names, message.checkpoint))
            case m.FetchSamples(lease=lease):
                if not access.samples:
                    raise ForbiddenError(f"node {node_id} asks for samples, but runs no first stage of job {self._config.job_id}")
                batch = await loop.run_in_executor(self._reader, self._read, lease)
                return self._reply({str(number): tensor for number, tensor in enumerate(batch)})
            case m.UploadState():
                await loop.run_in_executor(self._disk, self._uploads.take, node_id, message, buffers, access)
                return m.Done(), []
        raise _unknown(message)

    def _check_reads(self, node_id: str, access: Access, names: Sequence[str]) -> None:
        known = set(self._weights.names)
        for name in names:
            if name not in known:
                raise MalformedMessageError(f"node {node_id} asks for a tensor {name[:80]!r}, which the model does not have")
            if name not in access.reads:
                raise ForbiddenError(f"node {node_id} asks for tensor {name!r}, which its stage does not need")

    @staticmethod
    def _reply(tensors: Mapping[str, Tensor]) -> tuple[m.TensorsReply, list[Buffer]]:
        specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
        return m.TensorsReply(tensors=specs), [to_buffer(tensor) for tensor in tensors.values()]

    def _tensors(self, names: Sequence[str], checkpoint: str) -> dict[str, Tensor]:
        """Return tensors as they are in a checkpoint of this job, or before training; they may have to be read from disk or made first."""
        if not checkpoint:
            return self._weights.read(names)
        opened = self._open(checkpoint)
        saved = opened.model([name for name in names if name in opened.names])
        # Buffers that are not in the state_dict are not in the checkpoint either.
        made = self._weights.read([name for name in names if name not in saved])
        return {name: saved[name] if name in saved else made[name] for name in names}

    def _optimizer_state(self, names: Sequence[str], checkpoint: str) -> dict[str, Tensor]:
        wanted = frozenset(names)
        if checkpoint:
            return self._open(checkpoint).optimizer(wanted)
        return {key: value for key, value in self._optimizer.items() if key.rpartition("/")[0] in wanted}

    def _open(self, checkpoint: str) -> OpenedCheckpoint:
        """Return a checkpoint of this job; its checksums are compared when it is first asked for. Raises CheckpointError."""
        if self._opened is None or self._opened[0] != checkpoint:
            self._opened = checkpoint, open_files(self._writer.path_of(checkpoint))
        return self._opened[1]

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

    async def _finish(self, message: m.FinishCheckpoint) -> m.CheckpointWritten:
        # Tensors of the model that its graph never touches: no stage has them, they are as they were.
        kept = await asyncio.get_running_loop().run_in_executor(self._maker, self._weights.read, sorted(self._unused))
        contents = self._contents(message)
        path = await asyncio.get_running_loop().run_in_executor(self._disk, self._write, message, kept, contents)
        # It may have replaced one of the same name.
        self._opened = None
        logger.info("checkpoint_written job=%s path=%s", message.job_id, path)
        return m.CheckpointWritten(path=str(path))

    def _write(self, message: m.FinishCheckpoint, kept: Mapping[str, Tensor], contents: CheckpointContents) -> Path:
        self._uploads.check_finished(message.checkpoint, message.attempt)
        if kept:
            self._writer.add(message.checkpoint, UNUSED_SEGMENT, kept, {}, attempt=message.attempt)
        return self._writer.finish(message.checkpoint, contents, attempt=message.attempt)


def _unknown(message: m.Message) -> MalformedMessageError:
    return MalformedMessageError(f"the requester does not answer {type(message).__name__}")
