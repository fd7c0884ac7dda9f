"""One bad cluster of five ruins the plain mean and not the guarded ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from roost.averaging.robust import RobustMean, clipped_mean, trimmed_mean
from roost.errors import ProtocolError

MEMBERS, SIZE, BAD = 5, 4096, 2
WEIGHTS = [100.0, 120.0, 90.0, 110.0, 80.0]
CENTRE = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))

Attack = Callable[[Tensor], Tensor]
ATTACKS: dict[str, Attack] = {
    "random values": lambda honest: 30 * torch.randn(SIZE, generator=torch.Generator().manual_seed(2)),
    "signs flipped": lambda honest: -honest,
    "differences flipped and ten times as large": lambda honest: CENTRE - 10 * (honest - CENTRE),
    "a norm of a million": lambda honest: CENTRE + 1e6 * (honest - CENTRE) / (honest - CENTRE).norm(),
    "values near the end of float32": lambda honest: torch.full((SIZE,), 3e38),
    "zeros": lambda honest: torch.zeros(SIZE),
    "one value that is not a number": lambda honest: honest.index_fill(0, torch.tensor([7]), float("nan")),
    "infinities": lambda honest: torch.full((SIZE,), float("inf")),
}
GUARDS: dict[str, Callable[[list[Tensor], list[float]], RobustMean]] = {
    "clipped": clipped_mean,
    "trimmed": trimmed_mean,
}


def honest_values(seed: int = 3) -> list[Tensor]:
    """Return what five clusters have after some updates from the last mean: a common direction, and noise of their own."""
    generator = torch.Generator().manual_seed(seed)
    common = 0.01 * torch.randn(SIZE, generator=generator)
    return [CENTRE + common + 0.005 * torch.randn(SIZE, generator=generator) for _ in range(MEMBERS)]


def plain_mean(values: list[Tensor], weights: list[float]) -> Tensor:
    return sum((weight * value for weight, value in zip(weights, values, strict=True)), torch.zeros(SIZE)) / sum(weights)


def distance(found: Tensor, values: list[Tensor]) -> float:
    """Return how far a mean is from that of the honest members, relative to how far they have moved."""
    others = [value for member, value in enumerate(values) if member != BAD]
    weights = [weight for member, weight in enumerate(WEIGHTS) if member != BAD]
    honest = plain_mean(others, weights)
    return float((found - honest).norm() / (honest - CENTRE).norm())


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_one_bad_member_of_five_ruins_the_plain_mean(attack: Attack) -> None:
    values = honest_values()
    attacked = [attack(value) if member == BAD else value for member, value in enumerate(values)]
    assert not distance(plain_mean(attacked, WEIGHTS), values) < 1.0


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_one_bad_member_of_five_does_not_ruin_a_guarded_mean(attack: Attack, guard: Callable[..., RobustMean]) -> None:
    values = honest_values()
    attacked = [attack(value) if member == BAD else value for member, value in enumerate(values)]
    found = guard(attacked, WEIGHTS)
    assert distance(found.mean, values) < 0.5
    assert (*found.refused, *found.suspects) == (BAD,)


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
def test_honest_members_are_averaged_nearly_as_before_and_nobody_is_suspected(guard: Callable[..., RobustMean]) -> None:
    values = honest_values()
    found = guard(values, WEIGHTS)
    moved = (plain_mean(values, WEIGHTS) - CENTRE).norm()
    assert float((found.mean - plain_mean(values, WEIGHTS)).norm() / moved) < 0.2
    assert (found.refused, found.suspects) == ((), ())


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
def test_a_member_that_claims_a_million_samples_does_not_count_for_all(guard: Callable[..., RobustMean]) -> None:
    values = honest_values()
    attacked = [-value if member == BAD else value for member, value in enumerate(values)]
    weights = [1e6 if member == BAD else weight for member, weight in enumerate(WEIGHTS)]
    assert distance(guard(attacked, weights).mean, values) < 0.8


def test_equal_differences_are_not_clipped() -> None:
    values = [CENTRE + 1.0 for _ in range(3)]
    assert torch.allclose(clipped_mean(values, [1.0, 2.0, 3.0]).mean, CENTRE + 1.0)


def test_a_trimmed_mean_is_the_weighted_mean_of_what_is_left() -> None:
    values = [torch.tensor([value]) for value in (0.0, 1.0, 2.0, 4.0, 1000.0)]
    assert trimmed_mean(values, [1.0, 1.0, 1.0, 2.0, 1.0]).mean.tolist() == [pytest.approx((1.0 + 2.0 + 8.0) / 4)]


@pytest.mark.parametrize("guard", [clipped_mean, trimmed_mean])
def test_members_that_all_have_the_same_keep_it(guard: Callable[..., RobustMean]) -> None:
    torch.testing.assert_close(guard([CENTRE, CENTRE, CENTRE], [1.0, 1.0, 1.0]).mean, CENTRE)


@pytest.mark.parametrize("guard", [clipped_mean, trimmed_mean])
def test_of_two_members_there_is_no_telling_who_lies(guard: Callable[..., RobustMean]) -> None:
    with pytest.raises(ProtocolError, match="1 of 2 members average values that are not finite"):
        guard([CENTRE, torch.full((SIZE,), float("nan"))], [1.0, 1.0])


@pytest.mark.parametrize("weights", [[0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]])
@pytest.mark.parametrize("guard", [clipped_mean, trimmed_mean])
def test_weights_that_cannot_be_samples_are_refused(guard: Callable[..., RobustMean], weights: list[float]) -> None:
    with pytest.raises(ProtocolError, match="which cannot be samples"):
        guard([CENTRE, CENTRE], weights)


def movements(shares: list[float], seed: int = 5) -> list[Tensor]:
    """Return how far clusters move in a round that train at these paces."""
    generator = torch.Generator().manual_seed(seed)
    common = 0.01 * torch.randn(SIZE, generator=generator)
    return [share * (common + 0.003 * torch.randn(SIZE, generator=generator)) for share in shares]


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
def test_clusters_that_are_expected_to_be_faster_count_for_what_they_have_done(guard: Callable[..., RobustMean]) -> None:
    shares = [0.25, 0.5, 0.5, 1.25, 2.5]
    values, weights = movements(shares), [100 * share for share in shares]
    wanted = plain_mean(values, weights)
    found = guard(values, weights, shares)
    assert float((found.mean - wanted).norm() / wanted.norm()) < 0.2
    assert found.suspects == ()
    # Without shares the fast ones look far away, and their work is lost.
    assert float(guard(values, weights).mean.norm() / wanted.norm()) < 0.6


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
@pytest.mark.parametrize("bad", [0, 2, 3])
def test_a_cluster_moves_the_mean_no_farther_than_its_share_lets_it(guard: Callable[..., RobustMean], bad: int) -> None:
    shares = [0.5, 0.8, 1.0, 1.2, 1.5]
    values, weights = movements(shares), [100 * share for share in shares]
    honest = plain_mean([value for member, value in enumerate(values) if member != bad], [w for m, w in enumerate(weights) if m != bad])
    attacked = [-10 * value if member == bad else value for member, value in enumerate(values)]
    found = guard(attacked, weights, shares)
    assert float((found.mean - honest).norm() / honest.norm()) < 0.5
    assert found.suspects == (bad,)


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
def test_what_the_others_have_learnt_is_not_lost_if_two_of_five_have_done_nothing(guard: Callable[..., RobustMean]) -> None:
    values = [torch.zeros(SIZE), torch.zeros(SIZE), *movements([1.0, 1.0, 1.0])]
    found = guard(values, [1e-6, 1e-6, 100.0, 100.0, 100.0])
    wanted = plain_mean(values[2:], [1.0, 1.0, 1.0])
    assert float((found.mean - wanted).norm() / wanted.norm()) < 0.3
    assert found.suspects == ()


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
def test_one_that_has_samples_alone_is_not_believed(guard: Callable[..., RobustMean]) -> None:
    values = [*(torch.zeros(SIZE) for _ in range(4)), *movements([1000.0])]
    assert float(guard(values, [1e-6, 1e-6, 1e-6, 1e-6, 100.0]).mean.norm()) == 0.0
