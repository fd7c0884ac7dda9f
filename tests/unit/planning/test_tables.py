"""The terms of docs/planning.md that need no neighbour."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from by_hand import ByHand
from synthetic import KB, MB, Scene, all_links, even_model, job, link, model, node, random_scene, scene, unit

from roost.config import PlanningConfig, TensorCodec
from roost.planning.memory import IN_FLIGHT_LIMIT
from roost.planning.tables import StageTables, messages_of, shared_line


def tables_of(made: Scene, clusters: int = 1) -> StageTables:
    return made.maker().tables(made.nodes, clusters, range(len(made.nodes)))


MEASURED = node("a", speed=2.0, memory_bytes_per_s=1e9, message_s=1e-4, wire_s_per_byte=1e-9)


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        # Half of 6 ms; 5 passes over 2 MB at 1 GB/s every other micro-batch, and 2 more for a copy; 6 messages; 20 kB each way.
        (1, 3, 0.003 + 0.005 + 0.002 + 6e-4 + 4e-5),
        # The first stage: one neighbour; 10 kB sent, the data and 10 kB of gradients received.
        (0, 2, 0.003 + 0.005 + 0.002 + 4e-4 + 3e-5),
        # The last copies no weights: 10 kB of gradients sent, 10 kB received.
        (2, 4, 0.003 + 0.005 + 4e-4 + 2e-5),
        # The whole model: no neighbour, the data received.
        (0, 4, 0.006 + 0.010 + 2e-4 + 1e-5),
    ],
)
def test_compute_is_work_updates_messages_and_bytes(first: int, last: int, expected: float) -> None:
    made = scene(even_model(4), [MEASURED, node("b")], config=job(optimizer="AdamW", batch_size=16))
    assert tables_of(made).compute[0, first, last] == pytest.approx(expected, rel=1e-12)


def test_an_update_that_was_measured_is_scaled_like_other_work_and_the_others_are_estimated() -> None:
    profile = model([unit(0, update=0.004), unit(1), unit(2, update=0.008)], stage=0.001)
    fast = node("a", speed=2.0, memory_bytes_per_s=1e9)
    tables = tables_of(scene(profile, [fast], config=job(optimizer="AdamW", batch_size=16)))
    # 9 ms of work, half of 12 ms of updates and 1 ms for the stage, twice as fast; 5 passes over unit 1 every other micro-batch.
    assert tables.compute[0, 0, 3] == pytest.approx((0.009 + 0.006 + 0.001) / 2 + 0.0025)
    # Without the last unit: the copy of 2 MB, read and written, too.
    assert tables.compute[0, 0, 2] == pytest.approx((0.006 + 0.002 + 0.001) / 2 + 0.0025 + 0.002)
    assert tables.compute[0, 2, 3] == pytest.approx((0.003 + 0.004 + 0.001) / 2)


def test_messages_are_two_for_each_neighbour_and_two_more() -> None:
    assert [messages_of(0, 5, 5), messages_of(0, 2, 5), messages_of(2, 4, 5), messages_of(3, 5, 5)] == [2, 4, 6, 4]


def test_what_was_not_measured_is_free() -> None:
    made = scene(even_model(4), [node("a", speed=0.25), node("b")], config=job(optimizer="AdamW"))
    assert tables_of(made).compute[0, 1, 3] == pytest.approx(0.024)


def line_scene(**fields: int) -> Scene:
    nodes = [node("a"), node("b")]
    return scene(even_model(4), nodes, [link("a", "b", rate=1e6), link("b", "a", rate=2e6)], config=job(batch_size=16, **fields))


def test_the_uplink_carries_values_onward_and_gradients_back() -> None:
    maker = line_scene().maker()
    assert maker.line_seconds(0, 1, 3, 1) == pytest.approx((0.020, 0.010))
    # The first stage sends no gradients, but receives the data; the last sends no values.
    assert maker.line_seconds(0, 0, 3, 1) == pytest.approx((0.010, 0.010))
    assert maker.line_seconds(0, 3, 4, 1) == pytest.approx((0.010, 0.005))
    assert maker.line_seconds(0, 0, 4, 1) == pytest.approx((0.0, 0.005))


def test_averaging_shares_the_line_while_it_keeps_up_with_its_interval() -> None:
    # Half of 2 MB there and half back, every 1000 updates of 2 micro-batches: 1000 bytes for each micro-batch.
    maker = line_scene(averaging_interval=1000).maker()
    assert maker.averaged_bytes(2)[1, 3] == pytest.approx(1000)
    assert maker.line_seconds(0, 1, 3, 2) == pytest.approx((0.021, 0.0105))


def test_averaging_that_cannot_keep_up_takes_half_of_the_line_and_no_more() -> None:
    maker = line_scene(averaging_interval=16).maker()
    assert maker.averaged_bytes(2)[1, 3] == pytest.approx(62_500)
    assert maker.line_seconds(0, 1, 3, 2) == pytest.approx((0.040, 0.020))


@pytest.mark.parametrize(("clusters", "share"), [(1, 0.0), (2, 1.0), (4, 1.5), (10, 1.8)])
def test_a_ring_sends_twice_the_bytes_less_those_of_one_member(clusters: int, share: float) -> None:
    maker = line_scene(averaging_interval=10).maker()
    assert maker.round_bytes(1, 3, clusters) == pytest.approx(share * 2 * MB)
    assert maker.averaged_bytes(clusters)[1, 3] == pytest.approx(share * 2 * MB / 20)


def test_compression_makes_fewer_bytes_of_both_kinds() -> None:
    made = scene(
        even_model(4),
        [node("a"), node("b")],
        config=job(averaging_interval=1000),
        options=PlanningConfig(activation_compression=0.5, averaging_compression=0.25),
    )
    assert made.maker().line_bytes(1, 3, 2) == pytest.approx((10 * KB, 10 * KB, 500))


@pytest.mark.parametrize(("codec", "factor"), [(TensorCodec.FP16, 0.5003), (TensorCodec.INT8, 0.254)])
def test_the_jobs_codec_makes_fewer_bytes_between_stages_and_leaves_the_data_as_it_is(codec: TensorCodec, factor: float) -> None:
    exact, coded = (
        scene(even_model(4), [node("a")], config=job(activation_compression=each)).maker() for each in (TensorCodec.NONE, codec)
    )
    assert coded.crossing[1:] == pytest.approx(factor * exact.crossing[1:])
    assert coded.crossing[0] == exact.crossing[0] > 0


def test_a_line_is_busy_with_both_or_twice_as_long_as_with_its_own() -> None:
    piped, averaged = np.array([[100.0, 100.0]]), np.array([[30.0, 400.0]])
    assert shared_line(piped, averaged, np.array([10.0, 1.0])).tolist() == [[[13.0, 20.0]], [[130.0, 200.0]]]


def test_the_table_of_lines_and_the_lines_one_by_one_agree() -> None:
    made = random_scene(random.Random(5), nodes=3, units=5)
    maker = made.maker()
    tables = maker.tables(made.nodes, 3, range(3))
    for place, (first, last) in itertools.product(range(3), itertools.combinations(range(6), 2)):
        slowest = max(float(tables.compute[place, first, last]), *maker.line_seconds(place, first, last, 3))
        assert tables.busy[place, first, last] == pytest.approx(slowest, rel=1e-12)
        sent, received, _ = maker.line_bytes(first, last, 3)
        assert (sent, received) == (maker.sent_bytes()[first, last], maker.received_bytes()[first, last])


@pytest.mark.parametrize("seed", range(6))
def test_every_entry_is_what_the_formulas_give_by_hand(seed: int) -> None:
    made = random_scene(random.Random(seed), nodes=3, units=4)
    for clusters in (1, 3):
        tables, by_hand = tables_of(made, clusters), ByHand(made, clusters)
        bound = made.config.max_in_flight or IN_FLIGHT_LIMIT
        for (place, member), (first, last) in itertools.product(enumerate(made.nodes), itertools.combinations(range(5), 2)):
            compute = by_hand.compute(member, first, last)
            up = by_hand.line(by_hand.bytes_out(first, last), first, last, by_hand.up(member))
            down = by_hand.line(by_hand.bytes_in(first, last), first, last, by_hand.down(member))
            assert tables.compute[place, first, last] == pytest.approx(compute, rel=1e-12)
            assert tables.busy[place, first, last] == pytest.approx(
                max(compute + by_hand.copying(member, first, last), up, down), rel=1e-12
            )
            most = int(tables.most_in_flight[place, first, last])
            assert most <= bound
            assert most == 0 or by_hand.memory(first, last, most) <= member.memory_bytes
            assert most == bound or by_hand.memory(first, last, most + 1) > member.memory_bytes


def test_an_empty_stage_is_impossible() -> None:
    tables = tables_of(scene(even_model(3), [node("a")]))
    for first, last in itertools.product(range(4), repeat=2):
        if last <= first:
            assert np.isinf(tables.busy[0, first, last])
            assert tables.most_in_flight[0, first, last] == 0


def test_the_bound_of_the_job_on_what_is_in_flight_is_kept() -> None:
    made = scene(even_model(3), [node("a"), node("small", memory=4 * MB)], config=job(max_in_flight=3))
    most = tables_of(made).most_in_flight
    assert most[0, 0, 3] == 3
    assert most[1, 0, 1] == 1
    assert most[1, 0, 3] == 0


def test_tables_of_some_nodes_use_the_lines_of_their_own_places() -> None:
    nodes = [node("a"), node("b"), node("c")]
    made = scene(even_model(4), nodes, [*all_links(nodes), *(link("c", other, rate=1e6) for other in "ab")])
    maker = made.maker()
    part = maker.tables(nodes[2:], 1, [2])
    assert part.busy[0, 1, 3] == pytest.approx(0.020)
    assert part.busy[0, 1, 3] == tables_of(made).busy[2, 1, 3]


@pytest.mark.parametrize(("codec", "share"), [(TensorCodec.NONE, 1.0), (TensorCodec.FP16, 0.5), (TensorCodec.INT8, 0.254)])
def test_the_codec_of_the_job_counts(codec: TensorCodec, share: float) -> None:
    maker = line_scene(averaging_interval=10, averaging_compression=codec).maker()
    assert maker.round_bytes(1, 3, 2) == pytest.approx(share * 2 * MB, rel=0.001)


def test_an_automatic_interval_is_planned_with_a_usual_one() -> None:
    assert line_scene(averaging_interval=0).maker().round_bytes(1, 3, 2) == line_scene(averaging_interval=16).maker().round_bytes(1, 3, 2)
