"""Work of a measuring process that its time limit does not count: drawing inputs, computing references."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["notify_with", "outside_limit"]

_notify: Callable[[bool], object] | None = None
_depth = 0


def notify_with(notify: Callable[[bool], object] | None) -> None:
    """Set the function that reports the begin (True) and the end (False) of work outside the time limit."""
    global _notify
    _notify = notify


@contextlib.contextmanager
def outside_limit() -> Iterator[None]:
    """Report the work in this context as outside the time limit of the task; contexts may be nested."""
    global _depth
    _depth += 1
    try:
        if _notify is not None and _depth == 1:
            _notify(True)
        yield
    finally:
        _depth -= 1
        if _notify is not None and _depth == 0:
            _notify(False)
