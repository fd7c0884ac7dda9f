"""Stages of a really captured model train as the model does alone."""

from __future__ import annotations

import pytest
import torch
from captured_kit import TiedModel, build, data, every_cut, model, no_cut
from torch.nn import functional


def plain(make, config, batches) -> TiedModel:
    whole = model()
    optimizer = getattr(torch.optim, config.optimizer.name)(whole.parameters(), **config.optimizer.as_dict())
    for number, (tokens, labels) in enumerate(batches):
        torch.manual_seed(make.micro_batch(number).seed)
        optimizer.zero_grad()
        functional.cross_entropy(whole(tokens), labels).backward()
        optimizer.step()
    return whole


@pytest.mark.parametrize("boundaries_of", [no_cut, every_cut])
def test_captured_stages_train_like_a_plain_loop(make, boundaries_of):
    config, batches = make.config(optimizer="AdamW", lr=0.01), data(8)
    pipeline = build(config, boundaries_of)
    for number, inputs in enumerate(batches):
        header = make.micro_batch(number, samples=6)
        pipeline.forward(header, inputs)
        pipeline.backward_and_update(header)
    whole = plain(make, config, batches)
    state = pipeline.state()
    expected = {name: tensor for name, tensor in whole.state_dict().items() if name != "head.weight"}
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    whole.eval()
    result = pipeline.evaluate(make.micro_batch(99, samples=6), batches[0])
    assert result.loss == functional.cross_entropy(whole(batches[0][0]), batches[0][1]).item()


def test_captured_stages_with_several_micro_batches_in_flight_keep_training(make):
    config, batches = make.config(optimizer="SGD", lr=0.05), data(1)
    pipeline = build(config, every_cut)
    headers = [make.micro_batch(number, samples=6) for number in range(40)]
    losses = []
    for number, header in enumerate(headers):
        losses.append(pipeline.forward(header, batches[0]))
        if number >= 3:
            pipeline.backward_and_update(headers[number - 3])
    for header in headers[-3:]:
        pipeline.backward_and_update(header)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert all((runner.in_flight, runner.versions_alive, runner.updates) == (0, 1, 40) for runner in pipeline.runners)
