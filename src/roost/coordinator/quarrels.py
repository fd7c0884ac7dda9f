"""Pairs of nodes that lose each other though both are there: the link between them is not used for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from roost.types import LinkProfile

logger = logging.getLogger(__name__)

QUARRELS = 2
"""Times that two nodes may lose each other before the link between them counts as useless."""
FORGIVEN_S = 10.0
"""Seconds after which a link is tried again; the next time twice as many, and so on."""
MOST_FORGIVEN_S = 600.0
USELESS_BYTES_PER_S = 1e3
USELESS_LATENCY_S = 60.0


class Quarrels:
    """Counts them, and says which links the planner should not use."""

    def __init__(self, job_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._job_id = job_id
        self._clock = clock
        self._counts: dict[frozenset[str], int] = {}
        self._until: dict[frozenset[str], float] = {}
        self._times: dict[frozenset[str], int] = {}

    def add(self, first: str, second: str) -> None:
        """Two nodes could not reach each other."""
        pair = frozenset((first, second))
        self._counts[pair] = self._counts.get(pair, 0) + 1
        if self._counts[pair] >= QUARRELS:
            self.avoid(first, second)

    def avoid(self, first: str, second: str) -> None:
        """Do not use the link between two nodes for a while."""
        if self.useless(first, second):
            return
        pair = frozenset((first, second))
        for_s = min(MOST_FORGIVEN_S, FORGIVEN_S * 2 ** self._times.get(pair, 0))
        self._times[pair] = self._times.get(pair, 0) + 1
        self._until[pair] = self._clock() + for_s
        logger.warning("link_useless job=%s first=%s second=%s seconds=%.0f", self._job_id, first, second, for_s)

    def useless(self, first: str, second: str) -> bool:
        """Return True if the link between two nodes is not to be used now."""
        return frozenset((first, second)) in self.pairs

    @property
    def pairs(self) -> frozenset[frozenset[str]]:
        """Nodes whose link is not to be used now."""
        for pair in [pair for pair, until in self._until.items() if self._clock() >= until]:
            del self._until[pair]
            # One more failure is enough from now on.
            self._counts[pair] = QUARRELS - 1
        return frozenset(self._until)

    @property
    def links(self) -> tuple[LinkProfile, ...]:
        """What the planner is told of useless links, both ways."""
        pairs = sorted(tuple(sorted(pair)) for pair in self.pairs)
        return tuple(
            LinkProfile(source=source, target=target, latency_s=USELESS_LATENCY_S, bytes_per_s=USELESS_BYTES_PER_S)
            for first, second in pairs
            for source, target in ((first, second), (second, first))
        )
