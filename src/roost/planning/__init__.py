"""Profiles in, a plan out: clusters, stages, shares, segments. Pure: no torch, no IO, no clock; `rng` is an argument."""

from roost.planning.planner import make_plan

__all__ = ["make_plan"]
