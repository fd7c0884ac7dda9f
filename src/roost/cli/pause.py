"""`roost pause`, `roost resume` and `roost leave`: the owner stops a node from computing, lets it go on, or takes it back."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console
from rich.markup import escape

from roost.cli.join import AGENT_LOCK, node_dirs
from roost.config import LEAVE_FILE, PAUSE_FILE
from roost.errors import CredentialsError, InvalidConfigError


def pause(*, name: str, state_dir: Path | None) -> None:
    """Pause the node. Raises InvalidConfigError if it is not clear which one, or if its agent does not run."""
    directory = _node_dir(name, state_dir)
    _make(directory, PAUSE_FILE)
    _say(directory, "paused: it finishes what it computes now, and computes nothing more until 'roost resume'")


def leave(*, name: str, state_dir: Path | None) -> None:
    """Let the node give its stage to another and end. Raises InvalidConfigError if it is not clear which one, or if none runs."""
    directory = _node_dir(name, state_dir)
    _make(directory, LEAVE_FILE)
    _say(directory, "leaves: it ends as soon as another node has taken over what it has; its log says so if none can")


def _make(directory: Path, file: str) -> None:
    if not _runs(directory):
        raise InvalidConfigError(f"no agent runs with the state directory {directory}", hint="Start it with 'roost join' first.")
    try:
        os.close(os.open(directory / file, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError as error:
        raise CredentialsError(f"{directory} cannot be written to: {error}", hint="Only the owner of a node can do that.") from error


def resume(*, name: str, state_dir: Path | None) -> None:
    """Let the node go on; nothing changes if it is not paused. Raises InvalidConfigError if it is not clear which one."""
    directory = _node_dir(name, state_dir)
    try:
        (directory / PAUSE_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise CredentialsError(f"{directory} cannot be written to: {error}", hint="Only the owner of a node can resume it.") from error
    _say(directory, "goes on")


def _say(directory: Path, what: str) -> None:
    Console(highlight=False).print(f"node {escape(directory.name.partition('@')[0])} {what}", soft_wrap=True)


def _node_dir(name: str, state_dir: Path | None) -> Path:
    """Return the state directory that is meant: the one given, or the only one with that name whose agent runs or is paused."""
    if state_dir is not None:
        if not state_dir.is_dir():
            raise InvalidConfigError(f"there is no state directory {state_dir}", hint="Give what 'roost join' was given as --state-dir.")
        return state_dir
    every = sorted(path for path in node_dirs().glob("*@*") if path.is_dir() and name in ("", path.name.partition("@")[0]))
    found = [path for path in every if _runs(path) or (path / PAUSE_FILE).exists()]
    if len(found) == 1:
        return found[0]
    called = f" called {name}" if name else ""
    if not found:
        raise InvalidConfigError(f"no agent{called} runs on this machine", hint="Look at 'roost status'; pause a node on its own machine.")
    names = ", ".join(str(path) for path in found)
    raise InvalidConfigError(f"{len(found)} agents{called} run on this machine: {names}", hint="Say which with --name or --state-dir.")


def _runs(directory: Path) -> bool:
    """Return whether an agent holds the directory."""
    lock = FileLock(directory / AGENT_LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError as error:
        raise CredentialsError(f"{directory} cannot be used: {error}", hint="Only the owner of a node can pause it.") from error
    lock.release()
    return False
