"""The bounded search for the optimum against plain enumeration in scalar arithmetic, and the profiles that it uses."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from benchmarks.planning_brute_force import find_optimum
from benchmarks.planning_costs import page_costs
from benchmarks.planning_pools import Scenario, make_scenario
from benchmarks.planning_profiles import MODELS, load_profile, merge_units

from roost.config import PlanningConfig
from roost.types import ModelProfile


class ScalarModel:
    """docs/planning.md with one number at a time."""

    def __init__(self, scenario: Scenario) -> None:
        self.s = scenario
        self.units = scenario.profile.units
        self.m = -(-scenario.config.batch_size // scenario.config.micro_batch_size)
        self.o = 2 if scenario.config.optimizer.name == "AdamW" else 0
        self.links = {(link.source, link.target): link for link in scenario.links}

    def x(self, u: int) -> float:
        if u == 0:
            return self.s.profile.input_bytes
        return 0 if u == len(self.units) else self.units[u - 1].crossing_bytes

    def cluster_value(self, order: Sequence[int], cuts: Sequence[int], clusters: int) -> tuple[float, float]:
        """Return value and samples per second with the best choice of stages that recompute; zeros if it does not fit."""
        return max(self.value_of(order, cuts, clusters, again) for again in itertools.product((False, True), repeat=len(order)))

    def value_of(self, order: Sequence[int], cuts: Sequence[int], clusters: int, again: Sequence[bool]) -> tuple[float, float]:
        """Return value and samples per second if those stages recompute; zeros if it does not fit."""
        s, nodes, last = self.s, [self.s.nodes[n] for n in order], len(order) - 1
        period, compute, hops = 0.0, [], []
        for k, node in enumerate(nodes):
            units = self.units[cuts[k] : cuts[k + 1]]
            out = (self.x(cuts[k + 1]) if k < last else 0) + (self.x(cuts[k]) if k > 0 else 0)
            into = self.x(cuts[k]) + (self.x(cuts[k + 1]) if k < last else 0)
            work = (
                s.profile.stage_s
                + s.profile.stage_update_s / self.m
                + sum((1 + again[k]) * unit.forward_s + unit.backward_s + unit.update_s / self.m for unit in units)
            )
            seconds = work * s.profile.reference_flop_per_s / node.flop_per_s
            moved = sum((3 + self.o) * unit.trainable_bytes for unit in units if not unit.update_s)
            moved += sum(2 * unit.trainable_bytes for unit in units) if k < last else 0
            if node.memory_bytes_per_s:
                seconds += moved / (node.memory_bytes_per_s * self.m)
            neighbours = (k > 0) + (k < last)
            seconds += (2 * neighbours + 2) * node.message_s + (out + into) * node.wire_s_per_byte
            averaged = sum(tensor.nbytes for unit in units for tensor in unit.tensors if tensor.averaged)
            a = 2 * (clusters - 1) / clusters * averaged / (s.config.averaging_interval * self.m)
            up = max(link.bytes_per_s for link in s.links if link.source == node.node_id)
            down = max(link.bytes_per_s for link in s.links if link.target == node.node_id)
            copied = (12 if clusters > 1 else 0) * averaged / (s.config.averaging_interval * self.m)
            copying = copied / node.memory_bytes_per_s if node.memory_bytes_per_s else 0.0
            period = max(period, seconds + copying, min(out + a, 2 * out) / up, min(into + a, 2 * into) / down)
            compute.append(seconds)
            if k < last:
                there, back = self.links[node.node_id, nodes[k + 1].node_id], self.links[nodes[k + 1].node_id, node.node_id]
                flows = [self.x(cuts[k + 1]) / there.bytes_per_s, self.x(cuts[k + 1]) / back.bytes_per_s]
                period = max(period, *flows)
                hops.append(there.latency_s + back.latency_s + sum(flows))
        kappa = s.options.staleness_cost
        trips = [sum(hops[k:]) + sum(compute[k:]) for k in range(len(nodes))]
        for k in range(len(nodes)):
            most = self.most_in_flight(order[k], cuts[k], cuts[k + 1], clusters > 1, again[k])
            if most == 0:
                return 0.0, 0.0
            period = max(period, trips[k] / most)
        # The least period, and those longer ones at which the first stage has a given staleness.
        best = (0.0, 0.0)
        for longer in [period, *(max(period, trips[0] / (1 + staleness * self.m)) for staleness in range(40))]:
            in_flight = max(1, math.ceil(trips[0] / longer * (1 - 1e-9)))
            rate = s.config.micro_batch_size / longer
            best = max(best, (rate / (1 + kappa * math.ceil((in_flight - 1) / self.m)), rate))
        return best[0] * math.prod(node.reliability for node in nodes), best[1]

    def most_in_flight(self, n: int, first: int, last: int, averaging: bool, again: bool) -> int:
        units = self.units[first:last]
        held, trainable = sum(unit.tensor_bytes for unit in units), sum(unit.trainable_bytes for unit in units)
        saved = sum(unit.saved_bytes for unit in units)
        averaged = sum(tensor.nbytes for unit in units for tensor in unit.tensors if tensor.averaged)
        largest = max((tensor.nbytes for unit in units for tensor in unit.tensors if tensor.trainable), default=0)
        held += (2 if self.o else 1) * largest
        ends = 2 * ((self.m if first == 0 else 1) * self.x(first) + self.x(last))
        in_flight = 0
        while in_flight < (self.s.config.max_in_flight or 200):
            versions = math.ceil(in_flight / self.m)
            activations = (in_flight + 1) * self.x(first) + saved if again else (in_flight + 1) * saved
            needed = held + (1 + self.o + versions) * trainable + activations + ends + (2 * averaged if averaging else 0)
            if needed > self.s.nodes[n].memory_bytes:
                break
            in_flight += 1
        return in_flight


def partitions(nodes: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Yield every way to put some of the nodes into clusters, without regard to order."""
    if not nodes:
        yield []
        return
    first, rest = nodes[0], nodes[1:]
    yield from partitions(rest)
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            for more in partitions(tuple(node for node in rest if node not in others)):
                yield [(first, *others), *more]


def plain_optimum(scenario: Scenario) -> float:
    model, count = ScalarModel(scenario), len(scenario.profile.units)
    known: dict[tuple[tuple[int, ...], int], tuple[float, float]] = {}

    def best(members: tuple[int, ...], clusters: int) -> tuple[float, float]:
        if (members, clusters) not in known:
            layouts = (
                (order, (0, *inner, count))
                for order in itertools.permutations(members)
                for inner in itertools.combinations(range(1, count), len(members) - 1)
            )
            known[members, clusters] = max((model.cluster_value(order, cuts, clusters) for order, cuts in layouts), default=(0.0, 0.0))
        return known[members, clusters]

    highest = 0.0
    for groups in partitions(tuple(range(len(scenario.nodes)))):
        found = [best(group, len(groups)) for group in groups]
        rates = [rate for _, rate in found]
        if groups and min(rates) > 0 and min(rates) >= scenario.options.slowest_cluster * max(rates):
            highest = max(highest, sum(value for value, _ in found))
    return highest


def tiny_profile(name: str, units: int) -> ModelProfile:
    return merge_units(load_profile(name), units)


@pytest.mark.parametrize("nodes,units,pools", [(2, 9, 24), (3, 7, 12), (4, 6, 4)])
def test_bounded_search_finds_what_plain_enumeration_finds(nodes: int, units: int, pools: int) -> None:
    for seed in range(pools):
        scenario = make_scenario(tiny_profile(MODELS[seed % len(MODELS)], units), nodes, seed)
        costs = page_costs(scenario.profile, scenario.nodes, scenario.links, scenario.config, scenario.options)
        expected = plain_optimum(scenario)
        assert find_optimum(costs).value == pytest.approx(expected, rel=1e-9), f"seed {seed}"
        # A known lower value, as of a planner's plan, must not change the answer.
        assert find_optimum(costs, 0.9 * expected).value == pytest.approx(expected, rel=1e-9), f"seed {seed}"


def test_bounded_search_leaves_out_clusters_that_are_too_slow() -> None:
    excluded = 0
    for seed in range(16):
        scenario = make_scenario(tiny_profile(MODELS[seed % len(MODELS)], 6), 3, seed)
        strict = dataclasses.replace(scenario, options=PlanningConfig(slowest_cluster=0.7))
        costs = page_costs(strict.profile, strict.nodes, strict.links, strict.config, strict.options)
        expected = plain_optimum(strict)
        assert find_optimum(costs).value == pytest.approx(expected, rel=1e-9), f"seed {seed}"
        excluded += expected < plain_optimum(dataclasses.replace(strict, options=PlanningConfig(slowest_cluster=0.0)))
    assert excluded > 0, "no pool had a cluster to leave out"


def test_merging_units_keeps_every_sum() -> None:
    for name in MODELS:
        whole = load_profile(name)
        merged = merge_units(whole, 12)
        assert 8 <= len(merged.units) <= 12
        assert sum(unit.tensor_bytes for unit in merged.units) == sum(unit.tensor_bytes for unit in whole.units)
        assert sum(unit.trainable_bytes for unit in merged.units) == sum(unit.trainable_bytes for unit in whole.units)
        assert sum(unit.saved_bytes for unit in merged.units) == sum(unit.saved_bytes for unit in whole.units)
        seconds = sum(unit.forward_s + unit.backward_s for unit in whole.units)
        assert sum(unit.forward_s + unit.backward_s for unit in merged.units) == pytest.approx(seconds)
        crossings = {unit.stop: unit.crossing_bytes for unit in whole.units}
        assert all(crossings[unit.stop] == unit.crossing_bytes for unit in merged.units)


def test_equal_seeds_make_equal_pools() -> None:
    profile = tiny_profile(MODELS[0], 8)
    assert make_scenario(profile, 6, 3) == make_scenario(profile, 6, 3)
    assert make_scenario(profile, 6, 3).nodes != make_scenario(profile, 6, 4).nodes
