"""Index of a database by workload and device, read in the background and kept up to date.

The best time of a workload depends on all its measurements (`answer_v1`), so that reading a large database
takes seconds. A thread reads it once, in the order of the first page, and later only the workloads that
changed. Pages show what is known so far.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tunebench._command import command_line
from tunebench.db.browse import Answer, Browser, Changes, DeviceEntry, StaleGroup, WorkloadEntry
from tunebench.db.figures import BaselineComparison, Figures
from tunebench.errors import TunebenchError
from tunebench.kernels import files_of
from tunebench.report.lower_bound import shown_bound_us, shown_ratio

__all__ = ["DAMAGE", "Catalogue", "Line", "Snapshot", "damage_of"]

REFRESH_S = 2.0
"""Shortest time between two looks for changes, in seconds; without requests there are none."""

LONGEST_PAUSE_S = 0.5
"""Longest pause for requests before the next workload is read, in seconds."""

DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that values of another type raise: SQLite stores any type in any column."""

PUBLISH_S = 0.3
"""Time between two snapshots while everything is read, in seconds."""

_LONGEST_CLOSE_S = 5.0

_REST = 4
"""The thread rests that many times as long as the last look took."""

Pair = tuple[int, str]
"""Id of a device, and a workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A workload on a device, as lists of workloads show it.

    Attributes:
        device: The device.
        entry: What the database contains; without measurements until `read`.
        read: Whether the measurements were read.
    """

    device: DeviceEntry
    entry: WorkloadEntry
    read: bool

    @property
    def operator(self) -> str:
        """Name of the operator, or ``"recorded"``."""
        return self.entry.workload.partition(":")[0]

    @property
    def side(self) -> str:
        """Text by which the page that compares two workloads finds it."""
        return f"workload {self.device.key} {self.entry.workload}"

    @property
    def best(self) -> Answer | None:
        """What `lookup` would return; None without a usable time."""
        return next(iter(self.entry.answers), None)

    @property
    def time_us(self) -> float | None:
        """Time of `best`, or else the fastest measured time, which is not verified."""
        return self.best.time_us if self.best is not None else self.entry.fastest_us

    @property
    def how(self) -> str | None:
        """How the time is known: ``"measured"``, ``"predicted"`` or ``"unverified"``.

        Without a time it is ``"failed"`` if a measurement failed, else None.
        """
        if self.best is not None:
            return self.best.kind
        if self.entry.fastest_us is not None:
            return "unverified"
        return "failed" if self.entry.failed else None

    @property
    def figures(self) -> Figures:
        """Comparison of the best with the default and with baselines; empty without one."""
        return self.best.figures if self.best is not None else Figures()

    @property
    def bound_us(self) -> float | None:
        """Lower bound of the search of the best, else the lowest one of any measurement.

        None if unknown, or if it rests on assumed rates of the device.
        """
        assumed = self.device.has_assumed_rates
        return shown_bound_us(self.figures.bound_us, self.entry.least_bound_us, assumed=assumed)

    @property
    def bound_ratio(self) -> float | None:
        """Best time over `bound_us`; at least 1 at measured rates, which a kernel may beat."""
        best_us = self.best.time_us if self.best is not None else None
        return shown_ratio(best_us, self.bound_us, assumed=self.device.has_assumed_rates)

    @property
    def default_ratio(self) -> float | None:
        """Speedup of the best over the default configuration; 1 for the default."""
        is_default = self.best is not None and self.best.is_default
        return self.figures.speedup_over_default(is_default=is_default)

    @property
    def library(self) -> tuple[str, BaselineComparison] | None:
        """The fastest baseline, and the comparison with it; None without one."""
        return self.figures.fastest_baseline

    def tune_command(self, db: str | None, variant: str | None = None) -> str:
        """Return the command that measures the workload again.

        Args:
            db: Value of `--db`; None for the default database.
            variant: Key of the only variant to measure; None for all.
        """
        return command_line(
            "tune",
            workload=self.entry.workload,
            variant=variant,
            variant_file=files_of(self.operator),
            device="cpu" if self.device.kind == "cpu" else self.device.product,
            db=db,
        )

    def fastest(self, kind: str) -> Answer | None:
        """Return the best answer of one kind, ``"measured"`` or ``"predicted"``."""
        return next((answer for answer in self.entry.answers if answer.kind == kind), None)


def damage_of(error: Exception, db: str | None) -> str:
    """Return the message for an error of `DAMAGE`.

    Args:
        error: The error.
        db: Value of `--db` for the database; None for the default one.
    """
    verify = command_line("db verify", db=db)
    return f"a record is damaged ({type(error).__name__}: {error}); check it: {verify}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of the catalogue.

    Attributes:
        devices: The devices, by id.
        lines: Every workload on every device with a trial of it, by workload.
        stale: Search spaces with stale trials.
        unread: Number of workloads whose measurements are not read yet.
        workloads: Number of workloads.
        error: Reason why the database could not be read at the last look; empty if it could.
    """

    devices: Mapping[int, DeviceEntry] = field(default_factory=dict)
    lines: tuple[Line, ...] = ()
    stale: tuple[StaleGroup, ...] = ()
    unread: int = 0
    workloads: int = 0
    error: str = ""

    def line(self, pair: Pair) -> Line | None:
        """Return the line of a device and workload; None if there is no trial."""
        return next((line for line in self.lines if (line.device.id, line.entry.workload) == pair), None)

    def device(self, key: str) -> DeviceEntry | None:
        """Return a device by its key."""
        return next((device for device in self.devices.values() if device.key == key), None)


class Catalogue:
    """Reads a database in a thread; `snapshot` never waits for it.

    Args:
        browser: The database.
        on_read: Called by the thread with each line that was read, after all are read.
    """

    def __init__(self, browser: Browser, on_read: Callable[[Line], object] = lambda line: None) -> None:
        self._browser, self._on_read = browser, on_read
        self._snapshot = Snapshot()
        self._entries: dict[Pair, WorkloadEntry] = {}
        self._pending: dict[str, tuple[int, ...]] = {}
        self._devices: dict[int, DeviceEntry] = {}
        self._stale: tuple[StaleGroup, ...] = ()
        self._runs: set[str] = set()
        self._state: Changes | None = None
        self._wanted, self._closing = threading.Event(), threading.Event()
        self._first = threading.Event()
        self._requests, self._gate = 0, threading.Condition()
        self._thread = threading.Thread(target=self._work, name="tunebench dashboard", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading, and wait for the query that runs, a few seconds at most."""
        self._closing.set()
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(_LONGEST_CLOSE_S)

    def snapshot(self, *, wait_s: float = 0.2) -> Snapshot:
        """Return the current entries, and schedule a check for changes.

        Args:
            wait_s: Longest wait for the list of workloads, after the start only.
        """
        self._wanted.set()
        self._first.wait(wait_s)
        return self._snapshot

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Read no further workload within the context, so that a page does not wait for the thread."""
        with self._gate:
            self._requests += 1
        try:
            yield
        finally:
            with self._gate:
                self._requests -= 1
                self._gate.notify_all()

    def wait(self, limit_s: float = 60.0) -> Snapshot:
        """Return the state once everything was read, a look failed, or `limit_s` has passed."""
        end = time.monotonic() + limit_s
        while (snapshot := self.snapshot()).unread or self._state is None:
            if snapshot.error or time.monotonic() > end:
                break
            time.sleep(0.01)
        return snapshot

    # -- the thread ----------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closing.is_set():
            self._wanted.clear()
            began, first = time.monotonic(), self._state is None
            try:
                self.read_changes()
            except TunebenchError as error:
                self._snapshot = replace(self._snapshot, error=str(error))
            except DAMAGE as error:
                message = damage_of(error, self._browser.location.option)
                self._snapshot = replace(self._snapshot, error=message)
            self._first.set()
            took = time.monotonic() - began
            self._closing.wait(max(REFRESH_S, 0.0 if first else _REST * took))
            self._wanted.wait()

    def read_changes(self) -> None:
        """Read the workloads that changed since the last look; the first time, all."""
        state = self._browser.changes()
        if self._state is not None and state == self._state:
            return
        if self._state is not None and state.file != self._state.file:
            self._forget()
        self._devices = {device.id: device for device in self._browser.devices()}
        stale = tuple(self._browser.stale_groups())
        changed = self._browser.changed_workloads(self._state or state, self._runs)
        device_ids = dict(self._browser.workloads())
        changed |= {group.workload for group in set(stale) ^ set(self._stale)}
        changed |= {workload for (_, workload), entry in self._entries.items() if entry.claimed}
        read_before = {workload for _, workload in self._entries}
        self._pending |= {
            w: device_ids[w] for w in sorted(device_ids) if w in changed or w not in read_before
        }
        self._stale = stale
        for pair in [pair for pair in self._entries if pair[0] not in device_ids.get(pair[1], ())]:
            del self._entries[pair]
        self._publish()
        self._read_pending()
        self._state = state

    def _forget(self) -> None:
        """Forget a file that was replaced."""
        self._entries, self._pending, self._stale, self._runs = {}, {}, (), set()
        self._state = None

    def _read_pending(self) -> None:
        published, read = time.monotonic(), set[Pair]()
        for workload in sorted(self._pending):
            if self._closing.is_set():
                return
            with self._gate:
                self._gate.wait_for(lambda: not self._requests, LONGEST_PAUSE_S)
            for entry in self._browser.entries(workload):
                self._entries[entry.device_id, workload] = entry
                read.add((entry.device_id, workload))
            del self._pending[workload]
            if time.monotonic() > published + PUBLISH_S:
                self._publish()
                published = time.monotonic()
        self._publish()
        for line in self._snapshot.lines:
            if (line.device.id, line.entry.workload) in read and not self._closing.is_set():
                self._on_read(line)

    def _publish(self) -> None:
        unread = {
            (device_id, workload): WorkloadEntry(device_id=device_id, workload=workload)
            for workload, devices in self._pending.items()
            for device_id in devices
            if (device_id, workload) not in self._entries
        }
        self._snapshot = Snapshot(
            devices=self._devices,
            lines=tuple(self._lines(unread)),
            stale=self._stale,
            unread=len({workload for _, workload in unread}),
            workloads=len({workload for _, workload in (*self._entries, *unread)}),
        )
        self._first.set()

    def _lines(self, unread: Mapping[Pair, WorkloadEntry]) -> Iterable[Line]:
        entries = {**unread, **self._entries}
        for pair in sorted(entries, key=lambda pair: (pair[1], pair[0])):
            device = self._devices.get(pair[0])
            if device is not None:
                yield Line(device=device, entry=entries[pair], read=pair in self._entries)
