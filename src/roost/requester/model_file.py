"""A captured model's costs in a file, so that it can be planned for again without the model: JSON, decoded strictly."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from roost.codec import decode_record, encode_record
from roost.config import JobConfig, NamedArguments
from roost.errors import InvalidConfigError, MalformedMessageError
from roost.types import ModelProfile

MAX_FILE_BYTES = 64 << 20
HINT = "Make it again: roost plan SCRIPT --save-profile FILE."


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """What planning needs of a job: what the model costs, and how it is trained."""

    config: JobConfig
    profile: ModelProfile

    def save(self, path: Path) -> None:
        """Write it. Raises InvalidConfigError if the file cannot be written."""
        text = json.dumps(encode_record(self), separators=(",", ":"), allow_nan=False)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidConfigError(f"{path}: the model's profile cannot be written: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> ModelFile:
        """Return what save() wrote; a file with a ModelProfile alone is taken as a job with AdamW and one micro-batch per batch.

        Raises InvalidConfigError if the file cannot be read or is anything else.
        """
        try:
            with path.open("rb") as stream:
                data = stream.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise InvalidConfigError(f"{path}: the model's profile cannot be read: {error.strerror}") from error
        if len(data) > MAX_FILE_BYTES:
            raise InvalidConfigError(f"{path}: a model's profile has at most {MAX_FILE_BYTES} bytes", hint=HINT)
        try:
            raw = json.loads(data)
            if isinstance(raw, dict) and "units" in raw:
                return _of_profile(decode_record(ModelProfile, raw))
            loaded = decode_record(cls, raw)
        except (ValueError, RecursionError, MalformedMessageError) as error:
            what = error.message if isinstance(error, MalformedMessageError) else str(error)
            raise InvalidConfigError(f"{path} is not a model's profile: {what}", hint=HINT) from error
        assert isinstance(loaded, ModelFile)
        return loaded


def _of_profile(profile: ModelProfile) -> ModelFile:
    size = profile.micro_batch_size
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", profile.name)[:64].lstrip("-._") or "model"
    config = JobConfig(job_id=name, optimizer=NamedArguments(name="AdamW"), batch_size=size, micro_batch_size=size, samples=size)
    return ModelFile(config=config, profile=profile)
