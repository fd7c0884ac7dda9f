from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from roost.config import JobConfig, NamedArguments
from roost.errors import InvalidConfigError
from roost.requester.pool_file import MAX_FILE_BYTES, MAX_NODES, ImaginedPool, load_pool_file
from roost.types import LinkProfile

EXAMPLE = Path(__file__).parents[3] / "examples" / "pool.yaml"


def load(tmp_path: Path, text: str | bytes) -> ImaginedPool:
    path = tmp_path / "pool.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_pool_file(path)


def link(pool: ImaginedPool, source: str, target: str) -> LinkProfile:
    (found,) = (one for one in pool.link_profiles() if (one.source, one.target) == (source, target))
    return found


def config() -> JobConfig:
    return JobConfig(job_id="j", optimizer=NamedArguments(name="SGD"), samples=100, batch_size=32, micro_batch_size=16)


# ---------------------------------------------------------------- what a file says


def test_a_node_needs_a_memory_only(tmp_path: Path) -> None:
    pool = load(tmp_path, "nodes: [{memory: 8GB}]")
    (node,) = pool.node_profiles(2e9)
    assert (node.node_id, node.memory_bytes, node.flop_per_s, node.reliability) == ("node-1", 8 * 10**9, 2e9, 1.0)
    assert node.emulated
    assert pool.link_profiles() == ()
    assert pool.settings == {}


def test_speed_is_relative_to_the_machine_of_the_profile_and_gflops_are_not(tmp_path: Path) -> None:
    pool = load(tmp_path, "nodes: [{name: a, memory: 1, speed: 2.5}, {name: b, memory: 1, gflops: 50}]")
    assert [node.flop_per_s for node in pool.node_profiles(4e9)] == [1e10, 5e10]
    assert [node.flop_per_s for node in pool.node_profiles(8e9)] == [2e10, 5e10]


def test_a_link_is_as_fast_as_the_slower_of_uplink_and_downlink_and_latencies_add_up(tmp_path: Path) -> None:
    text = """
    nodes:
      - {name: a, memory: 1GB, up_mbit: 20, down_mbit: 100, latency_ms: 10}
      - {name: b, memory: 1GB, up_mbit: 40, down_mbit: 16, latency_ms: 5}
    """
    pool = load(tmp_path, text)
    assert link(pool, "a", "b") == LinkProfile(source="a", target="b", latency_s=0.015, bytes_per_s=2e6)
    assert link(pool, "b", "a") == LinkProfile(source="b", target="a", latency_s=0.015, bytes_per_s=5e6)


def test_a_link_of_its_own_replaces_rate_or_latency_both_ways(tmp_path: Path) -> None:
    text = """
    nodes: [{name: a, memory: 1GB}, {name: b, memory: 1GB}, {name: c, memory: 1GB}]
    links:
      - {between: [a, b], mbit: 8}
      - {between: [c, a], latency_ms: 50}
    """
    pool = load(tmp_path, text)
    for source, target in (("a", "b"), ("b", "a")):
        assert (link(pool, source, target).bytes_per_s, link(pool, source, target).latency_s) == (1e6, 0.0002)
    for source, target in (("a", "c"), ("c", "a")):
        assert (link(pool, source, target).bytes_per_s, link(pool, source, target).latency_s) == (125e6, 0.05)
    assert link(pool, "b", "c").bytes_per_s == 125e6


def test_a_latency_may_be_zero(tmp_path: Path) -> None:
    pool = load(tmp_path, "nodes: [{name: a, memory: 1, latency_ms: 0}, {name: b, memory: 1, latency_ms: 0.0}]")
    assert link(pool, "a", "b").latency_s == 0


def test_a_count_makes_nodes_with_numbers_and_links_name_them_all(tmp_path: Path) -> None:
    text = """
    nodes: [{name: lab, memory: 1GB, count: 3}, {name: desk, memory: 2GB}]
    links:
      - {between: [lab, desk], mbit: 8}
      - {between: [lab, lab], mbit: 80}
      - {between: [lab-2, desk], mbit: 16}
    """
    pool = load(tmp_path, text)
    assert [node.node_id for node in pool.node_profiles(1e9)] == ["lab-1", "lab-2", "lab-3", "desk"]
    assert link(pool, "desk", "lab-3").bytes_per_s == 1e6
    assert link(pool, "lab-1", "lab-3").bytes_per_s == 1e7
    # The later entry counts.
    assert link(pool, "lab-2", "desk").bytes_per_s == 2e6


def test_settings_of_the_job_replace_those_of_the_script(tmp_path: Path) -> None:
    pool = load(tmp_path, "nodes: [{memory: 1}]\njob: {batch_size: 8, averaging_interval: 4, max_clusters: 2, max_in_flight: 3}")
    job = pool.apply(config())
    assert (job.batch_size, job.micro_batch_size, job.averaging_interval, job.max_clusters, job.max_in_flight) == (8, 8, 4, 2, 3)
    assert load(tmp_path, "nodes: [{memory: 1}]").apply(config()) == config()


def test_settings_that_do_not_go_together_are_refused_with_the_file_named(tmp_path: Path) -> None:
    pool = load(tmp_path, "nodes: [{memory: 1}]\njob: {micro_batch_size: 64}")
    with pytest.raises(InvalidConfigError, match=r"pool\.yaml, job: micro_batch_size 64 must be in 1\.\.batch_size=32"):
        pool.apply(config())


@pytest.mark.parametrize("text", ["nodes: [{memory: 1GB}]\nlinks:\njob:\n", "# a comment\n---\nnodes:\n- memory: 1 GiB\n"])
def test_empty_parts_and_comments_do_no_harm(tmp_path: Path, text: str) -> None:
    assert len(load(tmp_path, text).nodes) == 1


def test_the_example_is_right() -> None:
    pool = load_pool_file(EXAMPLE)
    assert len(pool.nodes) == 5
    assert link(pool, "attic-1", "attic-2").bytes_per_s == 125e6
    assert pool.apply(config()).averaging_interval == 16


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must have 'nodes:' at its top"),
        ("[]", "must have 'nodes:' at its top"),
        ("nodes", "must have 'nodes:' at its top"),
        ("links: []", "'nodes' must list at least one node"),
        ("nodes: []", "'nodes' must list at least one node"),
        ("nodes: {a: 1}", "'nodes' must be a list"),
        ("nodes: [desk]", "'nodes' must be a list"),
        ("nodes: [{memory: 1}]\nnode: []", "the file: unknown field 'node'; there are nodes, links, job"),
        ("nodes: [{memory: 1, memry: 2}]", "nodes[0]: unknown field 'memry'; there are name, memory"),
        ("nodes: [{name: desk, memory: 1, 7: 2}]", "nodes[0] (desk): unknown field '7'"),
        ("nodes: [{name: desk}]", "nodes[0] (desk): memory is missing"),
        ("nodes: [{memory: 1}, {name: b, memory: lots}]", "nodes[1] (b): memory: size 'lots' is not a number of bytes"),
        ("nodes: [{memory: -1}]", "nodes[0]: memory: size -1 must not be negative"),
        ("nodes: [{memory: 0}]", "memory must be above 0"),
        ("nodes: [{memory: 1.5}]", "memory must be bytes or text such as 8GB, not 1.5"),
        ("nodes: [{memory: true}]", "memory must be bytes or text"),
        ("nodes: [{memory: 9999999TB}]", "memory must be above 0 and at most"),
        ("nodes: [{memory: [1]}]", "memory must be bytes or text such as 8GB, not [1]"),
        ("nodes: [{name: 7, memory: 1}]", "name must be 1 to 64 letters"),
        ("nodes: [{name: on, memory: 1}]", "name must be 1 to 64 letters, digits, '_', '.' or '-', not True"),
        ("nodes: [{name: a b, memory: 1}]", "name must be 1 to 64 letters"),
        ("nodes: [{name: -, memory: 1}]", "name must be 1 to 64 letters"),
        ("nodes: [{name: a, memory: 1, speed: 0}]", "nodes[0] (a): speed must be above 0 and at most 1e+06, not 0"),
        ("nodes: [{name: a, memory: 1, speed: -2}]", "speed must be above 0"),
        ("nodes: [{name: a, memory: 1, speed: .nan}]", "speed must be above 0 and at most 1e+06, not nan"),
        ("nodes: [{name: a, memory: 1, speed: .inf}]", "speed must be above 0 and at most 1e+06, not inf"),
        ("nodes: [{name: a, memory: 1, speed: fast}]", "speed must be a number, not 'fast'"),
        ("nodes: [{name: a, memory: 1, speed: 1e3}]", "speed must be a number, not '1e3': write 1000 or 1.0e+3"),
        ("nodes: [{name: a, memory: 1, speed: 15e-1}]", "speed must be a number, not '15e-1': write 1.5e+0"),
        (f"nodes: [{{name: a, memory: 1, speed: 0x{'f' * 9000}}}]", "not a very large number"),
        (f"nodes: [{{name: a, memory: 1, count: 0x{'f' * 9000}}}]", "count must be in 1..1024, not a very large number"),
        (f"nodes: [{{name: 0x{'f' * 9000}, memory: 1}}]", "not a very large number"),
        (f"nodes: [{{name: a, memory: 0x{'f' * 9000}}}]", "not a very large number"),
        ("nodes: [{name: a, memory: 1, speed: yes}]", "speed must be a number, not True"),
        ("nodes: [{name: a, memory: 1, speed: null}]", "speed must be a number, not None"),
        ("nodes: [{name: a, memory: 1, gflops: -5}]", "gflops must be above 0"),
        ("nodes: [{name: a, memory: 1, gflops: 5, speed: 1}]", "speed and gflops exclude each other"),
        ("nodes: [{name: a, memory: 1, up_mbit: 0}]", "up_mbit must be above 0"),
        ("nodes: [{name: a, memory: 1, down_mbit: -1}]", "down_mbit must be above 0"),
        ("nodes: [{name: a, memory: 1, latency_ms: -1}]", "latency_ms must be above 0"),
        ("nodes: [{name: a, memory: 1, latency_ms: false}]", "latency_ms must be a number, not False"),
        ("nodes: [{name: a, memory: 1, reliability: 1.5}]", "reliability must be above 0 and at most 1, not 1.5"),
        ("nodes: [{name: a, memory: 1, reliability: 0}]", "reliability must be above 0"),
        ("nodes: [{name: a, memory: 1, count: 0}]", "count must be in 1..1024, not 0"),
        ("nodes: [{name: a, memory: 1, count: 2.5}]", "count must be a whole number, not 2.5"),
        ("nodes: [{name: a, memory: 1, count: 9999}]", "count must be in 1..1024, not 9999"),
        ("nodes: [{name: a, memory: 1, count: 600}, {name: b, memory: 1, count: 600}]", "1200 nodes are too many: at most 1024"),
        ("nodes: [{name: a, memory: 1}, {name: a, memory: 1}]", "two nodes have the name 'a'"),
        ("nodes: [{name: a, memory: 1, count: 2}, {name: a-2, memory: 1}]", "two nodes have the name 'a-2'"),
        ("nodes: [{name: a, memory: 1, count: 2}, {name: a, memory: 1}]", "'a' names both a node and a group"),
        ("nodes: [{memory: 1}, {name: node-1, memory: 1}]", "two nodes have the name 'node-1'"),
        (f"nodes: [{{name: {'a' * 64}, memory: 1, count: 2}}]", "has a name of more than 64 letters"),
        ("nodes: [{name: a, memory: 1}]\nlinks: [[a, b]]", "'links' must be a list"),
        ("nodes: [{name: a, memory: 1}]\nlinks: [{mbit: 1}]", "links[0]: between must name two nodes"),
        ("nodes: [{name: a, memory: 1}]\nlinks: [{between: [a], mbit: 1}]", "between must name two nodes"),
        ("nodes: [{name: a, memory: 1}]\nlinks: [{between: [a, b], mbit: 1}]", "links[0]: between: there is no node 'b'; there are a"),
        ("nodes: [{name: a, memory: 1}]\nlinks: [{between: [a, [a]], mbit: 1}]", "there is no node ['a']"),
        ("nodes: [{name: a, memory: 1}]\nlinks: [{between: [a, a], mbit: 1}]", "a has no link to itself"),
        ("nodes: [{memory: 1, count: 2}]\nlinks: [{between: [node-1-1, node-1-2]}]", "mbit or latency_ms must be given"),
        ("nodes: [{memory: 1, count: 2}]\nlinks: [{between: [node-1-1, node-1-2], mbit: 0}]", "links[0]: mbit must be above 0"),
        ("nodes: [{memory: 1, count: 2}]\nlinks: [{between: [node-1-1, node-1-2], mbps: 5}]", "unknown field 'mbps'"),
        ("nodes: [{memory: 1}]\njob: [1]", "'job' must have fields"),
        ("nodes: [{memory: 1}]\njob: {lr: 1}", "job: unknown field 'lr'; there are batch_size"),
        ("nodes: [{memory: 1}]\njob: {batch_size: 0}", "job: batch_size must be in 1.."),
        ("nodes: [{memory: 1}]\njob: {batch_size: 1.5}", "job: batch_size must be a whole number, not 1.5"),
        ("nodes: [{memory: 1}]\njob: {max_clusters: -1}", "job: max_clusters must be in 0.."),
    ],
)
def test_every_mistake_names_file_entry_and_field(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(InvalidConfigError, match=re.escape(reason)) as caught:
        load(tmp_path, text)
    assert caught.value.message.startswith(str(tmp_path / "pool.yaml"))
    assert "examples/pool.yaml" in caught.value.hint


BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 30)), "nodes: *a29"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "line 1: anchors and aliases (& and *) are not taken"),
        ("nodes: &n [{memory: 1}]", "line 1: anchors and aliases"),
        ("base: &b {memory: 1}\nnodes: [{<<: *b}]", "anchors and aliases"),
        ("nodes: " + "[" * 500, "nested more than 8 deep"),
        ("nodes: " + "[" * 5000, "nest"),
        ("nodes: " + "{a: " * 5000, "nested more than 8 deep"),
        ("nodes: [{memory: 1}]\n---\nnodes: []", "line 2: a second document"),
        ("nodes: [{memory: 1}]\nnodes: []", "line 2: 'nodes' is there twice"),
        ("nodes:\n- memory: 1\n  speed: 1\n  speed: 2", "line 4: 'speed' is there twice"),
        ("nodes: [", "the file is not YAML"),
        ("nodes: !!python/object/apply:os.system ['true']", "the file is not YAML: could not determine a constructor"),
        ("nodes: [{memory: 1, ? [a] : b}]", "the file is not YAML"),
        ("nodes: [{memory: 1, speed: 2020-99-99}]", "the file is not YAML: month must be in 1..12"),
        ("\tnodes: 1", "the file is not YAML"),
        (b"nodes: \xc3\x28\xa0", "the file is not YAML"),
        (b"nodes: \x00", "the file is not YAML"),
        ("nodes: [{memory: 1, speed: " + "9" * 9000 + "}]", "the file is not YAML"),
        ("#" * (MAX_FILE_BYTES + 1), f"the file is larger than {MAX_FILE_BYTES} bytes"),
    ],
)
def test_files_made_to_break_the_reader_are_refused(tmp_path: Path, text: str | bytes, reason: str) -> None:
    with pytest.raises(InvalidConfigError, match=re.escape(reason)) as caught:
        load(tmp_path, text)
    assert len(caught.value.message) < 1000


def test_a_file_that_is_not_there_or_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="the file cannot be read: No such file"):
        load_pool_file(tmp_path / "none.yaml")
    with pytest.raises(InvalidConfigError, match="the file cannot be read: Is a directory"):
        load_pool_file(tmp_path)


def test_the_largest_pool_is_taken(tmp_path: Path) -> None:
    assert len(load(tmp_path, f"nodes: [{{name: a, memory: 1GB, count: {MAX_NODES}}}]").nodes) == MAX_NODES


def test_files_that_stand_for_too_much_are_refused_at_once(tmp_path: Path) -> None:
    many = ", ".join("{name: a, memory: 1, count: 1024}" for _ in range(1200))
    whole = "nodes: [{name: a, memory: 1, count: 1024}]\nlinks: [" + "{between: [a, a], mbit: 1}, " * 3 + "]"
    single = "nodes: [{name: a, memory: 1}, {name: b, memory: 1}]\nlinks: [" + "{between: [a, b], mbit: 1}, " * 2001 + "]"
    values = "nodes: [" + "1," * 70_000 + "]"
    tracemalloc.start()
    try:
        for text, reason in (
            (f"nodes: [{many}]", "2048 nodes are too many: at most 1024"),
            (whole, "the entries of links stand for 3145728 pairs of nodes, counting both ways: at most 2000000"),
            (single, "2001 entries of links are too many: at most 2000"),
            ("nodes: [{memory: 1" + ":59" * 80_000 + "}]", "line 1: a value has more than 16384 letters"),
            (values, "line 1: the file has more than 65536 values"),
        ):
            with pytest.raises(InvalidConfigError, match=reason):
                load(tmp_path, text)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_a_link_within_a_group_is_one_between_any_two_of_it(tmp_path: Path) -> None:
    pool = load(tmp_path, "nodes: [{name: a, memory: 1, count: 3}]\nlinks: [{between: [a, a], mbit: 8}]")
    assert {one.bytes_per_s for one in pool.link_profiles()} == {1e6}
    assert len(pool.links) == 6


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("name", "memory", "between", "mbit", "x")), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(raw=st.dictionaries(st.sampled_from(("nodes", "links", "job", "other")), ANYTHING | st.lists(ANYTHING, max_size=2), max_size=3))
def test_whatever_a_file_says_it_is_taken_or_refused_with_a_reason(raw: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(raw))
    try:
        pool = load_pool_file(path)
    except InvalidConfigError as error:
        assert str(path) in error.message
    else:
        assert pool.node_profiles(1e9)
