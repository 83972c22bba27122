"""Strict decoding of one JSON line: a device or a measurement."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, get_args

from tunebench import workloads
from tunebench.cache_file import value_of
from tunebench.db.bulk import CLOCK_TOLERANCE
from tunebench.db.contradiction import contradictions
from tunebench.db.record import (
    PURPOSES,
    RECORDED,
    NewMeasurement,
    TrialKey,
    Verdict,
    VersusDefault,
)
from tunebench.device import Device
from tunebench.errors import InputError, UnknownName
from tunebench.outcome import CacheState, Effort, Outcome, Resources, Result, Verification, from_json
from tunebench.space import Config

__all__ = ["check_plain", "check_workload", "device_from_json", "measurement_from_json", "refuse_constant"]

MAX_TEXT = 10_000
"""Largest length of a text, such as a compiler's message."""
MAX_NAME = 2000
"""Largest length of a name: device, workload, variant, revision."""
MAX_METRIC = 100
"""Largest length of the name of a metric."""
MAX_DEPTH = 32
"""Largest nesting of objects and lists in free-form data."""
MAX_INTEGER = 1 << 63
"""Databases store only integers below this magnitude."""

# -- a device --------------------------------------------------------------------------------------


def device_from_json(data: Mapping[str, Any]) -> Device:
    """Return the device of a line.

    Raises:
        InputError: if a field is missing or malformed, or the key is not that of the device.
    """
    fields = {name: value for name, value in data.items() if name not in ("what", "tunebench", "key")}
    check_plain(fields, "the description of a device")
    for name in ("name", "kind", "architecture"):
        _text(data, name)
    for name, kind in _DEVICE_FIGURES.items():
        if name in fields and not _fits(fields[name], kind):
            raise InputError(f"device fields must be numbers, got {name}={str(fields[name])[:100]}")
    try:
        device = Device(**fields)
    except TypeError as error:
        raise InputError(f"its fields are not those of a device of this version: {error}") from None
    if device.key != data.get("key") or device.kind not in ("gpu", "cpu"):
        raise InputError(f"its key must be {device.key} and its kind gpu or cpu")
    return device


_DEVICE_FIGURES = {
    name: kind
    for name, kind in typing.get_type_hints(Device).items()
    if name not in ("name", "kind", "architecture")
}


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value has the type of its field and is not negative; integers are valid floats."""
    arguments = get_args(kind)
    if type(None) in arguments:
        return value is None or _fits(value, arguments[0])
    if arguments:
        return isinstance(value, dict) and all(_fits(rate, arguments[1]) for rate in value.values())
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if isinstance(value, int):
        return 0 <= value < 1 << 53
    return kind is float and isinstance(value, float) and 0 <= value < 1e300


# -- a measurement ---------------------------------------------------------------------------------


def measurement_from_json(data: Mapping[str, Any], devices: Mapping[str, Device]) -> NewMeasurement:
    """Return the measurement of a line.

    Args:
        data: The line.
        devices: Devices of earlier lines, by key.

    Raises:
        InputError: if a field is missing, unknown, malformed or out of range, or contradicts another; the
            message names it.
    """
    key = TrialKey(
        **{name: _text(data, name) for name in ("device", "workload", "variant", "revision")},
        config=_config(data.get("config")),
    )
    check_workload(key.workload)
    if key.device not in devices:
        raise InputError(f"no earlier line describes the device {key.device!r}")
    if data.get("purpose") not in PURPOSES:
        raise InputError(f"purpose must be one of: {', '.join(PURPOSES)}")
    outcome, bound_us = _outcome(data.get("outcome")), _number(data, "bound_us")
    for reason in contradictions(outcome, bound_us):
        raise InputError(reason)
    return NewMeasurement(
        key=key,
        result=Result(
            outcome=outcome,
            resources=_resources(data.get("resources")),
            effort=_effort(data.get("effort")),
            conditions=_plain(data.get("conditions"), "conditions"),
        ),
        purpose=data["purpose"],
        bound_us=bound_us,
        seed=_seed(data.get("seed")),
        recorded_at=_moment(data.get("recorded_at")),
        verdict=_verdict(data),
    )


def _verdict(data: Mapping[str, Any]) -> Verdict:
    """Return the comparison with others, which lines of earlier versions lack."""
    versus, verdicts = data.get("versus_default"), get_args(VersusDefault)
    if versus is not None and versus not in verdicts:
        raise InputError(f"versus_default must be one of: {', '.join(verdicts)}")
    return Verdict(versus_default=versus, comparison=_plain(data.get("comparison", {}), "comparison"))


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise InputError(f"{name} must be text of 1 to {MAX_NAME} printable characters")
    return value


def _number(data: Mapping[str, Any], name: str) -> float | None:
    value = data.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e300:
        raise InputError(f"{name} must be a non-negative number")
    return float(value)


def _seed(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < MAX_INTEGER):
        raise InputError("seed must be an integer")
    return value


def _moment(value: Any) -> datetime:
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        moment = datetime.min
    if moment.tzinfo is None:
        raise InputError("recorded_at must be a time with its time zone, such as 2026-01-31T12:00:00+00:00")
    # A time in the future would make all later measurements count as older.
    if moment.year < 1970 or moment.year > 9000 or moment > datetime.now(UTC) + CLOCK_TOLERANCE:
        raise InputError(f"recorded_at must be between 1970 and now, got {moment.isoformat()}")
    return moment


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{name} must be an object")
    return value


def _plain(value: Any, name: str) -> dict[str, Any]:
    data = _object(value, name)
    check_plain(data, name)
    return data


def check_plain(value: Any, name: str, depth: int = 0) -> None:
    """Check that a value survives every supported database.

    Args:
        value: Decoded JSON.
        name: Name of the field, for the message.
        depth: Nesting of the value.

    Raises:
        InputError: if it is nested too deeply, or contains a text or a number that a database cannot store.
    """
    match value:
        case None | bool():
            return
        case str() if len(value) <= MAX_TEXT and "\0" not in value and not _has_surrogate(value):
            return
        case int() if abs(value) < MAX_INTEGER:
            return
        case float() if math.isfinite(value):
            return
        case dict() | list() if depth < MAX_DEPTH:
            for item in (*value, *value.values()) if isinstance(value, dict) else value:
                check_plain(item, name, depth + 1)
            return
    raise InputError(f"{name} must be plain JSON data, got {ascii(value)[:100]}")


def refuse_constant(constant: str) -> None:
    """Refuse NaN and Infinity, which Python's parser accepts; an argument for its `parse_constant`."""
    raise ValueError(f"{constant} is not JSON")


def _has_surrogate(text: str) -> bool:
    """Return whether a text contains a lone surrogate, which cannot be encoded."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


@functools.lru_cache(maxsize=1024)
def check_workload(text: str) -> None:
    """Check that a workload is canonical; a workload of an unknown operator may be any text.

    Raises:
        InputError: if it is not.
    """
    if text.startswith(RECORDED):
        return
    try:
        canonical_text = str(workloads.parse(text))
    except UnknownName as error:
        if error.kind == "operator":
            return
        raise
    except RecursionError:
        raise InputError("its workload is nested too deeply") from None
    if canonical_text != text:
        raise InputError(f"its workload must be written as {canonical_text}")


def _config(value: Any) -> Config:
    values = _object(value, "config")
    if not values or not all(name.isidentifier() and len(name) <= MAX_TEXT for name in values):
        raise InputError("config must have parameters whose names are identifiers")
    return Config({name: value_of(values, name) for name in values})


def _resources(value: Any) -> Resources:
    values = _object(value, "resources")
    names = {field.name for field in dataclasses.fields(Resources)}
    if set(values) - names or not all(type(v) is int and 0 <= v < MAX_INTEGER for v in values.values()):
        raise InputError(f"resources must be integers; known names: {', '.join(sorted(names))}")
    return Resources(**values)


def _effort(value: Any) -> Effort:
    values = _object(value, "effort")
    return Effort(**{field.name: _number(values, field.name) or 0.0 for field in dataclasses.fields(Effort)})


def _outcome(value: Any) -> Outcome:
    fields = dict(_object(value, "outcome"))
    for name in fields:
        check = _CHECKS.get(name)
        if check is not None:
            fields[name] = check(fields, name)
    try:
        return from_json(fields)
    except KeyError:
        raise InputError(
            f"the kind of an outcome must be known, got {str(fields.get('kind'))[:100]!r}"
        ) from None
    except TypeError as error:
        raise InputError(f"outcome: {error}") from None


def _time(data: Mapping[str, Any], name: str) -> float:
    time_us = _number(data, name)
    if not time_us:
        raise InputError(f"{name} must be positive")
    return time_us


def _times(data: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = data[name]
    if not isinstance(values, list) or not values:
        raise InputError(f"{name} must be a non-empty list of times")
    return tuple(_time({name: value}, name) for value in values)


def _interval(data: Mapping[str, Any], name: str) -> tuple[float, ...]:
    times = _times(data, name)
    if len(times) != 2 or times[0] > times[1]:
        raise InputError(f"{name} must be two times in ascending order")
    return times


def _reason(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise InputError(f"{name} must be text")
    return value[:MAX_TEXT].encode("utf-8", "replace").decode().replace("\0", " ")


def _flag(data: Mapping[str, Any], name: str) -> bool:
    if not isinstance(data[name], bool):
        raise InputError(f"{name} must be true or false")
    return bool(data[name])


def _cache(data: Mapping[str, Any], name: str) -> str:
    if data[name] not in get_args(CacheState):
        raise InputError(f"{name} must be one of: {', '.join(get_args(CacheState))}")
    return str(data[name])


def _verification(data: Mapping[str, Any], name: str) -> Verification:
    values = _object(data[name], name)
    methods = get_args(typing.get_type_hints(Verification)["how"])
    if values.get("how") not in methods:
        raise InputError(f"the verification method must be one of: {', '.join(methods)}")
    errors = {name: _number(values, name) for name in ("worst", "absolute", "relative")}
    return Verification(how=values["how"], detail=_reason(values, "detail"), **errors)


def _metrics(data: Mapping[str, Any], name: str) -> dict[str, float]:
    metrics = _plain(data[name], name)
    for metric, value in metrics.items():
        if not 0 < len(metric) <= MAX_METRIC or isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{name} must be numbers by names of up to {MAX_METRIC} characters")
    return metrics


def _conditions(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    return _plain(data[name], name)


_CHECKS: Mapping[str, Callable[[Mapping[str, Any], str], Any]] = {
    **dict.fromkeys(("median_us", "predicted_us", "above_us", "incumbent_us"), _time),
    **dict.fromkeys(("bound_us", "low_us", "high_us"), _number),
    "samples_us": _times,
    "ci_us": _interval,
    "cache": _cache,
    "verification": _verification,
    "reason": _reason,
    "refused": _flag,
    "conditions": _conditions,
    "metrics": _metrics,
}
"""Check of each field of an outcome; the constructor of the outcome refuses unknown fields."""
