"""A plan in a file, so that a changed pool can be compared with it later: JSON, decoded strictly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from roost.codec import decode_record
from roost.config import check_identifier
from roost.errors import InvalidConfigError, MalformedMessageError
from roost.requester.record_file import load_record, save_record
from roost.types import ClusterPlan, ModelProfile, Plan

WHAT = "plan"
HINT = "Make it again: roost plan ... --save-plan FILE."
FIT_HINT = "Give the plan that the job runs with, and the script or profile of that job."


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan. Raises InvalidConfigError if the file cannot be written."""
    save_record(plan, path, what=WHAT)


def load_plan(path: Path) -> Plan:
    """Return what save_plan() wrote. Raises InvalidConfigError if the file cannot be read or is anything else."""
    return load_record(path, _decode, what=WHAT, hint=HINT)


def _decode(raw: object) -> Plan:
    _complete(raw)
    plan = decode_record(Plan, raw)
    assert isinstance(plan, Plan)
    if not plan.clusters:
        raise MalformedMessageError("it has no clusters")
    for index, cluster in enumerate(plan.clusters):
        _check_cluster(cluster, index)
    _check_names(plan)
    stages = Counter(stage.node_id for stage in plan.stages)
    twice = sorted(name for name, count in stages.items() if count > 1)
    if twice:
        raise MalformedMessageError(f"{twice[0]} has more than one stage")
    return plan


def _complete(raw: object) -> None:
    """Add what plans lack that were written before stages could recompute: none of theirs did."""
    clusters = raw.get("clusters") if isinstance(raw, dict) else None
    for cluster in clusters if isinstance(clusters, list) else ():
        stages = cluster.get("stages") if isinstance(cluster, dict) else None
        for stage in stages if isinstance(stages, list) else ():
            if isinstance(stage, dict):
                stage.setdefault("recompute", False)


def _check_names(plan: Plan) -> None:
    """Raise MalformedMessageError unless every node has a name that a node can have."""
    names = [stage.node_id for stage in plan.stages] + [backup.node_id for backup in plan.backup_stages] + list(plan.backups)
    names += [name for segment in plan.segments for name in segment.members]
    for name in names:
        try:
            check_identifier(name, "node")
        except InvalidConfigError as error:
            raise MalformedMessageError(error.message) from error


def _check_cluster(cluster: ClusterPlan, index: int) -> None:
    """Raise MalformedMessageError unless the stages of a cluster follow each other from unit 0 on, in order."""
    if not cluster.stages:
        raise MalformedMessageError(f"cluster {index} has no stages")
    places = [(stage.cluster, stage.index) for stage in cluster.stages]
    if cluster.index != index or places != [(index, place) for place in range(len(places))]:
        raise MalformedMessageError(f"the stages of cluster {index} are not numbered in their order")
    reached = 0
    for stage in cluster.stages:
        if stage.first_unit != reached or stage.last_unit <= reached:
            units = f"{stage.first_unit} .. {stage.last_unit}"
            raise MalformedMessageError(f"{stage.node_id} has units {units} where unit {reached} comes next")
        reached = stage.last_unit


def check_plan_fits(plan: Plan, profile: ModelProfile, path: Path) -> None:
    """Raise InvalidConfigError if the plan in `path` is one of another model than that of `profile`: units or tensors differ."""
    problem = _misfit(plan, profile)
    if problem:
        raise InvalidConfigError(f"{path}: the plan is not one of {profile.name}: {problem}", hint=FIT_HINT)


def _misfit(plan: Plan, profile: ModelProfile) -> str:
    """Return in what a plan differs from the model, '' if in nothing."""
    units = len(profile.units)
    for cluster in plan.clusters:
        planned = cluster.stages[-1].last_unit
        if planned != units:
            return f"cluster {cluster.index} has {planned} units, the model {units}"
    for stage in plan.stages:
        start, stop = profile.units[stage.first_unit].start, profile.units[stage.last_unit - 1].stop
        if (stage.start, stage.stop) != (start, stop):
            mine = f"{stage.start} .. {stage.stop}"
            return f"the stage of {stage.node_id} runs graph positions {mine}, in the model these units are {start} .. {stop}"
    planned_names = {name for segment in plan.segments for name in segment.tensors}
    names = {tensor.name for unit in profile.units for tensor in unit.tensors if tensor.averaged}
    for more, where in ((planned_names - names, "the plan alone"), (names - planned_names, "the model alone")):
        if more:
            others = f" and {len(more) - 1} more are" if len(more) > 1 else " is"
            return f"{min(more)}{others} in {where}"
    planned_bytes, nbytes = sum(segment.nbytes for segment in plan.segments), _averaged_bytes(profile)
    return f"its tensors have {planned_bytes} bytes, those of the model {nbytes}" if planned_bytes != nbytes else ""


def _averaged_bytes(profile: ModelProfile) -> int:
    return sum(tensor.nbytes for unit in profile.units for tensor in unit.tensors if tensor.averaged)
