"""Reports of dispatched calls: which kernel ran, and why."""

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
    """One dispatched call.

    Attributes:
        function: Operator of the workload; without one, the function that was called.
        workload: The workload; None if no operator covers the call.
        by: Whose kernel ran.
        reason: Reason for the choice.
        variant: Key of the variant; None for torch.
        config: Its configuration; None for torch.
    """

    function: str
    workload: Workload | None
    by: Literal["tunebench", "torch"]
    reason: str
    variant: str | None = None
    config: Config | None = None

    def __str__(self) -> str:
        """Return the call as one line."""
        call = self.function if self.workload is None else str(self.workload)
        kernel = self.by if self.variant is None else f"{self.variant} with {self.config}"
        return f"{call}: {kernel} ({self.reason})"


_watchers: tuple[Callable[[DispatchedCall], None], ...] = ()
_lock = threading.Lock()


def is_watched() -> bool:
    """Return whether there are watchers; without them no `DispatchedCall` is created."""
    return bool(_watchers)


def notify(call: DispatchedCall) -> None:
    """Report a call to all watchers, in the calling thread."""
    for watcher in _watchers:
        watcher(call)


@contextmanager
def watching(callback: Callable[[DispatchedCall], None]) -> Iterator[None]:
    """Call `callback` for every dispatched call of the process, in all threads.

    It is called before the kernel, in the calling thread; an exception that it raises aborts the call.

    Args:
        callback: Receives each call.
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
