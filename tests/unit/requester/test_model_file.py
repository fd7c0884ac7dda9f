from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from roost.codec import encode_record
from roost.config import JobConfig, NamedArguments
from roost.errors import InvalidConfigError
from roost.requester.model_file import ModelFile
from roost.types import ModelProfile, TensorKind, TensorRecord, UnitProfile

PROFILE = ModelProfile(
    name="my net!",
    micro_batch_size=4,
    reference_flop_per_s=1e9,
    units=(
        UnitProfile(
            start=0,
            stop=2,
            label="layers.0",
            forward_s=0.001,
            backward_s=0.002,
            forward_flop=1.0,
            tensors=(TensorRecord(name="w", dtype="float32", shape=(3, 2), kind=TensorKind.PARAMETER, trainable=True),),
            saved_bytes=5,
            crossing_bytes=0,
        ),
    ),
    input_bytes=7,
)
CONFIG = JobConfig(job_id="j", optimizer=NamedArguments(name="SGD", arguments=(("lr", 0.1),)), samples=9, batch_size=8, micro_batch_size=4)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    file = ModelFile(config=CONFIG, profile=PROFILE)
    file.save(tmp_path / "model.json")
    assert ModelFile.load(tmp_path / "model.json") == file


def test_a_bare_profile_is_a_job_with_adamw_and_one_micro_batch(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(encode_record(PROFILE)))
    loaded = ModelFile.load(path)
    assert loaded.profile == PROFILE
    assert (loaded.config.job_id, loaded.config.optimizer.name) == ("my-net-", "AdamW")
    assert (loaded.config.batch_size, loaded.config.micro_batch_size) == (4, 4)


def changed(**fields: object) -> str:
    raw = encode_record(ModelFile(config=CONFIG, profile=PROFILE))
    raw["profile"].update(fields)
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "expected exactly the fields"),
        ("{}", "expected exactly the fields ['config', 'profile']"),
        (changed(name=7), "ModelFile.profile.name: '7' is not a valid str"),
        (changed(micro_batch_size=0), "micro-batch size 0"),
        (changed(reference_flop_per_s=float("nan")), "'nan' is not a valid float"),
        (changed(units=[]), "has 0 units"),
        (changed(extra=1), "expected exactly the fields"),
        ('{"units": []}', "expected exactly the fields"),
        ("[" * 100_000, "is not a model's profile"),
    ],
)
def test_what_is_no_profile_is_refused_with_its_place(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(InvalidConfigError, match=re.escape(reason)) as caught:
        ModelFile.load(path)
    assert str(path) in caught.value.message
    assert "--save-profile" in caught.value.hint


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="cannot be read: No such file"):
        ModelFile.load(tmp_path / "none")
    with pytest.raises(InvalidConfigError, match="cannot be written: No such file"):
        ModelFile(config=CONFIG, profile=PROFILE).save(tmp_path / "no" / "model.json")
