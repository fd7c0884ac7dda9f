"""The drawing of `benchmarks.theory`: two panels, as an SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

INK, MUTED, RULE, PAPER = "#1f2933", "#667085", "#dde2e9", "#ffffff"
LINE_COLOURS = ("#8494ab", "#3b7dd8", "#2b8a3e", "#e8590c", "#7048e8")
MARK_COLOURS = ("#e8590c", "#7048e8", "#0c8599")
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
WIDTH, HEIGHT = 1060, 470
PANEL_W, PANEL_H = 420, 310
TOP = 92
LEFT, RIGHT = 76, 596
"""Where the panels' axes begin."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One measured point."""

    x: float
    y: float
    filled: bool
    """A ring instead of a disc: the theorem says nothing here."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points that belong together."""

    name: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True, kw_only=True)
class _Axes:
    """One panel: x is logarithmic, y too unless `linear`."""

    left: float
    x: tuple[float, float]
    y: tuple[float, float]
    linear: bool = False

    def across(self, value: float) -> float:
        """Return the picture's x of a value."""
        low, high = (math.log10(end) for end in self.x)
        return self.left + PANEL_W * (math.log10(value) - low) / (high - low)

    def up(self, value: float) -> float:
        """Return the picture's y of a value."""
        if self.linear:
            part = (value - self.y[0]) / (self.y[1] - self.y[0])
        else:
            low, high = (math.log10(end) for end in self.y)
            part = (math.log10(value) - low) / (high - low)
        return TOP + PANEL_H * (1 - part)


def draw(lines: Sequence[Line], bound: Sequence[tuple[float, float]], stops: Sequence[Line]) -> str:
    """Return the picture: errors against updates with the proved bound of one cluster, and speed-up per cluster against the step."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="Convergence rate and speed-up per cluster" font-family="{FONT}">',
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
        *_rates(lines, bound),
        *_stops(stops),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _rates(lines: Sequence[Line], bound: Sequence[tuple[float, float]]) -> list[str]:
    marks = [mark for line in lines for mark in line.marks]
    axes = _Axes(
        left=LEFT,
        x=(0.8 * min(mark.x for mark in marks), 1.25 * max(mark.x for mark in marks)),
        y=(0.7 * min(mark.y for mark in marks), 1.3 * max(y for _, y in bound)),
    )
    title, note = "Mean squared gradient norm", "mean over whole runs and all seeds; dashed: what is proved for one cluster"
    parts = _frame(axes, (title, note, "updates of each cluster, K"), _decades(*axes.x), _decades(*axes.y))
    parts.append(_path(axes, bound, MUTED, dashed=True))
    for number, line in enumerate(lines):
        parts += _drawn(axes, line, LINE_COLOURS[number % len(LINE_COLOURS)])
    return [*parts, *_legend(axes.left + 14, TOP + PANEL_H - 18 * len(lines) - 4, lines, LINE_COLOURS)]


def _stops(stops: Sequence[Line]) -> list[str]:
    marks = [mark for line in stops for mark in line.marks]
    axes = _Axes(left=RIGHT, x=(0.7 * min(mark.x for mark in marks), 1.5 * max(mark.x for mark in marks)), y=(0.0, 1.1), linear=True)
    title, note = "Speed-up per cluster, and where it stops", "discs: all conditions of linear speed-up hold; rings: they do not"
    parts = _frame(axes, (title, note, "step size over what conditions (3) and (4) allow"), _decades(*axes.x), [0, 0.25, 0.5, 0.75, 1])
    if axes.x[0] < 1 < axes.x[1]:
        parts.append(_path(axes, [(1, axes.y[0]), (1, axes.y[1])], MUTED, dashed=True))
    for number, line in enumerate(stops):
        parts += _drawn(axes, line, MARK_COLOURS[number % len(MARK_COLOURS)])
    # The upper right is empty: curves that fall have fallen by there, and the others are above.
    return [*parts, *_legend(axes.left + 0.66 * PANEL_W, TOP + 0.34 * PANEL_H, stops, MARK_COLOURS)]


def _frame(axes: _Axes, words: tuple[str, str, str], across: Sequence[float], up: Sequence[float]) -> list[str]:
    """Return title, note, grid and numbers of a panel; `words` are the title, the note below it, and what runs across."""
    title, note, below = words
    right, bottom = axes.left + PANEL_W, TOP + PANEL_H
    parts = [_text(axes.left, TOP - 36, title, size=16, weight=650), _text(axes.left, TOP - 14, note, size=11.5, colour=MUTED)]
    for value in up:
        y = axes.up(value)
        parts.append(f'<line x1="{axes.left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{RULE}"/>')
        parts.append(_text(axes.left - 8, y + 4, f"{value:g}", size=11, colour=MUTED, anchor="end"))
    for value in across:
        x = axes.across(value)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="{RULE}"/>')
        parts.append(_text(x, bottom + 18, f"{value:,.0f}" if value >= 1 else f"{value:g}", size=11, colour=MUTED, anchor="middle"))
    parts.append(f'<rect x="{axes.left}" y="{TOP}" width="{PANEL_W}" height="{PANEL_H}" fill="none" stroke="{MUTED}"/>')
    parts.append(_text(axes.left + PANEL_W / 2, bottom + 42, below, size=12, anchor="middle"))
    return parts


def _drawn(axes: _Axes, line: Line, colour: str) -> list[str]:
    parts = [_path(axes, [(mark.x, mark.y) for mark in line.marks], colour)]
    for mark in line.marks:
        inside = colour if mark.filled else PAPER
        x, y = axes.across(mark.x), axes.up(mark.y)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" fill="{inside}" stroke="{colour}" stroke-width="1.6"/>')
    return parts


def _path(axes: _Axes, points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> str:
    places = " ".join(f"{axes.across(x):.1f},{axes.up(y):.1f}" for x, y in points)
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>'


def _legend(x: float, y: float, lines: Sequence[Line], colours: Sequence[str]) -> list[str]:
    parts = []
    for number, line in enumerate(lines):
        middle = y + 18 * number
        colour = colours[number % len(colours)]
        parts.append(f'<line x1="{x}" y1="{middle}" x2="{x + 22}" y2="{middle}" stroke="{colour}" stroke-width="2.4"/>')
        parts.append(_text(x + 30, middle + 4, line.name, size=12))
    return parts


def _decades(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def _text(x: float, y: float, words: str, *, size: float, colour: str = INK, weight: int = 400, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}" font-weight="{weight}">{words}</text>'
