"""A clock for what is given one."""

from __future__ import annotations


class HandClock:
    """Shows what a test sets it to, in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
