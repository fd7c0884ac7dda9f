from __future__ import annotations

import datetime
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from roost.errors import CredentialsError
from roost.transport.authority import create_authority
from roost.transport.credentials import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    Credentials,
    create_key,
    dns_name,
    fingerprint,
    load_or_create_key,
    read_identity,
    write_private,
)
from roost.types import Role


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    return create_authority(tmp_path / "authority").create_credentials("node-1", Role.NODE)


def test_credentials_are_what_they_were_after_saving(credentials: Credentials, tmp_path: Path) -> None:
    credentials.save(tmp_path / "state")
    assert Credentials.load(tmp_path / "state") == credentials


def test_files_are_for_their_owner_only(credentials: Credentials, tmp_path: Path) -> None:
    credentials.save(tmp_path / "state")
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state").iterdir()} == {0o600}


def test_saving_again_replaces_a_readable_file_by_a_private_one(credentials: Credentials, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / KEY_FILE).write_text("old")
    credentials.save(tmp_path / "state")
    assert stat.S_IMODE((tmp_path / "state" / KEY_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("name", [KEY_FILE, CERTIFICATE_FILE, AUTHORITY_FILE])
@pytest.mark.parametrize("damage", [None, b"", b"not a file of credentials"])
def test_missing_and_damaged_files_are_named_errors(credentials: Credentials, tmp_path: Path, name: str, damage: bytes | None) -> None:
    credentials.save(tmp_path / "state")
    path = tmp_path / "state" / name
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    with pytest.raises(CredentialsError):
        Credentials.load(tmp_path / "state")


def test_a_key_of_another_certificate_is_refused(credentials: Credentials, tmp_path: Path) -> None:
    replace(credentials, key_pem=create_key()).save(tmp_path / "state")
    with pytest.raises(CredentialsError, match="key"):
        Credentials.load(tmp_path / "state")


def test_a_certificate_of_another_authority_is_refused(credentials: Credentials, tmp_path: Path) -> None:
    other = create_authority(tmp_path / "other")
    replace(credentials, authority_pem=other.certificate_pem).save(tmp_path / "state")
    with pytest.raises(CredentialsError, match="authority"):
        Credentials.load(tmp_path / "state")


def test_a_certificate_that_has_run_out_is_refused(credentials: Credentials, tmp_path: Path) -> None:
    credentials.save(tmp_path / "state")
    with pytest.raises(CredentialsError, match="ran out"):
        Credentials.load(tmp_path / "state", now=datetime.datetime(2200, 1, 1, tzinfo=datetime.UTC))


def test_identity_comes_from_the_certificate(credentials: Credentials) -> None:
    assert read_identity(credentials.certificate_pem) == ("node-1", Role.NODE)


def test_a_certificate_that_names_no_peer_has_no_identity(credentials: Credentials) -> None:
    with pytest.raises(CredentialsError):
        read_identity(credentials.authority_pem)


def test_dns_names_are_valid_and_differ_where_ids_differ() -> None:
    ids = ["node", "Node", "NODE", "a.b", "a-b", "a_b", "x" * 64]
    names = [dns_name(peer_id) for peer_id in ids]
    assert len(set(names)) == len(ids)
    assert all(len(label) <= 63 for name in names for label in name.split("."))
    assert all(name == name.lower() for name in names)


def test_a_fingerprint_is_of_the_certificate_and_not_of_its_text(credentials: Credentials) -> None:
    text = fingerprint(credentials.certificate_pem)
    assert text == fingerprint(b"some words before\n" + credentials.certificate_pem)
    assert text.startswith("sha256:")
    assert len(text) == 71


def test_a_key_is_made_once_and_found_again(tmp_path: Path) -> None:
    assert load_or_create_key(tmp_path / "state") == load_or_create_key(tmp_path / "state")


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CredentialsError, match="file"):
        write_private(tmp_path / "file" / "key.pem", b"secret")
