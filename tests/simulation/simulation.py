"""A whole job: simulated clusters, the real lease book, node table, schedules and rings, and a coordinator that may lose nodes."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

from simulated_cluster import SimulatedCluster, SimulatedStage
from simulated_ring import SimulatedRing
from world import World

from roost.protocol.averaging_round import RingMember
from roost.protocol.data_leases import LeaseBook
from roost.protocol.membership import NodeAssigned, NodeHeard, NodeJoined, NodeState, NodeTable
from roost.protocol.pipeline_schedule import DATA, PipelineSchedule, RunUpdate
from roost.types import Lease

UNITS = 6
HEARTBEAT_S = 2.0
LOST_AFTER_S = 9.0
ROUND_DEADLINE_S = 30.0
COORDINATOR = "coordinator"


class Simulation:
    """Builds a job from a seed and runs it to its end, with every invariant checked after every event."""

    def __init__(self, seed: int, *, stalls: bool = False, loss: bool = False) -> None:
        self.world = World(seed)
        rng = self.world.rng
        self.samples, self.validation = rng.randrange(20, 60), rng.randrange(0, 12)
        self.batch_size = rng.choice([2, 4, 6])
        self.micro_batch_size = rng.randrange(1, self.batch_size + 1)
        self.epochs = rng.randrange(1, 4)
        self.clusters = [self._cluster(index) for index in range(rng.randrange(2 if loss else 1, 4))]
        speeds = [1 / cluster.speed for cluster in self.clusters]
        shares = tuple(speed / sum(speeds) for speed in speeds)
        self.book = LeaseBook(
            self.samples, self.validation, shares, self.batch_size, self.epochs, 0, rng.randrange(1, 3), self.validation > 0
        )
        self.table = NodeTable(LOST_AFTER_S)
        self.counted: Counter[tuple[bool, int, int]] = Counter()  # (training, epoch, sample) -> times it was reported done
        self.given: dict[int, Lease] = {}
        self.lost: set[int] = set()
        self.order = 0
        self.exact_rounds = 0
        self.waiting: set[str] = set()
        self.phase = "training"
        self.finished = False
        for cluster in self.clusters:
            cluster.stall_rate = 0.03 if stalls else 0.0
        if loss:
            victim = rng.choice(rng.choice(self.clusters).stages)
            self.world.after(rng.uniform(1.0, 60.0), COORDINATOR, lambda: self._kill(victim))

    # ------------------------------------------------------------ building

    def _cluster(self, index: int) -> SimulatedCluster:
        rng = self.world.rng
        cluster = SimulatedCluster(
            world=self.world,
            index=index,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            interval=rng.randrange(1, 6),
            ragged=self.samples % self.batch_size != 0,
        )
        count = rng.randrange(1, 5)
        cuts = [0, *sorted(rng.sample(range(1, UNITS), count - 1)), UNITS]
        # Values may skip stages; one path always leads from each stage to the next.
        edges = {(source, source + 1) for source in range(count - 1)}
        edges |= {pair for pair in itertools.combinations(range(count), 2) if rng.random() < 0.3}
        bound = rng.choice([0, 1, 2, 6])
        for place in range(count):
            sources = {source for source, target in edges if target == place} or {DATA}
            targets = {target for source, target in edges if source == place}
            in_flight = min(count - place, bound) if bound else count - place
            schedule = PipelineSchedule(place, count, frozenset(sources), frozenset(targets), in_flight)
            stage = SimulatedStage(
                cluster=cluster, index=place, units=tuple(range(cuts[place], cuts[place + 1])), schedule=schedule, bound=in_flight
            )
            stage.sources, stage.targets = sources, targets
            cluster.stages.append(stage)
        cluster.ask_coordinator = lambda want: self._lease(cluster, want)
        cluster.report_done = lambda stage, lease: self.world.send(stage.name, COORDINATOR, lambda: self._done(cluster.index, lease))
        return cluster

    def _form_rings(self) -> None:
        """One ring per segment of the clusters that are left; earlier rings are dropped with their messages."""
        alive = [cluster for cluster in self.clusters if cluster.index not in self.lost]
        for cluster in alive:
            for stage in cluster.stages:
                for ring in stage.rings:
                    ring.closed = True
                stage.rings = []
        edges = sorted({unit for cluster in alive for stage in cluster.stages for unit in (stage.units[0], stage.units[-1] + 1)})
        for number, (first, last) in enumerate(itertools.pairwise(edges)):
            owners = [next(stage for stage in cluster.stages if first in stage.units) for cluster in alive]
            if len(owners) > 1:
                self._form_ring(number, tuple(range(first, last)), owners)

    def _form_ring(self, number: int, units: tuple[int, ...], owners: list[SimulatedStage]) -> None:
        members = tuple(stage.name for stage in owners)
        rings = {}
        for stage in owners:
            ring = SimulatedRing(
                world=self.world,
                node=stage.name,
                units=units,
                member=RingMember(number, members, stage.name, ROUND_DEADLINE_S),
                size=len(members),
                weights=stage.weights,
                samples=lambda stage=stage: stage.samples,
                computing=lambda stage=stage: stage.running is not None,
            )
            ring.samples_applied = stage.samples
            ring.on_order = lambda stage=stage: self._averaged(stage)
            stage.rings.append(ring)
            rings[stage.name] = ring
        for ring in rings.values():
            ring.peers = rings

    # ------------------------------------------------------------ running

    def run(self) -> None:
        """Run the job to its end and check what must hold then."""
        for stage in self._stages():
            self.table.handle(NodeJoined(node_id=stage.name, now=0.0))
            self.table.handle(NodeAssigned(node_id=stage.name))
            self._beat(stage)
        self._watch()
        self._form_rings()
        self._open_training()
        self.world.run(lambda: self.finished and all(stage.schedule.idle for stage in self._stages()), self.check, most_events=200_000)
        self.check_end()

    def _stages(self) -> list[SimulatedStage]:
        return [stage for cluster in self.clusters if cluster.index not in self.lost for stage in cluster.stages]

    def _beat(self, stage: SimulatedStage) -> None:
        self.world.send(stage.name, COORDINATOR, lambda: self._heard(stage.name))
        self.world.after(HEARTBEAT_S, stage.name, lambda: self._beat(stage))

    def _heard(self, name: str) -> None:
        self.table.handle(NodeHeard(node_id=name, now=self.world.now))

    def _watch(self) -> None:
        for name in self.table.expire(self.world.now):
            self._lose(int(name[1 : name.index("s")]))
        expiry = self.table.next_expiry()
        assert expiry is not None
        self.world.at(expiry, COORDINATOR, self._watch)

    def _kill(self, victim: SimulatedStage) -> None:
        self.world.note(f"{victim.name} dies")
        self.world.dead.add(victim.name)

    def _lose(self, index: int) -> None:
        """A node is lost, so its cluster is: others take over its leases, and the rings form anew."""
        if index in self.lost:
            return
        self.world.note(f"cluster {index} is lost")
        self.lost.add(index)
        self.world.dead.update(stage.name for stage in self.clusters[index].stages)
        self.book.release(index)
        self._form_rings()
        if self.phase == "averaging":
            self._average()
        else:
            self._resume()

    def _resume(self) -> None:
        for cluster in self.clusters:
            if cluster.index not in self.lost:
                self.world.send(COORDINATOR, cluster.stages[0].name, cluster.resume)

    def _lease(self, cluster: SimulatedCluster, want: int) -> None:
        first = cluster.stages[0].name

        def answer() -> None:
            leases, drained = self.book.request(cluster.index, want)
            self.given.update({lease.lease_id: lease for lease in leases})
            self.world.send(COORDINATOR, first, lambda: cluster.granted(leases, drained))

        self.world.send(first, COORDINATOR, answer)

    def _done(self, cluster: int, lease_id: int) -> None:
        if cluster in self.lost:
            return
        self.book.done(cluster, [lease_id])
        lease = self.given[lease_id]
        self.counted.update((lease.training, lease.epoch, sample) for sample in range(lease.start, lease.stop))
        if self.book.all_done and self.phase == "training":
            self._average()
        elif self.book.all_done and self.phase == "evaluating":
            self._next()

    def _open_training(self) -> None:
        self.phase = "training"
        self.book.open_training()
        self._resume()

    def _average(self) -> None:
        """Everything is drained: order one exact round in every ring."""
        self.phase = "averaging"
        self.order += 1
        self.waiting = {stage.name for stage in self._stages() if stage.rings}
        order = self.order
        for stage in self._stages():
            for ring in stage.rings:
                self.world.send(COORDINATOR, stage.name, lambda ring=ring: ring.start(order))
        if not self.waiting:
            self._averaging_done()

    def _averaged(self, stage: SimulatedStage) -> None:
        """A ring of this node has carried out its order: the node reports once all its rings have."""
        if all(ring.order == self.order and ring.member.finished >= ring.order << 20 for ring in stage.rings):
            self.world.send(stage.name, COORDINATOR, lambda order=self.order: self._reported(stage.name, order))

    def _reported(self, name: str, order: int) -> None:
        if order == self.order and self.phase == "averaging":
            self.waiting.discard(name)
            if not self.waiting:
                self._averaging_done()

    def _averaging_done(self) -> None:
        self.check_exact_mean()
        if self.validation:
            self.phase = "evaluating"
            self.book.open_evaluation()
            self._resume()
        else:
            self._next()

    def _next(self) -> None:
        if self.book.at_end:
            self.finished = True
        else:
            self._open_training()

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        """Assert what must hold after every event."""
        assert all(count == 1 for count in self.counted.values()), "a sample was counted twice"
        for stage in self._stages():
            assert stage.schedule.in_flight <= stage.bound
            assert stage.schedule.computing == (stage.running is not None)

    def check_exact_mean(self) -> None:
        """Assert that all clusters hold the exact weighted mean of what they held when the pipelines had drained."""
        holders: dict[int, list[Fraction]] = {}
        for stage in self._stages():
            # The first stage may report the last batch while a later one still takes that batch's update: whatever reads the
            # weights waits for it, and a ring's snapshot has waited.
            assert stage.schedule.in_flight == 0
            assert stage.schedule.idle or (isinstance(stage.running, RunUpdate) and not stage.rings)
            for unit, value in stage.weights.items():
                holders.setdefault(unit, []).append(value)
            for ring in stage.rings:
                number = ring.member.finished
                parts = [peer.snapshots[number] for peer in ring.peers.values()]
                total = sum(weight for _, weight in parts)
                for unit in ring.units:
                    mean = sum((values[unit] * weight for values, weight in parts), Fraction(0)) / total
                    assert stage.weights[unit] == mean, f"{stage.name} does not hold the mean of unit {unit}"
        assert all(len(set(values)) == 1 for values in holders.values())
        self.exact_rounds += 1

    def check_end(self) -> None:
        """Assert that every sample of every epoch was counted once, and that every stage has applied what its cluster reported."""
        training = {(epoch, sample) for kind, epoch, sample in self.counted if kind}
        assert training == {(epoch, sample) for epoch in range(self.epochs) for sample in range(self.samples)}
        evaluated = Counter(sample for kind, _, sample in self.counted.elements() if not kind)
        assert set(evaluated) == set(range(self.validation))
        assert len(set(evaluated.values())) <= 1
        assert self.book.epochs_done == self.epochs
        for cluster in self.clusters:
            if cluster.index not in self.lost:
                assert all(stage.applied == cluster.stages[0].applied for stage in cluster.stages)
        if not self.lost:
            total: Counter[tuple[int, int]] = Counter()
            for cluster in self.clusters:
                total.update(cluster.stages[0].applied)
            assert set(total.values()) == {1}
        assert set(self.table.in_state(NodeState.ACTIVE)) >= {stage.name for stage in self._stages()}
