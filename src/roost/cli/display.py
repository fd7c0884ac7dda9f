"""Shows a run to a person: the plan as a table, one progress line per cluster, the result."""

from __future__ import annotations

import time
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from roost.cli.plan_text import layers_of
from roost.config import format_bytes
from roost.requester.run import Run, RunMetrics
from roost.types import ClusterPlan, ModelProfile, NodeProfile, Plan

LINE_EVERY_S = 5.0
"""Seconds between progress lines where the output is not a terminal."""


class RunDisplay:
    """An Observer that draws to a console; on a terminal the progress lines move in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._last_line = 0.0
        self._shown_epochs = 0
        self._paused: tuple[str, ...] = ()
        self._saving = ""

    def planned(self, plan: Plan, nodes: tuple[NodeProfile, ...], profile: ModelProfile) -> None:
        """Print the plan."""
        self._console.print(plan_table(plan, nodes, profile))
        for note in plan.notes:
            self._console.print(f"  [dim]{escape(note)}[/]", soft_wrap=True)
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def updated(self, metrics: RunMetrics) -> None:
        """Show progress, and every new line of history."""
        for result in metrics.history[self._shown_epochs :]:
            parts = [f"epoch {result.epoch}/{metrics.epochs}: loss {result.train_loss:.4f}"]
            if result.validation_loss is not None:
                parts.append(f"validation loss {result.validation_loss:.4f}")
            if result.metric is not None and result.validation_loss is not None:
                parts.append(f"metric {result.metric:.4f}")
            self._console.print("  " + ", ".join(parts) + f"  [dim]({result.seconds:.1f} s)[/]", soft_wrap=True)
        self._shown_epochs = len(metrics.history)
        if metrics.paused != self._paused:
            self._paused = metrics.paused
            waits = f"waiting for {', '.join(metrics.paused)}, paused by the owner" if metrics.paused else "no node is paused any more"
            self._console.print(f"  [yellow]{escape(waits)}[/]", soft_wrap=True)
        if metrics.saving != self._saving:
            self._saving = metrics.saving
            if metrics.saving:
                self._console.print(f"  [dim]saving {escape(metrics.saving)} in the background[/]", soft_wrap=True)
        if self._live is not None:
            self._live.update(_progress(metrics), refresh=True)
        elif time.monotonic() - self._last_line >= LINE_EVERY_S and any(cluster.updates for cluster in metrics.clusters):
            self._last_line = time.monotonic()
            for cluster in metrics.clusters:
                self._console.print(_cluster_line(metrics, cluster.cluster), soft_wrap=True)

    def close(self) -> None:
        """Take the moving lines off the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _cluster_line(metrics: RunMetrics, index: int) -> Text:
    cluster = next(cluster for cluster in metrics.clusters if cluster.cluster == index)
    loss = "    --" if cluster.loss is None else f"{cluster.loss:.4f}"
    return Text(
        f"  cluster {cluster.cluster}: {cluster.samples_per_s:.0f} samples/s, loss {loss}, "
        f"staleness {cluster.staleness_mean:.1f} (max {cluster.staleness_max}), {cluster.updates} updates"
    )


def _progress(metrics: RunMetrics) -> RenderableType:
    head = Table.grid(padding=(0, 1))
    head.add_row(
        Text(f"  {metrics.state:<10} epoch {metrics.epochs_done:.1f}/{metrics.epochs}"),
        ProgressBar(total=metrics.epochs, completed=metrics.epochs_done, width=10),
        Text(f"{metrics.elapsed_s:.0f} s, {format_bytes(metrics.bytes_sent)} sent, {metrics.averaging_rounds} rounds", no_wrap=True),
    )
    return Group(head, *(_cluster_line(metrics, cluster.cluster) for cluster in metrics.clusters))


def plan_table(plan: Plan, nodes: tuple[NodeProfile, ...], profile: ModelProfile) -> Group:
    """Return who holds which layers, memory needed against memory there, and the predicted rates: a table per cluster."""
    by_id = {node.node_id: node for node in nodes}
    parts: list[RenderableType] = [
        Text(
            f"plan: {len(plan.clusters)} cluster(s), {len(plan.rings)} ring(s), {plan.samples_per_s:.0f} samples/s predicted",
            style="italic",
        )
    ]
    parts += [_cluster_table(cluster, by_id, profile) for cluster in plan.clusters]
    if any(node.emulated for node in nodes):
        parts.append(Text("* emulated: memory or speed of this node is declared, not measured", style="dim"))
    return Group(*parts)


def _cluster_table(cluster: ClusterPlan, nodes: dict[str, NodeProfile], profile: ModelProfile) -> Table:
    table = Table(
        title=f"cluster {cluster.index}: {cluster.share:.0%} of the data, {cluster.samples_per_s:.0f} samples/s",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("stage", justify="right")
    table.add_column("node", overflow="fold")
    table.add_column("layers", overflow="fold")
    table.add_column("memory need/has", justify="right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("in flight", justify="right", no_wrap=True)
    for stage in cluster.stages:
        table.add_row(
            str(stage.index),
            Text(f"{stage.node_id}{'*' if nodes[stage.node_id].emulated else ''}"),
            Text(layers_of(stage, profile)),
            f"{format_bytes(stage.memory_needed_bytes)} / {format_bytes(stage.memory_available_bytes)}",
            f"{1000 * stage.compute_s:.2f}",
            str(stage.max_in_flight),
        )
    return table


def print_result(console: Console, run: Run, *, model_line: str) -> None:
    """Print what was reached, where the checkpoint is, and the lines of Python that load it."""
    metrics = run.metrics()
    last = metrics.history[-1] if metrics.history else None
    state = "stopped" if run.stopped else "done"
    epochs = f"{metrics.epochs_done:.1f} of {metrics.epochs} epochs"
    console.print(f"\n[bold]{state}[/] after {epochs}, {metrics.elapsed_s:.1f} s of training", soft_wrap=True)
    if last is not None and last.metric is not None:
        console.print(f"  validation metric   {last.metric:.4f}")
    if last is not None and last.validation_loss is not None:
        console.print(f"  validation loss     {last.validation_loss:.4f}")
    console.print(f"  samples/s           {metrics.samples_per_s:.0f}")
    console.print(f"  bytes sent          {format_bytes(metrics.bytes_sent)}")
    console.print(f"  averaging rounds    {metrics.averaging_rounds}")
    console.print(f"  staleness, largest  {metrics.staleness_max} updates")
    if run.checkpoint is not None:
        console.print(f"  checkpoint          {escape(str(run.checkpoint))}\n", soft_wrap=True)
        console.print(escape(loading_lines(run.checkpoint, model_line)), highlight=True, soft_wrap=True)


def loading_lines(checkpoint: Path, model_line: str) -> str:
    """Return the lines of plain Python that load the model of a checkpoint."""
    return "\n".join(
        (
            "from safetensors.torch import load_file",
            model_line,
            f'model.load_state_dict(load_file("{(checkpoint / "model.safetensors").as_posix()}"))',
            "model.eval()",
        )
    )
