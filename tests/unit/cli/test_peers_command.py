from __future__ import annotations

import json
from pathlib import Path

import pytest

from roost.cli.coordinator import DATABASE, print_token
from roost.cli.peers import revoke, show
from roost.coordinator.store import Store
from roost.errors import CredentialsError, InvalidConfigError
from roost.types import Role


@pytest.fixture
def state(tmp_path: Path) -> Path:
    with Store(tmp_path / DATABASE) as store:
        for name, role in (("ann", Role.REQUESTER), ("node-1", Role.NODE)):
            secret = store.issue_token(role, now=86_400.0, ttl_s=60)
            store.redeem_token(secret, peer_id=name, key_hash=f"key of {name}", serial=7, now=86_400.0)
            store.set_certificate(name, 7, 31_536_000.0)
    return tmp_path


def test_the_peers_that_joined_are_listed_with_role_and_times(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(state, json_output=False)
    shown = capsys.readouterr().out
    assert "2 peer(s)" in shown
    assert all(text in shown for text in ("ann", "requester", "node-1", "1970-01-02 00:00", "1971-01-01 00:00"))
    revoke(state, "node-1")
    capsys.readouterr()
    show(state, json_output=True)
    ann, node = json.loads(capsys.readouterr().out)
    assert (ann["peer_id"], ann["role"], ann["revoked_at"]) == ("ann", "requester", None)
    assert node["revoked_at"] > 0


def test_revoking_says_how_the_name_can_be_given_again(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    revoke(state, "node-1")
    assert "roost token --role node --replace node-1" in capsys.readouterr().out
    print_token(state, role="node", ttl_s=60.0, replaces="node-1")
    assert capsys.readouterr().out.startswith("roost1-")


def test_a_peer_that_never_joined_cannot_be_revoked(state: Path) -> None:
    with pytest.raises(InvalidConfigError, match="no peer called 'node-7'"):
        revoke(state, "node-7")


def test_a_directory_without_a_coordinator_is_named(tmp_path: Path) -> None:
    for command in (lambda: revoke(tmp_path, "node-1"), lambda: show(tmp_path, json_output=True)):
        with pytest.raises(CredentialsError, match="no coordinator has run with the state directory"):
            command()
