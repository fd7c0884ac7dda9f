"""Means that one member of five cannot ruin: of all members' values of a chunk, seen side by side.

A ring of partial sums hides who added what, so these need every member's values of a chunk in one place: its owner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roost.config import ONE_SAMPLE, bad_members, robust_quorum
from roost.errors import ProtocolError

WEIGHT_CAP = 2.0
"""A member counts for at most so many times the median member's samples: what it says of them cannot be checked."""
LARGEST = 2.0**126
"""Larger values count as not finite: differences between them can overflow float32."""
SUSPECT_RATIO = 5.0
"""A member whose values lie so many times farther from the centre than the median member's is named."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RobustMean:
    """What the owner of a chunk makes of all members' values of it."""

    mean: Tensor
    """(n,), in the dtype of the values."""
    refused: tuple[int, ...]
    """Members, by position, with a value that is not finite, or not below LARGEST: they were left out."""
    suspects: tuple[int, ...]
    """Members, by position, whose values lie SUSPECT_RATIO times farther from the centre than the median member's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Members:
    """The members whose values can be used, side by side."""

    places: list[int]
    """Their positions among all members."""
    refused: tuple[int, ...]
    """The positions of the others."""
    rates: Tensor
    """(members, n): values per share, in the dtype of the values."""
    parts: Tensor
    """(members,) float64: what each rate counts for in the mean of rates; they add up to 1."""
    voters: Tensor
    """(members,) bool: those who say what is usual."""
    pace: float
    """What the mean of the rates is multiplied with to be the mean of the values."""


def clipped_mean(values: Sequence[Tensor], weights: Sequence[float], shares: Sequence[float] | None = None) -> RobustMean:
    """Return the weighted mean of the members' differences to their median, each clipped to the median of their norms, plus the median.

    Centred clipping (Karimireddy, He and Jaggi, arXiv 2012.10333, algorithm 2, one iteration) with the median, coordinate by coordinate,
    as its centre and the median norm as its radius. `values` are one (n,) tensor per member, `weights` the samples behind each. With
    `shares`, where values are movements, those of a member that is expected to consume twice as many samples are taken to be twice as
    large. A member moves the mean by at most its part of the median norm. What members without samples have is not asked where enough
    others have some. Raises ProtocolError if fewer than half of the members have finite values, or the weights are not positive.
    """
    members = _members(values, weights, shares)
    middle, norms = _middle(members)
    differences = members.rates - middle
    radius = norms[members.voters].median()
    scales = torch.where(norms > radius, radius / norms, 1.0)
    mean = middle + ((members.parts * scales).to(differences.dtype) @ differences)
    return RobustMean(mean=mean.mul_(members.pace), refused=members.refused, suspects=_suspects(members, norms))


def trimmed_mean(values: Sequence[Tensor], weights: Sequence[float], shares: Sequence[float] | None = None) -> RobustMean:
    """Return, coordinate by coordinate, the weighted mean without the `bad_members` smallest and as many largest values.

    The coordinate-wise trimmed mean (Yin, Chen, Ramchandran and Bartlett, arXiv 1803.01498, definition 2). `values` are one (n,) tensor per
    member, `weights` the samples behind each, `shares` as for clipped_mean. With fewer members than that takes as many are trimmed as
    leave one; a member left out since its values are not finite counts as trimmed. Raises ProtocolError as clipped_mean does.
    """
    members = _members(values, weights, shares)
    count = len(members.places)
    cut = max(0, min(bad_members(len(values)) - len(members.refused), (count - 1) // 2))
    ordered, places = members.rates.sort(dim=0)
    kept = slice(cut, count - cut)
    taken = members.parts.to(ordered.dtype)[places[kept]]
    mean = (ordered[kept] * taken).sum(dim=0) / taken.sum(dim=0)
    return RobustMean(mean=mean.mul_(members.pace), refused=members.refused, suspects=_suspects(members, _middle(members)[1]))


def bounded_mean(values: Sequence[Tensor], weights: Sequence[float], radii: Sequence[float]) -> RobustMean:
    """Return the weighted mean of the members' movements, each clipped to its own radius: for when too few have moved to compare them.

    `values` are one (n,) tensor per member, `weights` the samples behind each. Raises ProtocolError as clipped_mean does.
    """
    finite, refused = _finite(values)
    given = _samples([weights[member] for member in finite])
    stacked = torch.stack([values[member] for member in finite])
    capped = given.clamp(max=WEIGHT_CAP * float(given[given >= min(ONE_SAMPLE, float(given.max()))].median()))
    norms, most = _norms(stacked), torch.tensor([radii[member] for member in finite], dtype=torch.float64)
    scales = torch.where(norms > most, most / norms, 1.0)
    return RobustMean(mean=(capped / capped.sum() * scales).to(stacked.dtype) @ stacked, refused=refused, suspects=())


def _members(values: Sequence[Tensor], weights: Sequence[float], shares: Sequence[float] | None) -> _Members:
    finite, refused = _finite(values)
    given = _samples([weights[member] for member in finite])
    expected = torch.ones_like(given) if shares is None else torch.tensor([shares[member] for member in finite], dtype=torch.float64)
    voters = given >= ONE_SAMPLE
    if int(voters.sum()) < robust_quorum(len(values)):
        voters = torch.ones_like(voters)
    # Of two in the middle the smaller one: half of the members may not raise it.
    usual = (given / expected)[voters & (given > 0)].median()
    capped = torch.minimum(given, WEIGHT_CAP * usual * expected)
    counted = capped * expected
    stacked = torch.stack([values[member] for member in finite])
    rates = stacked if shares is None else stacked / expected.to(stacked.dtype)[:, None]
    pace = float(counted.sum() / capped.sum())
    return _Members(places=finite, refused=refused, rates=rates, parts=counted / counted.sum(), voters=voters, pace=pace)


def _samples(weights: Sequence[float]) -> Tensor:
    """Return the weights as a tensor, (members,) float64. Raises ProtocolError if they cannot be samples."""
    given = torch.tensor(weights, dtype=torch.float64)
    if not bool(torch.isfinite(given).all()) or bool((given < 0).any()) or float(given.sum()) <= 0:
        raise ProtocolError(f"the weights of an averaging round are {given.tolist()}, which cannot be samples")
    return given


def _finite(values: Sequence[Tensor]) -> tuple[list[int], tuple[int, ...]]:
    """Return the members, by position, whose values are all below LARGEST, and the others. Raises ProtocolError if most are not."""
    finite = [member for member, value in enumerate(values) if value.numel() == 0 or bool(value.abs().max() < LARGEST)]
    if 2 * len(finite) <= len(values):
        raise ProtocolError(f"{len(values) - len(finite)} of {len(values)} members average values that are not finite")
    return finite, tuple(member for member in range(len(values)) if member not in finite)


def _middle(members: _Members) -> tuple[Tensor, Tensor]:
    """Return the median of the voters' rates, coordinate by coordinate, (n,), and how far each member is from it, (members,) float64."""
    middle = members.rates[members.voters].median(dim=0).values
    return middle, _norms(members.rates - middle)


def _norms(differences: Tensor) -> Tensor:
    """Return the Euclidean norm of each row, (members,) float64: values near the end of float32 do not overflow it."""
    return torch.linalg.vector_norm(differences, dim=1, dtype=torch.float64)


def _suspects(members: _Members, norms: Tensor) -> tuple[int, ...]:
    limit = SUSPECT_RATIO * float(norms[members.voters].median())
    asked = zip(members.places, norms.tolist(), members.voters.tolist(), strict=True)
    return tuple(place for place, norm, votes in asked if votes and norm > limit > 0)
