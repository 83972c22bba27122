"""State of a worker process that user code may change and that later calls would inherit."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

__all__ = ["ProcessState"]

_Pair = tuple[Callable[[], Any], Callable[[Any], object]]
"""A function that reads a part of the state, and one that sets it."""


class ProcessState:
    """The state of this process as it is now: alarms, signals, limits, priority and modes of the interpreter.

    Otherwise the next configuration would fail, or would be slower, because of the last one.
    """

    def __init__(self) -> None:
        self._parts = [(read, write, read()) for read, write in _parts()]

    def restore(self) -> None:
        """Restore what was changed, where the system allows it."""
        for read, write, value in self._parts:
            with contextlib.suppress(OSError, ValueError, TypeError):  # such as a lowered hard limit
                if read() != value:
                    write(value)


def _parts() -> Iterator[_Pair]:
    yield sys.getrecursionlimit, sys.setrecursionlimit
    yield sys.gettrace, sys.settrace
    yield sys.getprofile, sys.setprofile
    if (numpy := sys.modules.get("numpy")) is not None:
        yield numpy.geterr, partial(_call, numpy.seterr)
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        yield partial(_seconds_of, timer), partial(signal.setitimer, timer)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        yield partial(signal.getsignal, number), partial(signal.signal, number)
    yield (
        partial(signal.pthread_sigmask, signal.SIG_BLOCK, ()),
        partial(signal.pthread_sigmask, signal.SIG_SETMASK),
    )
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            limit = getattr(resource, name)
            yield partial(resource.getrlimit, limit), partial(resource.setrlimit, limit)
    yield partial(os.getpriority, os.PRIO_PROCESS, 0), partial(os.setpriority, os.PRIO_PROCESS, 0)
    if sys.platform == "linux":
        yield partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0)


def _call(function: Callable[..., object], named: dict[str, Any]) -> None:
    function(**named)


def _seconds_of(timer: int) -> float:
    return signal.getitimer(timer)[0]
