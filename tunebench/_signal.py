"""Signals that end a run: SIGTERM and SIGHUP are handled like Ctrl-C, and none is lost in a destructor."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["ending_like_ctrl_c"]

_NAMES = ("SIGTERM", "SIGHUP")

_AGAIN_S = 0.05
"""Time after which an interrupt that a destructor lost is raised again, in seconds."""


@contextlib.contextmanager
def ending_like_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first SIGTERM or SIGHUP within the context, and ignore further ones.

    Batch systems and closed terminals send them. A handler of the program is kept, and so is an ignored
    signal, as under `nohup`. Does nothing in other threads than the main one, which cannot set handlers.

    Python drops an exception that is raised in a destructor or a callback from C. A KeyboardInterrupt, also
    that of Ctrl-C, is raised again a moment later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    ended = False

    def end(_number: int, _frame: object) -> None:
        nonlocal ended
        if not ended:
            ended = True
            raise KeyboardInterrupt

    def end_again(unraisable: Any) -> None:
        nonlocal ended
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            previous_hook(unraisable)
            return
        ended = False
        timer = threading.Timer(_AGAIN_S, _send, [next(iter(ours), signal.SIGINT)])
        timer.daemon = True
        timer.start()

    previous_hook, sys.unraisablehook = sys.unraisablehook, end_again
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        sys.unraisablehook = previous_hook


def _send(number: int) -> None:
    """Send a signal to the main thread, unless the run that handles it ended."""
    ident = threading.main_thread().ident
    if ident is not None and callable(signal.getsignal(number)):
        signal.pthread_kill(ident, number)
