"""Pairs of nodes that lose each other though both are there: the link between them is not used for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from roost.types import LinkProfile

logger = logging.getLogger(__name__)

QUARRELS = 2
"""Times that two nodes may lose each other before the link between them counts as useless."""
FORGIVEN_S = 600.0
"""Seconds after which a link is tried again."""
USELESS_BYTES_PER_S = 1e3
USELESS_LATENCY_S = 60.0


class Quarrels:
    """Counts them, and says which links the planner should not use."""

    def __init__(self, job_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._job_id = job_id
        self._clock = clock
        self._counts: dict[frozenset[str], int] = {}
        self._since: dict[frozenset[str], float] = {}

    def add(self, first: str, second: str) -> None:
        """Two nodes could not reach each other."""
        pair = frozenset((first, second))
        self._counts[pair] = self._counts.get(pair, 0) + 1
        if self._counts[pair] >= QUARRELS:
            self.avoid(first, second)

    def avoid(self, first: str, second: str) -> None:
        """Do not use the link between two nodes for FORGIVEN_S."""
        if not self.useless(first, second):
            logger.warning("link_useless job=%s first=%s second=%s", self._job_id, first, second)
            self._since[frozenset((first, second))] = self._clock()

    def useless(self, first: str, second: str) -> bool:
        """Return True if the link between two nodes is not to be used now."""
        pair = frozenset((first, second))
        since = self._since.get(pair)
        if since is not None and self._clock() - since >= FORGIVEN_S:
            del self._since[pair]
            self._counts.pop(pair, None)
            since = None
        return since is not None

    @property
    def links(self) -> tuple[LinkProfile, ...]:
        """What the planner is told of useless links, both ways."""
        pairs = sorted(tuple(sorted(pair)) for pair in self._since)
        return tuple(
            LinkProfile(source=source, target=target, latency_s=USELESS_LATENCY_S, bytes_per_s=USELESS_BYTES_PER_S)
            for first, second in pairs
            if self.useless(first, second)
            for source, target in ((first, second), (second, first))
        )
