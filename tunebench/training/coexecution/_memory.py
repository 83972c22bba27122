"""Memory of the process: how much it has, and how to give freed memory back."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["MEMORY_SHARE", "copies_reason", "resident_bytes", "return_freed_memory"]

MEMORY_SHARE = 0.2
"""Part of the memory of the process by which a trial may raise it."""


def resident_bytes() -> float:
    """Return the resident memory of this process in bytes; infinity on systems other than Linux."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except OSError:
        return math.inf
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def copies_reason(size_bytes: float) -> str | None:
    """Return why a trial may not take as much memory for copies and gradients, or None."""
    if size_bytes > MEMORY_SHARE * resident_bytes():
        return "parameters, gradients and states are too much to copy"
    return None


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library can do so. It takes milliseconds."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return the function of glibc, or None in another C library."""
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):
        return None
