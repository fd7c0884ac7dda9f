from __future__ import annotations

import pytest
import torch

from roost.weights.twister import skip


def after_drawing(used: int, draws: int) -> tuple[torch.Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(5)
    torch.empty(used).uniform_(generator=generator)
    state = generator.get_state()
    torch.empty(draws).uniform_(generator=generator)
    return state, generator


@pytest.mark.parametrize("used", [0, 1, 623, 624, 625, 1000])
@pytest.mark.parametrize("draws", [0, 1, 5, 623, 624, 625, 1248, 100_003])
def test_skipping_gives_the_numbers_that_come_after_drawing(used: int, draws: int) -> None:
    state, drawn = after_drawing(used, draws)
    skipped = torch.Generator()
    skipped.set_state(skip(state, draws))
    assert torch.equal(torch.empty(2000).uniform_(generator=skipped), torch.empty(2000).uniform_(generator=drawn))


@pytest.mark.parametrize("used", [0, 3, 624])
@pytest.mark.parametrize("draws", [2**24 + 1, 2**24 + 624, 20_000_001])
def test_a_long_jump_gives_the_numbers_that_come_after_drawing(used: int, draws: int) -> None:
    state, drawn = after_drawing(used, draws)
    jumped = torch.Generator()
    jumped.set_state(skip(state, draws))
    assert torch.equal(torch.empty(2000).normal_(generator=jumped), torch.empty(2000).normal_(generator=drawn))


def test_two_jumps_are_one_long_jump() -> None:
    state, _ = after_drawing(7, 0)
    twice, once = torch.Generator(), torch.Generator()
    twice.set_state(skip(skip(state, 10**12), 3 * 10**12))
    once.set_state(skip(state, 4 * 10**12))
    assert torch.equal(torch.empty(2000).uniform_(generator=twice), torch.empty(2000).uniform_(generator=once))


def test_a_kept_normal_number_survives_skipping() -> None:
    generator = torch.Generator().manual_seed(1)
    torch.empty(1).normal_(generator=generator)
    state = generator.get_state()
    torch.empty(50).uniform_(generator=generator)
    skipped = torch.Generator()
    skipped.set_state(skip(state, 50))
    assert torch.equal(torch.empty(3).normal_(generator=skipped), torch.empty(3).normal_(generator=generator))
