"""Telling of served calls whoever asks: what ran, by whose kernel, and why."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from tunebench.space import Config
from tunebench.workload import Workload

__all__ = ["DispatchedCall", "is_watched", "notify", "watching"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedCall:
    """One served call.

    Attributes:
        function: The operator of the workload; without one, the function that was called.
        workload: The problem; None if it is none of ours.
        by: Whose kernel ran it.
        reason: Why, in words.
        variant: Key of our variant, if it ran.
        config: Its configuration.
    """

    function: str
    workload: Workload | None
    by: Literal["tunebench", "torch"]
    reason: str
    variant: str | None = None
    config: Config | None = None

    def __str__(self) -> str:
        """Return it as a line."""
        what = self.function if self.workload is None else str(self.workload)
        kernel = self.by if self.variant is None else f"{self.variant} with {self.config}"
        return f"{what}: {kernel} ({self.reason})"


_watchers: tuple[Callable[[DispatchedCall], None], ...] = ()
_lock = threading.Lock()


def is_watched() -> bool:
    """Tell whether anybody watches; nobody makes a `DispatchedCall` otherwise."""
    return bool(_watchers)


def notify(call: DispatchedCall) -> None:
    """Tell of a call, in the thread that makes it."""
    for watcher in _watchers:
        watcher(call)


@contextmanager
def watching(callback: Callable[[DispatchedCall], None]) -> Iterator[None]:
    """Have `callback` told of every served call of the process, those of other threads included.

    It is called before the kernel is, in the thread that calls it; what it raises ends the call.
    """
    global _watchers
    with _lock:
        _watchers = (*_watchers, callback)
    try:
        yield
    finally:
        with _lock:
            remaining = list(_watchers)
            remaining.remove(callback)
            _watchers = tuple(remaining)
