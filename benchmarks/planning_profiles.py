"""The measured profiles that the planning benchmark plans for, from benchmarks/profiles/*.json. Never imports torch."""

from __future__ import annotations

import json
from pathlib import Path

from roost.codec import decode_record, encode_record
from roost.types import ModelProfile, TensorKind, TensorRecord, UnitProfile

PROFILES = Path(__file__).parent / "profiles"
MODELS = ("resnet50", "bert-base", "gpt2-small", "llama-1b")


def load_profile(name: str) -> ModelProfile:
    """Return the profile of one of MODELS, decoded strictly. Raises OSError or MalformedMessageError."""
    profile = decode_record(ModelProfile, json.loads((PROFILES / f"{name}.json").read_bytes()))
    assert isinstance(profile, ModelProfile)
    return profile


def save_profile(profile: ModelProfile) -> Path:
    """Write `profile` under its name and return the file."""
    PROFILES.mkdir(exist_ok=True)
    path = PROFILES / f"{profile.name}.json"
    record = encode_record(profile)
    units = record.pop("units")
    # One unit a line: a difference between two measurements can be read.
    head = json.dumps(record, allow_nan=False)[:-1]
    lines = ",\n".join(json.dumps(unit, separators=(",", ":"), allow_nan=False) for unit in units)
    path.write_text(f'{head}, "units": [\n{lines}\n]}}\n')
    return path


def merge_units(profile: ModelProfile, limit: int) -> ModelProfile:
    """Return `profile` with runs of neighbouring units merged so that about `limit` remain.

    A run's costs are sums, its crossing is that of its last unit, and its tensors of one kind become one. Runs hold about the
    same seconds and bytes, and end where the fewest values cross.
    """
    units = profile.units
    if len(units) <= limit:
        return profile
    seconds = [unit.forward_s + unit.backward_s for unit in units]
    sizes = [unit.tensor_bytes + unit.saved_bytes for unit in units]
    weights = [s / sum(seconds) + b / sum(sizes) for s, b in zip(seconds, sizes, strict=True)]
    merged, first = [], 0
    for number in range(limit):
        last = _run_end(profile, weights, first, number, limit)
        if last > first:
            merged.append(_merge(units[first:last], f"{number}"))
            first = last
    return ModelProfile(
        name=profile.name,
        micro_batch_size=profile.micro_batch_size,
        reference_flop_per_s=profile.reference_flop_per_s,
        units=tuple(merged),
        input_bytes=profile.input_bytes,
        stage_s=profile.stage_s,
        stage_update_s=profile.stage_update_s,
    )


def _run_end(profile: ModelProfile, weights: list[float], first: int, number: int, limit: int) -> int:
    """Return the unit after the run that starts at `first`: within half a run of an even division, where little crosses."""
    if number == limit - 1:
        return len(weights)
    whole, done = sum(weights), 0.0
    low, high = (number + 0.6) / limit * whole, (number + 1.4) / limit * whole
    candidates, nearest = [], (whole, first)
    for index, weight in enumerate(weights[:-1]):
        done += weight
        if index < first:
            continue
        nearest = min(nearest, (abs(done - (number + 1) / limit * whole), index + 1))
        if low <= done <= high:
            candidates.append((profile.units[index].crossing_bytes, index + 1))
    return min(candidates)[1] if candidates else nearest[1]


def _merge(run: tuple[UnitProfile, ...], name: str) -> UnitProfile:
    return UnitProfile(
        start=run[0].start,
        stop=run[-1].stop,
        label=run[0].label,
        forward_s=sum(unit.forward_s for unit in run),
        backward_s=sum(unit.backward_s for unit in run),
        update_s=sum(unit.update_s for unit in run),
        forward_flop=sum(unit.forward_flop for unit in run),
        tensors=_merge_tensors(tuple(tensor for unit in run for tensor in unit.tensors), name),
        saved_bytes=sum(unit.saved_bytes for unit in run),
        crossing_bytes=run[-1].crossing_bytes,
    )


def _merge_tensors(tensors: tuple[TensorRecord, ...], name: str) -> tuple[TensorRecord, ...]:
    """Return one tensor for each combination of kind, trainable and averaged, of as many bytes as those it stands for."""
    sums: dict[tuple[TensorKind, bool, bool], int] = {}
    for tensor in tensors:
        key = (tensor.kind, tensor.trainable, tensor.averaged)
        sums[key] = sums.get(key, 0) + tensor.nbytes
    return tuple(
        TensorRecord(
            name=f"{kind.value}-{'trainable' if trainable else 'fixed'}-{'averaged' if averaged else 'own'}-{name}",
            dtype="float32" if averaged else "uint8",
            shape=(size // 4 if averaged else size,),
            kind=kind,
            trainable=trainable,
        )
        for (kind, trainable, averaged), size in sums.items()
    )
