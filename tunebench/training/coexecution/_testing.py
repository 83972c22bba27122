"""Hooks for tests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["FORCED", "diverge_at", "forced", "is_forced", "take"]

_THREAD = threading.local()

FORCED = "forced by a test"
"""Reason of a divergence by `diverge_at` in the report."""


@contextlib.contextmanager
def diverge_at(call: int) -> Iterator[None]:
    """Make a call of the next iteration of this thread count as unknown.

    Args:
        call: Number of the call of a function of torch within the iteration, from 0.
    """
    _THREAD.call = call
    try:
        yield
    finally:
        _THREAD.call = None


@contextlib.contextmanager
def forced() -> Iterator[None]:
    """Co-execute every iteration of this thread whose path is known, whether or not that is faster."""
    before = is_forced()
    _THREAD.forced = True
    try:
        yield
    finally:
        _THREAD.forced = before


def is_forced() -> bool:
    """Return whether every iteration whose path is known is co-executed."""
    return bool(getattr(_THREAD, "forced", False))


def take() -> int | None:
    """Return the call that counts as unknown in the iteration that begins, and forget it."""
    call: int | None = getattr(_THREAD, "call", None)
    _THREAD.call = None
    return call
