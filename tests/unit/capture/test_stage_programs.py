"""Captured graphs, whole and cut, compute what the eager model computes."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from capture_models import EXAMPLES, accuracy, evaluate, example, train_step, training_tensors
from torch import Tensor, nn

from roost.capture.cut import cut, legal_cuts, tensor_positions
from roost.capture.export import Captured, capture
from roost.capture.graph_format import from_bytes, to_bytes
from roost.capture.program import DATA_SOURCE
from roost.errors import GraphFormatError


def eager_step(model: nn.Module, loss: nn.Module, data: tuple[Tensor, Tensor], seed: int) -> Tensor:
    torch.manual_seed(seed)
    value = loss(model(data[0]), data[1])
    value.backward()
    return value.detach()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-9))


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("samples", [1, 3, 8])
def test_one_stage_is_bit_identical_to_eager_for_every_batch_size(name: str, samples: int) -> None:
    case = example(name)
    captured = case.captured()
    data = (case.inputs[:samples], case.labels[:samples])
    tensors = training_tensors(captured)
    graph_loss = train_step(captured, [], data, tensors, seed=7)
    eager_loss = eager_step(case.model, case.loss, data, seed=7)
    assert torch.equal(graph_loss, eager_loss)
    for parameter_name, parameter in case.model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(tensors[parameter_name].grad, parameter.grad), parameter_name


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("stages", [2, 3, 4, 5, 6])
def test_any_cut_gives_the_loss_and_gradients_of_eager(name: str, stages: int) -> None:
    case = example(name)
    captured = case.captured()
    data = (case.inputs, case.labels)
    expected = eager_step(case.model, case.loss, data, seed=3)
    rng = random.Random(stages)
    for _ in range(3):
        cuts = sorted(rng.sample(legal_cuts(captured.graph), stages - 1))
        tensors = training_tensors(captured)
        assert torch.equal(train_step(captured, cuts, data, tensors, seed=3), expected)
        for parameter_name, parameter in case.model.named_parameters():
            assert relative_error(tensors[parameter_name].grad, parameter.grad) < 1e-6, (cuts, parameter_name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_buffers_after_two_steps_equal_eagers_in_any_cut(name: str) -> None:
    case = example(name)
    captured = case.captured()
    cuts = legal_cuts(captured.graph)
    tensors = training_tensors(captured)
    for seed in (1, 2):
        train_step(captured, [cuts[len(cuts) // 2]], (case.inputs, case.labels), tensors, seed=seed)
        eager_step(case.model, case.loss, (case.inputs, case.labels), seed=seed)
    for buffer_name, buffer in case.model.named_buffers():
        assert torch.equal(tensors[buffer_name], buffer), buffer_name


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("samples", [1, 8])
def test_evaluation_equals_model_eval_and_changes_nothing(name: str, samples: int) -> None:
    case = example(name)
    captured = case.captured()
    tensors = training_tensors(captured)
    train_step(captured, [], (case.inputs, case.labels), tensors, seed=1)
    eager_step(case.model, case.loss, (case.inputs, case.labels), seed=1)
    before = {key: item.detach().clone() for key, item in tensors.items()}
    case.model.eval()
    data = (case.inputs[:samples], case.labels[:samples])
    cuts = legal_cuts(captured.graph)
    state = torch.get_rng_state()
    for chosen in ([], [cuts[len(cuts) // 3], cuts[-1]]):
        loss, metric = evaluate(captured, chosen, data, tensors)
        with torch.no_grad():
            output = case.model(data[0])
            assert torch.equal(loss, case.loss(output, data[1]))
            assert torch.equal(metric, accuracy(output, data[1]))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[key], item) for key, item in tensors.items())


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_graph_that_went_through_bytes_gives_the_same_results(name: str) -> None:
    case = example(name)
    captured = case.captured()
    data = to_bytes(captured.graph)
    again = Captured(graph=from_bytes(data), tensors=captured.tensors, aliases=captured.aliases, extras=captured.extras)
    assert again.graph == captured.graph
    assert to_bytes(again.graph) == data
    ours, theirs = training_tensors(captured), training_tensors(again)
    batch = (case.inputs, case.labels)
    assert torch.equal(train_step(captured, [], batch, ours, seed=5), train_step(again, [], batch, theirs, seed=5))
    for record in captured.graph.tensors:
        if record.trainable:
            assert torch.equal(ours[record.name].grad, theirs[record.name].grad)


def test_a_tied_weight_has_one_owner_and_is_sent_like_a_value() -> None:
    captured = example("tied_gpt").captured()
    assert captured.aliases == {"head.weight": "tokens.weight"}
    cuts = legal_cuts(captured.graph)
    first, middle, last = cut(captured.graph, [0, cuts[len(cuts) // 3], cuts[-4], len(captured.graph.nodes)])
    assert "tokens.weight" in [record.name for record in first.tensors]
    assert "tokens.weight" not in [record.name for record in (*middle.tensors, *last.tensors, *last.shared)]
    tied = next(n for n in first.sends[2] if (record := captured.graph.tensor_of(n)) is not None and record.name == "tokens.weight")
    assert tied in first.differentiable and tied in last.differentiable


def test_every_tensor_of_the_graph_has_exactly_one_owner() -> None:
    captured = example("convnet").captured()
    programs = cut(captured.graph, [0, *legal_cuts(captured.graph), len(captured.graph.nodes)])
    owned = [record.name for program in programs for record in program.tensors]
    assert owned == [record.name for record in captured.graph.tensors]


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("stages", [2, 4])
def test_the_positions_of_a_tensor_tell_who_owns_and_who_shares_it_in_any_cut(name: str, stages: int) -> None:
    graph = example(name).captured().graph
    positions = tensor_positions(graph)
    rng = random.Random(stages)
    for _ in range(3):
        for program in cut(graph, [0, *sorted(rng.sample(legal_cuts(graph), stages - 1)), len(graph.nodes)]):
            owned = {tensor for tensor, found in positions.items() if program.start <= found[0] < program.stop}
            needed = {tensor for tensor, found in positions.items() if any(program.start <= at < program.stop for at in found)}
            assert owned == {record.name for record in program.tensors}
            assert needed == owned | {record.name for record in program.shared}


def test_labels_enter_at_the_first_stage_and_reach_the_last_without_a_gradient() -> None:
    captured = example("perceptron").captured()
    first, _, last = cut(captured.graph, [0, 2, 4, len(captured.graph.nodes)])
    assert first.receives == {DATA_SOURCE: (0, 1)}
    assert last.receives[0] == (1,)
    assert 1 not in last.differentiable
    assert (first.loss_value, last.loss_value) == (None, captured.graph.loss)


def test_only_stages_with_dropout_draw_random_numbers() -> None:
    captured = example("perceptron").captured()
    programs = cut(captured.graph, [0, 2, 3, len(captured.graph.nodes)])
    assert [program.draws_random for program in programs] == [False, True, False]


def test_the_metric_is_not_computed_in_training() -> None:
    captured = example("perceptron").captured()
    (program,) = cut(captured.graph, [0, len(captured.graph.nodes)])
    training = [step.op for step in program.training_schedule.steps]
    evaluation = [step.op for step in program.evaluation_schedule.steps]
    assert "aten.argmax.default" not in training
    assert "aten.argmax.default" in evaluation


def test_no_cut_lies_before_an_in_place_operation_or_between_two_uses_of_a_changing_buffer() -> None:
    captured = example("convnet").captured()
    graph = captured.graph
    cuts = legal_cuts(graph)
    in_place = next(index for index, node in enumerate(graph.nodes) if node.op == "aten.relu_.default")
    assert in_place not in cuts
    with pytest.raises(GraphFormatError, match="must not be cut"):
        cut(graph, [0, in_place, len(graph.nodes)])
    with pytest.raises(GraphFormatError, match="must ascend"):
        cut(graph, [0, 5, 5, len(graph.nodes)])


class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.norm(self.first(x))))


def test_a_batch_norm_that_is_used_twice_stays_in_one_stage() -> None:
    captured = capture(SharedNorm(), nn.MSELoss(), (torch.randn(8, 4),), (torch.randn(8, 4),))
    uses = [index for index, node in enumerate(captured.graph.nodes) if "batch_norm" in node.op]
    assert not [position for position in legal_cuts(captured.graph) if uses[0] < position <= uses[1]]


class FrozenScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4), requires_grad=False)
        self.register_buffer("shift", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.scale + self.shift) * self.scale + self.shift


def test_read_only_tensors_are_copied_to_every_stage_that_uses_them() -> None:
    model, x, y = FrozenScale(), torch.randn(8, 4), torch.randn(8, 4)
    captured = capture(model, nn.MSELoss(), (x,), (y,))
    assert [record.trainable for record in captured.graph.tensors if record.name == "scale"] == [False]
    first, second = cut(captured.graph, [0, 3, len(captured.graph.nodes)])
    assert {record.name for record in first.tensors} == {"first.weight", "first.bias", "scale", "shift"}
    assert {record.name for record in second.shared} == {"scale", "shift"}
    tensors = training_tensors(captured)
    loss = train_step(captured, [3], (x, y), tensors, seed=0)
    expected = nn.MSELoss()(model(x), y)
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert torch.equal(tensors["first.weight"].grad, model.first.weight.grad)


class SizeArithmetic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        pairs = x.shape[0] * 2
        return self.second(self.first(x).reshape(pairs, 2).reshape(x.shape[0], 4)) / x.shape[0]


def test_sizes_that_depend_on_the_batch_cross_cuts_as_numbers() -> None:
    model, x, y = SizeArithmetic(), torch.randn(8, 4), torch.randn(8, 4)
    captured = capture(model, nn.MSELoss(), (x,), (y,))
    for samples in (1, 3, 8):
        for position in legal_cuts(captured.graph):
            tensors = training_tensors(captured)
            loss = train_step(captured, [position], (x[:samples], y[:samples]), tensors, seed=0)
            assert torch.equal(loss, nn.MSELoss()(model(x[:samples]), y[:samples]).detach())


def test_two_threads_may_run_one_program_at_once() -> None:
    case = example("gpt")
    captured = case.captured()
    (program,) = cut(captured.graph, [0, len(captured.graph.nodes)])
    halves = [(case.inputs[:4], case.labels[:4]), (case.inputs[4:], case.labels[4:])]
    expected = [evaluate(captured, [], half, captured.tensors)[0] for half in halves]
    found: list[list[Tensor]] = [[], []]

    def work(index: int) -> None:
        for _ in range(20):
            results = program.run(dict(enumerate(halves[index])), captured.tensors, training=False)
            found[index].append(results[captured.graph.loss])

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for index in (0, 1):
        assert len(found[index]) == 20
        assert all(torch.equal(item, expected[index]) for item in found[index])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            x = layer(first) * first + x
        return x


def test_a_value_is_handed_on_from_each_stage_that_uses_it_to_the_next() -> None:
    model, x, y = Residual(), torch.randn(8, 4), torch.randn(8, 4)
    captured = capture(model, nn.MSELoss(), (x,), (y,))
    cuts = [1, 4, 7]
    programs = cut(captured.graph, [0, *cuts, len(captured.graph.nodes)])
    value = captured.graph.first_result
    assert [[source for source, numbers in program.receives.items() if value in numbers] for program in programs[1:]] == [[0], [1], [2]]
    tensors = training_tensors(captured)
    assert torch.equal(train_step(captured, cuts, (x, y), tensors, seed=0), eager_step(model, nn.MSELoss(), (x, y), seed=0))
    for name, parameter in model.named_parameters():
        assert torch.equal(tensors[name].grad, parameter.grad), name
