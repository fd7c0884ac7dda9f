"""Processes that are killed, frozen and started again in the middle of a job; found by id, on this machine."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from e2e_kit import START_S, Machine, small_job
from torch import nn

import roost
from inproc_pool import nodes_for_stages
from roost.chaos.injector import Incident
from roost.chaos.pool import COORDINATOR, BreakablePool
from roost.chaos.schedule import Fault, FaultKind
from roost.chaos.session import ChaosResult, ChaosSession
from roost.config import NodeOptions

NAMES = ("attic", "barn", "cellar", "desk", "shed")
"""Two of them hold the model: two clusters, and one node to spare."""


def deep_job(directory: Path, **fields: object) -> roost.Job:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 64), *(nn.Linear(64, 64) for _ in range(6)), nn.Linear(64, 3)]
    settings: dict[str, object] = {
        "model": nn.Sequential(*layers),
        "samples": 400,
        "epochs": 100_000,
        "max_clusters": 2,
        "sync_interval": 20,
        "averaging_interval": 8,
    }
    return small_job(directory, **{**settings, **fields})


def session(directory: Path, faults: list[Fault], **fields: object) -> ChaosSession:
    job = deep_job(directory, **fields)
    memory = nodes_for_stages(deep_job(directory, max_clusters=1), ["a", "b"])[0].memory_bytes * 5 // 4
    # Paced, so that five nodes leave this machine time to start a sixth process.
    nodes = [NodeOptions(name=name, memory=memory, relative_speed=0.1) for name in NAMES]
    return ChaosSession(job, nodes, directory, faults, on_incident=lambda incident: None)


def fault(kind: FaultKind, *, lasts_s: float, at_s: float = 3.0) -> Fault:
    return Fault(kind=kind, at_s=at_s, lasts_s=lasts_s, first=0.0, second=0.0)


def nothing_is_lost(result: ChaosResult) -> None:
    assert result.finished, result.error
    assert result.crashes == ()
    assert (result.data.lost, result.data.applied_twice) == (0, 0)
    assert result.data.trained > 0
