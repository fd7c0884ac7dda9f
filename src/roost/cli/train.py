"""`roost train`: runs a user's script with a pool and a display."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path

from rich.console import Console

from roost.api import DEFAULTS, Defaults
from roost.cli.display import RunDisplay, print_result
from roost.config import require
from roost.errors import RoostError, ScriptError
from roost.requester.pools import Pool, RemotePool, local
from roost.requester.run import Run


def choose_pool(address: str, *, token: str, nodes: int, local_nodes: int) -> Pool | None:
    """Return the pool the options name, None if they name none. Raises InvalidConfigError if they name two."""
    require(not (address and local_nodes), "--pool and --local exclude each other")
    if address:
        return RemotePool(address=address, token=token, nodes=nodes)
    return local(local_nodes) if local_nodes else None


def run_script(script: Path, arguments: list[str], pool: Pool | None) -> None:
    """Run `script` as plain Python would, then wait for the runs it started and print their results.

    Raises ScriptError if it cannot be read, raises, or trains nothing; then no run is left running.
    """
    if not script.is_file():
        raise ScriptError(f"there is no file {script}", hint="Give the path of a Python file that calls roost.train(job).")
    console = Console(highlight=False)
    display = RunDisplay(console)
    defaults = Defaults(pool=pool, observer=display)
    DEFAULTS.set(defaults)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        _execute(script)
        if not defaults.runs:
            raise ScriptError(f"{script} ended without calling roost.train(job)")
        for run in defaults.runs:
            run.wait()
    finally:
        _leave_nothing(defaults.runs)
        display.close()
    for run in defaults.runs:
        print_result(console, run, model_line="model = ...  # built as in your script")


def _execute(script: Path) -> None:
    try:
        runpy.run_path(str(script), run_name="__main__")
    except RoostError:
        raise
    except Exception as error:
        # The user's code may raise anything; it is shown with the user's own line and ends the command.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == script.resolve()]
        where = f"line {frames[-1].lineno}: {frames[-1].line}" if frames else "before its first line"
        raise ScriptError(f"{script} raised {type(error).__name__}: {error} ({where})") from error


def _leave_nothing(runs: list[Run]) -> None:
    for run in runs:
        if not run.ended:
            run.stop()
            run.join()
