"""Roost trains one PyTorch model on the PCs people already have.

import roost
run = roost.train(roost.Job(model=..., loss=..., data=...), pool=roost.local(nodes=3)).wait()
run.state_dict()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from roost.api import Job, train
    from roost.config import NodeOptions
    from roost.errors import RoostError
    from roost.protocol.batches import micro_batch_seed, sample_order
    from roost.requester.pools import RemotePool, local
    from roost.requester.run import Run, RunMetrics
    from roost.weights.deferred import deferred_init

__all__ = [
    "Job",
    "NodeOptions",
    "RemotePool",
    "RoostError",
    "Run",
    "RunMetrics",
    "deferred_init",
    "local",
    "micro_batch_seed",
    "sample_order",
    "train",
]

_HOMES = {
    "Job": "roost.api",
    "train": "roost.api",
    "NodeOptions": "roost.config",
    "RoostError": "roost.errors",
    "RemotePool": "roost.requester.pools",
    "local": "roost.requester.pools",
    "Run": "roost.requester.run",
    "RunMetrics": "roost.requester.run",
    "deferred_init": "roost.weights.deferred",
    "micro_batch_seed": "roost.protocol.batches",
    "sample_order": "roost.protocol.batches",
}


def __getattr__(name: str) -> Any:
    # Loaded when first used: the coordinator imports this package and must not import torch.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'roost' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)
