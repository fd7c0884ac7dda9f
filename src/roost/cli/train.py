"""`roost train`: runs a user's script with a pool and a display."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from roost.api import DEFAULTS, Defaults
from roost.cli.display import RunDisplay, print_result
from roost.cli.lifetime import stop_on_sigterm
from roost.config import require
from roost.errors import RoostError, ScriptError
from roost.requester.pools import LocalPool, Pool, RemotePool, local
from roost.requester.run import Run


def choose_pool(address: str, *, token: str, nodes: int, local_nodes: int) -> Pool | None:
    """Return the pool the options name, None if they name none. Raises InvalidConfigError if they name two."""
    require(not (address and local_nodes), "--pool and --local exclude each other: give one")
    require(address != "" or not token, "--token goes with --pool")
    if address:
        return RemotePool(address=address, token=token, nodes=nodes)
    return local(local_nodes) if local_nodes else None


def run_script(script: Path, arguments: list[str], pool: Pool | None, *, wait_s: float) -> None:
    """Run `script` as plain Python would, then wait for the runs it started and print their results.

    Ctrl+C and SIGTERM stop the runs cleanly, with a checkpoint. Raises ScriptError if the script cannot be read, raises, or
    trains nothing; then no run is left running.
    """
    if not script.is_file():
        raise ScriptError(f"there is no file {script}", hint="Give the path of a Python file that calls roost.train(job).")
    require(wait_s > 0, f"wait must be positive, not {wait_s}")
    console = Console(highlight=False)
    _announce(console, pool, wait_s)
    display = RunDisplay(console)
    defaults = Defaults(pool=pool, observer=display, wait_s=wait_s)
    DEFAULTS.set(defaults)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    with stop_on_sigterm():
        try:
            execute(script, defaults)
            if not defaults.runs:
                raise ScriptError(f"{script} ended without calling roost.train(job)")
            for run in defaults.runs:
                run.wait()
        finally:
            _leave_nothing(defaults.runs)
            display.close()
    for run in defaults.runs:
        print_result(console, run, model_line="# with `model` built as in your script:")


def _announce(console: Console, pool: Pool | None, wait_s: float) -> None:
    if isinstance(pool, RemotePool):
        console.print(f"pool {pool.address}: the job waits up to {wait_s:.0f} s for {pool.nodes} node(s) to join", soft_wrap=True)
    elif isinstance(pool, LocalPool):
        console.print(f"pool: {pool.size} node(s), started on this machine")


def execute(script: Path, defaults: Defaults) -> None:
    """Run `script` as its main program, with `defaults` set before. Raises ScriptError for what the script raises."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except RoostError:
        raise
    except KeyboardInterrupt:
        # Ctrl+C anywhere in the script after it began to train means the same as in wait(). Before that there is nothing to
        # save, and a second one gives up.
        if not defaults.runs or any(run.stopping for run in defaults.runs):
            raise
        for run in defaults.runs:
            run.stop()
    except SystemExit as error:
        # sys.exit() and sys.exit(0) end a script well.
        if error.code not in (None, 0):
            raise
    except Exception as error:
        # The user's code may raise anything; it is shown with the user's own line and ends the command.
        raise ScriptError(f"{script} raised {type(error).__name__}: {error} ({_where(script, error)})") from error


def run_up_to_train(script: Path, arguments: Sequence[str], defaults: Defaults) -> None:
    """Run `script` up to its first roost.train(job), which `defaults` make end it. Raises ScriptError if it does not get there."""
    if not script.is_file():
        raise ScriptError(f"there is no file {script}", hint="Give the path of a Python file that calls roost.train(job).")
    DEFAULTS.set(defaults)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        execute(script, defaults)
    except SystemExit as error:
        if not _got_there(defaults):
            raise ScriptError(f"{script} ended with exit code {str(error.code)[:200]} without calling roost.train(job)") from error
    except RoostError:
        # Once the model is captured, what the script does after that no longer matters.
        if not _got_there(defaults):
            raise
    if not _got_there(defaults):
        raise ScriptError(f"{script} ended without calling roost.train(job)")


def _got_there(defaults: Defaults) -> bool:
    return bool(defaults.prepared or defaults.checked or defaults.jobs)


def _where(script: Path, error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == script.resolve()]
    if frames:
        return f"line {frames[-1].lineno}: {frames[-1].line}"
    return f"line {error.lineno}" if isinstance(error, SyntaxError) else "before its first line"


def _leave_nothing(runs: list[Run]) -> None:
    for run in runs:
        run.stop()
    for run in runs:
        run.join()
