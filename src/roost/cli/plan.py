"""`roost plan`: what a training script would get on a pool, whether that is worth it, and what would make it better.

torch is imported only to run a script: planning for a saved profile takes a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from roost import messages as m
from roost.cli.lifetime import stop_on_sigterm
from roost.cli.output import output_to_errors
from roost.cli.plan_change import print_change, print_no_change
from roost.cli.plan_picture import draw_plan
from roost.cli.plan_report import as_json, error_json, print_plan, with_remedies
from roost.cli.status import NobodyHome
from roost.config import JobConfig, require
from roost.errors import InvalidConfigError, MalformedMessageError, PlanningError, RoostError
from roost.planning.advice import Advice, PoolChange, advise
from roost.planning.planner import make_plan
from roost.planning.remedies import remedies
from roost.planning.replan import PAYBACK_S, PlanChange, predict_again, propose_change
from roost.requester.model_file import ModelFile
from roost.requester.plan_file import check_plan_fits, load_plan, save_plan
from roost.requester.pool_file import ImaginedPool, load_pool_file
from roost.requester.pools import Pool, RemotePool, local
from roost.transport.dispatch import error_from
from roost.types import LinkProfile, ModelProfile, NodeProfile, Plan

MEASURE_MARGIN_S = 120.0
"""Time for measuring links and planning, on top of the time nodes have to join."""
NO_POOL_HINT = "Add --pool-file FILE (imagined nodes; see examples/pool.yaml), --pool HOST:PORT, or --local N."


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """What the command line asks for."""

    script: Path | None = None
    arguments: tuple[str, ...] = ()
    """For the script."""
    pool_file: Path | None = None
    address: str = ""
    token: str = ""
    nodes: int = 1
    local_nodes: int = 0
    wait_s: float = 120.0
    profile: Path | None = None
    save_profile: Path | None = None
    current: Path | None = None
    """The plan that a job runs with: what should change about it?"""
    payback_s: float | None = None
    """Seconds within which a change of it must pay; None: PAYBACK_S."""
    save_plan: Path | None = None
    svg: Path | None = None
    advice: bool = True
    json_output: bool = False


@dataclass(frozen=True, kw_only=True)
class PoolAnswer:
    """A pool, and what planning for it gave."""

    nodes: tuple[NodeProfile, ...]
    links: tuple[LinkProfile, ...]
    plan: Plan | None
    refusal: PlanningError | None
    """Set if there is no plan."""
    change: PlanChange | None = None
    """From the plan that a job runs with to `plan`; None if there is none, or if nothing should change."""


def run(command: PlanCommand) -> None:
    """Plan, and print the plan; if JSON is wanted, an error is printed as well as raised.

    Raises RoostError; for a pool that cannot hold the model with the changes that would do.
    """
    try:
        refusal = _run(command)
    except RoostError as error:
        if command.json_output:
            print(error_json(error), flush=True)
        raise
    if refusal is not None:
        raise refusal


def _run(command: PlanCommand) -> PlanningError | None:
    """Print the plan, or return why there is none, printed already if JSON is wanted."""
    _check(command)
    # Files are read first: a mistake in one should not show only after the model was measured.
    imagined = load_pool_file(command.pool_file) if command.pool_file is not None else None
    current = load_plan(command.current) if command.current is not None else None
    with stop_on_sigterm():
        with _status(command, "measuring the model ..."):
            model, pool = _model(command)
        if command.save_profile is not None:
            model.save(command.save_profile)
        if current is not None and command.current is not None:
            check_plan_fits(current, model.profile, command.current)
        config = model.config if imagined is None else imagined.apply(model.config)
        with _status(command, "planning ..."):
            answer = _imagine(imagined, model.profile) if imagined is not None else _ask(command, pool, model)
            if current is not None:
                answer = _changed(answer, current, model.profile, config, _payback_s(command))
            elif imagined is not None:
                answer = _planned(answer, model.profile, config)
        if answer.plan is None:
            return _refusal(command, answer, model.profile, config)
        advice = None
        if command.advice and current is None:
            with _status(command, "planning for changed pools ..."):
                advice = _advice(answer, answer.plan, model.profile, config)
    _show(command, model.profile, config, answer, answer.plan, advice, current)
    return None


def _show(
    command: PlanCommand,
    profile: ModelProfile,
    config: JobConfig,
    answer: PoolAnswer,
    plan: Plan,
    advice: Advice | None,
    current: Plan | None,
) -> None:
    """Write the files that were asked for, and print."""
    if command.save_plan is not None:
        save_plan(plan, command.save_plan)
    if command.svg is not None:
        _write(command.svg, draw_plan(plan, profile, config, advice))
    if command.json_output:
        print(as_json(profile, config, answer.nodes, answer.links, plan=plan, advice=advice, change=answer.change), flush=True)
        return
    console = Console(highlight=False)
    if current is not None and answer.change is not None:
        print_change(console, answer.change, current, answer.nodes, profile)
    elif current is not None:
        print_no_change(console, current, plan, _payback_s(command))
    print_plan(console, profile, config, answer.nodes, plan, advice)


def _check(command: PlanCommand) -> None:
    if command.script is not None and str(command.script).startswith("-") and not command.script.is_file():
        raise InvalidConfigError(f"unknown option {str(command.script)!r}", hint="roost plan --help lists the options.")
    if (command.script is None) == (command.profile is None):
        raise InvalidConfigError(
            "give either a script or --profile",
            hint="roost plan SCRIPT.py runs a training script up to roost.train(job); --profile reads what --save-profile wrote.",
        )
    require(not command.arguments or command.script is not None, f"unknown arguments {list(command.arguments)}")
    pools = [name for name, given in _pools(command) if given]
    require(len(pools) <= 1, f"{' and '.join(pools)} exclude each other: give one")
    require(command.address != "" or not command.token, "--token goes with --pool")
    if command.script is None and not pools:
        raise InvalidConfigError("no pool to plan for", hint=NO_POOL_HINT)
    require(command.nodes >= 1, f"nodes must be at least 1, not {command.nodes}")
    require(command.wait_s > 0, f"wait must be positive, not {command.wait_s}")
    require(command.payback_s is None or command.current is not None, "--payback-s goes with --current")
    payback_s = _payback_s(command)
    require(math.isfinite(payback_s) and payback_s > 0, f"payback-s must be positive, not {payback_s}")
    for path in (command.svg, command.save_profile, command.save_plan):
        require(path is None or path.resolve().parent.is_dir(), f"there is no directory {path and path.parent} to write {path} in")


def _payback_s(command: PlanCommand) -> float:
    return PAYBACK_S if command.payback_s is None else command.payback_s


def _pools(command: PlanCommand) -> list[tuple[str, bool]]:
    return [("--pool-file", command.pool_file is not None), ("--pool", command.address != ""), ("--local", command.local_nodes != 0)]


@contextlib.contextmanager
def _status(command: PlanCommand, words: str) -> Iterator[None]:
    """Show what takes so long, on a terminal."""
    errors = Console(stderr=True)
    if command.json_output or not errors.is_terminal:
        yield
        return
    with errors.status(words):
        yield


# ------------------------------------------------------------ the model


def _model(command: PlanCommand) -> tuple[ModelFile, Pool | None]:
    """Return the model to plan for, and the pool: that of the command line, or else of the script."""
    pool: Pool | None = None
    if command.address:
        pool = RemotePool(address=command.address, token=command.token, nodes=command.nodes)
    elif command.local_nodes:
        pool = local(command.local_nodes)
    if command.profile is not None:
        return ModelFile.load(command.profile), pool
    assert command.script is not None, "checked before"
    # What a script prints is for people; with --json standard output is for the one line.
    with output_to_errors() if command.json_output else contextlib.nullcontext():
        model, scripts_pool = _run_script(command.script, command.arguments)
    return model, pool or scripts_pool


def _run_script(script: Path, arguments: tuple[str, ...]) -> tuple[ModelFile, Pool | None]:
    """Run `script` up to its first roost.train(job). Raises ScriptError if it does not get there."""
    from roost.api import Defaults
    from roost.cli.train import run_up_to_train

    defaults = Defaults(plan_only=True)
    run_up_to_train(script, arguments, defaults)
    prepared = defaults.prepared[0]
    return ModelFile(config=prepared.package.config, profile=prepared.package.profile), prepared.pool


# ------------------------------------------------------------ the pool


def _imagine(imagined: ImaginedPool, profile: ModelProfile) -> PoolAnswer:
    """Return an imagined pool, not planned for yet."""
    nodes, links = imagined.node_profiles(profile.reference_flop_per_s), imagined.link_profiles()
    return PoolAnswer(nodes=nodes, links=links, plan=None, refusal=None)


def _planned(pool: PoolAnswer, profile: ModelProfile, config: JobConfig) -> PoolAnswer:
    """Return the pool with a plan, or why there is none."""
    try:
        plan = make_plan(profile, pool.nodes, pool.links, config, random.Random(config.seed))
    except PlanningError as error:
        return dataclasses.replace(pool, plan=None, refusal=error)
    return dataclasses.replace(pool, plan=plan, refusal=None)


def _changed(pool: PoolAnswer, current: Plan, profile: ModelProfile, config: JobConfig, payback_s: float) -> PoolAnswer:
    """Return the pool with the plan to go on with from `current`, and what changes; or why there is none."""
    where = profile, pool.nodes, pool.links, config
    try:
        change = propose_change(current, *where, random.Random(config.seed), payback_s=payback_s)
        plan = predict_again(current, *where) if change is None else change.plan
    except PlanningError as error:
        return dataclasses.replace(pool, plan=None, refusal=error)
    return dataclasses.replace(pool, plan=plan, refusal=None, change=change)


def _ask(command: PlanCommand, pool: Pool | None, model: ModelFile) -> PoolAnswer:
    if pool is None:
        raise InvalidConfigError("no pool to plan for: neither an option nor the script names one", hint=NO_POOL_HINT)
    return asyncio.run(_ask_pool(pool, model, command))


async def _ask_pool(pool: Pool, model: ModelFile, command: PlanCommand) -> PoolAnswer:
    """Enter `pool`, ask its coordinator, and leave. Raises what breaks the pool meanwhile."""
    broken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def break_off(error: RoostError) -> None:
        if not broken.done():
            broken.set_exception(error)

    async with pool.enter(on_failure=break_off) as membership:
        transport = membership.transport
        await transport.start(NobodyHome())
        request = m.PlanRequest(
            protocol_version=m.PROTOCOL_VERSION,
            torch_version=_torch_version(command),
            config=model.config,
            profile=model.profile,
            wait_nodes=membership.wait_nodes,
            wait_s=command.wait_s,
        )
        call = asyncio.create_task(transport.call(membership.coordinator, request, deadline_s=command.wait_s + MEASURE_MARGIN_S))
        try:
            await asyncio.wait({call, broken}, return_when=asyncio.FIRST_COMPLETED)
            reply = call.result().message if call.done() else broken.result()
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await transport.stop()
            broken.cancel()
    if not isinstance(reply, m.PoolPlan):
        raise MalformedMessageError(f"the coordinator answered a request for a plan with {type(reply).__name__}")
    refusal = error_from(reply.refusal) if reply.refusal is not None else None
    if reply.plan is None and not isinstance(refusal, PlanningError):
        raise refusal or MalformedMessageError("the coordinator sent neither a plan nor why there is none")
    return PoolAnswer(
        nodes=reply.nodes, links=reply.links, plan=reply.plan, refusal=refusal if isinstance(refusal, PlanningError) else None
    )


def _torch_version(command: PlanCommand) -> str:
    """Return the version that a script would train with; empty where there is no script."""
    if command.script is None:
        return ""
    import torch

    return torch.__version__


# ------------------------------------------------------------ what is made of it


def _advice(answer: PoolAnswer, plan: Plan, profile: ModelProfile, config: JobConfig) -> Advice:
    return advise(profile, answer.nodes, answer.links, config, plan, random.Random(config.seed))


def _refusal(command: PlanCommand, answer: PoolAnswer, profile: ModelProfile, config: JobConfig) -> PlanningError:
    """Return the error of a pool that cannot be planned for, with the changes that would do; print them if JSON is wanted."""
    assert answer.refusal is not None, "without a plan there is a reason"
    found: tuple[PoolChange, ...] = ()
    if command.advice:
        with _status(command, "looking for the smallest change that would do ..."):
            found = remedies(profile, answer.nodes, answer.links, config, random.Random(config.seed))
    error = with_remedies(answer.refusal, found)
    if command.json_output:
        print(as_json(profile, config, answer.nodes, answer.links, error=error, changes=found), flush=True)
    return error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidConfigError(f"{path}: the picture cannot be written: {error.strerror}") from error
