from __future__ import annotations

import pytest
import torch

from roost.pipeline.random_state import ForwardRandomness

CPU = torch.device("cpu")


def test_stages_draw_what_one_process_would():
    torch.manual_seed(5)
    expected = torch.rand(3), torch.rand(3)
    first = ForwardRandomness(stage=0, draws=True, carries=True, device=CPU)
    second = ForwardRandomness(stage=1, draws=True, carries=False, device=CPU)
    with first.forward(5, None):
        one = torch.rand(3)
    torch.manual_seed(123)
    with second.forward(5, first.after):
        two = torch.rand(3)
    assert torch.equal(one, expected[0])
    assert torch.equal(two, expected[1])
    assert second.after is None


def test_the_processs_generator_is_put_back_even_after_an_error():
    before = torch.get_rng_state()
    randomness = ForwardRandomness(stage=0, draws=True, carries=True, device=CPU)
    with pytest.raises(ZeroDivisionError), randomness.forward(5, None):
        torch.rand(3)
        1 / 0  # noqa: B018
    assert torch.equal(torch.get_rng_state(), before)
    assert randomness.after is None


def test_a_stage_on_an_accelerator_seeds_its_own_generator_by_micro_batch_and_stage(monkeypatch):
    calls = []

    class Accelerator:
        get_rng_state = staticmethod(lambda: "kept")
        set_rng_state = staticmethod(lambda state: calls.append(state))
        manual_seed = staticmethod(lambda seed: calls.append(seed))

    monkeypatch.setattr(torch, "get_device_module", lambda device: Accelerator)
    for stage in (0, 1):
        with ForwardRandomness(stage=stage, draws=True, carries=False, device=torch.device("cuda")).forward(5, None):
            pass
    assert calls[1] == calls[3] == "kept"
    assert calls[0] != calls[2]
