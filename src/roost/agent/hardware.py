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

from roost.config import AgentConfig
from roost.pipeline.probe import free_memory_bytes, measure, update_bytes_per_s
from roost.types import NodeProfile

logger = logging.getLogger(__name__)

LENT_FRACTION = 0.8
"""Part of the free memory that is lent when the owner sets no budget."""
SPEED_BUDGET_S = 0.6
UPDATE_BUDGET_S = 0.25
PROBE_LOCK = Path.home() / ".roost" / "probe.lock"
PROBE_WAIT_S = 20.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def profile_node(config: AgentConfig) -> NodeProfile:
    """Return what this machine can do, measured in about a second; declared values replace measured ones.

    The address and the cost of messages are filled in once the transport listens.
    """
    threads = config.threads or torch.get_num_threads()
    with _alone():
        speed = measure(threads=threads, device=config.device, budget_s=SPEED_BUDGET_S)
        update_rate = update_bytes_per_s(threads, config.device, budget_s=UPDATE_BUDGET_S)
    memory = config.memory_bytes or int(LENT_FRACTION * free_memory_bytes(config.device))
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
        host=host_name(),
        host_cores=usable_cores(),
    )


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
