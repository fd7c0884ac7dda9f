"""Keeps standard output for the one JSON line that was asked for."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def output_to_errors() -> Iterator[None]:
    """Send to standard error what is printed to standard output, also past Python: by child processes and libraries in C."""
    _flush_output()
    with contextlib.ExitStack() as stack:
        # Either may be closed; then there is nothing to keep clean, or nowhere to send it.
        with contextlib.suppress(OSError):
            kept = os.dup(1)
            stack.callback(os.close, kept)
            os.dup2(2, 1)
            stack.callback(os.dup2, kept, 1)
        stack.callback(_flush_output)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _flush_output() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None and not stream.closed:
            stream.flush()
