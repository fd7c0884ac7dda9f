from __future__ import annotations

import math

import torch

from roost.pipeline.probe import free_memory_bytes, measure, update_bytes_per_s


def test_the_probe_reports_both_speeds_and_their_geometric_mean():
    threads = torch.get_num_threads()
    speed = measure(1, "cpu", budget_s=0.01)
    assert speed.matmul_flop_per_s > 0
    assert speed.convolution_flop_per_s > 0
    assert math.isclose(speed.flop_per_s, math.sqrt(speed.matmul_flop_per_s * speed.convolution_flop_per_s))
    assert torch.get_num_threads() == threads


def test_some_memory_is_free():
    assert free_memory_bytes("cpu") > 0


def test_the_rate_of_updates_is_measured_and_threads_are_put_back():
    threads = torch.get_num_threads()
    assert update_bytes_per_s(1, "cpu", budget_s=0.01) > 0
    assert torch.get_num_threads() == threads
