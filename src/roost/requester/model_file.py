"""A captured model's costs in a file, so that it can be planned for again without the model: JSON, decoded strictly."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from roost.codec import decode_record
from roost.config import JobConfig, NamedArguments
from roost.requester.record_file import load_record, save_record
from roost.types import ModelProfile

WHAT = "model's profile"
HINT = "Make it again: roost plan SCRIPT --save-profile FILE."


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """What planning needs of a job: what the model costs, and how it is trained."""

    config: JobConfig
    profile: ModelProfile

    def save(self, path: Path) -> None:
        """Write it. Raises InvalidConfigError if the file cannot be written."""
        save_record(self, path, what=WHAT)

    @classmethod
    def load(cls, path: Path) -> ModelFile:
        """Return what save() wrote; a file with a ModelProfile alone is taken as a job with AdamW and one micro-batch per batch.

        Raises InvalidConfigError if the file cannot be read or is anything else.
        """
        return load_record(path, _decode, what=WHAT, hint=HINT)


def _decode(raw: object) -> ModelFile:
    if isinstance(raw, dict) and "units" in raw:
        return _of_profile(decode_record(ModelProfile, raw))
    loaded = decode_record(ModelFile, raw)
    assert isinstance(loaded, ModelFile)
    return loaded


def _of_profile(profile: ModelProfile) -> ModelFile:
    size = profile.micro_batch_size
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", profile.name)[:64].lstrip("-._") or "model"
    config = JobConfig(job_id=name, optimizer=NamedArguments(name="AdamW"), batch_size=size, micro_batch_size=size, samples=size)
    return ModelFile(config=config, profile=profile)
