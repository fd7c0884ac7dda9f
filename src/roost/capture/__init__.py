"""Turns a model and its loss into a graph that is data, cuts it into stages, and measures what each piece costs."""

from __future__ import annotations
