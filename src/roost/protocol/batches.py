"""How a lease is cut into batches and micro-batches, and which random numbers belong to them."""

from __future__ import annotations

import hashlib
import random

from roost.types import Lease, MicroBatch

SEED_BITS = 63


def _derive(*parts: int | str) -> int:
    """Return an integer in 0 .. 2**63 - 1 that depends on all parts; the same on every machine and Python version."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


def micro_batch_seed(seed: int, cluster: int, number: int) -> int:
    """Return the seed (0 .. 2**63 - 1) of the `number`-th training micro-batch of a cluster, counted from 0 without evaluation.

    A plain loop that calls `torch.manual_seed(micro_batch_seed(job_seed, 0, n))` before its n-th step draws the same
    dropout masks as cluster 0 does. With several micro-batches per batch, n = batch * ceil(batch_size /
    micro_batch_size) + position.
    """
    return _derive("micro-batch", seed, cluster, number)


def sample_order(samples: int, epoch: int, seed: int) -> list[int]:
    """Return the order in which an epoch visits the samples: a permutation of range(samples)."""
    order = list(range(samples))
    random.Random(_derive("order", seed, epoch)).shuffle(order)
    return order


def micro_batches(
    lease: Lease, *, batch_size: int, micro_batch_size: int, next_number: int, next_batch: int, seed: int, cluster: int = 0
) -> tuple[list[tuple[MicroBatch, int, int]], int, int]:
    """Return the micro-batches of a lease as (header, start, stop), with offsets into the lease, and the next two counters.

    Batches have `batch_size` samples and micro-batches `micro_batch_size`; the last of each may be smaller. Evaluation
    leases have no batches: batch is -1, and every micro-batch stands alone.
    """
    cut: list[tuple[MicroBatch, int, int]] = []
    step = batch_size if lease.training else micro_batch_size
    per_batch = -(-batch_size // micro_batch_size)
    for batch_start in range(0, lease.samples, step):
        batch_stop = min(batch_start + step, lease.samples)
        starts = range(batch_start, batch_stop, micro_batch_size)
        for position, start in enumerate(starts):
            stop = min(start + micro_batch_size, batch_stop)
            header = MicroBatch(
                number=next_number,
                batch=next_batch if lease.training else -1,
                position=position,
                count=len(starts),
                samples=stop - start,
                batch_samples=batch_stop - batch_start,
                training=lease.training,
                seed=micro_batch_seed(seed, cluster, next_batch * per_batch + position) if lease.training else 0,
                lease=lease.lease_id,
            )
            cut.append((header, start, stop))
            next_number += 1
        next_batch += 1 if lease.training else 0
    return cut, next_number, next_batch
