"""A plan as an SVG picture: a row per cluster, a box per stage, the links between them, and what binds in colour."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from roost.cli.plan_text import averaging_line, layers_of, sizes, title
from roost.config import JobConfig, PlanningConfig, format_bytes
from roost.planning.advice import Advice, format_rate, hop_bytes
from roost.types import ClusterPlan, ModelProfile, Plan, SegmentPlan, StagePlan

MARGIN = 28
HEAD = 92
"""Height of the titles."""
SIDE = 168
"""Width of the column with the clusters' names."""
BOX_W, BOX_H = 236, 122
GAP_X, GAP_Y = 92, 46
LINE_GAP = 34
"""Between two lines of boxes of one cluster."""
PER_LINE = 4
BAR_X, BAR_W = 58, 76
FOOT = 66
MOST_CURVES = 24
"""Ring lines that are drawn; with more of them only the numbered dots are."""
MOST_DOTS = 7
LEAST_WIDTH = 2 * MARGIN + SIDE + 2 * BOX_W + GAP_X
CHARACTER = 0.57
"""Width of a character of a proportional font, relative to its size: about; texts are cut by it, and have their whole in a tooltip."""

INK, MUTED, RULE, PAPER, CARD = "#1f2933", "#667085", "#cfd6df", "#ffffff", "#f6f8fb"
BUSY, MEMORY, BINDS, BINDS_CARD = "#3b7dd8", "#8494ab", "#e8590c", "#fff4ec"
RING_COLOURS = ("#2b8a3e", "#7048e8", "#0c8599", "#a61e8c", "#5c7c0f", "#1a4f9c", "#845ef7", "#087f5b")
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
ARROW = (
    '<marker id="{}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" markerUnits="userSpaceOnUse" orient="auto">'
    '<path d="M0 0.5 L8 4 L0 7.5 z" fill="{}"/></marker>'
)
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a box is: its upper left corner."""

    x: float
    y: float


def draw_plan(plan: Plan, profile: ModelProfile, config: JobConfig, advice: Advice | None, options: PlanningConfig | None = None) -> str:
    """Return the picture as the text of an SVG file; it needs no font file, script or other file."""
    return _Picture(plan, profile, config, advice, options or PlanningConfig()).text()


class _Picture:
    """Collects the pieces of one picture."""

    def __init__(self, plan: Plan, profile: ModelProfile, config: JobConfig, advice: Advice | None, options: PlanningConfig) -> None:
        self._plan = plan
        self._profile = profile
        self._config = config
        self._advice = advice
        self._options = options
        self._nodes = len(plan.stages) + len(plan.backups)
        self._colours = {ring.index: RING_COLOURS[i % len(RING_COLOURS)] for i, ring in enumerate(plan.rings)}
        self._numbers = {ring.index: i for i, ring in enumerate(plan.rings)}
        self._places: dict[str, _Place] = {}
        self._rows: list[float] = []
        self._parts: list[str] = []

    def text(self) -> str:
        """Return the whole file."""
        widest = min(PER_LINE, max(max(len(cluster.stages) for cluster in self._plan.clusters), min(PER_LINE, len(self._plan.backups))))
        width = max(LEAST_WIDTH, 2 * MARGIN + SIDE + widest * BOX_W + (widest - 1) * GAP_X)
        bottom = self._place_boxes()
        self._titles(width)
        self._curves()
        for cluster in self._plan.clusters:
            self._cluster(cluster)
        bottom = self._backups(bottom)
        height = self._legend(bottom, width)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
        names = f' role="img" aria-label={_attribute(title(self._plan, self._profile, self._nodes))} font-family="{FONT}">'
        paper = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
        markers = f"<defs>{ARROW.format('plain', MUTED)}{ARROW.format('binds', BINDS)}</defs>"
        return "\n".join([head + names, markers, paper, *self._parts, "</svg>", ""])

    # ------------------------------------------------------------ places

    def _place_boxes(self) -> float:
        """Give every stage its place; return where the last row ends."""
        y = float(MARGIN + HEAD)
        for cluster in self._plan.clusters:
            self._rows.append(y)
            for stage in cluster.stages:
                line, column = divmod(stage.index, PER_LINE)
                x = MARGIN + SIDE + column * (BOX_W + GAP_X)
                self._places[stage.node_id] = _Place(x=x, y=y + line * (BOX_H + LINE_GAP))
            lines = -(-len(cluster.stages) // PER_LINE)
            y += lines * BOX_H + (lines - 1) * LINE_GAP + GAP_Y
        return y

    # ------------------------------------------------------------ pieces

    def _titles(self, width: float) -> None:
        room = width - 2 * MARGIN
        rate = f"{format_rate(self._plan.samples_per_s)} predicted"
        self._write(MARGIN, MARGIN + 20, title(self._plan, self._profile, self._nodes), size=21, weight=650, room=room - 230)
        self._write(width - MARGIN, MARGIN + 20, rate, size=18, weight=650, anchor="end")
        if self._advice is not None:
            self._write(MARGIN, MARGIN + 46, self._advice.headline, size=13.5, room=room)
        words = averaging_line(self._plan, self._config.planned_interval)
        self._write(MARGIN, MARGIN + 68, words, size=12, colour=MUTED, room=room)

    def _cluster(self, cluster: ClusterPlan) -> None:
        y = self._rows[cluster.index]
        self._write(MARGIN, y + 24, f"cluster {cluster.index}", size=15, weight=650)
        lines = [format_rate(cluster.samples_per_s), f"{cluster.share:.0%} of the data"]
        if cluster.staleness:
            lines.append(f"staleness up to {cluster.staleness}")
        for number, line in enumerate(lines):
            self._write(MARGIN, y + 45 + 18 * number, line, size=12, colour=MUTED, room=SIDE - 16)
        bound = wrap(f"bound by {cluster.bottleneck}", SIDE - 16, 12, most=3)
        for number, line in enumerate(bound):
            self._write(MARGIN, y + 47 + 18 * len(lines) + 15 * number, line, size=12, colour=BINDS, room=SIDE - 16)
        sizes = hop_bytes(self._profile, cluster, self._config, self._options)
        rates = [size * cluster.samples_per_s / self._profile.micro_batch_size for size in sizes]
        for before, after in zip(cluster.stages, cluster.stages[1:], strict=False):
            self._link(before, after, rates[before.index])
        for stage in cluster.stages:
            self._stage(stage)

    def _link(self, before: StagePlan, after: StagePlan, bytes_per_s: float) -> None:
        start, end = self._places[before.node_id], self._places[after.node_id]
        # The line of either end may be what binds, and a round trip begins with the way onward.
        binds = before.binding in ("uplink", "downlink", "round trip") or after.binding in ("uplink", "downlink")
        colour, marker, thick = (BINDS, "binds", 3) if binds else (MUTED, "plain", 1.6)
        x1, y1, x2, y2 = start.x + BOX_W, start.y + BOX_H / 2, end.x, end.y + BOX_H / 2
        middle = start.y + BOX_H + LINE_GAP / 2
        straight = start.y == end.y
        path = f"M{x1} {y1} H{x2 - 2}" if straight else f"M{x1} {y1} h18 V{middle} H{x2 - 18} V{y2} H{x2 - 2}"
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{thick}" stroke-linejoin="round" marker-end="url(#{marker})"/>'
        )
        label = f"{format_bytes(bytes_per_s)}/s"
        tip = f"{before.node_id} to {after.node_id}: {label} of values, and as much of gradients back"
        x, y = ((x1 + x2) / 2, y1 - 9) if straight else ((x1 + x2) / 2, middle - 6)
        self._write(x, y, label, size=11.5, colour=BINDS if binds else INK, anchor="middle", tip=tip, halo=True)

    def _stage(self, stage: StagePlan) -> None:
        place, binding = self._places[stage.node_id], stage.binding
        x, y = place.x, place.y
        # Full memory keeps a node from doing more, but it is not what its cluster waits for.
        slowest = binding not in ("", "memory")
        self._box(x, y, BINDS_CARD if slowest else CARD, BINDS if slowest else RULE, thick=2.2 if slowest else 1.2)
        name, tip = f"stage {stage.index}", ""
        if stage.recompute:
            name, tip = f"{name}, recomputes", "every forward runs again before its backward: its activations are not kept"
        self._write(x + 12, y + 23, stage.node_id, size=14, weight=650, room=BOX_W - (150 if stage.recompute else 82))
        self._write(x + BOX_W - 12, y + 23, name, size=11, colour=MUTED, anchor="end", tip=tip)
        self._write(x + 12, y + 41, layers_of(stage, self._profile), size=11, colour=MUTED, room=BOX_W - 24)
        self._bar(x, y + 55, "busy", stage.busy, BINDS if binding == "compute" else BUSY, f"{stage.busy:.0%}")
        used = stage.memory_needed_bytes / stage.memory_available_bytes
        memory = sizes(stage.memory_needed_bytes, stage.memory_available_bytes)
        self._bar(x, y + 73, "memory", used, BINDS if binding == "memory" else MEMORY, memory)
        self._dots(stage, x + 12, y + 107)
        words = f"{binding} binds" if binding else ""
        self._write(x + BOX_W - 12, y + 111, words, size=11, weight=600, colour=BINDS, anchor="end")

    def _box(self, x: float, y: float, fill: str, stroke: str, *, thick: float) -> None:
        size = f'width="{BOX_W}" height="{BOX_H}" rx="9"'
        self._parts.append(f'<rect x="{x}" y="{y}" {size} fill="{fill}" stroke="{stroke}" stroke-width="{thick}"/>')

    def _bar(self, x: float, y: float, name: str, fraction: float, colour: str, value: str) -> None:
        self._write(x + 12, y + 8.5, name, size=10.5, colour=MUTED)
        left, filled = x + BAR_X, BAR_W * min(1.0, max(0.0, fraction))
        self._parts.append(f'<rect x="{left}" y="{y}" width="{BAR_W}" height="9" rx="3" fill="#e3e8ef"/>')
        if filled:
            self._parts.append(f'<rect x="{left}" y="{y}" width="{filled:.1f}" height="9" rx="3" fill="{colour}"/>')
        self._write(left + BAR_W + 7, y + 8.5, value, size=10.5, room=BOX_W - BAR_X - BAR_W - 14)

    # ------------------------------------------------------------ rings

    def _rings_of(self, node_id: str) -> list[SegmentPlan]:
        return [ring for ring in self._plan.rings if node_id in ring.members]

    def _dot_place(self, node_id: str, ring: SegmentPlan) -> tuple[float, float] | None:
        number = self._rings_of(node_id).index(ring)
        place = self._places[node_id]
        return (place.x + 20 + 19 * number, place.y + 107) if number < MOST_DOTS else None

    def _dots(self, stage: StagePlan, x: float, y: float) -> None:
        rings = self._rings_of(stage.node_id)
        for ring in rings[:MOST_DOTS]:
            centre = self._dot_place(stage.node_id, ring)
            assert centre is not None, "the first rings have places"
            tip = f"ring {self._numbers[ring.index]}: {format_bytes(ring.nbytes)}, {' - '.join(ring.members)}"
            circle = f'<circle cx="{centre[0]}" cy="{centre[1]}" r="8" fill="{self._colours[ring.index]}"/>'
            self._parts.append(f"<g><title>{_clean(tip)}</title>{circle}")
            self._write(centre[0], centre[1] + 3.5, str(self._numbers[ring.index]), size=10, weight=650, colour=PAPER, anchor="middle")
            self._parts.append("</g>")
        if len(rings) > MOST_DOTS:
            self._write(x + 8 + 19 * MOST_DOTS, y + 3.5, f"+{len(rings) - MOST_DOTS}", size=10, colour=MUTED)

    def _curves(self) -> None:
        """Join the owners of each ring's tensors, from the uppermost down; which is whose neighbour is in the tooltips."""
        chains = [(ring, sorted(ring.members, key=lambda name: self._places[name].y)) for ring in self._plan.rings]
        if sum(len(chain) - 1 for _, chain in chains) > MOST_CURVES:
            return
        for ring, chain in chains:
            for one, other in zip(chain, chain[1:], strict=False):
                ends = self._dot_place(one, ring), self._dot_place(other, ring)
                if ends[0] is not None and ends[1] is not None:
                    self._curve(ring, ends[0], ends[1])

    def _curve(self, ring: SegmentPlan, start: tuple[float, float], end: tuple[float, float]) -> None:
        (x1, y1), (x2, y2) = start, end
        bend = max(36.0, (y2 - y1) * 0.45)
        curve = f"M{x1} {y1} C{x1} {y1 + bend:.0f} {x2} {y2 - bend:.0f} {x2} {y2}"
        look = f'stroke="{self._colours[ring.index]}" stroke-width="1.8" stroke-dasharray="5 4" opacity="0.75"'
        self._parts.append(f'<path d="{curve}" fill="none" {look}/>')

    # ------------------------------------------------------------ below the clusters

    def _backups(self, y: float) -> float:
        """Draw the nodes without a stage; return where they end."""
        if not self._plan.backups:
            return y
        self._write(MARGIN, y + 24, "backups", size=15, weight=650, colour=MUTED)
        self._write(MARGIN, y + 45, "no stage of their own", size=12, colour=MUTED)
        targets = {backup.node_id: f"for stage {backup.stage} of cluster {backup.cluster}" for backup in self._plan.backup_stages}
        height = 52
        for index, node_id in enumerate(self._plan.backups):
            line, column = divmod(index, PER_LINE)
            x, top = MARGIN + SIDE + column * (BOX_W + GAP_X), y + line * (height + 14)
            self._parts.append(
                f'<rect x="{x}" y="{top}" width="{BOX_W}" height="{height}" rx="9" fill="#f1f3f5" stroke="#adb5bd" stroke-dasharray="5 4"/>'
            )
            self._write(x + 12, top + 22, node_id, size=14, weight=600, colour=MUTED, room=BOX_W - 24)
            self._write(x + 12, top + 40, targets.get(node_id, "left over"), size=11, colour=MUTED, room=BOX_W - 24)
        lines = -(-len(self._plan.backups) // PER_LINE)
        return y + lines * (height + 14) + GAP_Y - 14

    def _legend(self, y: float, width: float) -> float:
        """Explain the signs; return the height of the picture."""
        self._parts.append(f'<path d="M{MARGIN} {y - 14} H{width - MARGIN}" stroke="{RULE}"/>')
        x, line = float(MARGIN), y + 12
        signs = [
            (f'<rect x="{{x}}" y="{{y}}" width="22" height="9" rx="3" fill="{BUSY}"/>', "part of the time that a node computes"),
            (f'<rect x="{{x}}" y="{{y}}" width="22" height="9" rx="3" fill="{MEMORY}"/>', "memory needed / lent"),
            (f'<rect x="{{x}}" y="{{y}}" width="22" height="9" rx="3" fill="{BINDS}"/>', "what binds"),
            (
                f'<path d="M{{x}} {{m}} h20" stroke="{MUTED}" stroke-width="1.6" marker-end="url(#plain)"/>',
                "values, as many gradients back",
            ),
        ]
        if self._plan.rings:
            dot = f'<circle cx="{{c}}" cy="{{m}}" r="7" fill="{RING_COLOURS[0]}"/>'
            signs.append((dot, "nodes with the same number average the same tensors"))
        for sign, words in signs:
            needed = 32 + len(words) * 11.5 * CHARACTER + 22
            if x + needed > width - MARGIN and x > MARGIN:
                x, line = float(MARGIN), line + 21
            self._parts.append(sign.format(x=x, y=line - 8, m=line - 3.5, c=x + 11))
            self._write(x + 30, line, words, size=11.5, colour=MUTED)
            x += needed
        return line + FOOT - 42

    def _write(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float,
        weight: int = 400,
        colour: str = INK,
        anchor: str = "start",
        room: float | None = None,
        tip: str = "",
        halo: bool = False,
    ) -> None:
        """Add a text; one that is wider than `room` is cut and shows its whole when pointed at."""
        if not words:
            return
        shown = words if room is None else fit(words, room, size)
        whole = tip or (words if shown != words else "")
        around = f' stroke="{PAPER}" stroke-width="4" stroke-linejoin="round" paint-order="stroke"' if halo else ""
        title_tag = f"<title>{_clean(whole)}</title>" if whole else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}"{around}>'
            f"{title_tag}{_clean(shown)}</text>"
        )


def fit(words: str, room: float, size: float) -> str:
    """Return `words`, cut with an ellipsis if they are wider than `room` at that font size."""
    most = max(1, int(room / (size * CHARACTER)))
    return words if len(words) <= most else words[: most - 1].rstrip() + "…"


def wrap(words: str, room: float, size: float, *, most: int) -> list[str]:
    """Return `words` as at most `most` lines that are about as wide as `room`; the last takes what is left."""
    width = max(1, int(room / (size * CHARACTER)))
    lines = textwrap.wrap(words, width, break_long_words=False)
    return [*lines[: most - 1], " ".join(lines[most - 1 :])] if len(lines) > most else lines


def _clean(words: str) -> str:
    return escape(NOT_XML.sub("\ufffd", words))


def _attribute(words: str) -> str:
    return quoteattr(NOT_XML.sub("\ufffd", words))
