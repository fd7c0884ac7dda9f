from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from roost.cli.display import RunDisplay, loading_lines, plan_table
from roost.messages import JobState
from roost.metrics.rates import ClusterProgress
from roost.requester.run import RunMetrics
from roost.types import ClusterPlan, EpochResult, ModelProfile, NodeProfile, Plan, SegmentPlan, StagePlan, UnitProfile

LONG = "a-node-with-a-rather-long-name"


def unit(index: int, label: str) -> UnitProfile:
    return UnitProfile(
        start=index,
        stop=index + 1,
        label=label,
        forward_s=0.001,
        backward_s=0.001,
        forward_flop=1.0,
        tensors=(),
        saved_bytes=0,
        crossing_bytes=0,
    )


def profile(*labels: str) -> ModelProfile:
    units = tuple(unit(index, label) for index, label in enumerate(labels))
    return ModelProfile(name="model", micro_batch_size=1, reference_flop_per_s=1e9, units=units, input_bytes=1)


def node(name: str, *, emulated: bool = False) -> NodeProfile:
    return NodeProfile(
        node_id=name,
        address="127.0.0.1:1",
        memory_bytes=5_900_000,
        flop_per_s=1e9,
        matmul_flop_per_s=1e9,
        convolution_flop_per_s=1e9,
        device="cpu",
        threads=1,
        emulated=emulated,
    )


def stage(cluster: int, index: int, name: str, first: int, last: int) -> StagePlan:
    return StagePlan(
        cluster=cluster,
        index=index,
        node_id=name,
        first_unit=first,
        last_unit=last,
        start=first,
        stop=last,
        max_in_flight=2,
        memory_needed_bytes=123_400_000_000,
        memory_available_bytes=567_800_000_000,
        compute_s=1.23456,
        send_s=0.0,
    )


def plan(*clusters: tuple[StagePlan, ...], notes: tuple[str, ...] = ()) -> Plan:
    return Plan(
        clusters=tuple(
            ClusterPlan(index=index, stages=stages, share=0.5, samples_per_s=1234.5, bottleneck="x")
            for index, stages in enumerate(clusters)
        ),
        segments=(SegmentPlan(index=0, tensors=(), nbytes=1, members=("a", "b")),),
        backups=(),
        samples_per_s=2469.0,
        notes=notes,
    )


def console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=80, highlight=False), out


def metrics(*, history: tuple[EpochResult, ...] = (), updates: int = 0) -> RunMetrics:
    cluster = ClusterProgress(
        cluster=0, samples_per_s=123456.7, loss=12.3456, staleness_mean=1.23, staleness_max=4, updates=updates, samples=updates
    )
    return RunMetrics(
        state=JobState.TRAINING,
        epochs_done=1.0,
        epochs=100,
        elapsed_s=1.0,
        samples=1,
        samples_per_s=1.0,
        clusters=(cluster,),
        history=history,
        bytes_sent=1,
        averaging_rounds=1,
        cpu_s=1.0,
        staleness_max=4,
    )


def test_the_plan_fits_80_columns_and_says_who_holds_which_layers() -> None:
    to, out = console()
    labels = ("features.0", "features.3", "features.4", "classifier.0", "loss")
    planned = plan((stage(0, 0, "desk", 0, 2), stage(0, 1, "laptop", 2, 5)), (stage(1, 0, "attic", 0, 5),))
    to.print(plan_table(planned, (node("desk", emulated=True), node("laptop"), node("attic")), profile(*labels)))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [" ".join(line.split()) for line in lines]
    assert "plan: 2 cluster(s), 1 ring(s), 2469 samples/s predicted" in rows
    assert "cluster 0: 50% of the data, 1234 samples/s" in rows
    assert "0 desk* features.0 .. 3 123.4 GB / 567.8 GB 1234.56 2" in rows
    assert "1 laptop features.4 .. loss 123.4 GB / 567.8 GB 1234.56 2" in rows
    assert "0 attic features.0 .. loss 123.4 GB / 567.8 GB 1234.56 2" in rows
    assert any(row.startswith("* emulated") for row in rows)


def test_long_names_are_folded_and_nothing_is_lost() -> None:
    to, out = console()
    labels = ("transformer.encoder.layers.0.attention.projection", "transformer.decoder.layers.11.feed_forward.output")
    to.print(plan_table(plan((stage(0, 0, LONG, 0, 2),)), (node(LONG),), profile(*labels)))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in out.getvalue()
    shown = "".join(out.getvalue().split())
    assert all(part in shown for part in ("projection", "output", "123.4GB/567.8GB", "1234.56"))


@pytest.mark.parametrize("label", ["[bold]", "layers[0]", "[/]"])
def test_brackets_in_names_are_shown_as_they_are(label: str) -> None:
    to, out = console()
    display = RunDisplay(to)
    display.planned(plan((stage(0, 0, "a", 0, 1),), notes=(f"note {label}",)), (node("a"),), profile(label))
    assert label in out.getvalue()
    assert f"note {label}" in out.getvalue()


def test_a_checkpoint_that_is_saved_in_the_background_is_named_once() -> None:
    to, out = console()
    display = RunDisplay(to)
    for saving in ("", "epoch-0001", "epoch-0001", "", "epoch-0003"):
        display.updated(replace(metrics(), saving=saving))
    display.close()
    shown = [line.strip() for line in out.getvalue().splitlines()]
    assert shown == ["saving epoch-0001 in the background", "saving epoch-0003 in the background"]


def test_every_epoch_is_shown_once_on_one_line() -> None:
    to, out = console()
    display = RunDisplay(to)
    first = EpochResult(epoch=1, train_loss=123.45678, validation_loss=123.45678, metric=0.5, samples=1, seconds=12345.6)
    second = EpochResult(epoch=2, train_loss=1.0, validation_loss=None, metric=None, samples=1, seconds=2.0)
    for history in ((), (first,), (first, second), (first, second)):
        display.updated(metrics(history=history))
    display.close()
    lines = out.getvalue().splitlines()
    assert lines == [
        "  epoch 1/100: loss 123.4568, validation loss 123.4568, metric 0.5000  (12345.6 s)",
        "  epoch 2/100: loss 1.0000  (2.0 s)",
    ]


def test_without_a_terminal_progress_is_a_line_now_and_then_once_there_is_progress() -> None:
    to, out = console()
    display = RunDisplay(to)
    display.updated(metrics())
    assert out.getvalue() == ""
    display.updated(metrics(updates=3))
    display.updated(metrics(updates=4))
    assert out.getvalue().splitlines() == ["  cluster 0: 123457 samples/s, loss 12.3456, staleness 1.2 (max 4), 3 updates"]


def test_whom_a_run_waits_for_is_said_once_and_when_it_goes_on() -> None:
    to, out = console()
    display = RunDisplay(to)
    for paused in ((), ("desk", "[b]"), ("desk", "[b]"), ()):
        display.updated(replace(metrics(), paused=paused))
    assert out.getvalue().splitlines() == ["  waiting for desk, [b], paused by the owner", "  no node is paused any more"]


def test_the_lines_that_load_a_checkpoint_are_python() -> None:
    text = loading_lines(Path("/a path/[x]/epoch-0001"), "model = build()")
    compile(text, "lines", "exec")
    assert 'load_file("/a path/[x]/epoch-0001/model.safetensors")' in text
