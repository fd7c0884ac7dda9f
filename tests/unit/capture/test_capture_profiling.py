"""Profiles cover the whole graph once, count what must be counted, and change nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from capture_models import EXAMPLES, example
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from roost.capture.cut import cut, legal_cuts
from roost.capture.export import capture
from roost.capture.profiling import _fitted, choose_cuts, estimate, profile


@pytest.mark.parametrize("name", EXAMPLES)
def test_units_are_contiguous_legal_and_own_every_tensor_once(name: str) -> None:
    case = example(name)
    captured = case.captured()
    before = {key: item.clone() for key, item in captured.tensors.items()}
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    found = profile(captured, (case.inputs,), (case.labels,), reference_flop_per_s=1e9, repeats=1)
    assert found.units[0].start == 0 and found.units[-1].stop == len(captured.graph.nodes)
    assert {unit.stop for unit in found.units[:-1]} <= set(legal_cuts(captured.graph))
    assert [item for unit in found.units for item in unit.tensors] == list(captured.graph.tensors)
    assert sum(unit.forward_s for unit in found.units) > 0 and sum(unit.backward_s for unit in found.units) > 0
    assert found.micro_batch_size == 8
    assert all(unit.label for unit in found.units)
    assert torch.equal(torch.get_rng_state(), generator) and torch.get_num_threads() == threads
    assert all(torch.equal(before[key], item) for key, item in captured.tensors.items())


def test_costs_of_a_linear_layer_are_known_exactly() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    captured = capture(model, nn.MSELoss(), (x,), (y,))
    found = profile(captured, (x,), (y,), reference_flop_per_s=1e9, repeats=1)
    first, tanh, second = found.units[:3]
    assert [unit.label for unit in (first, tanh, second)] == ["0", "1", "2"]
    assert (first.forward_flop, tanh.forward_flop, second.forward_flop) == (2 * 8 * 16 * 32, 0, 2 * 8 * 32 * 4)
    assert first.saved_bytes == 8 * 16 * 4 and tanh.saved_bytes == 8 * 32 * 4
    labels = 8 * 4 * 4
    assert first.crossing_bytes == 8 * 32 * 4 + labels and second.crossing_bytes == 8 * 4 * 4 + labels
    assert found.units[-1].crossing_bytes == 0
    assert found.input_bytes == 8 * 16 * 4 + labels


def test_a_tied_weight_counts_among_the_crossing_bytes() -> None:
    weight = example("tied_gpt").model.tokens.weight
    crossing = []
    for name in ("gpt", "tied_gpt"):
        case = example(name)
        units = profile(case.captured(), (case.inputs,), (case.labels,), reference_flop_per_s=1e9, repeats=1).units
        crossing.append(next(unit.crossing_bytes for unit in units if unit.label == "blocks.1.ln2"))
    assert crossing[1] - crossing[0] == weight.numel() * 4


def test_many_cuts_are_thinned_to_a_bound() -> None:
    graph = example("gpt").captured().graph
    for most in (5, 10, 20):
        chosen = choose_cuts(graph, most)
        assert 0 < len(chosen) < most
        cut(graph, [0, *chosen, len(graph.nodes)])
    assert choose_cuts(graph) == legal_cuts(graph)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30), st.floats(1e-6, 10.0))
def test_unit_times_are_fitted_to_what_the_whole_takes_and_keep_their_order(times: list[float], total: float) -> None:
    found = _fitted(times, total)
    assert min(found) >= 0
    assert sum(found) == pytest.approx(total, rel=1e-6, abs=1e-9)
    assert sorted(range(len(times)), key=times.__getitem__) == sorted(range(len(times)), key=lambda index: (found[index], times[index]))


def test_every_unit_pays_the_same_for_having_been_run_alone() -> None:
    assert _fitted([0.6, 0.3, 0.4], 1.0) == pytest.approx([0.5, 0.2, 0.3])
    assert _fitted([0.6, 0.05, 0.4], 0.6) == pytest.approx([0.4, 0.0, 0.2])


def test_updates_are_measured_where_there_are_parameters_and_with_an_optimizer_only() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    captured = capture(model, nn.MSELoss(), (x,), (y,))
    before = {key: item.clone() for key, item in captured.tensors.items()}
    found = profile(captured, (x,), (y,), reference_flop_per_s=1e9, make_optimizer=torch.optim.AdamW, repeats=1)
    first, tanh, second = found.units[:3]
    assert first.update_s + second.update_s > 0 and tanh.update_s == 0
    assert all(torch.equal(before[key], item) for key, item in captured.tensors.items())
    without = profile(captured, (x,), (y,), reference_flop_per_s=1e9, repeats=1)
    assert all(unit.update_s == 0 for unit in without.units)


def test_costs_in_bfloat16_are_the_same_measured_and_estimated_without_running() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    captured = capture(model, nn.MSELoss(), (x,), (y,))
    mixed = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    measured = profile(captured, (x,), (y,), reference_flop_per_s=1e9, repeats=1, computing=mixed)
    estimated = estimate(captured, (x,), (y,), reference_flop_per_s=1e9, bytes_per_s=1e9, computing=mixed)
    first, tanh, _ = measured.units[:3]
    labels = 8 * 4 * 4
    assert first.crossing_bytes == tanh.crossing_bytes == 8 * 32 * 2 + labels
    # What autocast made of the input is kept for the weight's gradient, at half the bytes.
    assert first.saved_bytes == 8 * 16 * 2 and tanh.saved_bytes == 8 * 32 * 2
    for one, other in zip(measured.units, estimated.units, strict=True):
        assert (one.saved_bytes, one.crossing_bytes, one.forward_flop) == (other.saved_bytes, other.crossing_bytes, other.forward_flop)
