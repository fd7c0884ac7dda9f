"""Damaged checkpoints are refused with a typed error or are whole. ROOST_FUZZ_MINUTES: see test_fuzz_graphs.py."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import corpus
import pytest
from benchmarks.hostile_files import SPECS, sample_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from test_fuzz_graphs import FUZZING, MINUTES

from roost.checkpoint.manifest import MANIFEST_FILE, MODEL_FILE
from roost.checkpoint.reader import load
from roost.errors import RoostError
from roost.weights.checkpoint_tensors import open_checkpoint

WORDS = [b"-", b"0", b"e9", b"null", b"[", b"]", b"{}", b",", b'"', b"1", b"9" * 20, b"\x00", b"\xff" * 8, b"F64", b"U8", b"BOOL"]


def damaged(content: bytes, data: st.DataObject, most: int) -> bytes:
    """Return `content` with a few changes among its first `most` bytes."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, min(most, len(changed)) - 1))
        length = data.draw(st.integers(0, 8))
        changed[position : position + length] = data.draw(st.binary(max_size=8) | st.sampled_from(WORDS))
    return bytes(changed)


@pytest.mark.timeout(max(300, 120 * MINUTES))
@FUZZING
@given(st.booleans(), st.data())
def test_damaged_checkpoints_are_refused_or_hold_what_they_list(manifest: bool, data: st.DataObject) -> None:
    listing, model = corpus.checkpoint_files()
    with tempfile.TemporaryDirectory() as directory:
        path = sample_checkpoint(Path(directory))
        if manifest:
            (path / MANIFEST_FILE).write_bytes(damaged(listing, data, len(listing)))
        else:
            model = damaged(model, data, 400)
            (path / MODEL_FILE).write_bytes(model)
            raw = json.loads(listing)
            raw["files"][0].update(nbytes=len(model), sha256=hashlib.sha256(model).hexdigest())
            (path / MANIFEST_FILE).write_text(json.dumps(raw))
        try:
            checkpoint = load(path)
        except RoostError:
            pass
        else:
            listed = {spec.name: spec.shape for spec in checkpoint.manifest.contents.tensors}
            assert listed.items() <= {name: tuple(tensor.shape) for name, tensor in checkpoint.model.items()}.items()
        wanted = {spec.name: spec for spec in SPECS}
        try:
            tensors = open_checkpoint(path / MODEL_FILE, wanted).read(tuple(wanted))
        except RoostError:
            return
        assert all(tuple(tensors[spec.name].shape) == spec.shape for spec in SPECS)
