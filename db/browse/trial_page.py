"""Parts of the query for a page of trials: one measurement of each trial, its order and selection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from tunebench.db.browse.entry import TrialFilter, TrialRow
from tunebench.db.schema import measurement_table as _measurement
from tunebench.db.schema import trial_table as _trial

__all__ = ["TRIAL_ORDERS", "beyond", "representatives", "selected", "trial_row"]

_LATE = 1e300
"""Sort key in place of a missing number."""


def representatives(device_id: int, workload: str) -> sa.Subquery:
    """Return the trials of a workload on a device, each with one measurement (see `TrialRow`)."""
    trial, measurement = _trial.c, _measurement.c
    time_us = sa.func.coalesce(measurement.median_us, measurement.predicted_us)
    rank = sa.func.row_number().over(
        partition_by=trial.id,
        order_by=(
            sa.case((time_us.is_not(None), 0), else_=1),
            sa.case((measurement.purpose == "finalist", 0), else_=1),
            measurement.id.desc(),
        ),
    )
    ranked = (
        sa.select(
            *(trial.id, trial.variant, trial.config, trial.stale, measurement.run_id),
            *(measurement.purpose, time_us.label("time_us"), measurement.id.label("measurement_id")),
            sa.func.coalesce(measurement.kind, trial.state).label("kind"),
            *(measurement.ci_low_us, measurement.ci_high_us, measurement.bound_us),
            *(measurement.reason, measurement.recorded_at, rank.label("place")),
        )
        .join_from(_trial, _measurement, measurement.trial_id == trial.id, isouter=True)
        .where(trial.device_id == device_id, trial.workload == workload)
        .subquery()
    )
    return sa.select(ranked).where(ranked.c.place == 1).subquery()


TRIAL_ORDERS: Mapping[str, Any] = {
    "time": lambda c: sa.func.coalesce(c.time_us, _LATE),
    "bound": lambda c: sa.func.coalesce(c.bound_us, _LATE),
    "variant": lambda c: c.variant,
    "config": lambda c: c.config,
    "outcome": lambda c: c.kind,
    "recorded": lambda c: sa.func.coalesce(c.measurement_id, 0),
}
"""Columns that trials can be ordered by, with the expression of each."""


def selected(columns: Any, select: TrialFilter) -> Iterator[sa.ColumnElement[bool]]:
    """Yield the conditions of a selection on the columns of `representatives`."""
    if select.variant:
        yield columns.variant == select.variant
    if select.kind:
        yield columns.kind == select.kind
    if select.source:
        yield columns.stale if select.source == "stale" else sa.not_(columns.stale)
    if select.config:
        yield columns.config.icontains(select.config, autoescape=True)
    if select.run:
        yield columns.run_id == select.run


def beyond(key: Any, row_id: Any, cursor: tuple[Any, Any], *, downwards: bool) -> sa.ColumnElement[bool]:
    """Return the condition that selects the rows after a place, in ascending or descending order.

    Args:
        key: Column that rows are ordered by.
        row_id: Column that orders rows with equal keys.
        cursor: Key and id of the row at the place.
        downwards: Whether the order is descending.
    """
    value, last = cursor
    further = key < value if downwards else key > value
    tied = row_id < last if downwards else row_id > last
    return sa.or_(further, sa.and_(key == value, tied))


def trial_row(row: Mapping[Any, Any]) -> TrialRow:
    """Return a row of `representatives`, with its column `key`, as a dataclass."""
    return TrialRow(
        id=row["id"],
        variant=row["variant"],
        config=row["config"],
        stale=bool(row["stale"]),
        kind=row["kind"],
        purpose=row["purpose"],
        time_us=row["time_us"],
        ci_us=None if row["ci_low_us"] is None else (row["ci_low_us"], row["ci_high_us"]),
        bound_us=row["bound_us"],
        reason=row["reason"],
        recorded_at=row["recorded_at"],
        cursor=(row["key"], row["id"]),
    )
