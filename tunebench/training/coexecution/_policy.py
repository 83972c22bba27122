"""Decide for each iteration whether it is co-executed or runs as without co-execution, by measured times."""

from __future__ import annotations

from collections import deque

__all__ = ["Policy"]

_EVERY = 4
"""One of so many iterations runs as in eager mode until the decision, to time it."""

_LATER = 64
"""One of so many iterations runs as in eager mode after the decision."""

_WINDOW = 16
"""Number of iterations whose mean time is compared."""

_PATIENCE = 8
"""Number of windows within which a step must become faster, as long as fewer of its iterations diverge."""


class Policy:
    """Times of a step's iterations, and the decision that follows from them.

    Attributes:
        reason: Why the step runs as without co-execution; None while it is co-executed.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._eager: deque[float] = deque(maxlen=_WINDOW)
        self._other: deque[float] = deque(maxlen=_WINDOW)
        self._known: deque[bool] = deque(maxlen=_WINDOW)
        self._count = 0
        self._decided = False
        self._windows = 0
        self._threads: dict[bool, deque[float]] = {arm: deque(maxlen=_WINDOW) for arm in (False, True)}

    def runs_eagerly(self) -> bool:
        """Return whether the next iteration runs as without co-execution."""
        if self.reason is not None:
            return True
        self._count += 1
        return self._count % (_LATER if self._decided else _EVERY) == 0

    def add_eager(self, seconds: float) -> None:
        """Note the time of an iteration that ran as without co-execution."""
        self._eager.append(seconds)

    def threaded(self) -> bool:
        """Return whether the next iteration runs backward passes in another thread."""
        inline, beside = self._threads[False], self._threads[True]
        if len(beside) < _WINDOW // 2 or self._count % _LATER < 2:
            return len(beside) < len(inline)
        return sorted(beside)[len(beside) // 2] < sorted(inline)[len(inline) // 2]

    def add(self, seconds: float, *, known: bool, threaded: bool) -> None:
        """Note the time of another iteration, whether its path was known, and whether it used a thread."""
        if known:
            self._threads[threaded].append(seconds)
        self._other.append(seconds)
        self._known.append(known)
        if len(self._other) == _WINDOW and len(self._eager) >= 4 and self._count % _WINDOW == _WINDOW - 1:
            self._decide()

    def _decide(self) -> None:
        self._windows += 1
        eager_s = sorted(self._eager)[len(self._eager) // 2]
        seconds = sorted(self._other)[: _WINDOW - 2]
        mean_s = sum(seconds) / len(seconds)
        if mean_s <= eager_s:
            self._decided = True
            return
        unknown = self._known.count(False)
        if 0 < unknown <= _WINDOW // 2 and self._windows < _PATIENCE:
            return
        paths = f", {unknown} of {_WINDOW} iterations took new paths" if unknown else ""
        self.reason = f"co-execution takes {mean_s * 1e3:.2f} ms, eager mode {eager_s * 1e3:.2f} ms{paths}"
