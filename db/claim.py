"""Claims of trials: whose they are, how long, and what becomes of those of the dead."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tunebench.db.owner import is_dead
from tunebench.db.record import NewMeasurement
from tunebench.db.schema import trial_table as _trial

__all__ = ["CLAIM_S", "LONGEST_CLAIM", "claimable", "lock_configs", "release_dead", "take_over_dead"]

CLAIM_S = 600.0
"""How long a claim lasts unless it is renewed: longer than any one trial should take."""

LONGEST_CLAIM = timedelta(days=1)
"""No claim expires later than that from now: one that does was made while a clock was wrong."""

_LOCKS = 0x74756E65 << 32
"""Of a PostgreSQL server's locks, those that are ours begin here."""


def claimable(owner: str, now: datetime) -> sa.ColumnElement[bool]:
    """Return what selects a claimed trial that an owner may have: it expired, or is the owner's own."""
    ends = _trial.c.claim_expires_at
    expired = (ends <= now) | (ends > now + LONGEST_CLAIM)
    return (_trial.c.state == "claimed") & (expired | (_trial.c.claim_owner == owner))


def take_over_dead(
    connection: sa.Connection, identity: Sequence[sa.ColumnElement[bool]], claim: Mapping[str, Any]
) -> bool:
    """Take a trial from a process of this host that ended; tell whether that was so."""
    holder = connection.execute(sa.select(_trial.c.claim_owner).where(*identity)).scalar()
    if holder is None or not is_dead(holder):
        return False
    held = (*identity, _trial.c.state == "claimed", _trial.c.claim_owner == holder)
    return connection.execute(_trial.update().where(*held).values(**claim)).rowcount == 1


def release_dead(connection: sa.Connection) -> None:
    """Drop the claims of processes of this host that ended without releasing them."""
    owners = sa.select(_trial.c.claim_owner).where(_trial.c.state == "claimed").distinct()
    dead = [owner for owner in connection.execute(owners).scalars() if is_dead(owner)]
    if dead:
        connection.execute(_trial.delete().where(_trial.c.state == "claimed", _trial.c.claim_owner.in_(dead)))


def lock_configs(connection: sa.Connection, measurements: Sequence[NewMeasurement]) -> None:
    """Let those who record one configuration wait for each other: each marks the others' revisions.

    SQLite has one writer at a time anyhow.
    """
    if connection.dialect.name == "postgresql":
        keys = {(each.key.space, str(each.key.config)) for each in measurements}
        for turn in sorted(zlib.crc32(f"{space} {config}".encode()) for space, config in keys):
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCKS + turn)))
