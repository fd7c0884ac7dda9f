"""Finds the line of the user's code that an error is about."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.fx.proxy import TracerBase

_LIBRARY_ROOTS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_DECORATORS = str(Path(torch.__file__).parent / "utils" / "_contextlib.py")
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_INSTALLED = ("site-packages", "dist-packages")


def user_line(trace_back: TracebackType | None) -> str:
    """Return ' at FILE:LINE: CODE' for the innermost frame that is neither torch's nor ours; empty if there is none."""
    return _innermost(traceback.extract_tb(trace_back))


def calling_line() -> str:
    """Return ' at FILE:LINE: CODE' for the user's innermost frame around the call of this function."""
    return _innermost(traceback.extract_stack())


def user_line_of_stack(stack_trace: str | None) -> str:
    """Return ' at FILE:LINE: CODE' from the stack trace that torch.export keeps with a node; empty if there is none."""
    lines = (stack_trace or "").splitlines()
    for index in range(len(lines) - 1, -1, -1):
        parts = lines[index].strip().split('"')
        if len(parts) == 3 and parts[0] == "File " and is_users(parts[1]):
            number = parts[2].removeprefix(", line ").split(",")[0]
            return place(parts[1], number, lines[index + 1] if index + 1 < len(lines) else "")
    return ""


def user_frame(frame: traceback.FrameSummary | None) -> str:
    """Return ' at FILE:LINE: CODE' for a frame; empty if it is not the user's."""
    return place(frame.filename, frame.lineno, frame.line) if frame is not None and is_users(frame.filename) else ""


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's among `frame` and those it was called from."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def line_of(frame: FrameType) -> str:
    """Return ' at FILE:LINE: CODE' of what a frame is executing."""
    file = frame.f_code.co_filename
    return place(file, frame.f_lineno, linecache.getline(file, frame.f_lineno))


def place(file: str, line: int | str | None, code: str | None) -> str:
    """Return ' at FILE:LINE: CODE'."""
    text = (code or "").strip()
    return f" at {file}:{line}" + (f": {text}" if text else "")


def called_from_torch() -> bool:
    """Return True if the function that calls this one was called by torch itself; a decorator of torch does not count."""
    caller: FrameType | None = sys._getframe(2)
    while caller is not None and caller.f_code.co_filename == _DECORATORS:
        caller = caller.f_back
    return caller is not None and caller.f_code.co_filename.startswith(_LIBRARY_ROOTS[0])


@contextmanager
def whole_stacks() -> Iterator[None]:
    """Make torch.export keep with each node the lines of all functions that lead to it, not of forward methods alone."""
    original = TracerBase._filter_traceback_frames

    def whole(self: Any, summary: traceback.StackSummary) -> traceback.StackSummary:
        self._record_forward_stack_traces_only = False
        return original(self, summary)

    TracerBase._filter_traceback_frames = whole  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        TracerBase._filter_traceback_frames = original  # type: ignore[method-assign]


def _innermost(frames: Iterable[traceback.FrameSummary]) -> str:
    own = [frame for frame in frames if is_users(frame.filename)]
    return user_frame(own[-1]) if own else ""


def is_users(file: str) -> bool:
    """Return True if a file is neither torch's, nor ours, nor of Python's standard library."""
    if file.startswith((*_LIBRARY_ROOTS, "<")):
        return False
    return not file.startswith(_STANDARD_LIBRARY) or any(folder in file for folder in _INSTALLED)
