"""Observers of a configuration while it is measured: power, energy and clocks by NVML, or a user's own.

An observer is called around the samples, out of their timing. After the samples it may ask for further
launches, which NVML needs: its power is averaged over a tenth of a second or more.

Source: NVML reference, nvmlDeviceGetTotalEnergyConsumption (from Volta on) and nvmlDeviceGetPowerUsage. Both
are updated in steps of tens of milliseconds, which are measured here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tunebench._user_code import limited
from tunebench.errors import InputError, describe_error
from tunebench.measure._clock import Clock
from tunebench.outcome import Measured, Outcome

__all__ = [
    "NVML",
    "LaunchRepeats",
    "NvmlObserver",
    "ObservedSamples",
    "Observer",
    "absolute_observers",
    "load_observer",
    "metric_names",
]

NVML = "nvml"
"""Name of the observer of power, energy and clocks."""

OBSERVED_S = 1.0
"""Least time for which launches are repeated, in seconds: dozens of updates of the energy."""

WARM_UP_S = 0.3
"""Time for which launches are repeated before, in seconds: power is averaged over earlier work."""

LONGEST = 4.0
"""Longest time of an observation, as a multiple of `OBSERVED_S`, if the energy is not updated."""

BATCH_S = 0.005
"""Time of the launches between two readings, in seconds."""

MOST_IN_BATCH = 1000

IMPORT_S = 60.0
"""Time limit of the import of an observer's file, in seconds."""

MAX_OBSERVED = 100
"""Largest number of values of an observer."""

LaunchRepeats = Callable[[int, Callable[[], None]], None]
"""Enqueues a run so many times, calls a function while the device works on them, and waits for their end."""


class Observer(Protocol):
    """What an observer must have; `OBSERVER` of a user's file needs no base class.

    Attributes:
        metrics: Names of the values that it observes.
    """

    metrics: Sequence[str]

    def before_samples(self) -> None:
        """Start observing: the first sample follows."""

    def after_samples(self) -> Mapping[str, float]:
        """Return the values by name: the last sample has been taken."""


class NvmlObserver:
    """Power, energy of one run, and clocks, while runs are repeated with warm caches.

    Args:
        clock: Readings of the GPU.
        seconds: Least time of repeated launches, in seconds.
        now: Clock in seconds.
    """

    metrics = ("energy_j", "power_w", "clock_mhz", "memory_clock_mhz", "power_updates_hz")

    def __init__(
        self, clock: Clock, *, seconds: float = OBSERVED_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._seconds, self._now = clock, seconds, now

    def before_samples(self) -> None:
        """Do nothing: samples are too short for the power of NVML."""

    def after_samples(self) -> Mapping[str, float]:
        """Return nothing: see `observe`."""
        return {}

    def observe(self, repeat: LaunchRepeats, run_us: float) -> dict[str, float]:
        """Return power, energy and clocks of repeated runs.

        Args:
            repeat: Repeats the run.
            run_us: Time of one run, in microseconds.

        Returns:
            `energy_j` of one run and `power_w`, between the first and the last update of the energy; medians
            of `clock_mhz` and `memory_clock_mhz`; and `power_updates_hz`, the rate of updates.
        """
        if self._clock.problem is not None:
            raise InputError(f"NVML cannot be read: {self._clock.problem}")
        batch = max(1, min(MOST_IN_BATCH, math.ceil(BATCH_S * 1e6 / run_us)))
        began = self._now()
        while self._now() - began < WARM_UP_S:
            repeat(batch, lambda: None)
        readings = self._readings(repeat, batch)
        return _power(readings) | self._clocks(readings)

    def _readings(self, repeat: LaunchRepeats, batch: int) -> list[_Reading]:
        """Return readings between batches, until there are updates over `seconds`, or they do not come."""
        readings: list[_Reading] = []
        began, runs = self._now(), 0
        while True:
            clocks: list[tuple[float | None, float | None]] = []
            repeat(batch, functools.partial(self._read_clocks, clocks))
            runs += batch
            reading = _Reading(
                at_s=self._now(),
                runs=runs,
                energy_j=self._clock.energy_j(),
                power_w=self._clock.power_w(),
                clocks_mhz=clocks[-1],
            )
            readings.append(reading)
            elapsed_s, updates = reading.at_s - began, _updates(readings)
            lasts = len(updates) > 1 and updates[-1].at_s - updates[0].at_s >= self._seconds
            if lasts or (elapsed_s >= self._seconds and reading.energy_j is None):
                return readings
            if elapsed_s >= LONGEST * self._seconds:
                return readings

    def _read_clocks(self, clocks: list[tuple[float | None, float | None]]) -> None:
        clocks.append((self._clock.sm_mhz(), self._clock.memory_mhz()))

    @staticmethod
    def _clocks(readings: Sequence[_Reading]) -> dict[str, float]:
        names = ("clock_mhz", "memory_clock_mhz")
        columns = zip(*(reading.clocks_mhz for reading in readings), strict=True)
        known = {
            name: [mhz for mhz in column if mhz is not None]
            for name, column in zip(names, columns, strict=True)
        }
        return {name: statistics.median(clocks) for name, clocks in known.items() if clocks}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """State after some runs; None where NVML has no reading."""

    at_s: float
    runs: int
    energy_j: float | None
    power_w: float | None
    clocks_mhz: tuple[float | None, float | None]


def _updates(readings: Sequence[_Reading]) -> list[_Reading]:
    """Return the readings at which the energy had changed since the one before."""
    return [
        reading
        for before, reading in itertools.pairwise(readings)
        if reading.energy_j is not None and before.energy_j is not None and reading.energy_j > before.energy_j
    ]


def _power(readings: Sequence[_Reading]) -> dict[str, float]:
    """Return power, energy of a run and rate of updates, by the energy, else by readings of the power."""
    updates = _updates(readings)
    first, last = readings[0], readings[-1]
    if len(updates) > 1:
        first, last = updates[0], updates[-1]
        assert first.energy_j is not None
        assert last.energy_j is not None
        joules, count = last.energy_j - first.energy_j, len(updates) - 1
    else:
        watts = [reading.power_w for reading in readings if reading.power_w is not None]
        if not watts or last.at_s <= first.at_s:
            return {}
        joules = statistics.fmean(watts) * (last.at_s - first.at_s)
        count = sum(before != after for before, after in itertools.pairwise(watts))
    seconds = last.at_s - first.at_s
    return {
        "energy_j": joules / (last.runs - first.runs),
        "power_w": joules / seconds,
        "power_updates_hz": count / seconds,
    }


@dataclass(slots=True)
class ObservedSamples:
    """The values of observers of one configuration; what an observer raises is noted and fails nothing.

    Attributes:
        observers: The observers.
        values: Observed values by name.
        problems: Why values are missing.
    """

    observers: Sequence[Any]
    values: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def before(self) -> None:
        """Call the observers before the first sample."""
        for observer in self.observers:
            self._call(observer, observer.before_samples)

    def after(self) -> None:
        """Call the observers after the last sample."""
        for observer in self.observers:
            self._call(observer, observer.after_samples)

    def repeat(self, repeat: LaunchRepeats, run_us: float) -> None:
        """Call the observers that need further launches.

        Args:
            repeat: Repeats the run.
            run_us: Time of one run, in microseconds.
        """
        for observer in self.observers:
            if hasattr(observer, "observe"):
                self._call(observer, functools.partial(observer.observe, repeat, run_us))

    def _call(self, observer: Any, function: Callable[[], Mapping[str, Any] | None]) -> None:
        name = type(observer).__name__
        try:
            values = {str(metric): float(value) for metric, value in dict(function() or {}).items()}
        except Exception as error:  # a user's observer may raise anything; the reason is kept
            self.problems.append(f"{name}: {describe_error(error)}")
            return
        for metric, value in list(values.items())[:MAX_OBSERVED]:
            if math.isfinite(value):
                self.values[metric] = value
            else:
                self.problems.append(f"{name}: {metric} is {value}")

    def added_to(self, outcome: Outcome) -> Outcome:
        """Return a measurement with the values as metrics, and with the problems among its conditions."""
        if not isinstance(outcome, Measured) or not self.observers:
            return outcome
        problems = {"not_observed": self.problems} if self.problems else {}
        return dataclasses.replace(
            outcome,
            metrics={**outcome.metrics, **self.values},
            conditions={**outcome.conditions, **problems},
        )


def load_observer(path: str | Path) -> Any:
    """Import a user's observer; a file is imported once in each process.

    Args:
        path: Python file that defines `OBSERVER`, with what `Observer` names.

    Raises:
        InputError: The file cannot be imported, or has no such object.
    """
    file = Path(path).resolve()
    name = f"tunebench_observer_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        with limited(f"the import of {path}", IMPORT_S):
            _import(file, name, path)
    observer = getattr(sys.modules[name], "OBSERVER", None)
    lacking = [part for part in ("metrics", "before_samples", "after_samples") if not hasattr(observer, part)]
    if lacking:
        raise InputError(f"observer {path}: OBSERVER must have {', '.join(lacking)}")
    return observer


def _import(file: Path, name: str, path: str | Path) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise InputError(f"observer {path}: expected {NVML} or a Python file that defines OBSERVER")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # a user's file may raise anything; the message keeps it
        sys.modules.pop(name, None)
        if not isinstance(error, Exception | SystemExit):
            raise
        raise InputError(f"observer {path}: {describe_error(error)}") from error


def absolute_observers(observers: Sequence[str]) -> tuple[str, ...]:
    """Return observers with absolute paths: workers run in another folder."""
    return tuple(name if name == NVML else str(Path(name).absolute()) for name in observers)


def metric_names(observers: Sequence[str]) -> set[str]:
    """Return the names of the values that observers provide.

    Args:
        observers: `NVML`, or files.

    Raises:
        InputError: A file cannot be loaded.
    """
    chosen = [NvmlObserver if name == NVML else load_observer(name) for name in observers]
    return {str(metric) for observer in chosen for metric in observer.metrics}
