"""Tuning spaces that other tuners have measured: Kernel Tuner's cache files and the T4 format.

Nothing of such a file is executed or trusted beyond its schema; it may be compressed by gzip.

Source: Kernel Tuner, "Cache files"; Autotuning community, "T4: tuning results format" (schema 1.0.0).
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.errors import InputError
from tunebench.outcome import CompileFailed, LaunchFailed, Outcome, WrongResult
from tunebench.space import Parameter, Space, Table, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Recording", "read"]

MAX_BYTES = 1 << 30
"""Most that a file may hold once it is decompressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A space of which every configuration was tried, on one device.

    Attributes:
        kernel: Name of the kernel, as recorded; empty in T4 files, which do not tell it.
        device: Name of the device, as its driver tells it; empty where it is not told.
        problem: Its size, as recorded; empty where it is not told.
        table: The configurations.
        times_us: What each took, in microseconds: the recorded average, NaN for a failure.
        fastest_us: The fastest sample of each, NaN for a failure.
        failures: What became of the rows without a time.
    """

    kernel: str
    device: str
    problem: tuple[int, ...]
    table: Table
    times_us: NDArray[np.float64]
    fastest_us: NDArray[np.float64]
    failures: Mapping[int, Outcome]

    @property
    def optimum_us(self) -> float:
        """Least recorded time."""
        return float(np.nanmin(self.times_us))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One configuration of a file: its values, and its time in microseconds or why it has none."""

    values: dict[str, Value]
    time_us: float
    fastest_us: float
    failure: Outcome | None = None


def read(path: Path) -> Recording:
    """Read a recorded space.

    Raises:
        InputError: if the file cannot be read, is of another format, or contradicts itself.
    """
    data = _load(path)
    if isinstance(data, dict) and isinstance(data.get("cache"), dict):
        return _kernel_tuner(data, path)
    if isinstance(data, dict) and isinstance(data.get("results"), list):
        return _t4(data, path)
    raise InputError(
        f"{path} is neither a Kernel Tuner cache file nor in T4 format: it has no cache, no results"
    )


def _load(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if compressed else open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise InputError(f"{path} holds more than {MAX_BYTES >> 20} MiB")
        return json.loads(text)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error


def _kernel_tuner(data: Mapping[str, Any], path: Path) -> Recording:
    names = data.get("tune_params_keys")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{path}: tune_params_keys must list the names of the parameters")
    declared = data.get("tune_params")
    entries = []
    for key, entry in data["cache"].items():
        if not isinstance(entry, dict):
            raise InputError(f"{path}: cache entry {key!r} must be an object")
        entries.append(_entry(entry, names, entry.get("time"), entry.get("times"), path))
    return _recording(
        entries,
        names,
        declared if isinstance(declared, dict) else {},
        path,
        kernel=str(data.get("kernel_name", "")),
        device=str(data.get("device_name", "")),
        problem=_problem(data.get("problem_size")),
    )


def _t4(data: Mapping[str, Any], path: Path) -> Recording:
    entries: list[_Entry] = []
    names: list[str] = []
    for number, result in enumerate(data["results"]):
        values = result.get("configuration") if isinstance(result, dict) else None
        if not isinstance(values, dict):
            raise InputError(f"{path}: result {number} must have a configuration")
        names = names or list(values)
        measured = {
            m.get("name"): m.get("value") for m in result.get("measurements", ()) if isinstance(m, dict)
        }
        time = measured.get("time") if result.get("invalidity") == "correct" else result.get("invalidity")
        times = result.get("times")
        samples = times.get("runtimes") if isinstance(times, dict) else None
        entries.append(_entry(values, names, time, samples, path))
    return _recording(entries, names, {}, path, kernel="", device="", problem=())


_FAILURES: dict[str, type[CompileFailed] | type[LaunchFailed] | type[WrongResult]] = {
    "CompilationFailedConfig": CompileFailed,
    "RuntimeFailedConfig": LaunchFailed,
    "InvalidConfig": LaunchFailed,
    "compile": CompileFailed,
    "runtime": LaunchFailed,
    "constraints": LaunchFailed,
    "correctness": WrongResult,
}
"""What other tuners call a failure, and what it is here; any other word counts as a failed launch."""


def _entry(values: Mapping[str, Any], names: Iterable[str], time: Any, samples: Any, path: Path) -> _Entry:
    """Return one configuration; times are given in milliseconds."""
    try:
        config = {name: values[name] for name in names}
    except KeyError as error:
        raise InputError(f"{path}: a configuration lacks the parameter {error}") from None
    if not all(isinstance(value, int | float | str) for value in config.values()):
        raise InputError(f"{path}: parameters must be numbers or text, got {config}")
    if isinstance(time, int | float) and not isinstance(time, bool):
        if not 0 < time < math.inf:
            raise InputError(f"{path}: a time must be positive, got {time} for {config}")
        numbers = [s for s in samples if isinstance(s, int | float)] if isinstance(samples, list) else []
        return _Entry(config, 1e3 * time, 1e3 * min([*numbers, time]))
    failure = _FAILURES.get(str(time), LaunchFailed)
    return _Entry(config, math.nan, math.nan, failure(reason=f"recorded as {time}"))


def _problem(size: Any) -> tuple[int, ...]:
    sizes = size if isinstance(size, list) else [size]
    return tuple(sizes) if all(isinstance(s, int) and not isinstance(s, bool) for s in sizes) else ()


def _recording(
    entries: list[_Entry], names: list[str], declared: Mapping[str, Any], path: Path, **told: Any
) -> Recording:
    """Put entries in the order of their space; declared values give the order of a parameter's values."""
    if not any(entry.failure is None for entry in entries):
        raise InputError(f"{path}: no configuration of {len(entries)} has a time")
    parameters = []
    for name in names:
        present = {entry.values[name] for entry in entries}
        order = declared.get(name)
        values = [v for v in order if v in present] if isinstance(order, list) else []
        if set(values) != present or len(values) != len(present):
            values = sorted(present, key=lambda value: (isinstance(value, str), value))
        parameters.append(Parameter(name, tuple(values), "recorded"))
    space = Space(tuple(parameters))
    ordinals = np.array([space.ordinals(entry.values) for entry in entries], dtype=np.int16)
    keys = space.keys(ordinals)
    order = np.argsort(keys)
    if len(np.unique(keys)) != len(keys):
        raise InputError(f"{path}: a configuration is there twice")
    placed = [entries[i] for i in order]
    return Recording(
        table=Table(space, ordinals[order]),
        times_us=np.array([entry.time_us for entry in placed]),
        fastest_us=np.array([entry.fastest_us for entry in placed]),
        failures={row: entry.failure for row, entry in enumerate(placed) if entry.failure is not None},
        **told,
    )
