"""Counter of calls and time per operation, saved to the database periodically."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebench.db import Demand, open_store
from tunebench.device import Device
from tunebench.torch import _tensor

__all__ = ["DemandCounter", "ProfiledOperation", "device_of"]


@dataclass(frozen=True, slots=True)
class ProfiledOperation:
    """An operation that a program runs.

    Attributes:
        device: Torch device.
        name: Canonical text of a workload, or the name of another operation.
        is_workload: Whether it is a workload.
    """

    device: Any
    name: str
    is_workload: bool


@dataclass(slots=True)
class _Count:
    """Calls and time of an operation, and how much of both is saved."""

    calls: int = 0
    time_us: float = 0.0
    saved_calls: int = 0
    saved_us: float = 0.0


def device_of(device: Any) -> Device | None:
    """Return the device of a torch device; None if it is neither a CPU nor an NVIDIA GPU."""
    located = _tensor.device_of(device)
    return None if isinstance(located, str) else located[0]


class DemandCounter:
    """Thread-safe counter of calls and time per operation. A forked process counts and saves nothing.

    Args:
        db: Database that `save` writes to: a path, a URL, or None for the user's database.
    """

    def __init__(self, db: str | Path | None) -> None:
        self._db = db
        self._spent: dict[ProfiledOperation, _Count] = {}
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._pid = os.getpid()

    def add(self, entry: ProfiledOperation, calls: int, time_us: float) -> None:
        """Add calls and microseconds of an operation; either may be 0."""
        if os.getpid() != self._pid:  # a thread of the parent process may hold the lock
            return
        with self._lock:
            spent = self._spent.get(entry)
            if spent is None:
                spent = self._spent[entry] = _Count()
            spent.calls += calls
            spent.time_us += time_us

    def entries(self) -> list[tuple[ProfiledOperation, int, float]]:
        """Return all operations with calls and microseconds, most time first."""
        with self._lock:
            rows = [(entry, spent.calls, spent.time_us) for entry, spent in self._spent.items()]
        return sorted(rows, key=lambda row: (-row[2], row[0].name))

    def check(self) -> None:
        """Create or open the database, so that an unusable one is reported before the program runs.

        Raises:
            InputError: if the URL is not one of a database.
            DatabaseError: if the database cannot be opened.
        """
        open_store(self._db).close()

    def save(self) -> None:
        """Save what was counted since the last save.

        Raises:
            DatabaseError: if the database cannot be written; the next save includes everything.
        """
        if os.getpid() != self._pid:
            return
        with self._saving:
            for device, rows in self._unsaved():
                with open_store(self._db) as store:
                    store.add_demand(device, [demand for _, demand in rows])
                for spent, demand in rows:
                    spent.saved_calls += demand.calls
                    spent.saved_us += demand.time_us

    def _unsaved(self) -> list[tuple[Device, list[tuple[_Count, Demand]]]]:
        unsaved: dict[str, tuple[Device, list[tuple[_Count, Demand]]]] = {}
        with self._lock:
            for entry, spent in self._spent.items():
                calls, time_us = spent.calls - spent.saved_calls, spent.time_us - spent.saved_us
                device = device_of(entry.device) if entry.is_workload and calls > 0 else None
                if device is not None:
                    demand = Demand(workload=entry.name, calls=calls, time_us=max(0.0, time_us))
                    unsaved.setdefault(device.key, (device, []))[1].append((spent, demand))
        return list(unsaved.values())
