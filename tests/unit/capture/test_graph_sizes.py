"""What a graph takes is found on shapes alone, and a graph that takes too much is refused before anything is computed."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from benchmarks.hostile_graphs import BATCH, FIRST_FREE, INPUT, NEW, SHAPES, WEIGHT, as_bytes, calling, sample_graph, with_nodes
from capture_models import EXAMPLES, example, training_tensors
from torch import Tensor, nn

from roost.capture.bounded import bounded
from roost.capture.cut import cut, legal_cuts
from roost.capture.export import capture
from roost.capture.graph import MAX_NODES, Graph
from roost.capture.graph_format import from_bytes
from roost.capture.safe_calls import callable_of
from roost.capture.signatures import ValueKind
from roost.capture.sizes import check_sizes, data_shapes
from roost.errors import GraphFormatError

MB = 10**6


def sizes_of(data: bytes, limit: int = MB) -> Any:
    return check_sizes(from_bytes(data), SHAPES, limit)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_bytes_of_every_value_are_those_of_a_real_run(name: str) -> None:
    chosen = example(name)
    captured = chosen.captured()
    graph = captured.graph
    shapes = [tuple(chosen.inputs.shape), tuple(chosen.labels.shape)]
    sizes = check_sizes(graph, shapes, 10 * MB)
    cuts = legal_cuts(graph)
    programs = cut(graph, [0, *cuts, len(graph.nodes)])
    values: dict[int, Tensor] = {0: chosen.inputs, 1: chosen.labels}
    tensors = training_tensors(captured)
    for program in programs:
        given = {number: values[number].detach() for numbers in program.receives.values() for number in numbers}
        values.update(program.run(given, tensors, training=True))
    for number, value in values.items():
        is_number = graph.kinds[number] is not ValueKind.TENSOR
        assert sizes.values[number] == (0 if is_number else value.numel() * value.element_size())
    assert sizes.largest_bytes <= sizes.made_bytes


def test_nothing_is_computed_and_no_random_number_is_drawn() -> None:
    chosen = example("gpt")
    graph = chosen.captured().graph
    state = torch.get_rng_state()
    check_sizes(graph, [tuple(chosen.inputs.shape), tuple(chosen.labels.shape)], MB)
    assert torch.equal(state, torch.get_rng_state())


def test_a_value_over_the_limit_is_refused_naming_its_node() -> None:
    data = calling("aten.zeros.default", [[1000, 1000]])
    assert sizes_of(data, 4 * MB).values[FIRST_FREE] == 4 * MB
    with pytest.raises(GraphFormatError, match=r"node 9: it takes 4.0 MB, over the limit of 4.0 MB"):
        sizes_of(data, 4 * MB - 1)


def test_limits_hold_for_the_nodes_of_one_stage_only() -> None:
    graph = from_bytes(calling("aten.zeros.default", [[1000, 1000]]))
    check_sizes(graph, SHAPES, MB, nodes=range(9))
    with pytest.raises(GraphFormatError, match="node 9"):
        check_sizes(graph, SHAPES, MB, nodes=range(9, 10))


def test_what_an_operation_needs_on_the_way_counts_too() -> None:
    graph = calling("aten.einsum.default", ["ab,cd,ef,ab,cd,ef->", [WEIGHT] * 6])
    sizes = sizes_of(graph, 8 * MB)
    assert sizes.values[FIRST_FREE] == 4
    assert sizes.largest_bytes == (16 * 6) ** 3 * 4
    with pytest.raises(GraphFormatError, match="over the limit"):
        sizes_of(graph, MB)


def test_attention_without_dropout_needs_no_room_for_scores_and_with_dropout_it_does() -> None:
    def attention(dropout: float) -> bytes:
        view = ("aten.expand.default", [WEIGHT, [1, 1, 4096, 16, 6]], {}, 1)
        flat = ("aten.reshape.default", [NEW, [1, 1, 4096, 96]], {}, 1)
        query = {"value": FIRST_FREE + 1}
        return with_nodes([view, flat, ("aten.scaled_dot_product_attention.default", [query, query, query, None, dropout], {}, 1)])

    sizes_of(attention(0.0), 5 * MB)
    with pytest.raises(GraphFormatError, match="scaled_dot_product|over the limit"):
        sizes_of(attention(0.1), 5 * MB)


def test_recurrent_layers_are_measured_by_their_first_steps() -> None:
    class Recurrent(nn.Module):
        def __init__(self, batch_first: bool) -> None:
            super().__init__()
            self.turned = not batch_first
            self.layer = nn.LSTM(4, 6, num_layers=2, batch_first=batch_first, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1) if self.turned else x)[0]

    for batch_first in (True, False):
        data = torch.randn(3, 50, 4)
        graph = capture(Recurrent(batch_first), lambda y, t: (y.mean() - t.mean()) ** 2, (data,), (torch.randn(3),)).graph
        sizes = check_sizes(graph, [(3, 50, 4), (3,)], MB)
        node = next(node for node in graph.nodes if node.op == "aten.lstm.input")
        assert sizes.values[node.outputs[0]] == 3 * 50 * 12 * 4


def test_shapes_of_the_data_must_be_those_of_the_graph() -> None:
    graph = from_bytes(as_bytes(sample_graph()))
    assert data_shapes(graph, BATCH) == SHAPES
    for shapes in ((SHAPES[0],), ((BATCH, 7), (BATCH,)), ((BATCH,), (BATCH,)), ((BATCH, 6), (9,))):
        with pytest.raises(GraphFormatError):
            check_sizes(graph, shapes, MB)


def test_without_the_sizes_that_vary_there_are_no_shapes() -> None:
    raw = sample_graph()
    raw["data"][0][2] = [None, None]
    assert data_shapes(from_bytes(as_bytes(raw)), BATCH) is None


def test_the_largest_graph_of_equal_layers_takes_seconds() -> None:
    count = MAX_NODES - 10
    chain = [("aten.relu.default", [INPUT if index == 0 else {"value": FIRST_FREE + index - 1}], {}, 1) for index in range(count)]
    graph = from_bytes(with_nodes(chain))
    started = time.process_time()
    check_sizes(graph, SHAPES, MB * 100)
    assert time.process_time() - started < 5


def growing(graph_calls: list[tuple[str, list[Any], dict[str, Any], int]]) -> Graph:
    """Return the sample graph with a loss that needs the last of `graph_calls`."""
    raw = sample_graph()
    raw["nodes"] = raw["nodes"][:5]
    raw["metric"] = None
    following = 10
    for op, args, kwargs, outputs in graph_calls:
        raw["nodes"].append([op, args, kwargs, list(range(following, following + outputs)), ""])
        following += outputs
    raw["nodes"].append(["aten.sum.default", [{"value": following - 1}], {}, [following], ""])
    raw["nodes"].append(["aten.add.Tensor", [{"value": 9}, {"value": following}], {}, [following + 1], ""])
    raw["loss"] = following + 1
    return from_bytes(as_bytes(raw))


def test_a_stage_looks_at_the_shapes_of_what_arrives_before_it_computes() -> None:
    # Small for the announced batch, large for any other: (8 - batch) squared elements.
    graph = growing(
        [
            ("aten.sym_size.int", [INPUT, 0], {}, 1),
            ("scalar.sub", [8, {"value": 10}], {}, 1),
            ("scalar.mul", [{"value": 11}, 500], {}, 1),
            ("aten.zeros.default", [[{"value": 12}, {"value": 12}]], {}, 1),
        ]
    )
    check_sizes(graph, SHAPES, MB)
    program = bounded(cut(graph, [0, len(graph.nodes)])[0], graph, MB)
    tensors = {record.name: torch.zeros(record.shape, requires_grad=True) for record in graph.tensors}
    for batch in (8, 7, 8):
        values = {0: torch.zeros(batch, 6), 1: torch.zeros(batch, dtype=torch.int64)}
        assert program.run(values, tensors, training=True)[graph.loss].isfinite()
    assert len(program.checked) == 2
    with pytest.raises(GraphFormatError, match="over the limit"):
        program.run({0: torch.zeros(4, 6), 1: torch.zeros(4, dtype=torch.int64)}, tensors, training=True)
    assert len(program.checked) == 2


@pytest.mark.parametrize(("op", "left", "right"), [("scalar.mul", 2**62, 4), ("scalar.floordiv", 1, 0), ("scalar.mod", 1, 0)])
def test_numbers_that_do_not_fit_are_refused(op: str, left: int, right: int) -> None:
    with pytest.raises(GraphFormatError, match=op):
        callable_of(op)(left, right)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_dividing_the_smallest_integer_by_minus_one_does_not_end_the_process(dtype: torch.dtype) -> None:
    smallest = torch.tensor([torch.iinfo(dtype).min, 7], dtype=dtype)
    divide, by_number = callable_of("aten.div.Tensor_mode"), callable_of("aten.div.Scalar_mode")
    minus = torch.tensor([-1, 2], dtype=dtype)
    assert divide(smallest, minus, rounding_mode="trunc").tolist() == [torch.iinfo(dtype).min, 3]
    assert by_number(smallest, -1, rounding_mode="trunc").tolist() == [torch.iinfo(dtype).min, -7]


@pytest.mark.parametrize("mode", [None, "trunc", "floor"])
def test_division_is_torchs_own_where_that_is_safe(mode: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    divide, by_number = callable_of("aten.div.Tensor_mode"), callable_of("aten.div.Scalar_mode")
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8):
        left = torch.randint(0, 100, (50,), generator=generator).to(dtype)
        right = torch.randint(1, 9, (50,), generator=generator)
        assert torch.equal(divide(left, right, rounding_mode=mode), torch.div(left, right, rounding_mode=mode))
        for number in (3, -3, 2.5):
            assert torch.equal(by_number(left, number, rounding_mode=mode), torch.div(left, number, rounding_mode=mode))


def test_a_write_of_more_elements_than_there_are_is_refused() -> None:
    with pytest.raises(GraphFormatError):
        sizes_of(calling("aten.clamp_.Tensor", [{"value": 9}, {"value": 3}, None]))
    with pytest.raises(GraphFormatError):
        sizes_of(calling("aten.add_.Tensor", [{"value": 9}, {"value": 3}]))
