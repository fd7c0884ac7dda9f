"""Runs graphs in child processes that may take only so much memory and time, and tells what became of each."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import random
import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from roost.capture.arguments import DTYPES
from roost.capture.bounded import bounded
from roost.capture.cut import cut
from roost.capture.graph import Graph
from roost.capture.graph_format import from_bytes

MEMORY_BYTES = 6 << 30
LIMIT_BYTES = 64 << 20
"""What a value may take."""
SECONDS = 20
"""For one graph."""
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What became of a graph that was run."""

    position: int
    """In the list that was given."""
    outcome: str
    """'ran', the name of the exception it raised, or 'killed by signal N'."""

    @property
    def killed(self) -> bool:
        """True if the process did not survive the graph."""
        return self.outcome.startswith("killed")


def run_in_sandbox(graphs: Sequence[bytes], shapes: Sequence[tuple[int, ...]], seed: int) -> list[Ending]:
    """Return what became of each graph, run with random tensors between pages that must not be touched."""
    endings: list[Ending] = []
    context = multiprocessing.get_context("fork")
    while len(endings) < len(graphs):
        receiver, sender = context.Pipe(duplex=False)
        start = len(endings)
        child = context.Process(target=_child, args=(graphs[start:], shapes, seed + start, sender), daemon=True)
        child.start()
        sender.close()
        try:
            while len(endings) < len(graphs):
                if not receiver.poll(2 * SECONDS):
                    child.kill()
                endings.append(Ending(position=len(endings), outcome=receiver.recv()))
        except EOFError:
            child.join()
            endings.append(Ending(position=len(endings), outcome=f"killed by signal {-(child.exitcode or 0)}"))
        child.join()
        child.close()
    return endings


def _child(graphs: Sequence[bytes], shapes: Sequence[tuple[int, ...]], seed: int, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    for index, data in enumerate(graphs):
        signal.alarm(SECONDS)
        sender.send(_run(data, shapes, random.Random(seed + index)))
    signal.alarm(0)


def _run(data: bytes, shapes: Sequence[tuple[int, ...]], rng: random.Random) -> str:
    torch.manual_seed(rng.getrandbits(32))
    try:
        graph = from_bytes(data)
        program = bounded(cut(graph, [0, len(graph.nodes)])[0], graph, LIMIT_BYTES)
        tensors = {
            record.name: guarded(record.shape, DTYPES[record.dtype], rng).requires_grad_(record.trainable) for record in graph.tensors
        }
        values = {number: guarded(shape, DTYPES[graph.data[number].dtype], rng) for number, shape in enumerate(shapes)}
        loss = program.run(values, tensors, training=True)[graph.loss]
        if loss.requires_grad:
            loss.backward()
        program.run(values, tensors, training=False)
    except Exception as error:  # noqa: BLE001 - any exception is an ordinary end here: only the end of the process is not
        return type(error).__name__
    return "ran"


def guarded(shape: Sequence[int], dtype: torch.dtype, rng: random.Random) -> Tensor:
    """Return a tensor of random and extreme elements right before, or right after, a page whose use ends the process."""
    content = _elements(shape, dtype, rng)
    nbytes = content.numel() * content.element_size()
    if nbytes == 0:
        return content
    pages = -(-nbytes // _PAGE)
    area = mmap.mmap(-1, (pages + 2) * _PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    for guard in (start, start + (pages + 1) * _PAGE):
        assert libc.mprotect(ctypes.c_void_p(guard), _PAGE, 0) == 0
    offset = _PAGE if rng.random() < 0.3 else (pages + 1) * _PAGE - nbytes
    tensor = torch.frombuffer(area, dtype=dtype, count=content.numel(), offset=offset).view(content.shape)
    tensor.copy_(content)
    return tensor


def _elements(shape: Sequence[int], dtype: torch.dtype, rng: random.Random) -> Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_floating_point:
        tensor = torch.randn(shape)
        if rng.random() < 0.15 and tensor.numel():
            extreme = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e38, -1e38, 0.0])
            tensor = torch.where(torch.rand(shape) < 0.3, extreme[torch.randint(len(extreme), tuple(shape))], tensor)
        return tensor.to(dtype)
    choice = rng.random()
    if choice < 0.6:
        return torch.randint(0, 4, tuple(shape)).to(dtype)
    limits = torch.iinfo(dtype)
    extreme = torch.tensor([limits.min, limits.max, 0, 1, limits.min + 1, limits.max // 2 + 1, 3, 4], dtype=dtype)
    if limits.min < 0 and choice < 0.8:
        extreme = torch.tensor([limits.min, -1], dtype=dtype)
    return extreme[torch.randint(len(extreme), tuple(shape))]


def data_shapes_of(graph: Graph, samples: int) -> list[tuple[int, ...]]:
    """Return shapes for the data inputs of `graph`; whatever varies has the size `samples`."""
    return [tuple(samples if size is None else size for size in record.shape) for record in graph.data]
