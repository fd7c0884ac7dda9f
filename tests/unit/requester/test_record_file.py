from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from roost.codec import decode_record
from roost.errors import InvalidConfigError
from roost.requester import record_file
from roost.requester.record_file import load_record, save_record


@dataclass(frozen=True, kw_only=True)
class Thing:
    name: str


def decoded(raw: object) -> Thing:
    thing = decode_record(Thing, raw)
    assert isinstance(thing, Thing)
    return thing


def loaded(path: Path) -> Thing:
    return load_record(path, decoded, what="thing", hint="Make it again.")


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    save_record(Thing(name="é"), tmp_path / "thing.json", what="thing")
    assert loaded(tmp_path / "thing.json") == Thing(name="é")


def test_a_file_that_is_too_large_is_refused_before_it_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "thing.json"
    save_record(Thing(name="x" * 50), path, what="thing")
    monkeypatch.setattr(record_file, "MAX_FILE_BYTES", path.stat().st_size)
    assert loaded(path).name == "x" * 50
    monkeypatch.setattr(record_file, "MAX_FILE_BYTES", path.stat().st_size - 1)
    with pytest.raises(InvalidConfigError, match="thing.json: a thing has at most") as caught:
        loaded(path)
    assert caught.value.hint == "Make it again."


@pytest.mark.parametrize("content", [b"", b"\xff\xfe{", b"{}", b'{"name": 1}', b'{"name": NaN}', b"[" * 100_000])
def test_what_is_no_such_record_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "thing.json"
    path.write_bytes(content)
    with pytest.raises(InvalidConfigError, match="thing.json is not a thing: ") as caught:
        loaded(path)
    assert caught.value.hint == "Make it again."


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="none: the thing cannot be read: No such file"):
        loaded(tmp_path / "none")
    with pytest.raises(InvalidConfigError, match="the thing cannot be written: Is a directory"):
        save_record(Thing(name=""), tmp_path, what="thing")
