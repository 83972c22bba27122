"""HiGHS, the solver of linear and integer programs: the one place that makes a solver."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any

from tunebench.errors import MissingDependency

__all__ = ["silent_solver"]

_first = threading.Lock()
_made = False


def silent_solver() -> Any:
    """Return a new `highspy.Highs` that prints nothing, now or later.

    Raises:
        MissingDependency: HiGHS is not installed.
    """
    global _made
    try:
        import highspy
    except ModuleNotFoundError:
        raise MissingDependency("highspy", "torch") from None
    # HiGHS 1.16 prints a banner when the first solver of a process is made, before any option can be set.
    with _first:
        with contextlib.nullcontext() if _made else _discarded_output():
            solver = highspy.Highs()
        _made = True
    solver.silent()
    return solver


@contextlib.contextmanager
def _discarded_output() -> Iterator[None]:
    """Discard what C code prints: redirect the file descriptors of standard output and standard error."""
    flush = ctypes.CDLL(None).fflush
    with contextlib.ExitStack() as stack:
        sink = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, sink)
        flush(None)  # what the program has printed so far
        for descriptor in (1, 2):
            try:
                original = os.dup(descriptor)
            except OSError:  # a program without this stream, such as a service
                continue
            stack.callback(os.close, original)
            stack.callback(os.dup2, original, descriptor)
            os.dup2(sink, descriptor)
        stack.callback(flush, None)  # runs first: what C code has buffered
        yield
