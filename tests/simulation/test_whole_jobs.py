"""Whole jobs from a seed: real state machines, random delays, exact arithmetic; invariants after every event."""

from __future__ import annotations

import pytest

from simulation import Simulation

SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_counts_every_sample_once_and_ends_with_one_exact_model(seed: int) -> None:
    simulation = Simulation(seed)
    simulation.run()
    assert simulation.exact_rounds >= 1


@pytest.mark.parametrize("seed", range(25))
def test_nodes_that_stall_delay_rounds_but_spoil_nothing(seed: int) -> None:
    simulation = Simulation(1000 + seed, stalls=True)
    simulation.run()
    assert simulation.exact_rounds >= 1


@pytest.mark.parametrize("seed", range(40))
def test_a_cluster_that_is_lost_leaves_no_sample_behind_and_none_counted_twice(seed: int) -> None:
    simulation = Simulation(2000 + seed, loss=True)
    simulation.run()
    assert simulation.exact_rounds >= 1


def test_some_seeds_do_lose_a_cluster_and_some_do_abandon_rounds() -> None:
    lost, abandoned = 0, 0
    for seed in range(10):
        simulation = Simulation(2000 + seed, loss=True)
        simulation.run()
        lost += len(simulation.lost)
        simulation = Simulation(1000 + seed, stalls=True)
        simulation.run()
        abandoned += sum("abandons" in what for _, what in simulation.world.log)
    assert lost > 0
    assert abandoned > 0


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = Simulation(7, stalls=True), Simulation(7, stalls=True)
    first.run()
    second.run()
    assert first.world.log == second.world.log
    assert first.world.now == second.world.now
