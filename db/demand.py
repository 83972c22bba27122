"""Sums of the time that programs spend on workloads: one row per device, workload and origin database."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING

import sqlalchemy as sa

from tunebench.db import schema
from tunebench.db.record import Demand

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

__all__ = ["add_demand"]

_SET_SIZE = 1000  # rows per statement; SQLite allows 32766 variables, seven per row


def add_demand(
    connection: sa.Connection,
    insert: postgresql.Insert | sqlite.Insert,
    device_id: int,
    demands: Iterable[Demand],
    now: datetime,
) -> None:
    """Add counts to the rows of this database's own origin.

    Args:
        connection: Open write transaction.
        insert: INSERT into `demand` of the dialect.
        device_id: Id of the device.
        demands: Counts to add, one per workload.
        now: Current time.
    """
    origin = connection.execute(sa.select(schema.origin_table.c.id)).scalar_one()
    shared = {"device_id": device_id, "origin": origin, "first_noted_at": now, "last_noted_at": now}
    rows = [
        {"workload": demand.workload, "calls": demand.calls, "time_us": demand.time_us, **shared}
        for demand in demands
    ]
    stored, added = schema.demand_table.c, insert.excluded
    later = sa.case(
        (added.last_noted_at > stored.last_noted_at, added.last_noted_at), else_=stored.last_noted_at
    )
    for start in range(0, len(rows), _SET_SIZE):
        statement = insert.values(rows[start : start + _SET_SIZE]).on_conflict_do_update(
            index_elements=("device_id", "workload", "origin"),
            set_={
                "calls": stored.calls + added.calls,
                "time_us": stored.time_us + added.time_us,
                "last_noted_at": later,  # the clock may have been set back
            },
        )
        connection.execute(statement)
