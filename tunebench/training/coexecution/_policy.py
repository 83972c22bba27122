"""Decide for each iteration whether it is co-executed or runs as without co-execution, by measured times."""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

from tunebench.training.coexecution._memory import MEMORY_SHARE, resident_bytes

__all__ = ["Mode", "Policy"]

Mode = Literal["always", "auto", "report"]
"""Whether every known path is co-executed, those that pay, or none."""

_EVERY = 4
"""One of so many iterations runs as in eager mode until the decision, to time it."""

_LATER = 64
"""One of so many iterations runs as in eager mode after the decision."""

_WINDOW = 16
"""Number of iterations whose mean time is compared."""

_PATIENCE = 8
"""Number of windows within which a step must become faster, as long as fewer of its iterations diverge."""

_WARM_UP = 4
"""Number of iterations as in eager mode before the first record: libraries initialize in them."""

_SHARE = 0.15
"""Part of the time of all iterations that records, checks and divergences may cost."""

_RECORD = 12.0
"""Cost of the first record in iterations of eager mode, before one is measured.

First records of 29 programs of `benchmarks.programs` take 3 to 47 iterations, median 11.
"""

_THREAD = 4
"""Memory of iterations with another thread over that of the step.

What one thread frees does not serve the other. Source: the large music_transformer with glibc, 3.2 times, and
1.8 without threads.
"""

_RECENT = 4
"""Number of iterations whose mean cost is expected of the next one."""

_REFUSALS = 2
"""Number of records without a path after which a step is no longer recorded."""

_REPORTED = 16
"""One of so many iterations is recorded if the step is only reported, after the first ones."""


class Policy:
    """Times of a step's iterations, and the decision that follows from them.

    Attributes:
        mode: Whether known paths are co-executed.
        reason: Why the step runs as without co-execution; None while it is co-executed.
        has_memory: Whether the process has memory for records of the step.
    """

    def __init__(self, mode: Mode = "auto") -> None:
        self.mode = mode
        self.reason: str | None = None
        self._eager: deque[float] = deque(maxlen=_WINDOW)
        self._other: deque[float] = deque(maxlen=_WINDOW)
        self._known: deque[bool] = deque(maxlen=_WINDOW)
        self._costs: deque[float] = deque(maxlen=_RECENT)
        self._count = 0
        self._others = 0
        self._cost = 0.0
        self._refusals = 0
        self._decided = False
        self._next = round(_RECORD / _SHARE)
        self.has_memory = True
        self._start_bytes: float | None = None
        self._memory_share: float | None = None
        self._windows = 0
        self._threads: dict[bool, deque[float]] = {arm: deque(maxlen=_WINDOW) for arm in (False, True)}

    def runs_eagerly(self) -> bool:
        """Return whether the next iteration runs as without co-execution."""
        if self.reason is not None:
            return True
        if self.mode == "always":
            return False
        self._count += 1
        if self.mode == "report":
            return self._count > 2 and self._count % _REPORTED != 0
        if not self._affords():
            return True
        return self._count % (_LATER if self._decided else _EVERY) == 0

    def _affords(self) -> bool:
        """Return whether the next iteration may cost what the last ones did beyond eager mode.

        If not, some of the following ones are not asked about: sorting times takes part of a short iteration.
        """
        if self._start_bytes is None:
            self._start_bytes = resident_bytes()
        if self._count < self._next or len(self._eager) < _WARM_UP:
            return False
        eager_s = self.eager_s
        expected_s = sum(self._costs) / len(self._costs) if self._costs else _RECORD * eager_s
        needed = math.ceil((self._cost + expected_s) / (_SHARE * eager_s))
        self._next = min(needed, self._count + _WINDOW)
        return self._count >= needed and self._is_small()

    def _is_small(self) -> bool:
        """Return whether the step takes little memory, which is measured before the first record."""
        if self._memory_share is None:
            assert self._start_bytes is not None
            now_bytes = resident_bytes()
            self._memory_share = share = (now_bytes - self._start_bytes) / now_bytes
            if share > MEMORY_SHARE:
                self.has_memory = False
                self.reason = (
                    f"the step takes {share:.0%} of the memory of the process, and its record would take as "
                    'much again; mode="always" sets no limit'
                )
        return self.has_memory

    @property
    def eager_s(self) -> float:
        """Return the median time of iterations in eager mode in seconds."""
        return sorted(self._eager)[len(self._eager) // 2]

    def add_eager(self, seconds: float) -> None:
        """Note the time of an iteration that ran as without co-execution."""
        self._eager.append(seconds)

    def threaded(self) -> bool:
        """Return whether the next iteration runs backward passes in another thread."""
        if self._memory_share is not None and _THREAD * self._memory_share > MEMORY_SHARE:
            return False
        inline, beside = self._threads[False], self._threads[True]
        if len(beside) < _WINDOW // 2 or self._count % _LATER < 2:
            return len(beside) < len(inline)
        return sorted(beside)[len(beside) // 2] < sorted(inline)[len(inline) // 2]

    def add(self, seconds: float, *, known: bool, threaded: bool, learning_s: float = 0.0) -> None:
        """Note another iteration.

        Args:
            seconds: Its time.
            known: Whether its path was known.
            threaded: Whether it used a thread.
            learning_s: Time after it to learn its path, in seconds.
        """
        if known:
            self._threads[threaded].append(seconds)
        self._other.append(seconds)
        self._known.append(known)
        self._others += 1
        if self._eager:
            self._costs.append(seconds + learning_s - self.eager_s)
            self._cost += self._costs[-1]
        if self.mode == "always":
            return
        if len(self._other) == _WINDOW and len(self._eager) >= 4 and self._others % _WINDOW == 0:
            self._decide()

    def refuse(self, reason: str, site: str) -> None:
        """Note that a recorded iteration can only run as in eager mode, and that no path is known."""
        self._refusals += 1
        if self._refusals >= _REFUSALS and self.mode != "report":
            self.reason = f"no recorded iteration can be co-executed because of {site}: {reason}"

    def _decide(self) -> None:
        self._windows += 1
        seconds = sorted(self._other)[: _WINDOW - 2]
        mean_s = sum(seconds) / len(seconds)
        if mean_s <= self.eager_s:
            self._decided = True
            return
        unknown = self._known.count(False)
        if 0 < unknown <= _WINDOW // 2 and self._windows < _PATIENCE:
            return
        paths = f", {unknown} of {_WINDOW} iterations took new paths" if unknown else ""
        self.reason = (
            f"co-execution takes {mean_s * 1e3:.2f} ms, eager mode {self.eager_s * 1e3:.2f} ms{paths}"
        )
