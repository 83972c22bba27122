"""Preference between tuned kernels and torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

from tunebench.errors import UnknownName

__all__ = ["PREFERENCES", "Preference", "is_deterministic", "prefer", "preference", "set_preference"]

Preference = Literal["faster", "tunebench", "torch"]
"""`faster`: tuned kernels measured to be faster than torch on this device; `tunebench`: tuned kernels
wherever one supports the workload; `torch`: always torch.
"""

PREFERENCES: tuple[Preference, ...] = get_args(Preference)

_everywhere: Preference = "faster"
_here: ContextVar[Preference | None] = ContextVar("tunebench_preference", default=None)


def preference() -> Preference:
    """Return the current preference: that of this context, or else of the process."""
    return _here.get() or _everywhere


def is_deterministic() -> bool:
    """Return whether ``torch.use_deterministic_algorithms`` is set; False in a process without torch."""
    enabled = getattr(sys.modules.get("torch"), "are_deterministic_algorithms_enabled", None)
    return enabled is not None and bool(enabled())


def set_preference(preferred: Preference) -> None:
    """Set the preference of the process, for contexts without a preference.

    Args:
        preferred: One of `PREFERENCES`.

    Raises:
        UnknownName: if the preference does not exist.
    """
    global _everywhere
    _everywhere = _checked(preferred)


@contextmanager
def prefer(preferred: Preference) -> Iterator[None]:
    """Set the preference of this context: this thread, or this asyncio task.

    Args:
        preferred: One of `PREFERENCES`.

    Raises:
        UnknownName: if the preference does not exist.
    """
    token = _here.set(_checked(preferred))
    try:
        yield
    finally:
        _here.reset(token)


def _checked(preferred: Preference) -> Preference:
    if preferred not in PREFERENCES:
        raise UnknownName("preference", str(preferred), PREFERENCES)
    return preferred
