"""Whose kernel runs a problem where both a library and we have one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

from tunebench.errors import UnknownName

__all__ = ["PREFERENCES", "Preference", "prefer", "preference", "set_preference"]

Preference = Literal["faster", "tunebench", "torch"]
"""`faster`: ours where it is known to be faster than the library's, on this device; `tunebench`: ours
wherever one can do the problem; `torch`: the library's own, always.
"""

PREFERENCES: tuple[Preference, ...] = get_args(Preference)

_everywhere: Preference = "faster"
_here: ContextVar[Preference | None] = ContextVar("tunebench_preference", default=None)


def preference() -> Preference:
    """Return the preference in force: that of this context, else of the process."""
    return _here.get() or _everywhere


def set_preference(preferred: Preference) -> None:
    """Set the preference of the whole process, for contexts that have none of their own.

    Raises:
        UnknownName: if there is no such preference.
    """
    global _everywhere
    _everywhere = _checked(preferred)


@contextmanager
def prefer(preferred: Preference) -> Iterator[None]:
    """Prefer whose kernel in this context: this thread, or this task of asyncio.

    Raises:
        UnknownName: if there is no such preference.
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
