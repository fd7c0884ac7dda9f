"""What nodes upload arrives whole, in messages of bounded size, and never mixed with another attempt's parts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from roost import messages as m
from roost.agent.uploads import upload_state
from roost.checkpoint.manifest import CheckpointContents
from roost.checkpoint.reader import load
from roost.checkpoint.writer import CheckpointWriter
from roost.config import JobConfig, NamedArguments, TransportConfig
from roost.errors import CheckpointError, MalformedMessageError, MessageTooLargeError
from roost.pipeline.tensor_bytes import spec_of, to_buffer
from roost.requester.access import Access
from roost.requester.uploads import UploadReceiver
from roost.transport.inproc import InprocNetwork, InprocTransport
from roost.transport.interface import ReceivedBuffer, Sender
from roost.types import Peer, Role
from roost.weights.source import MemoryTensors

CONFIG = JobConfig(job_id="job", optimizer=NamedArguments(name="Adam", arguments=()), samples=10)
LARGE, SMALL = "large", "small"


def state(seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a model with a tensor of 40,000 bytes, and its optimizer state."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {LARGE: torch.rand(100, 100, generator=generator), SMALL: torch.rand(3, generator=generator)}
    optimizer = {f"{name}/exp_avg": torch.rand(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    return tensors, optimizer | {"small/step": torch.tensor(5.0)}


class Requester:
    """Takes uploads as the requester's service does, and remembers how large each message was."""

    def __init__(self, directory: Path) -> None:
        self.writer = CheckpointWriter(directory, keep=0)
        self.receiver = UploadReceiver(MemoryTensors(state()[0]), self.writer)
        self.sizes: list[int] = []

    async def on_message(self, sender: Sender, message: m.Message, buffers: list[ReceivedBuffer]) -> None:
        raise MalformedMessageError("nothing is taken without a reply")

    async def on_call(self, sender: Sender, message: m.Message, buffers: list[ReceivedBuffer]) -> tuple[m.Message, list[bytes]]:
        assert isinstance(message, m.UploadState)
        self.sizes.append(sum(len(buffer) for buffer in buffers))
        self.receiver.take(sender.peer_id, message, buffers, ACCESS)
        return m.Done(), []

    def finish(self, attempt: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        specs = tuple(spec_of(name, tensor) for name, tensor in state()[0].items())
        self.receiver.check_finished("e", attempt)
        contents = CheckpointContents(epoch=1, updates=1, tensors=specs, config=CONFIG)
        found = load(self.writer.finish("e", contents, attempt=attempt))
        return found.model, found.optimizer


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


ACCESS = Access(reads=frozenset(), uploads=frozenset({LARGE, SMALL, "other"}), segments=frozenset({0, 3}), samples=False)
Upload = Callable[..., Awaitable[None]]


def scene(directory: Path, work: Callable[[Requester, Upload], Awaitable[None]], *, limit: int = 1 << 30) -> None:
    async def main() -> None:
        network, requester = InprocNetwork(), Requester(directory)
        server = InprocTransport("requester", Role.REQUESTER, network, config=TransportConfig(max_message_bytes=limit))
        client = InprocTransport("node", Role.NODE, network)
        await server.start(requester)
        await client.start(requester)
        peer = Peer(peer_id="requester", address=server.address)

        async def upload(tensors: dict[str, Tensor], optimizer: dict[str, Tensor], segment: int = 0, **options: int) -> None:
            await upload_state(client, peer, job_id="job", checkpoint="e", segment=segment, tensors=tensors, optimizer=optimizer, **options)

        async with asyncio.timeout(20):
            await work(requester, upload)
        await client.stop()
        await server.stop()

    asyncio.run(main())


@pytest.mark.parametrize("most_bytes", [4096, 39_999, 40_000, 40_012, 1 << 20])
def test_a_segment_arrives_whole_in_messages_of_at_most_the_bytes_allowed(tmp_path: Path, most_bytes: int) -> None:
    tensors, optimizer = state()

    async def work(requester: Requester, upload: Upload) -> None:
        await upload(tensors, optimizer, most_bytes=most_bytes)
        assert max(requester.sizes) <= most_bytes
        assert sum(requester.sizes) == sum(tensor.nbytes for tensor in (*tensors.values(), *optimizer.values()))
        found = requester.finish()
        assert same(found[0], tensors)
        assert same(found[1], optimizer)

    scene(tmp_path, work)


def test_a_tensor_larger_than_the_requesters_message_limit_can_be_uploaded_in_pieces(tmp_path: Path) -> None:
    tensors, optimizer = state()

    async def work(requester: Requester, upload: Upload) -> None:
        with pytest.raises(MessageTooLargeError):
            await upload(tensors, optimizer)
        await upload(tensors, optimizer, most_bytes=10_000)
        assert same(requester.finish()[0], tensors)

    scene(tmp_path, work, limit=10_000)


def test_pieces_and_parts_of_two_attempts_never_mix(tmp_path: Path) -> None:
    (old, old_state), (new, new_state) = state(1), state(2)

    async def work(requester: Requester, upload: Upload) -> None:
        await upload(old, old_state, segment=0, most_bytes=1000)
        await upload(old, old_state, segment=3, most_bytes=1000)
        first = m.TensorPiece(spec=spec_of(LARGE, old[LARGE]), optimizer=False, start=0)
        lost = m.UploadState(job_id="job", checkpoint="e", segment=0, tensors=(), optimizer=(), pieces=(first,))
        requester.receiver.take("node", lost, [to_buffer(old[LARGE])[:1000]], ACCESS)
        await upload(new, new_state, segment=0, most_bytes=1500, attempt=1)
        found = requester.finish(attempt=1)
        assert same(found[0], new)
        assert same(found[1], new_state)

    scene(tmp_path, work)


def test_a_tensor_of_which_a_piece_is_missing_keeps_the_checkpoint_from_being_written(tmp_path: Path) -> None:
    tensors, optimizer = state()

    async def work(requester: Requester, upload: Upload) -> None:
        await upload(tensors, optimizer)
        piece = m.TensorPiece(spec=spec_of(LARGE, tensors[LARGE]), optimizer=False, start=0)
        message = m.UploadState(job_id="job", checkpoint="e", segment=0, tensors=(), optimizer=(), part=1, pieces=(piece,))
        requester.receiver.take("node", message, [bytes(10)], ACCESS)
        with pytest.raises(CheckpointError, match="node node sent 10 of the 40000 bytes of tensor 'large'"):
            requester.finish()

    scene(tmp_path, work)


PIECE = m.TensorPiece(spec=spec_of(LARGE, state()[0][LARGE]), optimizer=False, start=0)


@pytest.mark.parametrize(
    ("pieces", "buffers", "reason"),
    [
        ((m.TensorPiece(spec=PIECE.spec, optimizer=False, start=8),), [bytes(8)], "out of order"),
        ((PIECE, m.TensorPiece(spec=PIECE.spec, optimizer=False, start=4)), [bytes(8), bytes(8)], "out of order"),
        (
            (PIECE, m.TensorPiece(spec=replace(PIECE.spec, name="large/exp_avg"), optimizer=True, start=8)),
            [bytes(8), bytes(8)],
            "out of order",
        ),
        ((PIECE,), [bytes(40_001)], "sent a piece of 40001 bytes"),
        ((PIECE,), [b""], "sent a piece of 0 bytes"),
        ((PIECE,), [], "announced 1 tensors and sent 0"),
    ],
)
def test_pieces_that_do_not_make_a_tensor_are_refused_and_the_node_named(tmp_path, pieces, buffers, reason) -> None:
    receiver = Requester(tmp_path).receiver
    message = m.UploadState(job_id="job", checkpoint="e", segment=0, tensors=(), optimizer=(), pieces=pieces)
    with pytest.raises(MalformedMessageError, match=f"node liar .*{reason}"):
        receiver.take("liar", message, buffers, ACCESS)


@pytest.mark.parametrize(
    ("tensors", "optimizer", "reason"),
    [
        ({"other": torch.ones(3)}, {}, "uploads 'other', which the model does not have"),
        ({SMALL: torch.ones(4)}, {}, r"uploads 'small' as float32 \[4\], the model says float32 \[3\]"),
        ({SMALL: torch.ones(3, dtype=torch.float64)}, {}, "uploads 'small' as float64"),
        ({}, {"other/step": torch.ones(1)}, "uploads 'other/step', which the model does not have"),
        ({}, {"small/exp_avg": torch.ones(10_000)}, "uploads 40000 bytes of state 'small/exp_avg'"),
    ],
)
def test_tensors_that_cannot_be_the_models_are_refused_before_they_are_kept(tmp_path, tensors, optimizer, reason) -> None:
    receiver = Requester(tmp_path).receiver
    message = m.UploadState(
        job_id="job",
        checkpoint="e",
        segment=0,
        tensors=tuple(spec_of(name, tensor) for name, tensor in tensors.items()),
        optimizer=tuple(spec_of(name, tensor) for name, tensor in optimizer.items()),
    )
    with pytest.raises(MalformedMessageError, match=f"node liar {reason}"):
        receiver.take("liar", message, [to_buffer(tensor) for tensor in (*tensors.values(), *optimizer.values())], ACCESS)
    assert list(tmp_path.iterdir()) == []
