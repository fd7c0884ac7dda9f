"""What holds for every plan, on pools and models of every kind."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from synthetic import KB, MB, REFERENCE, all_links, even_model, job, link, model, node, parameter, unit

from roost.config import JobConfig, PlanningConfig
from roost.errors import EmptyPoolError, NodeTooSmallError, PlanningError, PoolTooSmallError
from roost.planning import make_plan
from roost.types import LinkProfile, ModelProfile, NodeProfile, Plan, StagePlan, TensorKind, TensorRecord

LITTLE_EFFORT = PlanningConfig(effort=0.02)
QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
OPTIMIZER_TENSORS = {"SGD": 0, "AdamW": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of the planner."""

    profile: ModelProfile
    nodes: tuple[NodeProfile, ...]
    links: tuple[LinkProfile, ...]
    config: JobConfig
    options: PlanningConfig = LITTLE_EFFORT

    def plan(self, seed: int = 0) -> Plan:
        return make_plan(self.profile, self.nodes, self.links, self.config, random.Random(seed), options=self.options)


# ------------------------------------------------------------ problems of every kind


@st.composite
def profiles(draw: st.DrawFn) -> ModelProfile:
    """Models of one to ten units; units without cost, parameters or traffic, tensors of several kinds."""
    units = []
    for index in range(draw(st.integers(1, 10))):
        frozen = TensorRecord(name=f"frozen.{index}", dtype="float32", shape=(250,), kind=TensorKind.PARAMETER, trainable=False)
        running = TensorRecord(name=f"running.{index}", dtype="float32", shape=(25,), kind=TensorKind.BUFFER, trainable=False)
        steps = TensorRecord(name=f"steps.{index}", dtype="int64", shape=(), kind=TensorKind.BUFFER, trainable=False)
        half = parameter(f"half.{index}", 2000, dtype="float16")
        extra = draw(st.lists(st.sampled_from([frozen, running, steps, half]), unique=True, max_size=3))
        units.append(
            unit(
                index,
                seconds=draw(st.sampled_from([0.0, 1e-6, 0.001, 0.003, 0.1])),
                parameters=draw(st.sampled_from([0, 4 * KB, MB, 5 * MB])),
                saved=draw(st.sampled_from([0, 100 * KB, 2 * MB])),
                crossing=draw(st.sampled_from([0, KB, 10 * KB, MB])),
                extra=extra,
            )
        )
    return model(units, micro_batch_size=draw(st.sampled_from([1, 8, 64])), input_bytes=draw(st.sampled_from([0, 10 * KB, MB])))


@st.composite
def pools(draw: st.DrawFn, least: int = 1, most: int = 6) -> tuple[NodeProfile, ...]:
    """One to six nodes: equal, or of speeds up to 10,000 times apart; costs measured or not."""
    speeds = draw(st.sampled_from([(1.0,), (0.5, 1.0), (1e-4, 0.01, 1.0), (0.3, 1.0, 3.0)]))
    memories = draw(st.sampled_from([(100 * MB,), (10 * MB, 40 * MB), (3 * MB, 15 * MB, 200 * MB)]))
    measured = draw(st.booleans())
    nodes = []
    for index in range(draw(st.integers(least, most))):
        plain = node(f"n{index}", memory=draw(st.sampled_from(memories)), speed=draw(st.sampled_from(speeds)))
        costs = {"memory_bytes_per_s": 5e9, "message_s": 1e-4, "wire_s_per_byte": 1e-9} if measured else {}
        nodes.append(dataclasses.replace(plain, reliability=draw(st.sampled_from([1.0, 1.0, 0.9, 0.01])), **costs))
    return tuple(nodes)


def links_between(draw: st.DrawFn, nodes: Sequence[NodeProfile]) -> tuple[LinkProfile, ...]:
    """Links of every quality, some of them not measured at all."""
    kinds = draw(st.sampled_from([("good",), ("good", "slow"), ("none",), ("dead",), ("far",), ("good", "none", "dead", "far", "slow")]))
    rates = {"good": (1e-4, 125e6), "slow": (0.02, 1e5), "dead": (1e-3, 1e-6), "far": (1e4, 1e6)}
    found = []
    for source in nodes:
        for target in nodes:
            kind = draw(st.sampled_from(kinds))
            if source is not target and kind in rates:
                latency, rate = rates[kind]
                found.append(link(source.node_id, target.node_id, latency=latency, rate=rate))
    return tuple(found)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    nodes = draw(pools())
    micro_batch = draw(st.sampled_from([1, 8, 32]))
    fewest = draw(st.sampled_from([1, 1, 1, 2]))
    config = job(
        optimizer=draw(st.sampled_from(sorted(OPTIMIZER_TENSORS))),
        micro_batch_size=micro_batch,
        batch_size=micro_batch * draw(st.sampled_from([1, 3])) + draw(st.sampled_from([0, 1])),
        min_clusters=fewest,
        max_clusters=draw(st.sampled_from([0, fewest, 3])),
        max_in_flight=draw(st.sampled_from([0, 0, 1, 2, 100])),
        averaging_interval=draw(st.sampled_from([1, 16])),
    )
    return Problem(profile=draw(profiles()), nodes=nodes, links=links_between(draw, nodes), config=config)


# ------------------------------------------------------------ what holds


def memory_by_the_book(problem: Problem, plan: Plan, stage: StagePlan) -> int:
    """Return the bytes of a stage by docs/planning.md, written down once more: without the planner's tables."""
    profile, config = problem.profile, problem.config
    units = profile.units[stage.first_unit : stage.last_unit]
    scale = config.micro_batch_size / profile.micro_batch_size
    per_batch = math.ceil(config.batch_size / config.micro_batch_size)
    tensors = [tensor for part in units for tensor in part.tensors]
    trainable = sum(tensor.nbytes for tensor in tensors if tensor.trainable)
    older = math.ceil((stage.max_in_flight - 1) / per_batch)
    before = profile.units[stage.first_unit - 1].crossing_bytes if stage.first_unit else profile.input_bytes
    arriving_once = math.ceil(before * scale)
    arriving = 2 * arriving_once * (1 if stage.first_unit else per_batch)
    leaving = 2 * math.ceil(units[-1].crossing_bytes * scale) if stage.last_unit < len(profile.units) else 0
    saved = sum(math.ceil(part.saved_bytes * scale) for part in units)
    kept = stage.max_in_flight * arriving_once + saved if stage.recompute else stage.max_in_flight * saved
    return (
        sum(tensor.nbytes for tensor in tensors)
        + (1 + OPTIMIZER_TENSORS[config.optimizer.name] + older) * trainable
        + kept
        + (2 if OPTIMIZER_TENSORS[config.optimizer.name] else 1) * max((tensor.nbytes for tensor in tensors if tensor.trainable), default=0)
        + arriving
        + leaving
        + (2 * sum(tensor.nbytes for tensor in tensors if tensor.averaged) if len(plan.clusters) > 1 else 0)
    )


def check_clusters(problem: Problem, plan: Plan) -> None:
    memory = {member.node_id: member.memory_bytes for member in problem.nodes}
    config = problem.config
    for one in plan.backup_stages:
        assert plan.clusters[one.cluster].stages[one.stage].memory_needed_bytes <= memory[one.node_id]
    # No node in two stages, and the backups are the nodes without one.
    assert sorted([*(stage.node_id for stage in plan.stages), *plan.backups]) == sorted(memory)
    assert config.min_clusters <= len(plan.clusters) <= (config.max_clusters or len(memory))
    assert [cluster.index for cluster in plan.clusters] == list(range(len(plan.clusters)))
    for cluster in plan.clusters:
        owned = [index for stage in cluster.stages for index in range(stage.first_unit, stage.last_unit)]
        assert owned == list(range(len(problem.profile.units)))
        for index, stage in enumerate(cluster.stages):
            assert (stage.cluster, stage.index) == (cluster.index, index)
            assert stage.first_unit < stage.last_unit
            assert stage.start == problem.profile.units[stage.first_unit].start
            assert stage.stop == problem.profile.units[stage.last_unit - 1].stop
            assert stage.max_in_flight >= 1
            assert config.max_in_flight == 0 or stage.max_in_flight <= config.max_in_flight
            assert stage.memory_needed_bytes <= stage.memory_available_bytes == memory[stage.node_id]
            assert stage.memory_needed_bytes == memory_by_the_book(problem, plan, stage)


def check_segments(problem: Problem, plan: Plan) -> None:
    unit_of = {tensor.name: index for index, part in enumerate(problem.profile.units) for tensor in part.tensors}
    tensors = {tensor.name: tensor for part in problem.profile.units for tensor in part.tensors}
    listed = [name for segment in plan.segments for name in segment.tensors]
    assert sorted(listed) == sorted(name for name, tensor in tensors.items() if tensor.averaged)
    for segment in plan.segments:
        assert segment.tensors
        assert len({tensors[name].dtype for name in segment.tensors}) == 1
        assert segment.nbytes == sum(tensors[name].nbytes for name in segment.tensors)
        for name in segment.tensors:
            owners = [s.node_id for c in plan.clusters for s in c.stages if s.first_unit <= unit_of[name] < s.last_unit]
            assert len(owners) == len(plan.clusters)
            assert sorted(segment.members) == sorted(owners)


def check_predictions(plan: Plan) -> None:
    assert math.fsum(cluster.share for cluster in plan.clusters) == pytest.approx(1.0)
    assert all(0 <= cluster.share <= 1 for cluster in plan.clusters)
    assert plan.samples_per_s == pytest.approx(math.fsum(cluster.samples_per_s for cluster in plan.clusters))
    assert all(cluster.bottleneck and math.isfinite(cluster.samples_per_s) and cluster.samples_per_s > 0 for cluster in plan.clusters)
    assert all(cluster.staleness >= 0 for cluster in plan.clusters)
    assert math.isfinite(plan.round_s) and plan.round_s >= 0
    assert math.isfinite(plan.round_updates) and plan.round_updates >= 0
    for stage in plan.stages:
        for number in (stage.compute_s, stage.send_s, stage.busy, stage.sent_bytes_per_s, stage.received_bytes_per_s):
            assert math.isfinite(number) and number >= 0
        assert stage.busy <= 1 + 1e-6
        assert stage.versions >= 1
    stands_by = [(one.cluster, one.stage) for one in plan.backup_stages]
    assert len(set(stands_by)) == len(stands_by)
    assert {one.node_id for one in plan.backup_stages} <= set(plan.backups)
    assert set(stands_by) <= {(stage.cluster, stage.index) for stage in plan.stages}


def check(problem: Problem, plan: Plan) -> None:
    check_clusters(problem, plan)
    check_segments(problem, plan)
    check_predictions(plan)


@settings(QUICK, max_examples=90)
@given(problem=problems())
def test_every_plan_holds_and_only_documented_errors_are_raised(problem: Problem) -> None:
    try:
        plan = problem.plan()
    except (EmptyPoolError, NodeTooSmallError, PoolTooSmallError):
        return
    check(problem, plan)


@settings(QUICK, max_examples=25)
@given(problem=problems(), seed=st.integers(0, 3), shuffle=st.randoms(use_true_random=False))
def test_the_same_inputs_give_the_same_plan_in_whatever_order_they_come(problem: Problem, seed: int, shuffle: random.Random) -> None:
    nodes, links = list(problem.nodes), list(problem.links)
    shuffle.shuffle(nodes)
    shuffle.shuffle(links)
    other = dataclasses.replace(problem, nodes=tuple(nodes), links=tuple(links))
    try:
        plan = problem.plan(seed)
    except PlanningError as error:
        with pytest.raises(type(error)) as again:
            other.plan(seed)
        assert str(again.value) == str(error)
        return
    assert problem.plan(seed) == plan == other.plan(seed)


# ------------------------------------------------------------ what is short


def given_more(problem: Problem, extra: int, nodes: int) -> Problem:
    """Return the problem in which the `nodes` largest nodes together lend `extra` bytes more."""
    largest = sorted(problem.nodes, key=lambda member: (-member.memory_bytes, member.node_id))[:nodes]
    names = {member.node_id for member in largest}
    each = math.ceil(extra / nodes)
    grown = (dataclasses.replace(m, memory_bytes=m.memory_bytes + each) if m.node_id in names else m for m in problem.nodes)
    return dataclasses.replace(problem, nodes=tuple(grown))


@settings(QUICK, max_examples=25)
@given(problem=problems(), shrink=st.sampled_from([3, 10, 50]))
def test_as_much_more_memory_as_the_error_says_is_enough(problem: Problem, shrink: int) -> None:
    small = (dataclasses.replace(m, memory_bytes=max(1, m.memory_bytes // shrink)) for m in problem.nodes)
    problem = dataclasses.replace(problem, nodes=tuple(small))
    for _ in range(3):
        try:
            plan = problem.plan()
        except NodeTooSmallError as error:
            # The largest node is too small for one unit: then it holds that, and others may still be too much.
            assert error.short_bytes > 0
            problem = given_more(problem, error.short_bytes, 1)
        except PoolTooSmallError as error:
            assert error.short_bytes > 0
            problem = given_more(problem, error.short_bytes, problem.config.min_clusters)
        except EmptyPoolError:
            return
        else:
            check(problem, plan)
            return
    raise AssertionError("what the errors asked for was not enough")


def test_a_pool_that_is_one_byte_short_is_told_so() -> None:
    profile, config = even_model(4), job()
    whole = dataclasses.replace(Problem(profile=profile, nodes=(node("a"),), links=(), config=config))
    needed = whole.plan().stages[0].memory_needed_bytes
    exact = dataclasses.replace(whole, nodes=(node("a", memory=needed),))
    check(exact, exact.plan())
    with pytest.raises(PoolTooSmallError) as short:
        dataclasses.replace(whole, nodes=(node("a", memory=needed - 1),)).plan()
    assert short.value.short_bytes == 1


# ------------------------------------------------------------ degenerate pools

TWO, FOUR = tuple(node(f"n{index}") for index in range(2)), tuple(node(f"n{index}", memory=16 * MB) for index in range(4))
EVEN = even_model(6)
DEGENERATE = {
    "one node": Problem(profile=EVEN, nodes=TWO[:1], links=(), config=job()),
    "no link measured": Problem(profile=EVEN, nodes=FOUR, links=(), config=job()),
    "hardly any bandwidth": Problem(profile=EVEN, nodes=FOUR, links=tuple(all_links(FOUR, rate=1e-6)), config=job()),
    "one link measured, and dead": Problem(profile=EVEN, nodes=FOUR, links=(link("n0", "n1", rate=1e-6),), config=job()),
    "a day of latency": Problem(profile=EVEN, nodes=FOUR, links=tuple(all_links(FOUR, latency=86_400.0)), config=job()),
    "links to nodes that are gone": Problem(profile=EVEN, nodes=TWO, links=(link("n0", "ghost"), link("ghost", "n1")), config=job()),
    "equal nodes": Problem(profile=EVEN, nodes=tuple(node(f"n{index}", memory=16 * MB) for index in range(7)), links=(), config=job()),
    "speeds 10,000 times apart": Problem(
        profile=EVEN, nodes=tuple(node(f"n{index}", memory=9 * MB, speed=10.0**-index) for index in range(5)), links=(), config=job()
    ),
    "a model of one unit": Problem(profile=even_model(1), nodes=FOUR, links=tuple(all_links(FOUR)), config=job()),
    "a model that costs nothing": Problem(
        profile=model([unit(0, seconds=0.0, parameters=0, saved=0, crossing=0)], input_bytes=0), nodes=TWO, links=(), config=job()
    ),
    "units that cost nothing": Problem(
        profile=model([unit(index, seconds=0.0 if index % 2 else 0.003) for index in range(6)]), nodes=FOUR, links=(), config=job()
    ),
    "a micro-batch far larger than measured": Problem(
        profile=even_model(6, saved=KB), nodes=TWO, links=(), config=job(batch_size=4096, micro_batch_size=4096)
    ),
    "one sample at a time": Problem(profile=EVEN, nodes=FOUR, links=(), config=job(batch_size=64, micro_batch_size=1)),
    "exactly two clusters": Problem(profile=EVEN, nodes=FOUR, links=(), config=job(min_clusters=2, max_clusters=2)),
    "one micro-batch in flight": Problem(profile=EVEN, nodes=FOUR, links=tuple(all_links(FOUR)), config=job(max_in_flight=1)),
    "nobody can be relied on": Problem(
        profile=EVEN, nodes=tuple(dataclasses.replace(m, reliability=1e-6) for m in FOUR), links=(), config=job()
    ),
    "a slow reference": Problem(profile=dataclasses.replace(EVEN, reference_flop_per_s=1.0), nodes=TWO, links=(), config=job()),
    "nodes that outrun the reference": Problem(profile=EVEN, nodes=(node("n0", speed=1e12 / REFERENCE),), links=(), config=job()),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_a_degenerate_pool_gets_a_plan(name: str) -> None:
    check(DEGENERATE[name], DEGENERATE[name].plan())


@pytest.mark.timeout(60)
@settings(QUICK, max_examples=5)
@given(seed=st.integers(0, 10**6), memory=st.sampled_from([8 * MB, 14 * MB, 80 * MB]), spread=st.sampled_from([1.0, 10.0, 1e4]))
@example(seed=0, memory=14 * MB, spread=1e4)
def test_larger_pools_of_every_spread_get_a_plan(seed: int, memory: int, spread: float) -> None:
    rng = random.Random(seed)
    nodes = tuple(node(f"n{index:02d}", memory=rng.randint(memory // 2, memory), speed=spread ** rng.random()) for index in range(14))
    pairs = [(a.node_id, b.node_id) for a in nodes for b in nodes if a is not b and rng.random() < 0.7]
    links = tuple(link(a, b, rate=10.0 ** rng.uniform(3, 9), latency=10.0 ** rng.uniform(-5, 0)) for a, b in pairs)
    problem = Problem(profile=even_model(rng.choice([9, 70])), nodes=nodes, links=links, config=job(max_clusters=rng.choice([0, 2])))
    try:
        plan = problem.plan()
    except PlanningError:
        assume(False)
    check(problem, plan)
