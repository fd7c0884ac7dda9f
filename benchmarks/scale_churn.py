"""When nodes come and go in the scale benchmark.

Sessions and the gaps between arrivals are Weibull-distributed with the parameters that Stutzbach and Rejaie fitted to the sessions of
BitTorrent peers that share Debian images (Understanding Churn in Peer-to-Peer Networks, IMC 2006, section on group-level
characterisation): shape 0.38 and scale 42.4 minutes, and shape 0.79. Half of the sessions end within 17 minutes, and the mean is 2.7 hours:
people who share a file stay for less long than those who lend a machine, so this is harder than volunteer computing.
"""

from __future__ import annotations

import math
import random

SESSION_SHAPE = 0.38
SESSION_SCALE_S = 42.4 * 60
ARRIVAL_SHAPE = 0.79


class Churn:
    """Draws sessions and arrivals for a pool in which `present` nodes are there on average."""

    def __init__(self, present: int, *, longer: float, rng: random.Random) -> None:
        """Sessions are `longer` times as long as published."""
        self._scale_s = SESSION_SCALE_S * longer
        self._rng = rng
        self.mean_s = self._scale_s * math.gamma(1 + 1 / SESSION_SHAPE)
        """Of a session."""
        # Little's law: present = arrivals per second x mean session.
        self._gap_scale_s = self.mean_s / present / math.gamma(1 + 1 / ARRIVAL_SHAPE)

    def session_s(self) -> float:
        """Return how long a node that has just arrived stays."""
        return self._rng.weibullvariate(self._scale_s, SESSION_SHAPE)

    def rest_s(self) -> float:
        """Return how long a node that is there at a moment of the steady state stays from then on.

        Sessions that are met at a moment are long ones: (length / scale) ** shape has a gamma distribution of order 1 + 1 / shape, and the
        moment falls anywhere in it.
        """
        length = self._scale_s * self._rng.gammavariate(1 + 1 / SESSION_SHAPE, 1.0) ** (1 / SESSION_SHAPE)
        return self._rng.random() * length

    def gap_s(self) -> float:
        """Return the time to the next arrival."""
        return self._rng.weibullvariate(self._gap_scale_s, ARRIVAL_SHAPE)
