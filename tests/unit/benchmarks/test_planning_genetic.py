"""The genetic baseline makes plans that hold by the cost model."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks import planning_genetic
from benchmarks.planning_costs import page_costs
from benchmarks.planning_pools import make_scenario
from benchmarks.planning_profiles import MODELS, load_profile, merge_units


@pytest.mark.parametrize("name", MODELS)
def test_genetic_plans_use_a_node_once_and_hold_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_genetic, "GENERATIONS", 30)
    scenario = make_scenario(merge_units(load_profile(name), 20), 12, 1)
    costs = page_costs(scenario.profile, scenario.nodes, scenario.links, scenario.config, scenario.options)
    best, by_memory = planning_genetic.genetic_plans(costs, np.random.default_rng(0))
    assert best.samples_per_s >= by_memory.samples_per_s
    assert best.clusters
    for plan in (best, by_memory):
        used = [node for nodes, _ in plan.clusters for node in nodes]
        assert len(used) == len(set(used))
        rates = 0.0
        for nodes, cuts in plan.clusters:
            assert cuts[0] == 0 and cuts[-1] == costs.units and len(cuts) == len(nodes) + 1
            rates += float(costs.evaluate(np.asarray([nodes]), np.asarray([cuts]), len(plan.clusters)).samples_per_s[0])
        assert plan.samples_per_s == pytest.approx(rates)


def test_more_generations_never_make_clusters_less_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = make_scenario(merge_units(load_profile(MODELS[0]), 8), 20, 2)
    costs = page_costs(scenario.profile, scenario.nodes, scenario.links, scenario.config, scenario.options)
    whole = float(costs.memory_needed(0, costs.units, 1, True))
    shortages = []
    for generations in (1, 200):
        monkeypatch.setattr(planning_genetic, "GENERATIONS", generations)
        labels = planning_genetic.form_clusters(costs, whole, 4, np.random.default_rng(5))
        held = np.bincount(labels, weights=costs.memory, minlength=4)
        shortages.append(float(np.maximum(0, whole - held[held > 0]).sum()))
    assert shortages[1] <= shortages[0]
