"""A backup's copy of a stage: fetched again and again while the stage trains, for the moment when its node is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from torch import Tensor

from roost import messages as m
from roost.errors import MalformedMessageError, RoostError
from roost.pipeline.tensor_bytes import from_buffer
from roost.transport.interface import Transport

logger = logging.getLogger(__name__)

FETCH_DEADLINE_S = 120.0
LEAST_PAUSE_S = 5.0
LINE_SHARE = 0.05
"""Most of the time that fetching takes: the stage that is followed needs its line, and its thread."""
GROUP_TENSORS = 64
"""Tensors that are fetched at once."""


class StageCopy:
    """The tensors and the optimizer state of one stage, as they were a moment ago."""

    def __init__(self, message: m.FollowStage, transport: Transport) -> None:
        self.message = message
        self._transport = transport
        self.tensors: dict[str, Tensor] = {}
        self.optimizer: dict[str, Tensor] = {}
        self.complete = asyncio.Event()
        """Set once every tensor was fetched."""

    async def run(self) -> None:
        """Fetch until cancelled. While the stage cannot be reached, what was fetched last stays."""
        job_id, source = self.message.job_id, self.message.source.peer_id
        while True:
            began = time.monotonic()
            try:
                await self._fetch_all()
                self.complete.set()
            except RoostError as error:
                # The stage may be held, its node lost, or another plan on its way: the coordinator says what follows.
                logger.warning("copy_not_renewed job=%s source=%s error=%s", job_id, source, error.message)
            took = time.monotonic() - began
            await asyncio.sleep(max(LEAST_PAUSE_S, took / LINE_SHARE))

    async def _fetch_all(self) -> None:
        names = self.message.tensors
        for start in range(0, len(names), GROUP_TENSORS):
            group = names[start : start + GROUP_TENSORS]
            request = m.FetchState(job_id=self.message.job_id, names=group)
            reply = await self._transport.call(self.message.source, request, deadline_s=FETCH_DEADLINE_S)
            found = reply.message
            if not isinstance(found, m.StateReply) or tuple(spec.name for spec in found.tensors) != group:
                raise MalformedMessageError(f"{self.message.source.peer_id} sent other tensors than it was asked for")
            specs = (*found.tensors, *found.optimizer)
            if len(specs) != len(reply.buffers):
                raise MalformedMessageError(f"{self.message.source.peer_id} announced {len(specs)} tensors and sent {len(reply.buffers)}")
            copies = [from_buffer(spec, buffer) for spec, buffer in zip(specs, reply.buffers, strict=True)]
            split = len(found.tensors)
            self.tensors.update({spec.name: tensor for spec, tensor in zip(found.tensors, copies[:split], strict=True)})
            self.optimizer.update({spec.name: tensor for spec, tensor in zip(found.optimizer, copies[split:], strict=True)})

    def part(self, names: tuple[str, ...]) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Return tensors and optimizer state of the copy; they are its own. Raises MalformedMessageError for others."""
        missing = [name for name in names if name not in self.tensors]
        if missing:
            raise MalformedMessageError(f"the copy does not hold tensor {missing[0]!r}")
        wanted = set(names)
        optimizer = {key: value for key, value in self.optimizer.items() if key.rpartition("/")[0] in wanted}
        return {name: self.tensors[name] for name in names}, optimizer
