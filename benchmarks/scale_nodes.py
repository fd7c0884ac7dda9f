"""Emulated nodes for the scale benchmark: they say what real ones say, when real ones would, and compute nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from roost import messages as m
from roost.errors import JobRefusedError, MalformedMessageError, RoostError
from roost.types import ClusterPlan, ModelProfile, NodeProfile, Plan, StageMetrics, StagePlan

if TYPE_CHECKING:
    from benchmarks.scale_pool import EmulatedPool

TORCH = "2.13.0"
PREFETCHED = 4
"""Leases that a first stage has at hand, as real ones."""
START_STAGE_S = 0.5
"""To build a stage once its bytes are there."""
ASK_AGAIN_S = 2.0
"""Between two attempts to register, as real nodes."""


class Doing(StrEnum):
    """What a node that is there does."""

    WAITING = "waiting"
    """It has no stage: the plan does not use it, or it has just arrived."""
    TRAINING = "training"
    STOPPED = "stopped"
    """Its stage stands still: its cluster has lost a node, or is being built."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """A node's stage."""

    job_id: str
    number: int
    cluster: ClusterPlan
    stage: StagePlan
    batch_size: int


class EmulatedNode:
    """One node. Everything happens in callbacks: ten thousand of them share one loop."""

    def __init__(self, profile: NodeProfile, model: ModelProfile, pool: EmulatedPool) -> None:
        self.profile = profile
        self.there = False
        self.doing = Doing.WAITING
        self.held: Held | None = None
        self._model = model
        self._pool = pool
        self._life = 0  # counts its arrivals: what was planned in an earlier life does not happen
        self._known = False
        self._heartbeat_s = 0.0  # as the coordinator said when it registered
        self._going = False
        self._requests = 0
        self._leases: list[int] = []
        self._samples = 0
        self._since = 0.0
        self._asking = False
        self._ticking = -1

    @property
    def name(self) -> str:
        return self.profile.node_id

    # ------------------------------------------------------------ there or not

    def arrive(self) -> None:
        """Start, and register."""
        self._life += 1
        self.there, self._known, self.held, self._since = True, False, None, self._pool.now
        self.doing = Doing.WAITING
        self._beat(self._life)

    def depart(self) -> None:
        """Go without a word."""
        self._turn(Doing.WAITING)
        self.there, self.held = False, None
        self._life += 1

    def _turn(self, doing: Doing) -> None:
        """Do something else from now on."""
        self._pool.spent[self.doing] += (self._pool.now - self._since) if self.there else 0.0
        self.doing, self._since = doing, self._pool.now

    def settle(self) -> None:
        """Count the time until now."""
        self._turn(self.doing)

    def stop(self) -> None:
        """Stand still: another node of the cluster is gone."""
        if self.held is not None:
            self._turn(Doing.STOPPED)

    # ------------------------------------------------------------ what it tells the coordinator

    def _later(self, seconds: float, action: Callable[[int], None]) -> None:
        self._pool.loop.call_later(seconds, self._if_alive, action, self._life)

    def _if_alive(self, action: Callable[[int], None], life: int) -> None:
        if life == self._life:
            action(life)

    def _beat(self, life: int) -> None:
        if not self._known:
            held = self.held
            message: m.Message = m.RegisterNode(
                protocol_version=m.PROTOCOL_VERSION,
                roost_version="benchmark",
                torch_version=TORCH,
                profile=self.profile,
                job_id=held.job_id if held is not None else "",
                cluster=held.number if held is not None else -1,
            )
        else:
            message = m.Heartbeat(job_id=self.held.job_id if self.held is not None else "", metrics=self._metrics())
        self._pool.tell(self, message, lambda reply: self._beaten(life, reply))

    def _beaten(self, life: int, reply: m.Message | RoostError) -> None:
        if life != self._life:
            return
        if isinstance(reply, m.Registered):
            self._known, self._heartbeat_s = True, reply.heartbeat_s
            if not reply.keep:
                self._drop()
        elif isinstance(reply, JobRefusedError):
            self._known = False
        self._later(self._heartbeat_s if self._known else ASK_AGAIN_S, self._beat)

    def _metrics(self) -> StageMetrics | None:
        held = self.held
        if held is None:
            return None
        batches = self._samples // held.batch_size
        return StageMetrics(
            node_id=self.name,
            cluster=held.cluster.index,
            stage=held.stage.index,
            updates=batches,
            micro_batches=batches,
            samples=self._samples,
            loss_sum=float(self._samples),
            loss_samples=self._samples,
            staleness_max=1,
            staleness_sum=batches,
            compute_s=self._pool.now,
            cpu_s=self._pool.now,
            bytes_sent=int(held.stage.sent_bytes_per_s * self._pool.now),
            bytes_received=int(held.stage.received_bytes_per_s * self._pool.now),
            rounds=batches // 16,
            number=held.number,
        )

    # ------------------------------------------------------------ training

    def _go(self) -> None:
        """Train from now on: the first stage asks for leases and reports them at the rate that the plan predicts."""
        assert self.held is not None
        self._turn(Doing.TRAINING)
        self._going = True
        if self.held.stage.index == 0:
            self._ask(self._life)
            if self._ticking != self.held.number:
                self._ticking = self.held.number
                self._tick(self.held.number)

    def _ask(self, life: int) -> None:
        held = self.held
        if held is None or not self._going or self._asking or len(self._leases) >= PREFETCHED:
            return
        self._requests += 1
        self._asking = True
        request = m.LeaseRequest(job_id=held.job_id, cluster=held.number, want=PREFETCHED - len(self._leases), number=self._requests)
        self._pool.tell(self, request, lambda reply: self._granted(life, held, reply))

    def _granted(self, life: int, held: Held, reply: m.Message | RoostError) -> None:
        self._asking = False
        if life != self._life or self.held is None or self.held.number != held.number:
            return
        if isinstance(reply, m.LeaseGrant):
            self._leases += [lease.lease_id for lease in reply.leases]
            self._going = not reply.drained
        else:
            self._later(ASK_AGAIN_S, self._ask)

    def _tick(self, number: int) -> None:
        """Finish a batch in every period of the cluster."""
        held = self.held
        if held is None or held.number != number:
            return
        self._batch(held)
        self._later(held.batch_size / held.cluster.samples_per_s, lambda life: self._tick(number))

    def _batch(self, held: Held) -> None:
        if self.doing is not Doing.TRAINING or not self._leases:
            return
        lease_id = self._leases.pop(0)
        self._samples += held.batch_size
        done = m.LeaseDone(job_id=held.job_id, cluster=held.number, lease_ids=(lease_id,))
        self._pool.tell(self, done, lambda reply: None)
        self._ask(self._life)

    # ------------------------------------------------------------ what it is told

    async def answer(self, message: m.Message) -> m.Message:
        """Answer the coordinator. Raises RoostError."""
        life = self._life
        match message:
            case m.ProbeLinks():
                return m.LinkReport(links=self._pool.links_of(self.name))
            case m.PrepareStage():
                await self._prepare(message, life)
            case m.HoldStage():
                self._require()
                self._turn(Doing.STOPPED)
                return self._report()
            case m.ChangePlan():
                self._change(message.plan, message.cluster)
            case m.ContinueJob():
                self._require()
                self._go()
            case m.AverageNow():
                self._require()
                await asyncio.sleep(1.0)
                return self._report()
            case m.SaveStage():
                self._require()
            case m.EndJob():
                self._drop()
            case _:
                raise MalformedMessageError(f"a node does not answer {type(message).__name__}")
        return m.Done()

    def _require(self) -> Held:
        if self.held is None:
            raise JobRefusedError(f"node {self.name} runs no stage")
        return self.held

    def _report(self) -> m.StageReport:
        metrics = self._metrics()
        assert metrics is not None
        return m.StageReport(metrics=metrics)

    async def _prepare(self, message: m.PrepareStage, life: int) -> None:
        cluster = message.plan.clusters[message.cluster]
        stage = cluster.stages[message.stage]
        self._turn(Doing.STOPPED)
        await asyncio.sleep(START_STAGE_S + self._fetched_bytes(stage) / self._pool.downlink(self.name))
        if life == self._life:
            self._drop(Doing.STOPPED)
            self.held = Held(
                job_id=message.config.job_id, number=message.number, cluster=cluster, stage=stage, batch_size=message.config.batch_size
            )

    def _fetched_bytes(self, stage: StagePlan) -> int:
        """Return what a stage weighs, AdamW's two tensors per parameter included, less what the node holds of it."""
        mine = range(self.held.stage.first_unit, self.held.stage.last_unit) if self.held is not None else range(0)
        units = [self._model.units[unit] for unit in range(stage.first_unit, stage.last_unit) if unit not in mine]
        return sum(unit.tensor_bytes + 2 * unit.trainable_bytes for unit in units)

    def _change(self, plan: Plan, index: int) -> None:
        held = self._require()
        cluster = plan.clusters[index]
        stage = next(stage for stage in cluster.stages if stage.node_id == self.name)
        self.held = replace(held, cluster=cluster, stage=stage)

    def _drop(self, doing: Doing = Doing.WAITING) -> None:
        self._turn(doing)
        self.held, self._leases, self._requests, self._samples, self._going = None, [], 0, 0, False
        self._asking, self._ticking = False, -1
