"""Means that one member of five cannot ruin: of all members' values of a chunk, seen side by side.

A ring of partial sums hides who added what, so these need every member's values of a chunk in one place: its owner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


def clipped_mean(values: Sequence[Tensor], weights: Sequence[float], centre: Tensor | None = None) -> RobustMean:
    """Return the weighted mean of the members' differences to `centre`, each clipped to the median of their norms, plus `centre`.

    Centred clipping (Karimireddy, He and Jaggi, arXiv 2012.10333, algorithm 2, one iteration) with the median norm as its radius. `values`
    are one (n,) tensor per member, `weights` the samples behind each; `centre`, (n,), is the last mean, or None for the median of the
    values, coordinate by coordinate. A member moves the mean by at most its share of the median norm. Raises ProtocolError if fewer
    than half of the members have finite values, or the weights are not positive.
    """
    finite, refused = _finite(values)
    stacked = torch.stack([values[member] for member in finite])
    shares = _shares([weights[member] for member in finite])
    middle = stacked.median(dim=0).values if centre is None else centre
    differences = stacked - middle
    norms = _norms(differences)
    radius = norms.median()
    scales = torch.where(norms > radius, radius / norms, 1.0)
    mean = middle + ((shares * scales).to(stacked.dtype) @ differences)
    return RobustMean(mean=mean, refused=refused, suspects=_suspects(finite, norms))


def trimmed_mean(values: Sequence[Tensor], weights: Sequence[float], trimmed: int = 1) -> RobustMean:
    """Return, coordinate by coordinate, the weighted mean without the `trimmed` smallest and as many largest values.

    The coordinate-wise trimmed mean (Yin, Chen, Ramchandran and Bartlett, arXiv 1803.01498, definition 2). `values` are one (n,) tensor per
    member, `weights` the samples behind each. With fewer than 2 x `trimmed` + 1 members as many are trimmed as leave one; a member left
    out since its values are not finite counts as trimmed. Raises ProtocolError as clipped_mean does.
    """
    finite, refused = _finite(values)
    stacked = torch.stack([values[member] for member in finite])
    shares = _shares([weights[member] for member in finite]).to(stacked.dtype)
    cut = max(0, min(trimmed - len(refused), (len(finite) - 1) // 2))
    ordered, members = stacked.sort(dim=0)
    kept = slice(cut, len(finite) - cut)
    taken = shares[members[kept]]
    mean = (ordered[kept] * taken).sum(dim=0) / taken.sum(dim=0)
    return RobustMean(mean=mean, refused=refused, suspects=_suspects(finite, _norms(stacked - stacked.median(dim=0).values)))


def _finite(values: Sequence[Tensor]) -> tuple[list[int], tuple[int, ...]]:
    """Return the members, by position, whose values are all below LARGEST, and the others. Raises ProtocolError if most are not."""
    finite = [member for member, value in enumerate(values) if value.numel() == 0 or bool(value.abs().max() < LARGEST)]
    if 2 * len(finite) <= len(values):
        raise ProtocolError(f"{len(values) - len(finite)} of {len(values)} members average values that are not finite")
    return finite, tuple(member for member in range(len(values)) if member not in finite)


def _shares(weights: Sequence[float]) -> Tensor:
    """Return the part of each member, (members,) float64 that add up to 1; no weight counts for more than WEIGHT_CAP medians."""
    given = torch.tensor(weights, dtype=torch.float64)
    if not bool(torch.isfinite(given).all()) or bool((given < 0).any()) or float(given.sum()) <= 0:
        raise ProtocolError(f"the weights of an averaging round are {list(weights)}, which cannot be samples")
    # Of two in the middle the smaller one: half of the members may not raise it.
    positive = given[given > 0]
    capped = given.clamp(max=WEIGHT_CAP * float(positive.median()))
    return capped / capped.sum()


def _norms(differences: Tensor) -> Tensor:
    """Return the Euclidean norm of each row, (members,) float64: values near the end of float32 do not overflow it."""
    return torch.linalg.vector_norm(differences, dim=1, dtype=torch.float64)


def _suspects(members: Sequence[int], norms: Tensor) -> tuple[int, ...]:
    limit = SUSPECT_RATIO * float(norms.median())
    return tuple(member for member, norm in zip(members, norms.tolist(), strict=True) if norm > limit > 0)
