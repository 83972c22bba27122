"""Kernel Tuner cache files.

Source: Kernel Tuner, "Cache files"; the schema of version 1.1.0 of the format.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tunebench.cache_file._row import (
    MAX_VALUES,
    RECORDED_AS,
    RawTrial,
    RecordedTrial,
    TuningLog,
    metrics_of,
    printable,
    problem_size_of,
    refused_field,
    value_of,
)
from tunebench.cache_file._stream import as_object
from tunebench.errors import InputError
from tunebench.outcome import CompileFailed, Measured
from tunebench.space import Value

__all__ = ["dump", "location", "read_header", "row_parser"]


def read_header(metadata: Mapping[str, Any]) -> TuningLog:
    """Return the metadata of a cache file.

    Args:
        metadata: Members of the file without rows.

    Raises:
        InputError: if it does not list its parameters.
    """
    names = metadata.get("tune_params_keys")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError("tune_params_keys must list the parameter names")
    return TuningLog(
        kernel=printable(str(metadata.get("kernel_name", ""))),
        device=printable(str(metadata.get("device_name", ""))),
        problem=problem_size_of(metadata.get("problem_size")),
        names=tuple(names),
        values=dict(_declared(metadata.get("tune_params"), names)),
        rows=(),
    )


def _declared(values: Any, names: list[str]) -> Iterator[tuple[str, tuple[Value, ...]]]:
    """Yield the declared values of parameters, in order, if all are valid."""
    for name in names if isinstance(values, dict) else ():
        declared = values.get(name)
        if isinstance(declared, list) and len(declared) <= MAX_VALUES:
            with contextlib.suppress(InputError):
                yield name, tuple(value_of({name: value}, name) for value in declared)


def row_parser(metadata: Mapping[str, Any], log: TuningLog) -> Callable[[Any], RecordedTrial]:
    """Return a function that converts an entry to a trial.

    Args:
        metadata: Members of the file without rows.
        log: Result of `read_header`.
    """
    return functools.partial(_row, names=log.names)


def location(number: int, key: str | int) -> str:
    """Return the location of an entry, for messages."""
    return f"cache entry {number} ({str(key)[:100]!r})"


def _row(entry: Any, names: tuple[str, ...]) -> RecordedTrial:
    entry = as_object(entry)
    raw = RawTrial(
        values=entry,
        time=entry.get("__error__", entry.get("time")),  # version 1.5 stores the failure next to the time
        samples=entry.get("times"),
        refused=None if "refused" in names else entry.get("refused"),
        compiling=entry.get("compile_time"),
        verifying=entry.get("verification_time"),
        measuring=entry.get("benchmark_time"),
        framework=entry.get("framework_time"),
        search=entry.get("strategy_time"),
        timestamp=entry.get("timestamp"),
        metrics={name: value for name, value in entry.items() if name not in _FIELDS and name not in names},
    )
    return raw.row(names)


_FIELDS = {
    *("time", "times", "__error__", "refused", "compile_time", "verification_time", "benchmark_time"),
    *("framework_time", "strategy_time", "timestamp"),
}
"""Fields of an entry that are neither parameters nor metrics."""


_FAILURE_NAMES = {CompileFailed.kind: "CompilationFailedConfig"}
"""Names of failures; others are runtime failures."""


def dump(log: TuningLog) -> dict[str, Any]:
    """Return a log as the contents of a cache file.

    Aborted measurements become runtime failures: the format has no name for them.
    """
    return {
        "schema_version": "1.1.0",
        "device_name": log.device,
        "kernel_name": log.kernel,
        "problem_size": list(log.problem),
        "tune_params_keys": list(log.names),
        "tune_params": {name: list(log.values_of(name)) for name in log.names},
        "objective": "time",
        "cache": {",".join(map(str, row.config.values())): _entry(row) for row in log.rows},
    }


def _entry(row: RecordedTrial) -> dict[str, Any]:
    outcome, effort, conditions = row.result.outcome, row.result.effort, row.result.conditions
    timed = isinstance(outcome, Measured)
    reason = getattr(outcome, "reason", "").removeprefix(RECORDED_AS)
    word = reason if reason == "InvalidConfig" else _FAILURE_NAMES.get(outcome.kind, "RuntimeFailedConfig")
    return {
        **metrics_of(outcome),
        **refused_field(outcome),
        **row.config,
        "time": row.time_us / 1e3 if timed else word,
        "times": [us / 1e3 for us in outcome.samples_us] if isinstance(outcome, Measured) else [],
        "compile_time": 1e3 * effort.compile_s,
        "verification_time": 1e3 * effort.verify_s,
        "benchmark_time": 1e3 * effort.measure_s,
        "strategy_time": 1e3 * conditions.get("search_s", 0.0),
        "framework_time": 1e3 * conditions.get("framework_s", 0.0),
        "timestamp": conditions.get("timestamp", ""),
    }
