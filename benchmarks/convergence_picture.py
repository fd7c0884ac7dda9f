"""Curves as the text of an SVG file, for `benchmarks.convergence`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

PANEL_W, PANEL_H = 470, 330
MARGIN, HEAD, FOOT, AXIS = 24, 64, 44, 54
ROW = 19
"""Height of a line of the legend."""
LEGEND_COLUMNS = 3
INK, MUTED, RULE, PAPER = "#1f2933", "#667085", "#dde2e9", "#ffffff"
COLOURS = (
    "#1f2933",
    "#98a2b3",
    "#475467",
    "#e8590c",
    "#2b8a3e",
    "#0c8599",
    "#7048e8",
    "#1a4f9c",
    "#c2255c",
    "#5c7c0f",
    "#a61e8c",
    "#b08900",
)
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
TICKS = (1, 2, 2.5, 5, 10)
CLEARANCE = 0.25
"""Part of the highest curve's fall that is cut off: the first points would flatten the rest."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve."""

    name: str
    points: tuple[tuple[float, float], ...]
    bold: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Axes with curves."""

    title: str
    lines: tuple[Line, ...]


def draw(title: str, subtitle: str, panels: Sequence[Panel], axes: tuple[str, str]) -> str:
    """Return the picture: panels beside each other on common axes (their names: x, y), one legend; it needs no other file."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    points = [point for panel in panels for line in panel.lines for point in line.points]
    low, high = min(y for _, y in points), max(y for _, y in points)
    high = low + (high - low) * (1 - CLEARANCE)
    frame = _Frame(right=max(x for x, _ in points), low=low - 0.04 * (high - low), high=high)
    rows = math.ceil(len(names) / LEGEND_COLUMNS)
    width = 2 * MARGIN + len(panels) * PANEL_W
    height = HEAD + PANEL_H + FOOT + rows * ROW + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="{FONT}">',
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        _text(MARGIN, 30, title, size=17, weight=600),
        _text(MARGIN, 50, subtitle, colour=MUTED),
    ]
    for index, panel in enumerate(panels):
        parts += _panel(panel, frame, MARGIN + index * PANEL_W, colours, axes)
    for index, name in enumerate(names):
        x = MARGIN + AXIS + index % LEGEND_COLUMNS * (width - 2 * MARGIN - AXIS) / LEGEND_COLUMNS
        y = HEAD + PANEL_H + FOOT + 14 + index // LEGEND_COLUMNS * ROW
        parts.append(f'<path d="M{x:.1f} {y - 4:.1f} h24" stroke="{colours[name]}" stroke-width="3"/>')
        parts.append(_text(x + 31, y, name))
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """Range of both axes; x begins at 0."""

    right: float
    low: float
    high: float

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the point's place within a panel."""
        inner_w, inner_h = PANEL_W - AXIS - 16, PANEL_H - 26
        return AXIS + x / self.right * inner_w, 26 + (self.high - y) / (self.high - self.low) * inner_h


def _panel(panel: Panel, frame: _Frame, left: float, colours: dict[str, str], axes: tuple[str, str]) -> list[str]:
    parts = [_text(left + AXIS, HEAD + 16, f"{panel.title} ({axes[1]})", weight=600)]
    for value in _ticks(frame.low, frame.high):
        x, y = frame.place(0, value)
        parts.append(f'<path d="M{left + x:.1f} {HEAD + y:.1f} H{left + PANEL_W - 16:.1f}" stroke="{RULE}"/>')
        parts.append(_text(left + x - 8, HEAD + y + 4, f"{value:g}", colour=MUTED, anchor="end"))
    for value in _ticks(0, frame.right):
        x, y = frame.place(value, frame.low)
        parts.append(_text(left + x, HEAD + y + 18, f"{value:,.0f}", colour=MUTED, anchor="middle"))
    parts.append(_text(left + (AXIS + PANEL_W) / 2, HEAD + PANEL_H + 36, axes[0], colour=MUTED, anchor="middle"))
    for line in panel.lines:
        inside = [(left + x, HEAD + y) for x, y in (frame.place(*point) for point in line.points if point[1] <= frame.high)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in inside)
        drawn = f'<polyline points="{path}" fill="none" stroke="{colours[line.name]}" stroke-width="{2.8 if line.bold else 1.6}"/>'
        parts.append(drawn)
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round values between `low` and `high`."""
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in TICKS if factor * power >= rough)
    return [step * index for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _text(x: float, y: float, text: str, *, size: int = 12, weight: int = 400, colour: str = INK, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" font-weight="{weight}" fill="{colour}">{escape(text)}</text>'
