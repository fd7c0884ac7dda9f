"""What this machine can do, and which machine it is."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from roost.config import AgentConfig, format_bytes
from roost.errors import InvalidConfigError
from roost.pipeline.allocator import keep_freed_memory, load_optimizers, release_freed_memory
from roost.pipeline.precision import can_compute
from roost.pipeline.probe import free_memory_bytes, measure, update_bytes_per_s
from roost.types import NodeProfile

logger = logging.getLogger(__name__)

LENT_FRACTION = 0.8
"""Part of the free memory that is lent when the owner sets no budget."""
SPEED_BUDGET_S = 0.6
UPDATE_BUDGET_S = 0.25
MIXED_BUDGET_S = 0.2
PROBE_LOCK = Path.home() / ".roost" / "probe.lock"
PROBE_WAIT_S = 20.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def profile_node(config: AgentConfig) -> NodeProfile:
    """Return what this machine can do, measured in some seconds; declared values replace measured ones.

    Speed and memory are those of the device: of a GPU its own memory is lent, not the host's.

    The address and the cost of messages are filled in once the transport listens.
    """
    threads = config.threads or default_threads()
    load_optimizers()
    memory = config.memory_bytes or int(LENT_FRACTION * free_memory_bytes(config.device))
    # Before it is measured, so that it is measured in the state in which it trains.
    keep_freed_memory(memory)
    with _alone():
        speed = measure(threads=threads, device=config.device, budget_s=SPEED_BUDGET_S)
        update_rate = update_bytes_per_s(threads, config.device, budget_s=UPDATE_BUDGET_S)
        mixed = 0.0
        if can_compute("bf16", torch.device(config.device)):
            mixed = measure(threads=threads, device=config.device, budget_s=MIXED_BUDGET_S, precision="bf16").flop_per_s
    release_freed_memory()
    factor = config.relative_speed
    return NodeProfile(
        node_id=config.node_id,
        address="",
        memory_bytes=memory,
        flop_per_s=speed.flop_per_s * factor,
        matmul_flop_per_s=speed.matmul_flop_per_s * factor,
        convolution_flop_per_s=speed.convolution_flop_per_s * factor,
        device=config.device,
        threads=threads,
        emulated=bool(config.memory_bytes) or factor < 1,
        relative_speed=factor,
        memory_bytes_per_s=update_rate * factor,
        bf16_flop_per_s=mixed * factor,
        up_bytes_per_s=config.uplink_bytes_per_s,
        down_bytes_per_s=config.downlink_bytes_per_s,
        host=host_name(),
        host_cores=usable_cores(),
    )


def check_device(device: str, memory_bytes: int) -> None:
    """Raise InvalidConfigError unless torch can compute on `device` here, and has that much memory there."""
    if device == "cuda" and not torch.cuda.is_available():
        why = "torch is installed without CUDA" if torch.version.cuda is None else "torch finds no GPU that it can use"
        raise InvalidConfigError(f"this machine cannot compute on cuda: {why}", hint="Join with --device cpu, or mend CUDA first.")
    if device == "mps" and not torch.backends.mps.is_available():
        raise InvalidConfigError("this machine cannot compute on mps: it needs a Mac with Apple silicon", hint="Join with --device cpu.")
    if device == "cuda" and memory_bytes > (total := int(torch.cuda.mem_get_info()[1])):
        what = f"the GPU has {format_bytes(total)}, so {format_bytes(memory_bytes)} of it cannot be lent"
        raise InvalidConfigError(what, hint="On cuda, --memory is the GPU's.")


def default_threads() -> int:
    """Return how many threads torch computes with if nobody says how many."""
    return torch.get_num_threads()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Let the agents of one user on this machine measure one after the other; one that waits too long measures all the same."""
    lock = FileLock(PROBE_LOCK)
    try:
        PROBE_LOCK.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock.acquire(timeout=PROBE_WAIT_S)
    except (Timeout, OSError) as error:
        logger.warning("measuring_not_alone error=%s", error)
    try:
        yield
    finally:
        lock.release()


def host_name() -> str:
    """Return a name that is the same for all processes of this machine until it restarts, and says nothing about it."""
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        # Not Linux: the network card's address tells machines apart, too.
        boot = str(uuid.getnode())
    return hashlib.sha256(f"roost-host/{socket.gethostname()}/{boot}".encode()).hexdigest()[:16]


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
