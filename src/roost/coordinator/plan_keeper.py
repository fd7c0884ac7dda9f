"""Which nodes run which stages of a running job, what of it is broken, and how the next plan is carried out (docs/failover.md)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from roost import messages as m
from roost.config import CoordinatorConfig, JobConfig
from roost.coordinator.job_record import JobRecord
from roost.coordinator.node_calls import NodeCalls, together
from roost.coordinator.quarrels import Quarrels
from roost.errors import NodeLostError, PlanningError, RoostError
from roost.planning.replan import predict_again, propose_change
from roost.planning.takeover import Holder, StageState, Transition, holders_of, state_of, transition, without_clusters
from roost.types import BackupPlan, ClusterPlan, LinkProfile, ModelProfile, NodeProfile, Plan, StageMetrics, StagePlan

logger = logging.getLogger(__name__)

HOLD_S = 5.0
"""Deadline for a node to hold or drop its stage, or to take note of a plan that leaves it its stage."""
LEAST_GAIN = 0.1
"""Clusters stop for a change that nothing forces only if it is predicted to train so much more: what is measured is noisier than less."""


class PlanKeeper:
    """The plan of one job and every change of it. `generation` counts the plans that nodes were told of."""

    def __init__(
        self,
        *,
        profile: ModelProfile,
        config: JobConfig,
        calls: NodeCalls,
        settings: CoordinatorConfig,
        prepare: Callable[[ClusterPlan, StagePlan, Transition], m.PrepareStage],
    ) -> None:
        """`prepare` makes the part of PrepareStage that does not depend on where a stage's state is."""
        self._profile = profile
        self._config = config
        self._calls = calls
        self._settings = settings
        self._prepare = prepare
        self.plan: Plan | None = None
        self.numbers: tuple[int, ...] = ()
        """The number of each cluster of the plan, by index."""
        self.generation = 0
        self.links: list[LinkProfile] = []
        """As they were measured."""
        self.broken: set[int] = set()
        """Numbers of clusters that cannot go on as they are."""
        self.gone: set[str] = set()
        """Nodes of the plan that are lost."""
        self._next_number = 0
        self._built = False
        self._copies: dict[str, Holder] = {}  # by node, what backups have a copy of
        self._told: set[str] = set()  # nodes that were asked to build a stage
        self.quarrels = Quarrels(config.job_id)

    # ------------------------------------------------------------ questions

    def stage_of(self, node_id: str) -> StagePlan | None:
        """Return the stage a node runs or holds, None if it has none."""
        stages = self.plan.stages if self.plan is not None else ()
        return next((stage for stage in stages if stage.node_id == node_id and node_id not in self.gone), None)

    @property
    def apart(self) -> bool:
        """True if nodes of a broken cluster cannot reach each other: as it is it would break again."""
        clusters = self.plan.clusters if self.plan is not None else ()
        broken = [cluster for cluster, number in zip(clusters, self.numbers, strict=True) if number in self.broken]
        pairs = self.quarrels.pairs
        return any(pair <= {stage.node_id for stage in cluster.stages} for cluster in broken for pair in pairs)

    @property
    def _usable_links(self) -> list[LinkProfile]:
        """Links as they were measured, but for those that are not to be used now."""
        return [*self.links, *self.quarrels.links]

    @property
    def copies(self) -> tuple[Holder, ...]:
        """What backups have a copy of."""
        return tuple(self._copies.values())

    def number_of(self, node_id: str) -> int:
        """Return the number of the cluster a node is in, -1 if it is in none."""
        stage = self.stage_of(node_id)
        return self.numbers[stage.cluster] if stage is not None else -1

    def concerns(self, node_id: str) -> bool:
        """Return True for a node that has a stage, or was asked to build one."""
        return self.stage_of(node_id) is not None or node_id in self._told

    @property
    def shares(self) -> dict[int, float]:
        """By number, the share of the data of every cluster."""
        assert self.plan is not None, "asked for only after planning"
        return {number: cluster.share for number, cluster in zip(self.numbers, self.plan.clusters, strict=True)}

    @property
    def running(self) -> tuple[ClusterPlan, ...]:
        """The clusters that are not broken."""
        clusters = self.plan.clusters if self.plan is not None else ()
        return tuple(cluster for cluster, number in zip(clusters, self.numbers, strict=True) if number not in self.broken)

    # ------------------------------------------------------------ what happens to it

    def begin(self, plan: Plan) -> None:
        """Take the first plan of the job; nothing is built yet."""
        self.plan = plan
        self.numbers = tuple(range(len(plan.clusters)))
        self._next_number = len(self.numbers)

    def restore(self, record: JobRecord) -> None:
        """Take the plan that a coordinator before this one had carried out."""
        self.plan, self.numbers, self.generation = record.plan, record.numbers, record.generation
        self.links = list(record.links)
        self.broken, self.gone = set(record.broken), set(record.gone)
        self._next_number, self._built = record.next_number, record.built
        self._told = {stage.node_id for stage in record.plan.stages}

    @property
    def next_number(self) -> int:
        """The number that the next new cluster gets."""
        return self._next_number

    @property
    def built(self) -> bool:
        """True once the stages of some plan have all been built."""
        return self._built

    def lose(self, node_id: str) -> int:
        """A node is gone: return the number of the cluster that breaks, -1 if none does."""
        number = self.number_of(node_id)
        self._told.discard(node_id)
        self._copies.pop(node_id, None)
        if number >= 0:
            self.gone.add(node_id)
            self.broken.add(number)
        return number

    # ------------------------------------------------------------ the first plan

    async def build(self) -> None:
        """Let all nodes of the first plan build their stages. Raises RoostError."""
        plan = self.plan
        assert plan is not None, "begin() first"
        await self._build(Transition(plan=plan, kept={}), {}, self.numbers)
        self._built = True

    # ------------------------------------------------------------ changes

    async def go_on_without_broken(self, order: int) -> None:
        """Let clusters that are not broken average without the broken ones from now on. Raises NodeLostError."""
        plan = self.plan
        assert plan is not None, "asked for only after planning"
        interim = without_clusters(plan, self.numbers, self.broken)
        if interim is None or not self._built:
            return
        self.generation += 1
        await self._tell_kept(interim, order)
        await self.let_go_on(interim.plan.stages)

    def next_plan(self, pool: Sequence[NodeProfile], rng: random.Random, *, improve: bool = True) -> Plan:
        """Return the plan to go on with on these nodes: the same one if it can be and no other is worth it. Raises PlanningError.

        Without `improve` only clusters that cannot run are changed.
        """
        plan = self.plan
        assert plan is not None, "asked for only after planning"
        propose = partial(
            propose_change,
            plan,
            self._profile,
            pool,
            config=self._config,
            rng=rng,
            copies={name: (copy.first_unit, copy.last_unit) for name, copy in self._copies.items()},
            improve=improve,
        )
        apart = self.quarrels.pairs
        try:
            change = propose(self._usable_links, apart=apart)
        except PlanningError as error:
            if not apart:
                raise
            # Better a link that may come back than no plan.
            logger.info("useless_links_tried job=%s reason=%s", self._config.job_id, error.message)
            change = propose(self.links)
        if change is None:
            return plan
        now = change.plan.samples_per_s - change.gain_samples_per_s
        if not change.forced and not self.broken and change.gain_samples_per_s < LEAST_GAIN * now:
            return plan
        logger.info("plan_changes job=%s reason=%s", self._config.job_id, change.reason)
        return change.plan

    def way_to(self, following: Plan) -> Transition:
        """Return what changes and what stays on the way to a plan."""
        plan = self.plan
        assert plan is not None, "asked for only after planning"
        # What was never built cannot stay as it is.
        return transition(plan, self.numbers, self.broken if self._built else self.numbers, following)

    def leaving(self, way: Transition) -> frozenset[int]:
        """Return the numbers of clusters that run now and are not kept."""
        return frozenset(self.numbers) - self.broken - frozenset(way.kept.values())

    async def hold(self, way: Transition) -> list[StageMetrics]:
        """Hold every stage that does not stay as it is, and return their counters. Raises NodeLostError."""
        plan = self.plan
        assert plan is not None, "asked for only after planning"
        reports: list[StageMetrics] = []
        borrowers = tuple(stage.node_id for stage in way.plan.stages)

        async def hold_one(node_id: str) -> None:
            try:
                message = m.HoldStage(job_id=self._config.job_id, borrowers=borrowers)
                reply = await self._calls.call(node_id, message, HOLD_S)
            except NodeLostError:
                raise
            except RoostError as error:
                # Without its state it is as good as lost; it may get another stage.
                raise NodeLostError(f"node {node_id} has lost its stage: {error.message}", node=node_id) from error
            if isinstance(reply, m.StageReport):
                reports.append(reply.metrics)

        if self._built:
            await together(hold_one(stage.node_id) for stage in self._held(plan, way))
        return reports

    def _held(self, plan: Plan, way: Transition) -> list[StagePlan]:
        kept = set(way.kept.values())
        return [stage for stage in plan.stages if stage.node_id not in self.gone and self.numbers[stage.cluster] not in kept]

    def states(self, way: Transition) -> dict[tuple[int, int], StageState]:
        """Return where the state of every stage of the changed clusters is, by index of cluster and stage."""
        plan = self.plan
        assert plan is not None, "asked for only after planning"
        there = {stage.node_id for stage in plan.stages} - self.gone if self._built else set()
        holders = (*holders_of(plan, self.numbers, set(way.kept.values()), there), *self._copies.values())
        return {
            (cluster.index, stage.index): state_of(stage, cluster, self._reached(stage.node_id, holders), self._profile)
            for cluster in way.changed
            for stage in cluster.stages
        }

    async def find_backups(self, pool: Sequence[NodeProfile], order: int) -> None:
        """Let nodes that wait, and can hold a stage of the one cluster there is, each keep a copy of one. Raises RoostError.

        With several clusters the others hold what is lost.
        """
        if self.plan is None or len(self.plan.clusters) > 1 or not self._built:
            return
        again = predict_again(self.plan, self._profile, pool, self._usable_links, self._config)
        if again.backup_stages != self.plan.backup_stages:
            self.plan = replace(self.plan, backups=again.backups, backup_stages=again.backup_stages)
            self.generation += 1
            await self._tell_kept(Transition(plan=self.plan, kept={0: self.numbers[0]}), order)
            await self.let_go_on(self.plan.stages)
        for backup in self.plan.backup_stages:
            await self.follow(backup)

    async def follow(self, backup: BackupPlan) -> None:
        """Let a backup keep a copy of its stage; returns once it has one. Raises RoostError."""
        plan = self.plan
        assert plan is not None, "asked for only after planning"
        stage = plan.clusters[backup.cluster].stages[backup.stage]
        number = self.numbers[backup.cluster]
        known = self._copies.get(backup.node_id)
        if known is not None and (known.number, known.first_unit, known.last_unit) == (number, stage.first_unit, stage.last_unit):
            return
        tensors = tuple(tensor.name for unit in self._profile.units[stage.first_unit : stage.last_unit] for tensor in unit.tensors)
        (source,) = self._calls.peers([stage.node_id])
        message = m.FollowStage(job_id=self._config.job_id, source=source, tensors=tensors)
        self._told.add(backup.node_id)
        await self._calls.call(backup.node_id, message, self._settings.prepare_s)
        if number in self.numbers and number not in self.broken:
            self._copies[backup.node_id] = Holder(
                node_id=backup.node_id, number=number, first_unit=stage.first_unit, last_unit=stage.last_unit, kept=False, copy=True
            )
            logger.info("copy_made job=%s node=%s source=%s", self._config.job_id, backup.node_id, stage.node_id)

    def _reached(self, node_id: str, holders: Sequence[Holder]) -> list[Holder]:
        return [holder for holder in holders if not self.quarrels.useless(node_id, holder.node_id)]

    def number_clusters(self, way: Transition) -> tuple[int, ...]:
        """Return the numbers of the clusters of the next plan; those that are built anew get new ones."""
        numbers = []
        for cluster in way.plan.clusters:
            if cluster.index in way.kept:
                numbers.append(way.kept[cluster.index])
            else:
                numbers.append(self._next_number)
                self._next_number += 1
        return tuple(numbers)

    async def carry_out(self, way: Transition, numbers: tuple[int, ...], states: dict[tuple[int, int], StageState], order: int) -> None:
        """Build the stages of changed clusters and re-form the rings of the others; then the plan is `way.plan`. Raises RoostError.

        The generation has been counted up before, and the requester knows the plan.
        """
        # Those that stay first: they are told who may fetch from them.
        await self._tell_kept(way, order)
        await self._build(way, states, numbers)
        before = self._told
        self.plan, self.numbers = way.plan, numbers
        used = {stage.node_id for stage in way.plan.stages}
        self._copies = {name: copy for name, copy in self._copies.items() if copy.number in numbers and name not in used}
        self.broken.clear()
        self.gone.clear()
        self._built = True
        self._told = used | self._copies.keys()
        await self._end(sorted(before - self._told))

    async def _build(self, way: Transition, states: dict[tuple[int, int], StageState], numbers: Sequence[int]) -> None:
        async def build_one(cluster: ClusterPlan, stage: StagePlan) -> None:
            state = states.get((cluster.index, stage.index), StageState(tensors={}, missing=()))
            sources = tuple(m.StateSource(node_id=node_id, tensors=names) for node_id, names in state.tensors.items())
            others = self._calls.peers([*(used.node_id for used in way.plan.stages), *state.tensors])
            message = replace(
                self._prepare(cluster, stage, way), number=numbers[cluster.index], generation=self.generation, sources=sources, peers=others
            )
            self._told.add(stage.node_id)
            await self._calls.call(stage.node_id, message, self._settings.prepare_s)

        await together(build_one(cluster, stage) for cluster in way.changed for stage in cluster.stages)

    async def _tell_kept(self, way: Transition, order: int) -> None:
        job_id, generation = self._config.job_id, self.generation
        peers = self._calls.peers(stage.node_id for stage in way.plan.stages)
        kept = [cluster for cluster in way.plan.clusters if cluster.index in way.kept]
        borrowers = tuple(stage.node_id for stage in way.plan.stages)

        async def tell(stage: StagePlan) -> None:
            message = m.ChangePlan(
                job_id=job_id,
                plan=way.plan,
                cluster=stage.cluster,
                peers=peers,
                generation=generation,
                order=order,
                borrowers=borrowers,
            )
            await self._calls.call(stage.node_id, message, HOLD_S)

        await together(tell(stage) for cluster in kept for stage in cluster.stages)

    async def let_go_on(self, stages: Iterable[StagePlan]) -> None:
        """Let stages average in the background, and first stages ask for leases. Raises NodeLostError."""
        message = m.ContinueJob(job_id=self._config.job_id)
        await together(self._calls.call(stage.node_id, message, HOLD_S) for stage in stages)

    async def _end(self, node_ids: Collection[str]) -> None:
        """Free nodes that have no stage in the plan any more."""

        async def end(node_id: str) -> None:
            try:
                message = m.EndJob(job_id=self._config.job_id, reason="its stage has gone to another node")
                await self._calls.call(node_id, message, HOLD_S)
            except RoostError as error:
                # It drops the stage when it registers again.
                logger.info("stage_not_ended job=%s node=%s error=%s", self._config.job_id, node_id, error.message)

        await asyncio.gather(*(end(node_id) for node_id in node_ids))
