from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import roost
from roost.config import NodeOptions
from roost.errors import InvalidConfigError, RoostError, StageFailedError
from roost.requester.pools import ChildProcess, LocalPool, RemotePool, local, requester_dir


def test_a_number_of_nodes_makes_so_many_equal_ones() -> None:
    assert local(3).size == 3
    assert local().size == 2


def test_nodes_may_be_given_as_options_or_dicts() -> None:
    assert local([NodeOptions(name="desk", memory="64MB"), {"name": "shed", "relative_speed": 0.5}]).size == 2


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (0, "1 to 256 nodes, not 0"),
        (257, "1 to 256 nodes, not 257"),
        ([], "at least one node"),
        ([{"name": "a"}, {"name": "a"}], "two nodes of the local pool have the same name"),
        ([{"name": "node-2"}, {}], "same name"),
        ([{"memory": "plenty"}], "size 'plenty'"),
        ([{"relative_speed": 0.0}], r"relative_speed must be in \(0, 1\]"),
        ([{"threads": 0}], "threads must be positive"),
        ([{"speed": 1}], r"no field \['speed'\]; there are \['downlink_mbit', 'extra', 'latency_ms', 'memory'"),
        ([5], "not 5"),
        ("desk", "nodes must be"),
    ],
)
def test_local_pools_that_make_no_sense_are_refused(nodes: Any, reason: str) -> None:
    with pytest.raises(InvalidConfigError, match=reason):
        local(nodes)


@pytest.mark.parametrize(
    ("fields", "reason"), [({"address": "desk"}, "must be host:port"), ({"address": "desk:1", "nodes": 0}, "at least 1")]
)
def test_remote_pools_that_make_no_sense_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfigError, match=reason):
        RemotePool(**fields)


def test_certificates_of_different_coordinators_are_kept_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folders = {requester_dir(address) for address in ("desk:7700", "desk:7701", "[::1]:7700", "../desk:1")}
    assert len(folders) == 4
    assert {folder.parent for folder in folders} == {tmp_path / ".roost" / "requester"}


def test_a_process_that_ends_at_once_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    async def main() -> None:
        failed: asyncio.Future[RoostError] = asyncio.get_running_loop().create_future()
        child = ChildProcess("shed", tmp_path / "shed.log", failed.set_result)
        await child.start(["join", "127.0.0.1:1", "no-token", "--name", "shed"], {"HOME": str(tmp_path)})
        with pytest.raises(StageFailedError, match="the shed process ended at once; its log ends with:"):
            await child.first_line()
        async with asyncio.timeout(30):
            error = await failed
        assert "the shed process ended (exit code 1)" in error.message
        assert "error [R401] this is not a join token" in error.message
        await child.stop()

    asyncio.run(main())


def test_a_local_pool_is_what_roost_local_returns() -> None:
    assert isinstance(roost.local(1), LocalPool)
