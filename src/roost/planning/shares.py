"""Which fraction of the data each cluster is expected to consume."""

from __future__ import annotations

import math
from collections.abc import Sequence


def data_shares(rates: Sequence[float]) -> tuple[float, ...]:
    """Return shares in proportion to the predicted samples per second; they add up to 1 (arXiv 2401.01728, data shares)."""
    whole = math.fsum(rates)
    return tuple(rate / whole for rate in rates)
