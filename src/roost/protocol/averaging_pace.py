"""When the next background round of a ring is due (docs/averaging.md)."""

from __future__ import annotations

from roost.config import AUTOMATIC_INTERVAL

LINE_SHARE = 0.5
"""Most of the time that an automatic interval lets rounds be on the wire."""
COMPUTE_SHARE = 0.01
"""Most of the time that it lets them keep training from computing: copying weights and applying averages."""


class AveragingPace:
    """Counts a stage's updates and decides, for one ring, after which of them a round is due."""

    def __init__(self, interval: int) -> None:
        """`interval` in updates; 0: from what rounds take."""
        self._interval = interval
        self._updates = 0
        self._asked_at = 0.0

    def updated(self, *, now: float, idle: bool, began_at: float, round_s: float, held_s: float) -> bool:
        """Count an update, and return True if a round is due after it.

        With a fixed interval that is after every so many updates, whatever the ring does. Otherwise, once the ring is `idle`, when
        so much time has passed since the last round began (at `began_at`, whoever opened it) that rounds like it, which took `round_s`
        and kept training from computing for `held_s`, take LINE_SHARE and COMPUTE_SHARE of it; the first, of which nothing is known
        yet, after AUTOMATIC_INTERVAL updates.
        """
        self._updates += 1
        if self._interval > 0:
            due = self._updates >= self._interval
        elif round_s <= 0:
            due = idle and self._updates >= AUTOMATIC_INTERVAL
        else:
            due = idle and now - max(self._asked_at, began_at) >= max(round_s / LINE_SHARE, held_s / COMPUTE_SHARE)
        if due:
            self._updates, self._asked_at = 0, now
        return due
