"""Signals while the command line is imported and after its command: it ends at once, with one line.

Nothing has begun that must be ended, or all of it has ended.

Raised inside of an import, KeyboardInterrupt may be printed as a traceback and be lost: the import system and
many packages ignore exceptions in callbacks. This module is imported first, and imports nothing that a
console script has not imported. Before it, in the start of Python itself, no code of a package runs.

The end of Python takes tenths of a second, and restores the default action of a signal that has a handler:
the process would die of it after its results were printed. Signals are ignored then.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

__all__ = ["ignore", "is_command_line", "quit_at_once", "stop_quitting"]

_INTERRUPTED = 130
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


def is_command_line() -> bool:
    """Return whether this process is `tunebench` or `python -m tunebench`, not another program."""
    program = sys.argv[0].replace("\\", "/").rpartition("/")[2] if sys.argv else ""
    words = sys.orig_argv
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    return program in ("tunebench", "tunebench.exe") or module == ["tunebench"]


def quit_at_once() -> None:
    """Let SIGINT, SIGTERM and SIGHUP end the process with one line, where they are not ignored or handled."""
    for number in _numbers():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _quit)


def ignore() -> None:
    """Ignore these signals where `quit_at_once` handles them, until the last moment of the interpreter."""
    for number in _numbers():
        if signal.getsignal(number) is _quit:
            signal.signal(number, signal.SIG_IGN)


def stop_quitting() -> None:
    """Let SIGINT raise KeyboardInterrupt again, and the others end the process as usual."""
    for number in _numbers():
        if signal.getsignal(number) is _quit:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


def _numbers() -> list[int]:
    return [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


def _quit(_number: int, _frame: object) -> None:
    try:
        os.write(2, b"error: interrupted\n")
    finally:  # also if stderr is closed
        os._exit(_INTERRUPTED)


if is_command_line():
    quit_at_once()
    atexit.register(ignore)  # registered first, it runs after all others
