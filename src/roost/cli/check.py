"""`roost check`: is the captured model the user's model, whole and cut into stages?"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from roost.api import CheckedJob, Defaults, measure_costs
from roost.capture.check import CutReport, check_cuts, even_cuts, tolerance
from roost.capture.cut import legal_cuts
from roost.capture.graph import Graph
from roost.capture.graph_format import to_bytes
from roost.capture.profiling import unit_label
from roost.cli.output import output_to_errors
from roost.cli.train import run_up_to_train
from roost.config import format_bytes, require
from roost.errors import CaptureMismatchError, InvalidConfigError, RoostError
from roost.planning.planner import make_plan
from roost.requester.pool_file import ImaginedPool, load_pool_file

MAX_STAGES = 64


def run(script: Path, arguments: tuple[str, ...], *, stages: str, pool_file: Path | None, json_output: bool) -> None:
    """Run `script` up to roost.train(job) and print how the captured model compares with the eager one.

    Raises CaptureMismatchError, naming the parameter that differs and the likely reason, and whatever train() would refuse the
    job with; if JSON is wanted, the error is printed as well.
    """
    try:
        numbers = _numbers(stages)
        pool = load_pool_file(pool_file) if pool_file is not None else None
        defaults = Defaults(check_only=True)
        with output_to_errors() if json_output else contextlib.nullcontext():
            run_up_to_train(script, arguments, defaults)
        checked = defaults.checked[0]
        console = None if json_output else Console(highlight=False)
        if console is not None:
            _print_capture(console, checked)
        reports = _compare_cuts(checked, numbers, pool, console)
        if json_output:
            print(json.dumps(_as_json(checked, reports)), flush=True)
    except RoostError as error:
        if json_output:
            print(json.dumps({"error": {"code": error.code, "message": error.message, "hint": error.hint}}), flush=True)
        raise


def _numbers(stages: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in stages.split(",") if part.strip())
    except ValueError as error:
        raise InvalidConfigError(f"--stages must be numbers such as 2,3,4, not {stages!r}") from error
    require(all(2 <= number <= MAX_STAGES for number in numbers), f"--stages must be between 2 and {MAX_STAGES}, not {stages!r}")
    return numbers


def _choices(checked: CheckedJob, numbers: Sequence[int], pool: ImaginedPool | None) -> list[tuple[int, ...]]:
    """Return the different cuts to compare: those a plan for `pool` makes, or even ones."""
    captured = checked.rehearsed.captured
    if pool is None:
        legal = legal_cuts(captured.graph)
        return list(dict.fromkeys(cuts for cuts in (even_cuts(captured, legal, number) for number in numbers) if cuts))
    costs = measure_costs(checked.rehearsed, checked.config)
    config = pool.apply(checked.config)
    plan = make_plan(costs, pool.node_profiles(costs.reference_flop_per_s), pool.link_profiles(), config, random.Random(config.seed))
    starts = [tuple(stage.start for stage in cluster.stages[1:]) for cluster in plan.clusters]
    return list(dict.fromkeys(cuts for cuts in starts if cuts))


def _compare_cuts(checked: CheckedJob, numbers: Sequence[int], pool: ImaginedPool | None, console: Console | None) -> list[CutReport]:
    rehearsed = checked.rehearsed
    if rehearsed.report is None:
        return []
    reports = []
    for cuts in _choices(checked, numbers, pool):
        report = check_cuts(rehearsed.captured, cuts, rehearsed.columns.batch, seed=checked.config.seed)
        if report.max_relative_error > tolerance(rehearsed.captured, report.worst_tensor):
            raise CaptureMismatchError(
                f"cut into {report.stages} stages at {', '.join(_places(rehearsed.captured.graph, cuts))}, {report.worst_tensor!r} differs "
                f"from the uncut model's by {report.max_relative_error:.2g} (relative)",
                hint="The uncut graph is right, so this is a fault of Roost's cutting: please report it with the model.",
            )
        reports.append(report)
        if console is not None:
            _print_cut(console, rehearsed.captured.graph, report)
    if console is not None and not reports:
        console.print("cut             no cut was compared: the model has no place to cut, or the pool needs none")
    return reports


def _places(graph: Graph, cuts: Sequence[int]) -> list[str]:
    return [unit_label(graph, start, stop) for start, stop in zip(cuts, (*cuts[1:], len(graph.nodes)), strict=True)]


def _print_capture(console: Console, checked: CheckedJob) -> None:
    captured, report = checked.rehearsed.captured, checked.rehearsed.report
    graph = captured.graph
    parameters = sum(tensor.numel() for name, tensor in captured.tensors.items() if any(r.name == name for r in graph.tensors))
    console.print(
        f"captured        {graph.name}: {len(graph.nodes)} operations, {len(legal_cuts(graph))} places to cut, graph of "
        f"{format_bytes(len(to_bytes(graph)))}, {parameters / 1e6:.3g} M numbers in {len(graph.tensors)} tensors"
        f"{f', {len(captured.aliases)} of them tied' if captured.aliases else ''}; {checked.capture_s:.1f} s",
        soft_wrap=True,
    )
    for record in graph.data:
        sizes = ", ".join("any" if size is None else str(size) for size in record.shape)
        console.print(f"data            {record.name}: {record.dtype} \\[{sizes}]", soft_wrap=True)
    if report is None:
        console.print("whole graph     not compared: the model is too large to run here, or has no weights here", soft_wrap=True)
    else:
        console.print(
            f"whole graph     {_verdict(report.same_loss, report.max_relative_gradient_error, report.worst_parameter)}", soft_wrap=True
        )


def _print_cut(console: Console, graph: Graph, report: CutReport) -> None:
    verdict = _verdict(report.same_loss, report.max_relative_error, report.worst_tensor)
    console.print(f"{report.stages:2d} stages       {verdict}; cut before {', '.join(_places(graph, report.cuts))}", soft_wrap=True)


def _verdict(same_loss: bool, error: float, worst: str) -> str:
    if same_loss and error == 0.0:
        return "same loss, same gradients, bit for bit"
    return f"same loss, same gradients within rounding: {worst or 'the loss'} differs by {error:.2g} (relative)"


def _as_json(checked: CheckedJob, reports: Sequence[CutReport]) -> dict[str, object]:
    captured, report = checked.rehearsed.captured, checked.rehearsed.report
    return {
        "model": captured.graph.name,
        "operations": len(captured.graph.nodes),
        "cuts": len(legal_cuts(captured.graph)),
        "graph_bytes": len(to_bytes(captured.graph)),
        "capture_s": checked.capture_s,
        "data": [dataclasses.asdict(record) for record in captured.graph.data],
        "whole": dataclasses.asdict(report) if report is not None else None,
        "stages": [dataclasses.asdict(item) for item in reports],
    }
