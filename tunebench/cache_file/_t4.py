"""The T4 format of tuning results.

Source: Autotuning community, "T4: tuning results format" (schema 1.0.0).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from tunebench.cache_file._row import (
    MAX_METRICS,
    RECORDED_AS,
    RawTrial,
    RecordedTrial,
    TuningLog,
    metrics_of,
    printable,
    problem_size_of,
    refused_field,
)
from tunebench.cache_file._stream import as_object
from tunebench.errors import InputError
from tunebench.outcome import Aborted, CompileFailed, Crashed, LaunchFailed, Measured, TimedOut, WrongResult

__all__ = ["dump", "location", "names_of", "read_header", "row_parser", "units_of"]

VERSION = "1.0.0"

_UNITS_US = {"s": 1e6, "seconds": 1e6, "ms": 1e3, "milliseconds": 1e3, "miliseconds": 1e3}
_UNITS_US |= {"us": 1.0, "microseconds": 1.0, "ns": 1e-3, "nanoseconds": 1e-3}
"""Microseconds in each unit of time; the format's default is milliseconds."""


def names_of(result: Any) -> tuple[str, ...]:
    """Return the parameter names of a result; empty if it has no configuration."""
    values = result.get("configuration") if isinstance(result, dict) else None
    return tuple(values) if isinstance(values, dict) else ()


def units_of(result: Any) -> dict[str, str]:
    """Return the units of the metrics of a result, as far as it has any."""
    measurements = result.get("measurements") if isinstance(result, dict) else None
    entries = measurements[:MAX_METRICS] if isinstance(measurements, list) else []
    pairs = ((entry.get("name"), entry.get("unit")) for entry in entries if isinstance(entry, dict))
    return {
        printable(name): printable(unit)
        for name, unit in pairs
        if isinstance(name, str) and isinstance(unit, str) and name != "time" and unit
    }


def read_header(
    members: Mapping[str, Any], names: tuple[str, ...], units: Mapping[str, str] | None = None
) -> TuningLog:
    """Return the metadata of a file in T4 format.

    The format has no fields for kernel and device; `dump` writes them to its metadata.

    Args:
        members: Members of the file without results.
        names: Parameter names of the first result with a configuration.
        units: Units of its metrics.

    Raises:
        InputError: if there are none.
    """
    if not names:
        raise InputError("expected results with a configuration, found none")
    metadata = _metadata(members)
    _unit(metadata.get("timeunit"), "ms")
    return TuningLog(
        kernel=printable(str(metadata.get("kernel_name", ""))),
        device=printable(str(metadata.get("device_name", ""))),
        problem=problem_size_of(metadata.get("problem_size")),
        workload=printable(str(metadata.get("workload", ""))),
        names=names,
        rows=(),
        units=units or {},
    )


def _metadata(members: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = members.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def row_parser(members: Mapping[str, Any], log: TuningLog) -> Callable[[Any], RecordedTrial]:
    """Return a function that converts a result to a trial.

    Args:
        members: Members of the file without results.
        log: Result of `read_header`.
    """
    return functools.partial(_row, names=log.names, unit=_unit(_metadata(members).get("timeunit"), "ms"))


def location(number: int, key: str | int) -> str:
    """Return the location of a result, for messages."""
    return f"result {number}"


def _row(result: Any, names: tuple[str, ...], unit: str) -> RecordedTrial:
    values = as_object(result).get("configuration")
    if not values:
        raise InputError("it must have a configuration")
    values = as_object(values)
    if unknown := set(values) - set(names):
        raise InputError(f"it has a parameter that the first result lacks: {min(unknown)[:100]}")
    measurements = result.get("measurements")
    entries = [m for m in measurements if isinstance(m, dict)] if isinstance(measurements, list) else []
    measured = next((m for m in entries if m.get("name") == "time"), {})
    phases = result.get("times")
    times: Mapping[str, Any] = phases if isinstance(phases, dict) else {}
    correct = result.get("invalidity") == "correct"
    return RawTrial(
        values=values,
        time=measured.get("value") if correct else result.get("invalidity"),
        unit_us=_UNITS_US[_unit(measured.get("unit"), unit)],
        others_unit_us=_UNITS_US[unit],
        samples=times.get("runtimes"),
        reason=measured.get("value"),
        refused=result.get("refused"),
        compiling=times.get("compilation", times.get("compilation_time")),
        verifying=times.get("validation"),
        measuring=times.get("benchmark"),
        framework=times.get("framework"),
        search=times.get("search_algorithm"),
        timestamp=result.get("timestamp"),
        metrics={str(m.get("name")): m.get("value") for m in entries if m.get("name") != "time"},
    ).row(names)


def _unit(unit: Any, otherwise: str) -> str:
    """Return the unit of a time, or the default; refuse unknown units."""
    unit = unit or otherwise
    if not isinstance(unit, str) or unit not in _UNITS_US:
        raise InputError(
            f"the unit of times must be one of {', '.join(_UNITS_US)}; got {printable(repr(unit))}"
        )
    return unit


_FAILURE_NAMES = {
    CompileFailed: "compile",
    LaunchFailed: "runtime",
    Crashed: "runtime",
    WrongResult: "correctness",
    TimedOut: "timeout",
    Aborted: "timeout",
}
"""Names of failures in the format; an aborted measurement counts as a timeout."""


def dump(log: TuningLog) -> dict[str, Any]:
    """Return a log in T4 format; its metadata holds the fields of `read_header` that T4 does not have."""
    metadata = {
        "timeunit": "milliseconds",
        "kernel_name": log.kernel,
        "device_name": log.device,
        "problem_size": list(log.problem),
        "workload": log.workload,
    }
    return {
        "metadata": {name: value for name, value in metadata.items() if value},
        "results": [_result(row, log.units) for row in log.rows],
        "schema_version": VERSION,
    }


def _result(row: RecordedTrial, units: Mapping[str, str]) -> dict[str, Any]:
    outcome, effort, conditions = row.result.outcome, row.result.effort, row.result.conditions
    timed = isinstance(outcome, Measured)
    reason = getattr(outcome, "reason", outcome.kind).removeprefix(RECORDED_AS)
    word = "constraints" if reason == "InvalidConfig" else _FAILURE_NAMES.get(type(outcome), "runtime")
    stamp = conditions.get("timestamp")
    return {
        **({"timestamp": stamp} if stamp else {}),
        "configuration": dict(row.config),
        "times": {
            "compilation": 1e3 * effort.compile_s,
            "framework": 1e3 * conditions.get("framework_s", 0.0),
            "search_algorithm": 1e3 * conditions.get("search_s", 0.0),
            "validation": 1e3 * effort.verify_s,
            "benchmark": 1e3 * effort.measure_s,
            "runtimes": [us / 1e3 for us in getattr(outcome, "samples_us", ())],
        },
        "invalidity": "correct" if timed else word,
        **refused_field(outcome),
        "correctness": int(timed or isinstance(outcome, Aborted)),
        "measurements": [
            {"name": "time", "value": row.time_us / 1e3 if timed else reason, "unit": "ms"},
            *(
                {"name": name, "value": value, "unit": units.get(name, "")}
                for name, value in metrics_of(outcome).items()
            ),
        ],
        "objectives": ["time"],
    }
