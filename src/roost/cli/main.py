"""`roost`: coordinator, token, revoke, peers, join, pause, resume, leave, train, plan, check, status, chaos, demo."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from roost.config import BYTES_PER_S_OF_MBIT, AgentConfig, CoordinatorConfig, parse_bytes
from roost.errors import RoostError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Train one model on the PCs you have.")
errors = Console(stderr=True, highlight=False)

COORDINATOR_DIR = Path.home() / ".roost" / "coordinator"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log every event.")]
ExitWithParent = Annotated[bool, typer.Option("--exit-with-parent", hidden=True, help="End when standard input is closed.")]


def main() -> None:
    """Run the command line. A RoostError is printed with what to do; the exit code is 1, or 2 for wrong arguments."""
    # gRPC's core writes every failed handshake to standard error; Roost logs what matters itself.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        app()
    except RoostError as error:
        errors.print(f"[bold red]error[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)


def set_up_logging(verbose: bool) -> None:
    """Log to standard error: warnings, or every event if `verbose`."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format=LOG_FORMAT, stream=sys.stderr)


@app.callback()
def _root() -> None:
    """Roost trains one PyTorch model on the PCs people already have."""


@app.command()
def coordinator(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines to join.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port that machines join at; 0 picks a free one.")] = 7700,
    advertise: Annotated[str, typer.Option(help="Name or address that other machines reach this one by.")] = "",
    state_dir: Annotated[Path, typer.Option(help="Keys, certificates and the database.")] = COORDINATOR_DIR,
    tokens: Annotated[int, typer.Option(help="Join tokens to print; each lets one machine join.")] = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Print addresses and tokens as one JSON line.")] = False,
    verbose: Verbose = False,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Start the matchmaking process; it prints how machines join."""
    from roost.cli import coordinator as command

    set_up_logging(verbose)
    config = CoordinatorConfig(host=host, port=port, advertise=advertise, state_dir=str(state_dir))
    command.run(config, tokens=tokens, json_output=json_output, exit_with_parent=exit_with_parent)


@app.command()
def token(
    role: Annotated[str, typer.Option(help="node or requester.")] = "node",
    ttl: Annotated[float, typer.Option(help="Seconds it is valid.")] = 86_400.0,
    replace: Annotated[str, typer.Option(help="For this name alone, which may have a new key then; its old key is revoked.")] = "",
    state_dir: Annotated[Path, typer.Option(help="The coordinator's state directory.")] = COORDINATOR_DIR,
) -> None:
    """Print a fresh one-time token (on the coordinator's machine)."""
    from roost.cli import coordinator as command

    command.print_token(state_dir, role=role, ttl_s=ttl, replaces=replace or None)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="A peer that has joined; 'roost peers' lists them.")],
    state_dir: Annotated[Path, typer.Option(help="The coordinator's state directory.")] = COORDINATOR_DIR,
) -> None:
    """Shut a peer out for good (on the coordinator's machine; a running coordinator knows at once)."""
    from roost.cli import peers as command

    command.revoke(state_dir, name)


@app.command()
def peers(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
    state_dir: Annotated[Path, typer.Option(help="The coordinator's state directory.")] = COORDINATOR_DIR,
) -> None:
    """List the peers that have joined, and until when their certificates last (on the coordinator's machine)."""
    from roost.cli import peers as command

    command.show(state_dir, json_output=json_output)


@app.command()
def join(
    address: Annotated[str, typer.Argument(help="host:port that the coordinator printed.")],
    token: Annotated[str, typer.Argument(help="One-time token; not needed again later. Also read from ROOST_TOKEN.")] = "",
    name: Annotated[str, typer.Option(help="This node's name; default: the host's.")] = "",
    memory: Annotated[str, typer.Option(help="Memory of the device to lend, such as 4GB; default: 80% of what is free.")] = "0",
    threads: Annotated[int, typer.Option(help="CPU threads to lend; default: all cores.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    host: Annotated[str, typer.Option(help="Address to listen on and to tell peers; default: found out.")] = "",
    port: Annotated[int, typer.Option(help="Port to listen on; default: a free one.")] = 0,
    advertise: Annotated[str, typer.Option(help="HOST or HOST:PORT to tell peers instead, behind a router that forwards a port.")] = "",
    relative_speed: Annotated[float, typer.Option(help="Emulate a slower machine: fraction of this one's speed.")] = 1.0,
    uplink_mbit: Annotated[float, typer.Option(help="Never send more than this, in Mbit/s; 0: no limit.")] = 0.0,
    downlink_mbit: Annotated[float, typer.Option(help="Never receive more than this, in Mbit/s; 0: no limit.")] = 0.0,
    latency_ms: Annotated[float, typer.Option(help="Emulate a distance: everything arrives so much later here.")] = 0.0,
    state_dir: Annotated[Path | None, typer.Option(help="Where this node's key and certificate are kept.")] = None,
    verbose: Verbose = False,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Lend this machine to a coordinator until Ctrl+C."""
    if threads:
        # Whatever the environment says: libraries read it when they are loaded.
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    from roost.cli import join as command

    set_up_logging(verbose)
    name = name or command.default_name()
    directory = state_dir or command.default_state_dir(address, name)
    config = AgentConfig(
        node_id=name,
        host=host,
        port=port,
        advertise=advertise,
        state_dir=str(directory),
        threads=threads,
        device=device,
        memory_bytes=parse_bytes(memory),
        relative_speed=relative_speed,
        uplink_bytes_per_s=uplink_mbit * BYTES_PER_S_OF_MBIT,
        downlink_bytes_per_s=downlink_mbit * BYTES_PER_S_OF_MBIT,
        latency_s=latency_ms / 1e3,
    )
    command.run(config, address=address, token=token or os.environ.get("ROOST_TOKEN", ""), exit_with_parent=exit_with_parent)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Python file that calls roost.train(job).")],
    pool: Annotated[str, typer.Option(help="host:port of a coordinator.")] = "",
    token: Annotated[str, typer.Option(help="One-time requester token, the first time. Also read from ROOST_TOKEN.")] = "",
    nodes: Annotated[int, typer.Option(help="Nodes to wait for.")] = 1,
    local: Annotated[int, typer.Option(help="Instead of a pool: so many nodes on this machine.")] = 0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for nodes to join.")] = 120.0,
    verbose: Verbose = False,
) -> None:
    """Run a training script on a pool, with progress. Further arguments go to the script."""
    from roost.cli import train as command

    set_up_logging(verbose)
    chosen = command.choose_pool(pool, token=token or os.environ.get("ROOST_TOKEN", ""), nodes=nodes, local_nodes=local)
    command.run_script(script, list(context.args), chosen, wait_s=wait)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def plan(
    context: typer.Context,
    script: Annotated[Path | None, typer.Argument(help="Python file that calls roost.train(job); it runs up to there.")] = None,
    pool_file: Annotated[Path | None, typer.Option(help="YAML file of imagined nodes and links; no network is used.")] = None,
    pool: Annotated[str, typer.Option(help="host:port of a coordinator: plan for the nodes that have joined it.")] = "",
    token: Annotated[str, typer.Option(help="One-time requester token, the first time. Also read from ROOST_TOKEN.")] = "",
    nodes: Annotated[int, typer.Option(help="Nodes to wait for.")] = 1,
    local: Annotated[int, typer.Option(help="Plan for so many nodes on this machine.")] = 0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for nodes to join.")] = 120.0,
    profile: Annotated[Path | None, typer.Option(help="Instead of a script: what --save-profile wrote.")] = None,
    save_profile: Annotated[Path | None, typer.Option(help="Write the model's costs, to plan again at once.")] = None,
    current: Annotated[Path | None, typer.Option(help="The plan a job runs with (see --save-plan): what should change now?")] = None,
    payback_s: Annotated[float | None, typer.Option(help="With --current: seconds a change has to pay in; default 600.")] = None,
    save_plan: Annotated[Path | None, typer.Option(help="Write the plan, for --current later.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the plan.")] = None,
    advice: Annotated[bool, typer.Option(help="Plan for changed pools too, to see what would help.")] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
    verbose: Verbose = False,
) -> None:
    """Show what a training script would get on a pool, and whether it is worth it. Nothing is trained."""
    from roost.cli import plan as command

    set_up_logging(verbose)
    request = command.PlanCommand(
        script=script,
        arguments=tuple(context.args),
        pool_file=pool_file,
        address=pool,
        token=token or (os.environ.get("ROOST_TOKEN", "") if pool else ""),
        nodes=nodes,
        local_nodes=local,
        wait_s=wait,
        profile=profile,
        save_profile=save_profile,
        current=current,
        payback_s=payback_s,
        save_plan=save_plan,
        svg=svg,
        advice=advice,
        json_output=json_output,
    )
    command.run(request)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def check(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Python file that calls roost.train(job); it runs up to there.")],
    stages: Annotated[str, typer.Option(help="Numbers of stages to cut the model in, into even parts.")] = "2,3,4",
    pool_file: Annotated[Path | None, typer.Option(help="YAML file of imagined nodes and links: cut as they would be given it.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
    verbose: Verbose = False,
) -> None:
    """Capture the model of a training script and tell whether it is still the same model, whole and cut. Nothing is trained."""
    from roost.cli import check as command

    set_up_logging(verbose)
    command.run(script, tuple(context.args), stages=stages, pool_file=pool_file, json_output=json_output)


@app.command()
def status(
    address: Annotated[str, typer.Argument(help="host:port of the coordinator.")],
    token: Annotated[str, typer.Option(help="One-time requester token, the first time. Also read from ROOST_TOKEN.")] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Show the nodes and the running job of a coordinator."""
    from roost.cli import status as command

    command.show(address, token=token or os.environ.get("ROOST_TOKEN", ""), json_output=json_output)


NodeName = Annotated[str, typer.Option(help="The node's name; not needed if only one agent runs on this machine.")]
NodeDirectory = Annotated[Path | None, typer.Option(help="What 'roost join' was given as --state-dir, if it was.")]


@app.command()
def pause(name: NodeName = "", state_dir: NodeDirectory = None) -> None:
    """Let a node of this machine compute nothing until 'roost resume'; its job waits and loses no work."""
    from roost.cli import pause as command

    command.pause(name=name, state_dir=state_dir)


@app.command()
def resume(name: NodeName = "", state_dir: NodeDirectory = None) -> None:
    """Let a paused node of this machine go on."""
    from roost.cli import pause as command

    command.resume(name=name, state_dir=state_dir)


@app.command()
def leave(name: NodeName = "", state_dir: NodeDirectory = None) -> None:
    """Take a node of this machine back: another node takes over its stage, then its agent ends."""
    from roost.cli import pause as command

    command.leave(name=name, state_dir=state_dir)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def chaos(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python file that calls roost.train(job), or 'demo'.")] = "demo",
    faults: Annotated[int, typer.Option(help="Faults to inject.")] = 12,
    minutes: Annotated[float, typer.Option(help="Minutes of training over which they come.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Draws the faults: the same ones for the same seed.")] = 0,
    kinds: Annotated[str, typer.Option(help="Kinds, with commas: kill, freeze, cut, blackhole, coordinator, restart; all.")] = "",
    nodes: Annotated[int, typer.Option(help="Nodes on this machine; the demo has 6.")] = 4,
    memory: Annotated[str, typer.Option(help="Memory that each lends, such as 64MB; the demo has its own.")] = "0",
    compare: Annotated[bool, typer.Option("--compare", help="Train once more without faults, and compare the loss.")] = False,
    directory: Annotated[Path | None, typer.Option(help="Keep logs and checkpoints there.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
) -> None:
    """Train on local nodes that are killed, frozen and cut off meanwhile, and tell what became of it."""
    from roost.cli import chaos as command

    set_up_logging(False)
    request = command.ChaosCommand(
        script=script,
        arguments=tuple(context.args),
        faults=faults,
        seed=seed,
        minutes=minutes,
        kinds=command.parse_kinds(kinds),
        nodes=nodes,
        memory=memory,
        directory=directory,
        compare=compare,
        json_output=json_output,
    )
    command.run(request)


@app.command()
def demo(
    json_output: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
    epochs: Annotated[int, typer.Option(help="Epochs to train.")] = 40,
    directory: Annotated[Path, typer.Option(help="Where the checkpoint goes.")] = Path("roost-demo"),
    verbose: Verbose = False,
) -> None:
    """Train the digits CNN on five local nodes of different (emulated) memory and speed."""
    from roost.cli import demo as command

    set_up_logging(verbose)
    command.run(epochs=epochs, directory=directory, json_output=json_output)


if __name__ == "__main__":
    main()
