"""Checks of single rows: values that cannot be decoded, and values that contradict one another."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from tunebench._figure import significant
from tunebench.db import schema
from tunebench.db.contradiction import contradictions
from tunebench.db.jsonl_codec import check_plain, refuse_constant
from tunebench.db.record import result_from_row
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.space import Config

__all__ = [
    "check_device",
    "check_measurement",
    "check_trial",
    "decode_row",
    "lenient_text",
    "raw_columns",
    "refusal",
]


def raw_columns(table: sa.Table) -> list[sa.Label[Any]]:
    """Return the columns of a table without type conversion: JSON and times as text."""
    return [_raw(column).label(column.name) for column in table.c]


def _raw(column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    if isinstance(column.type, sa.JSON | schema.UtcTime):
        return sa.cast(column, sa.Text)
    return sa.type_coerce(column, sa.types.NullType())


@contextmanager
def lenient_text(connection: sa.Connection) -> Iterator[None]:
    """Decode invalid UTF-8 in SQLite texts to surrogates instead of failing."""
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name != "sqlite":
        yield
        return
    driver.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
    try:
        yield
    finally:
        driver.text_factory = str


def decode_row(row: Mapping[Any, Any], table: sa.Table) -> dict[str, Any]:
    """Return a row with its JSON and times decoded.

    Args:
        row: A row of `raw_columns`.
        table: Its table.

    Raises:
        ValueError: if a value cannot be decoded.
    """
    decoded = dict(row)
    for column in table.c:
        value = decoded[column.name]
        try:
            if isinstance(value, str) and isinstance(column.type, sa.JSON):
                decoded[column.name] = json.loads(value, parse_constant=refuse_constant)
                check_plain(decoded[column.name], column.name)
            elif isinstance(value, str) and isinstance(column.type, schema.UtcTime):
                moment = datetime.fromisoformat(value)
                decoded[column.name] = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            elif isinstance(value, str):
                value.encode()
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError("the number is not finite")
        except (ValueError, RecursionError, InputError) as error:
            raise ValueError(f"its {column.name} cannot be decoded: {error}") from None
    return decoded


# Errors that constructors raise for damaged data.
_DECODE_ERRORS = (KeyError, TypeError, ValueError, AttributeError, InputError)


def check_measurement(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield kind and reason of each finding in a decoded measurement."""
    try:
        outcome = result_from_row(row).outcome
    except _DECODE_ERRORS as error:
        yield "unreadable", f"its outcome cannot be decoded: {error!r}"
        return
    samples_us = getattr(outcome, "samples_us", None)
    if samples_us is not None and not (samples_us and all(_positive(sample_us) for sample_us in samples_us)):
        yield "unreadable", "its samples must be positive times"
    elif row["fastest_us"] != (min(samples_us) if samples_us else None):
        yield "figure", f"its fastest sample is stored as {row['fastest_us']}"
    try:  # without the bound, with which the fastest sample is compared below
        yield from [("figure", reason) for reason in contradictions(outcome, None)]
    except (TypeError, ValueError):
        yield "figure", "its times must be numbers"
    fastest_us, bound_us = row["fastest_us"], row["bound_us"]
    if _positive(fastest_us) and _positive(bound_us) and fastest_us < bound_us:
        yield (
            "bound",
            f"it took {significant(fastest_us, 6)} us, below its lower bound of {significant(bound_us, 6)} "
            "us: one of the two is wrong",
        )


def refusal(row: Mapping[str, Any]) -> str | None:
    """Return why a decoded measurement cannot be taken over, by the rules of an import; None if it can."""
    reasons = [reason for kind, reason in check_measurement(row) if kind != "bound"]
    if not reasons:
        reasons = list(contradictions(result_from_row(row).outcome, row["bound_us"]))
    return reasons[0] if reasons else None


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def check_trial(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield kind and reason of each finding in a decoded trial."""
    values = row["config_values"]
    if not isinstance(values, dict) or not values:
        yield "unreadable", "its configuration has no values"
    elif any(isinstance(value, dict | list | type(None)) for value in values.values()):
        yield "unreadable", "its configuration has values of a type that parameters cannot have"
    elif str(Config(values)) != row["config"]:
        yield "config", f"its text is {row['config'][:200]}, but its values are {Config(values)}"


def check_device(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield kind and reason of each finding in a decoded device."""
    try:
        device = Device(**row["descriptor"])
        key = device.key
    except _DECODE_ERRORS as error:
        yield "unreadable", f"its description cannot be decoded: {error}"
        return
    if key != row["key"]:
        yield "device", f"its key is {row['key']}, but its description has the key {key}"
    values = (device.kind, device.architecture, device.name, device.sm_count, device.power_limit_w)
    columns = ("kind", "architecture", "product", "sm_count", "power_limit_w")
    for name, value in zip(columns, values, strict=True):
        if row[name] != value:
            yield "device", f"its {name} is {row[name]}, but its description has {value}"
