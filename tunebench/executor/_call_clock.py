"""The clock of a call in a worker process, and how long the process waited for a processor meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from time import monotonic as _monotonic  # a user's file may replace it in the module `time`
from typing import Any

from tunebench._user_code import machine_load, waited_s
from tunebench.executor._supervisor import descendants
from tunebench.measure.machine import busy_s

__all__ = ["CallClock"]

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PROCESSOR_TIMES = slice(11, 15)
"""Positions in /proc/PID/stat, after the name: user and system time of the process, and of its children."""

_REUSE_S = 1.0
"""Time for which a reading of the whole machine is used again, in seconds: it costs half a millisecond."""


class CallClock:
    """The wall time of one call, and its waits for a processor.

    A process waits while it could run and other processes run; on a busy machine, for most of the time. Linux
    counts these waits for each thread. The waits of main threads count, since parallel kernels run in them,
    too. Other systems do not count waits.

    Args:
        worker: Process id of the worker, or of an ancestor of it that has no other task.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._began = _monotonic()
        tree = self._tree()
        self._waited_s = {pid: waited_s(str(pid)) for pid in tree}
        self._credited_s = 0.0
        self._processor_s = _processor_s(tree)
        self._machine = _machine()

    def _tree(self) -> set[int]:
        return descendants(self._worker)

    @property
    def wall_s(self) -> float:
        """Wall time of the call, in seconds."""
        return _monotonic() - self._began

    def waited_s(self) -> float:
        """Return how long the process that waited most waited for a processor, in seconds."""
        waits = (waited_s(str(pid)) - self._waited_s.get(pid, 0.0) for pid in self._tree())
        return max(0.0, max(waits, default=0.0))

    def credit_s(self) -> float:
        """Return the waits for a processor since the last call of this method, in seconds."""
        waited = self.waited_s()
        credit, self._credited_s = waited - self._credited_s, waited
        return max(0.0, credit)

    def conditions(self, limited: str, limit_s: float) -> dict[str, Any]:
        """Return the conditions of `TimedOut`.

        Args:
            limited: What exceeded its limit: ``"call"``, ``"inputs"``, ``"user code"`` or ``"connection"``.
            limit_s: The limit, in seconds.
        """
        conditions: dict[str, Any] = {
            "limited": limited,
            "limit_s": limit_s,
            "wall_s": round(self.wall_s, 3),
            "processor_s": round(max(0.0, _processor_s(self._tree()) - self._processor_s), 2),
            "waited_s": round(self.waited_s(), 3),
            **machine_load(),
        }
        _readings.clear()
        (began, elsewhere_s), (ended, now_s) = self._machine, _machine()
        if elsewhere_s is not None and now_s is not None and ended > began:
            share = (now_s - elsewhere_s) / ((ended - began) * (os.cpu_count() or 1))
            conditions["busy_elsewhere"] = round(min(1.0, max(0.0, share)), 2)
        return conditions


_readings: list[tuple[float, float | None]] = []


def _machine() -> tuple[float, float | None]:
    """Return a time, and the processor time of other programs than the tuner and its workers until then."""
    now = _monotonic()
    if not _readings or now - _readings[0][0] > _REUSE_S:
        used_s = busy_s()
        own_s = sum(os.times()[:4]) + _processor_s(descendants(os.getpid()))
        _readings[:] = [(now, None if used_s is None else used_s - own_s)]
    return _readings[0]


def _processor_s(processes: Iterable[int]) -> float:
    """Return the processor time of processes and of their children that have ended, in seconds."""
    total = 0
    for pid in processes:
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            total += sum(map(int, fields[_PROCESSOR_TIMES]))
        except (OSError, ValueError):  # it has ended
            continue
    return total * _TICK_S
