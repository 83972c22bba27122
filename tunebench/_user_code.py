"""Time limits of the code of variants and operators, in the process that calls it.

A user's function may never return. The tuner and its workers call each one in `limited`, which raises a
`CodeTimeout` with the line that was running. The clock stops while the thread waits for a processor, so that
a busy machine fails no function.

In the main thread an alarm ends a loop, a sleep or a wait for a lock. In other threads an exception ends what
executes Python code. Compiled code that never returns to Python cannot be interrupted: workers are killed by
their parent then, and `end_process` ends the process of a command.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from tunebench._figure import significant
from tunebench._host import cores
from tunebench.errors import CodeTimeout, user_place

__all__ = [
    "GRACE_S",
    "IMPORT_S",
    "LEAST_S",
    "LONGEST_WAIT",
    "UNLIMITED",
    "end_process",
    "limit_user_code",
    "limited",
    "machine_load",
    "waited_s",
]

IMPORT_S = 60.0
"""Time limit for importing a user's file, in seconds; also of other functions called by a command."""

GRACE_S = 5.0
"""Time after a limit for an interrupted function to return, in seconds."""

END_S = 60.0
"""Time after a limit after which a process ends if its code was not interrupted, in seconds.

On a busy machine an interruption takes seconds, too.
"""

LONGEST_WAIT = 20.0
"""Longest wall time of a limited function or call, as a multiple of its limit."""

_AGAIN_S = 1.0
"""Time after which a function that caught or missed its interruption is interrupted again, in seconds."""

LEAST_S = 0.01
"""Time left that counts as none, in seconds."""


class _Overdue(BaseException):
    """Raised in a function that exceeds its limit; no `except Exception` of a user catches it."""


_limit_s: float | None = None
_notify: Callable[[str | None], None] | None = None
_ends_process = False
_inside = threading.local()
_STDERR = 2
UNLIMITED = contextlib.nullcontext()


@contextlib.contextmanager
def limit_user_code(limit_s: float, notify: Callable[[str | None], None] | None = None) -> Iterator[None]:
    """Limit the user code that is called in this context, by all threads.

    Args:
        limit_s: Time limit of each function, in seconds.
        notify: Called with a description of the function when it begins, and with None when it ends.
    """
    global _limit_s, _notify
    outer = _limit_s, _notify
    _limit_s, _notify = limit_s, notify
    try:
        yield
    finally:
        _limit_s, _notify = outer


@contextlib.contextmanager
def end_process() -> Iterator[None]:
    """End the process if user code that is called in this context cannot be interrupted.

    For commands: Python prints where the code was, and exits with status 1.
    """
    global _ends_process
    _ends_process = True
    try:
        yield
    finally:
        _ends_process = False


def limited(code: str, limit_s: float | None = None) -> AbstractContextManager[None]:
    """Return a context that limits a call of user code, as `limit_user_code` says; without that, it does not.

    Nested contexts have the limit of the outermost one. The context raises `CodeTimeout` if the code does
    not return within the limit.

    Args:
        code: Description of the code, for the error.
        limit_s: Another limit, in seconds, which also holds outside of `limit_user_code`.
    """
    limit_s = limit_s or _limit_s
    if limit_s is None or getattr(_inside, "limited", False):
        return UNLIMITED
    return _limited(code, limit_s)


@contextlib.contextmanager
def _limited(code: str, limit_s: float) -> Iterator[None]:
    _inside.limited = True
    notify = _notify
    if notify is not None:
        notify(code)
    try:
        with _alarm(limit_s) if _can_set_alarm() else _interrupting_thread(limit_s):
            yield
    except _Overdue as overdue:
        line = user_place(overdue)
        raise CodeTimeout(
            f"{code} did not return within {significant(limit_s)} s{f' ({line})' if line else ''}; make it "
            "faster, or raise the time limit (--timeout)",
            {"limited": "user code", "limit_s": limit_s, **machine_load()},
        ) from None
    finally:
        _inside.limited = False
        if notify is not None:
            notify(None)


def machine_load() -> dict[str, float]:
    """Return the load average of the last minute, and the number of cores; unknown ones are missing."""
    load = {"load": round(os.getloadavg()[0], 2)} if hasattr(os, "getloadavg") else {}
    return {**load, "cores": cores()}


def waited_s(thread: str) -> float:
    """Return how long a thread has waited for a processor since it started, in seconds; 0 if unknown.

    Args:
        thread: Its folder in /proc, such as ``"123"`` for the main thread of that process.
    """
    try:
        return int(Path(f"/proc/{thread}/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # it has ended, or the system does not count
        return 0.0


class _Clock:
    """The time that this thread used since the clock was made: wall time without waits for a processor."""

    def __init__(self, limit_s: float) -> None:
        self._thread = f"self/task/{threading.get_native_id()}"
        self._limit_s = limit_s
        self._began, self._waited_s = time.monotonic(), waited_s(self._thread)

    def left_s(self) -> float:
        """Return the time that is left of the limit, in seconds; 0 if none is."""
        wall_s = time.monotonic() - self._began
        left_s = self._limit_s - (wall_s - (waited_s(self._thread) - self._waited_s))
        return left_s if left_s > LEAST_S and wall_s < LONGEST_WAIT * self._limit_s else 0.0


def _can_set_alarm() -> bool:
    """Return whether this is the main thread, and its program does not use the alarm itself."""
    return (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, None)
        and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    )


@contextlib.contextmanager
def _alarm(limit_s: float) -> Iterator[None]:
    """Raise `_Overdue` in the main thread after a time limit."""
    clock, ended = _Clock(limit_s), False

    def set_alarm(after_s: float) -> None:
        # It repeats, since a loop may not notice a signal that comes while another thread starts.
        signal.setitimer(signal.ITIMER_REAL, after_s, _AGAIN_S)
        if _ends_process:
            faulthandler.dump_traceback_later(after_s + END_S, exit=True, file=_STDERR)

    def ring(_number: int, _frame: object) -> None:
        if ended:
            return
        left_s = clock.left_s()
        if left_s:
            set_alarm(left_s)
            return
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)  # the code may catch the exception
        raise _Overdue

    def end() -> None:
        nonlocal ended
        ended = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if _ends_process:
            faulthandler.cancel_dump_traceback_later()

    signal.signal(signal.SIGALRM, ring)
    try:
        try:
            set_alarm(limit_s)
            yield
        finally:
            end()
    finally:
        end()  # the alarm may have interrupted the first call


@contextlib.contextmanager
def _interrupting_thread(limit_s: float) -> Iterator[None]:
    """Raise `_Overdue` in this thread after a time limit, once it executes Python code."""
    clock, ended, thread = _Clock(limit_s), threading.Event(), ctypes.c_ulong(threading.get_ident())
    interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def watch() -> None:
        wait_s = limit_s
        while not ended.wait(wait_s):
            wait_s = clock.left_s()
            if not wait_s:
                interrupt(thread, ctypes.py_object(_Overdue))
                wait_s = _AGAIN_S

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        interrupt(thread, None)
