"""The models of the zoo, in small: captured, whole and cut, they train as the eager models do."""

from __future__ import annotations

from functools import cache

import pytest
from benchmarks.zoo.catalogue import ZOO, build
from benchmarks.zoo.comparison import Comparison, compare
from effects_audit import surprises

from roost.capture.graph_format import from_bytes, to_bytes

pytest.importorskip("transformers")

CHOICES = 10
LARGEST_ERROR = 1e-5
LEAST_EQUAL = 0.9


@cache
def comparison(name: str) -> Comparison:
    return compare(build(name, full=False), choices=CHOICES)


@pytest.mark.parametrize("name", ZOO)
def test_the_whole_graph_trains_with_the_bits_of_the_eager_model(name: str) -> None:
    found = comparison(name).whole
    assert found.bit_equal, found.worst


@pytest.mark.parametrize("name", ZOO)
def test_any_cut_gives_the_losses_gradients_and_buffers_of_the_eager_model(name: str) -> None:
    for found in comparison(name).pieces:
        assert found.relative_error <= LARGEST_ERROR, (found.cuts, found.worst)


@pytest.mark.parametrize("name", ZOO)
def test_evaluation_is_that_of_the_eager_model_for_other_sizes_too(name: str) -> None:
    assert comparison(name).evaluation_error == 0


@pytest.mark.parametrize("name", ZOO)
def test_nothing_happens_in_a_forward_that_the_analysis_does_not_foresee(name: str) -> None:
    case = build(name, full=False)
    assert surprises(comparison(name).captured, case.data) == []


@pytest.mark.parametrize("name", ZOO)
def test_the_graph_is_the_same_after_it_went_through_bytes(name: str) -> None:
    graph = comparison(name).captured.graph
    assert from_bytes(to_bytes(graph)) == graph


def test_nine_cuts_of_ten_give_the_same_bits() -> None:
    pieces = [piece for name in ZOO for piece in comparison(name).pieces]
    assert sum(piece.bit_equal for piece in pieces) >= LEAST_EQUAL * len(pieces)


@pytest.mark.parametrize(("name", "trained"), [("llama-lora", {"first", "second"}), ("llama-peft", {"lora_A", "lora_B"})])
def test_only_adapters_are_trained(name: str, trained: set[str]) -> None:
    records = comparison(name).captured.graph.tensors
    assert all(trained.intersection(record.name.split(".")) for record in records if record.trainable)
    assert any(record.trainable for record in records) and not all(record.trainable for record in records)


def test_parameters_of_bfloat16_stay_so() -> None:
    assert {record.dtype for record in comparison("llama-bf16").captured.graph.tensors if record.trainable} == {"bfloat16"}


@pytest.mark.parametrize("name", ["bert", "gpt-2", "qwen3", "t5", "dense-mixture"])
def test_tied_embeddings_are_one_tensor(name: str) -> None:
    assert comparison(name).captured.aliases


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "mixtral", "dense-mixture"])
def test_the_length_of_token_sequences_is_free(name: str) -> None:
    assert all(record.shape[:2] == (None, None) for record in comparison(name).captured.graph.data if len(record.shape) > 1)
