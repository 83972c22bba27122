"""What a program has spent on what, added up in memory and brought to the database now and then."""

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
    """What time is spent on.

    Attributes:
        device: Where, as torch names it.
        name: Canonical text of a workload, or what else was called.
        is_workload: Which of the two.
    """

    device: Any
    name: str
    is_workload: bool


@dataclass(slots=True)
class _Count:
    """How often, and how long it took in all; of which so much is in the database."""

    calls: int = 0
    time_us: float = 0.0
    saved_calls: int = 0
    saved_us: float = 0.0


def device_of(device: Any) -> Device | None:
    """Return a torch device as results are stored for it; None if it is neither a CPU nor an NVIDIA GPU."""
    found = _tensor.device_of(device)
    return None if isinstance(found, str) else found[0]


class DemandCounter:
    """Calls and times by entry; safe among threads. In a forked process it counts and saves nothing.

    Args:
        db: Database that `save` writes to: a path, a URL, or None for the user's.
    """

    def __init__(self, db: str | Path | None) -> None:
        self._db = db
        self._spent: dict[ProfiledOperation, _Count] = {}
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._pid = os.getpid()

    def add(self, entry: ProfiledOperation, calls: int, time_us: float) -> None:
        """Count calls and time; either may be 0."""
        if os.getpid() != self._pid:  # the lock may be held there by a thread that is not
            return
        with self._lock:
            spent = self._spent.get(entry)
            if spent is None:
                spent = self._spent[entry] = _Count()
            spent.calls += calls
            spent.time_us += time_us

    def entries(self) -> list[tuple[ProfiledOperation, int, float]]:
        """Return all that was counted, with calls and microseconds, the most time first."""
        with self._lock:
            found = [(entry, spent.calls, spent.time_us) for entry, spent in self._spent.items()]
        return sorted(found, key=lambda row: (-row[2], row[0].name))

    def check(self) -> None:
        """Open the database, and make it if there is none, so that a bad one is told before the program runs.

        Raises:
            InputError: if its URL names no database.
            DatabaseError: if it cannot be opened.
        """
        open_store(self._db).close()

    def save(self) -> None:
        """Bring to the database what is not there yet.

        Raises:
            DatabaseError: if that cannot be done; nothing is lost, and the next attempt brings it all.
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
        found: dict[str, tuple[Device, list[tuple[_Count, Demand]]]] = {}
        with self._lock:
            for entry, spent in self._spent.items():
                calls, time_us = spent.calls - spent.saved_calls, spent.time_us - spent.saved_us
                device = device_of(entry.device) if entry.is_workload and calls > 0 else None
                if device is not None:
                    demand = Demand(workload=entry.name, calls=calls, time_us=max(0.0, time_us))
                    found.setdefault(device.key, (device, []))[1].append((spent, demand))
        return list(found.values())
