"""A whole pool in virtual time: the production code of coordinator, agents and requester, on machines that a seed draws."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from small_job import MICRO_BATCH, SPEED, captured_job, job_package, memory_for, node_profile
from virtual_loop import VirtualLoop, VirtualMachine, virtual_time
from virtual_network import VirtualNetwork
from virtual_transport import VirtualTransport

from roost.agent import builder, links, message_probe
from roost.agent.service import Agent
from roost.capture import bounded
from roost.config import AgentConfig, CoordinatorConfig
from roost.coordinator import job_reports, plan_keeper
from roost.coordinator.service import Coordinator
from roost.coordinator.store import Store
from roost.errors import RoostError
from roost.messages import JobState
from roost.planning import planner, relocation, replan
from roost.planning.replan import PlanChange
from roost.requester.pools import Membership
from roost.requester.run import Run
from roost.types import NodeProfile, Peer, Plan, Role

COORDINATOR = "coordinator"
REQUESTER = "requester"
HUB = Peer(peer_id=COORDINATOR, address="virtual:coordinator")
SHORT_MEMORY = Path("/dev/shm")
"""Where files that need not outlive the process are quick to sync."""
WAITS: dict[str, Any] = {"heartbeat_s": 1.0, "rejoin_s": 60.0}
"""Of the coordinator. A job waits shortly for nodes when too few are left, so that a run that has lost them for good ends."""
QUIET_S = 5.0
"""A pool is watched so long after its job has ended."""


MOST_NODES = 7
"""Of a pool, those that join later among them: to plan for more takes longer than all that is simulated."""


@dataclass(frozen=True, kw_only=True)
class PoolShape:
    """What the pool of a seed is like."""

    stages: tuple[int, ...]
    """Nodes that each cluster needs."""
    min_clusters: int
    spares: int
    """Nodes that join while the job runs."""
    samples: int
    validation_samples: int
    settings: dict[str, Any]
    """Of the job's config."""


def draw_shape(rng: random.Random) -> PoolShape:
    """Return a small pool and a short job."""
    batches = rng.choice([1, 1, 2])
    settings: dict[str, Any] = {
        "batch_size": MICRO_BATCH * batches,
        "micro_batch_size": MICRO_BATCH,
        "epochs": rng.choice([1, 1, 2]),
        "sync_interval": rng.choice([1, 1, 2]),
        "averaging_interval": rng.choice([1, 2, 4, 0]),
        "mode": rng.choice(["async", "async", "async", "sync"]),
        "clip_norm": rng.choice([0.0, 0.0, 1.0]),
        "seed": rng.randrange(1000),
    }
    stages = tuple(rng.choice([1, 2, 3]) for _ in range(rng.choice([1, 1, 2, 2, 2, 3])))
    while sum(stages) >= MOST_NODES:
        stages = stages[1:]
    return PoolShape(
        stages=stages,
        min_clusters=rng.choice([1, 1, len(stages)]),
        spares=min(rng.choice([0, 1, 2]), MOST_NODES - sum(stages)),
        samples=rng.randrange(10, 25),
        validation_samples=rng.choice([0, 6]),
        settings=settings,
    )


class Host:
    """A machine and the process that runs on it, which may be replaced by a new one."""

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self.role = role
        self.machine: VirtualMachine | None = None
        self.transport: VirtualTransport | None = None
        self.agent: Agent | None = None
        self.task: asyncio.Task[Any] | None = None
        self.starts = 0
        self.dies_silently = False

    @property
    def up(self) -> bool:
        return self.machine is not None and not self.machine.dead


class PowerCut(BaseException):
    """Ends the callback in which a process dies: no handler of ordinary exceptions takes it."""


class WholePool:
    """One run of one seed. `record` has everything that happened, in order."""

    def __init__(self, seed: int, *, shape: PoolShape | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(f"pool {seed}")
        self.shape = shape or draw_shape(random.Random(f"shape {seed}"))
        self.loop = VirtualLoop(random.Random(f"threads {seed}"))
        self.loop.on_death = self._died
        self.record: list[tuple[Any, ...]] = []
        self.network = VirtualNetwork(self.loop, random.Random(f"network {seed}"), self.note)
        self.hosts: dict[str, Host] = {}
        self.machines: list[VirtualMachine] = []
        self.coordinator: Coordinator | None = None
        self.run: Run | None = None
        self.store: Store | None = None
        self.problems: list[str] = []
        self.ended_at = math.inf
        """When the requester knew that its job was over."""
        self._speeds: dict[str, float] = {}
        self._memories: dict[str, int] = {}

    def note(self, kind: str, *what: Any) -> None:
        """Write down what happened now."""
        self.record.append((round(self.loop.now, 9), kind, *what))

    # ------------------------------------------------------------ the whole run

    def play(self, story: Callable[[WholePool], Any], *, bound_s: float) -> None:
        """Run the job while `story` (a coroutine) makes faults, until it has ended or `bound_s` after the story has."""
        parent = SHORT_MEMORY if SHORT_MEMORY.is_dir() else None
        directory = Path(tempfile.mkdtemp(prefix="roost-pool-", dir=parent))
        secret_rng = random.Random(f"secrets {self.seed}")
        captured_job()  # measured once, while clocks still run
        try:
            # Messages name paths: from here they are the same in every run.
            with contextlib.chdir(directory), virtual_time(self.loop, secret_rng), self._listening(), brief_preparations():
                asyncio.set_event_loop(self.loop)
                try:
                    self.loop.run_until_complete(self._play(story, bound_s))
                    self._judge_tasks()
                finally:
                    self.loop.clean_up(self.machines)
                    asyncio.set_event_loop(None)
                    if self.store is not None:
                        self.store.close()
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    async def _play(self, story: Callable[[WholePool], Any], bound_s: float) -> None:
        package = job_package(
            Path("checkpoints"),
            self.shape.samples,
            self.shape.validation_samples,
            min_clusters=self.shape.min_clusters,
            max_clusters=len(self.shape.stages),
            **self.shape.settings,
        )
        for cluster, count in enumerate(self.shape.stages):
            memory = memory_for(package.config.batch_size, count)
            for stage in range(count):
                self._memories[f"n{cluster}{stage}"] = memory
        for spare in range(self.shape.spares):
            self._memories[f"spare{spare}"] = max(self._memories.values())
        self.hosts = {COORDINATOR: Host(COORDINATOR, Role.COORDINATOR), REQUESTER: Host(REQUESTER, Role.REQUESTER)}
        self.hosts |= {name: Host(name, Role.NODE) for name in self._memories}
        self._speeds = {name: self.rng.choice([0.3, 1.0, 1.0, 2.0]) for name in self._memories}
        self.start_coordinator()
        for name in self._memories:
            if not name.startswith("spare"):
                self.start_node(name)
        self.run = Run(package, self, observer=None, wait_s=60.0)
        requester = self.loop.run_on(self._boot(self.hosts[REQUESTER]), self.run._session())
        self.hosts[REQUESTER].task = requester
        self.loop.after(self.rng.uniform(0.5, 5.0), self._start_spares)
        telling = self.loop.create_task(story(self))
        telling.add_done_callback(lambda _: self.note("story", "is told"))
        await telling
        ended = asyncio.create_task(asyncio.wait({requester}, timeout=bound_s))
        await ended
        if not requester.done():
            self.problem(f"the job has not ended {bound_s:.0f} s after the last fault: {self._whereabouts()}")
            return
        self.ended_at = self.loop.now
        self.note("ended", self.outcome)
        await asyncio.sleep(QUIET_S)

    def _whereabouts(self) -> str:
        job = self.coordinator._job if self.coordinator is not None else None
        if job is None:
            return "no job"
        return f"{job.state}, {job.epochs_done:.2f} epochs done, {job.error}"

    def _start_spares(self) -> None:
        for name in self._memories:
            if name.startswith("spare") and not self.hosts[name].up:
                self.start_node(name)

    @property
    def state(self) -> JobState:
        """Where the requester thinks its job is."""
        assert self.run is not None
        return self.run.metrics().state

    @property
    def error(self) -> RoostError | None:
        """What the requester was told that its job failed with."""
        task = self.hosts[REQUESTER].task if self.hosts else None
        if task is not None and task.done() and not task.cancelled():
            error = task.exception()
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, RoostError):
                return error
        return self.run._error if self.run is not None else None

    @property
    def outcome(self) -> str:
        error = self.error
        return f"{type(error).__name__}: {error.message}" if error is not None else str(self.state)

    def problem(self, what: str) -> None:
        """Something that must not be."""
        self.note("problem", what)
        self.problems.append(f"{self.loop.now:.3f} s: {what}")

    # ------------------------------------------------------------ machines

    def _boot(self, host: Host) -> VirtualMachine:
        speed = self._speeds.get(host.name, 1.0)
        machine = VirtualMachine(
            host.name,
            offset_s=self.rng.uniform(0.0, 1e4),
            rate=1 + self.rng.uniform(-1e-4, 1e-4),
            step_s=(0.01 / speed, 0.1 / speed),
        )
        machine.wall_offset_s = self.rng.uniform(-5.0, 5.0)
        host.machine = machine
        host.starts += 1
        self.machines.append(machine)
        # Half of the restarted nodes come back on another port; the coordinator's and the requester's are known.
        moved = host.role is Role.NODE and host.starts > 1 and self.rng.random() < 0.5
        address = f"virtual:{host.name}" + (f":{host.starts}" if moved else "")
        host.transport = VirtualTransport(host.name, host.role, machine, self.network, address=address)
        self.note("start", host.name, host.transport.known_as)
        return machine

    def start_node(self, name: str) -> None:
        """Start the agent of a node, for the first time or again."""
        host = self.hosts[name]
        machine = self._boot(host)
        assert host.transport is not None
        host.agent = machine.context.run(self._agent, name, host.transport, self.profile(name))
        host.task = self.loop.run_on(machine, host.agent.run())

    def profile(self, name: str) -> NodeProfile:
        """Return what a node lends."""
        return node_profile(name, memory=self._memories[name], speed=SPEED * self._speeds[name])

    @staticmethod
    def _agent(name: str, transport: VirtualTransport, profile: NodeProfile) -> Agent:
        return Agent(config=AgentConfig(node_id=name), transport=transport, coordinator=HUB, profile=profile)

    def start_coordinator(self, *, stale: Path | None = None) -> None:
        """Start the coordinator with the database as it is on the disk, or as it was in an older copy."""
        host = self.hosts[COORDINATOR]
        machine = self._boot(host)
        database = self._database
        if stale is not None:
            for path in database.parent.glob(f"{database.name}*"):
                path.unlink()
            for path in stale.iterdir():
                shutil.copy(path, database.parent / path.name)
        self.store = Store(database)
        self.store.open()
        config = CoordinatorConfig(**WAITS)
        assert host.transport is not None
        self.coordinator = machine.context.run(lambda: Coordinator(config=config, transport=host.transport, store=self.store))  # type: ignore[arg-type]
        host.task = self.loop.run_on(machine, self._coordinate(self.coordinator, host.transport))

    @staticmethod
    async def _coordinate(coordinator: Coordinator, transport: VirtualTransport) -> None:
        coordinator.restore()
        await transport.start(coordinator)
        coordinator.take_over()
        try:
            await coordinator.watch()
        finally:
            await coordinator.close()
            await transport.stop()

    @property
    def _database(self) -> Path:
        path = Path("coordinator", "roost.sqlite")
        path.parent.mkdir(exist_ok=True)
        return path

    def copy_disk(self) -> Path:
        """Return a copy of the coordinator's database as it is now."""
        copy = Path(tempfile.mkdtemp(dir="."))
        for path in self._database.parent.iterdir():
            shutil.copy(path, copy / path.name)
        return copy

    # ------------------------------------------------------------ ends of machines

    def kill(self, name: str, *, after: int = 0, silently: bool = False) -> None:
        """End a process before it has run `after` more callbacks; `silently` is a machine without power: nobody is told."""
        host = self.hosts[name]
        assert host.machine is not None
        self.note("kill", name, after, silently)
        host.dies_silently = silently
        host.machine.doomed = after
        if after == 0:
            host.machine.dead = True
            self._died(host.machine)

    def kill_at_statement(self, statements: int) -> None:
        """End the coordinator's process when it has executed so many statements more, before it does what follows."""
        machine, store = self.hosts[COORDINATOR].machine, self.store
        assert machine is not None and store is not None
        self.note("kill", COORDINATOR, "at statement", statements)
        opened = store._opened
        left = iter(range(statements))

        def last() -> sqlite3.Connection:
            if next(left, None) is None:
                if not machine.dead:
                    machine.dead = True
                    self._died(machine)
                raise PowerCut
            return opened()

        store._opened = last  # type: ignore[method-assign]

    def _died(self, machine: VirtualMachine) -> None:
        host = self.hosts[machine.name]
        if host.machine is not machine or host.transport is None:
            return
        self.note("dead", machine.name)
        host.agent = None
        if host.name == COORDINATOR:
            self.coordinator = None
            if self.store is not None:
                with contextlib.suppress(sqlite3.Error):
                    self.store.close()
        if host.dies_silently:
            self.network.vanish(host.transport)
        else:
            self.network.leave(host.transport, "was killed")

    def freeze(self, name: str) -> None:
        """Stop a process where it is; its messages wait."""
        machine = self.hosts[name].machine
        assert machine is not None
        self.note("freeze", name)
        machine.frozen = True
        self.network.watch_silence()

    def thaw(self, name: str) -> None:
        """Let a frozen process go on."""
        machine = self.hosts[name].machine
        if machine is not None and machine.frozen:
            self.note("thaw", name)
            self.loop.thaw(machine)

    # ------------------------------------------------------------ the requester's pool

    @contextlib.asynccontextmanager
    async def enter(self, *, on_failure: Callable[[RoostError], None]) -> AsyncIterator[Membership]:
        """Yield what the requester needs to know."""
        transport = self.hosts[REQUESTER].transport
        assert transport is not None
        yield Membership(transport=transport, coordinator=HUB, wait_nodes=sum(self.shape.stages))

    # ------------------------------------------------------------ what must not happen

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Count every error with a traceback that is not a RoostError as a problem."""
        listener = ErrorListener(self)
        logger = logging.getLogger("roost")
        propagate, level = logger.propagate, logger.level
        logger.addHandler(listener)
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            logger.removeHandler(listener)
            logger.propagate = propagate
            logger.setLevel(level)

    def _judge_tasks(self) -> None:
        for failure in self.loop.failures:
            self.problem(f"the event loop heard of {failure.get('exception')!r}: {failure.get('message')}")
        for task in self.loop._tasks:
            if not task.done() or task.cancelled() or not task._log_traceback:
                continue
            if not isinstance(task.exception(), RoostError | PowerCut):
                self.problem(f"task {task.get_name()} ended with {task.exception()!r}, and nobody looked")


SHORTER: tuple[tuple[Any, str, Any], ...] = (
    (links, "PINGS", 1),
    (links, "PAYLOADS", 1),
    (links, "FIRST_BYTES", 4 << 10),
    (links, "LINK_S", 0.01),
    (message_probe, "WARM_UP", 1),
    (message_probe, "MESSAGES", 2),
    (message_probe, "LARGE_MESSAGES", 1),
    (message_probe, "LARGE_BYTES", 4 << 10),
    (builder, "check_sizes", lambda *_, **__: None),
    (bounded, "check_stage_sizes", lambda *_, **__: None),
    (job_reports, "UPDATE_S", 2.0),
    (planner, "SMALL_BUDGET", 1_000_000),
    (planner, "LARGE_BUDGET", 2_000_000),
    (planner, "LARGE_BUDGET_PER_NODE", 0),
    (planner, "FINAL_BUDGET", 100_000),
    (relocation, "WORK_BUDGET", 300_000),
    (replan, "MOST_TRIED", 20),
    (replan, "MOST_SWAPS", 20),
)
"""What is only about how exactly something is measured, checked, planned or shown: most of a run would be nothing else."""


@contextlib.contextmanager
def brief_preparations() -> Iterator[None]:
    """Let links and messages be measured with few and small messages, and plans be looked for briefly."""
    with contextlib.ExitStack() as stack:
        for module, name, value in SHORTER:
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.object(plan_keeper, "propose_change", remembering(plan_keeper.propose_change)))
        yield


def remembering(propose: Callable[..., PlanChange | None]) -> Callable[..., PlanChange | None]:
    """Return what answers as `propose_change`, and looks for nothing twice: equal questions have equal answers."""
    answers: dict[Any, PlanChange | None] = {}

    def remembered(
        current: Plan, profile: Any, nodes: Sequence[Any], links: Sequence[Any], *, config: Any, rng: random.Random, **options: Any
    ) -> PlanChange | None:
        asked = {name: tuple(sorted(value.items())) if isinstance(value, dict) else value for name, value in options.items()}
        question = (current, tuple(nodes), tuple(links), config, rng.getstate(), tuple(sorted(asked.items())))
        if question not in answers:
            answers[question] = propose(current, profile, nodes, links, config, rng, **options)
        return answers[question]

    return remembered


class ErrorListener(logging.Handler):
    """Writes down what the production code logs."""

    def __init__(self, pool: WholePool) -> None:
        super().__init__()
        self._pool = pool

    def emit(self, record: logging.LogRecord) -> None:
        """Note a warning; an unexpected exception is a problem."""
        if self._pool.loop.cleaning:
            return
        machine = self._pool.loop.current_machine
        self._pool.note("log", machine, record.levelname, record.getMessage())
        error = record.exc_info[1] if record.exc_info else None
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None and not isinstance(error, RoostError):
            self._pool.problem(f"{machine} logs {record.getMessage()}: {error!r}")
