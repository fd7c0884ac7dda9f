from __future__ import annotations

import pytest
import torch
from capture_models import EXAMPLES, example
from torch import Tensor, nn

from roost.capture.check import check_against_eager, check_cuts, even_cuts
from roost.capture.cut import legal_cuts
from roost.capture.export import capture
from roost.capture.rehearsal import Rehearsal
from roost.capture.tracing import CallLayout, own_loss
from roost.errors import CaptureMismatchError, NotCapturableError


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_two_steps_in_stages_equal_two_steps_of_the_whole_graph(name: str, stages: int) -> None:
    case = example(name)
    captured = case.captured()
    cuts = even_cuts(captured, legal_cuts(captured.graph), stages)
    report = check_cuts(captured, cuts, (case.inputs, case.labels), seed=3)
    assert 2 <= report.stages <= stages
    assert report.same_loss
    assert report.max_relative_error <= 1e-6


def test_a_wrong_cut_would_be_seen() -> None:
    case = example("perceptron")
    captured = case.captured()
    before = torch.get_rng_state()
    changed = Rehearsal(captured)
    changed.step((case.inputs, case.labels), 0)
    changed.descend(0.1)
    torch.set_rng_state(before)
    assert not torch.equal(changed.tensors["layers.0.weight"], captured.tensors["layers.0.weight"])
    assert all(gradient is None for gradient in changed.gradients().values())


class OwnLoss(nn.Module):
    """Takes keywords only, and returns a dict with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, *, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


LAYOUT = CallLayout(positional=0, keywords=("x", "labels"), label_keywords=("labels",))


def accuracy(output: dict[str, Tensor], labels: Tensor) -> Tensor:
    return (output["logits"].argmax(-1) == labels).float().mean()


def test_a_model_with_keywords_and_its_own_loss_is_captured_with_a_metric() -> None:
    torch.manual_seed(0)
    model, x, labels = OwnLoss(), torch.randn(6, 4), torch.randint(0, 3, (6,))
    captured = capture(model, own_loss, (x, labels), (), layout=LAYOUT, metric=accuracy)
    assert [record.name for record in captured.graph.data] == ["x", "labels"]
    report = check_against_eager(model, own_loss, captured, (x, labels), (), layout=LAYOUT, seed=1)
    assert report.same_loss
    assert report.max_relative_gradient_error == 0.0
    loss, metric = Rehearsal(captured).evaluate((x[:5], labels[:5]))
    output = model.eval()(x=x[:5], labels=labels[:5])
    assert torch.equal(loss, output["loss"])
    assert metric is not None
    assert torch.equal(metric, accuracy(output, labels[:5]))


@pytest.mark.parametrize("output", [(torch.tensor(2.0), 1), [torch.tensor(2.0)], {"loss": torch.tensor(2.0)}, torch.tensor(2.0)])
def test_the_own_loss_is_the_loss_or_the_first_item(output: object) -> None:
    assert float(own_loss(output)) == 2.0


def test_a_model_without_a_loss_of_its_own_is_refused() -> None:
    class NoLoss(OwnLoss):
        def forward(self, *, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"logits": self.layer(x)}

    with pytest.raises(NotCapturableError, match="returned a dict without a loss; does the batch have labels"):
        capture(NoLoss(), own_loss, (torch.randn(4, 4), torch.zeros(4).long()), (), layout=LAYOUT)


class AnyLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embedding(ids).mean(1))


@pytest.mark.parametrize("length", [1, 3])
def test_a_graph_of_varying_lengths_runs_any_length(length: int) -> None:
    torch.manual_seed(0)
    model, loss = AnyLength(), nn.CrossEntropyLoss()
    ids, labels = torch.randint(0, 20, (4, length)), torch.randint(0, 2, (4,))
    captured = capture(model, loss, (ids,), (labels,), dynamic=[{1}, ()])
    assert captured.graph.data[0].shape == (None, None)
    for other in (1, 2, 9):
        ids = torch.randint(0, 20, (4, other))
        assert torch.equal(Rehearsal(captured).evaluate((ids, labels))[0], loss(model.eval()(ids), labels))


def test_a_length_that_the_model_fixes_is_told() -> None:
    class Fixed(AnyLength):
        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.embedding(ids).view(-1, 5, 8).mean(1))

    captured = capture(Fixed(), nn.CrossEntropyLoss(), (torch.zeros(4, 5).long(),), (torch.zeros(4).long(),), dynamic=[{1}, ()])
    assert captured.graph.data[0].shape == (None, 5)


def test_a_model_that_is_another_each_time_is_told_apart_from_a_wrong_graph() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x) * self.calls

    model, x, labels = Counting(), torch.randn(6, 4), torch.randint(0, 3, (6,))
    captured = capture(model, nn.CrossEntropyLoss(), (x,), (labels,))
    with pytest.raises(CaptureMismatchError, match="runs twice with one seed") as caught:
        check_against_eager(model, nn.CrossEntropyLoss(), captured, (x,), (labels,), seed=0)
    assert "keeps state between calls" in str(caught.value)


def test_a_gradient_that_a_hook_changes_is_reported_with_its_parameter() -> None:
    model, x, labels = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), torch.randn(6, 4), torch.randint(0, 3, (6,))
    captured = capture(model, nn.CrossEntropyLoss(), (x,), (labels,))
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(CaptureMismatchError, match="gradient of parameter '0.weight'") as caught:
        check_against_eager(model, nn.CrossEntropyLoss(), captured, (x,), (labels,), seed=0)
    assert "hooks" in (caught.value.hint or "")
