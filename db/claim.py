"""Claims of trials: owner, expiry, and release of the claims of dead processes."""

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
"""Lifetime of a claim in seconds unless it is renewed: longer than any one trial should take."""

LONGEST_CLAIM = timedelta(days=1)
"""A claim that expires later than this was made with a wrong clock, and is free."""

_LOCKS = 0x74756E65 << 32
"""First key of the advisory locks that tunebench takes in PostgreSQL."""


def claimable(owner: str, now: datetime) -> sa.ColumnElement[bool]:
    """Return the condition that selects claimed trials that `owner` may claim: expired, or its own."""
    expires_at = _trial.c.claim_expires_at
    expired = (expires_at <= now) | (expires_at > now + LONGEST_CLAIM)
    return (_trial.c.state == "claimed") & (expired | (_trial.c.claim_owner == owner))


def take_over_dead(
    connection: sa.Connection, identity: Sequence[sa.ColumnElement[bool]], claim: Mapping[str, Any]
) -> bool:
    """Claim a trial whose owner is a dead process of this host; return whether that succeeded.

    Args:
        connection: Open write transaction.
        identity: Conditions that select the trial.
        claim: Columns of the new claim.
    """
    holder = connection.execute(sa.select(_trial.c.claim_owner).where(*identity)).scalar()
    if holder is None or not is_dead(holder):
        return False
    still_claimed = (*identity, _trial.c.state == "claimed", _trial.c.claim_owner == holder)
    return connection.execute(_trial.update().where(*still_claimed).values(**claim)).rowcount == 1


def release_dead(connection: sa.Connection) -> None:
    """Delete the claims of dead processes of this host."""
    owners = sa.select(_trial.c.claim_owner).where(_trial.c.claim_owner.is_not(None)).distinct()
    dead = [owner for owner in connection.execute(owners).scalars() if is_dead(owner)]
    if dead:
        connection.execute(_trial.delete().where(_trial.c.state == "claimed", _trial.c.claim_owner.in_(dead)))


def lock_configs(connection: sa.Connection, measurements: Sequence[NewMeasurement]) -> None:
    """Lock configurations: concurrent records of one would mark each other's revisions as stale.

    SQLite has a single writer and needs no lock.
    """
    if connection.dialect.name == "postgresql":
        keys = {(measurement.key.space, str(measurement.key.config)) for measurement in measurements}
        for turn in sorted(zlib.crc32(f"{space} {config}".encode()) for space, config in keys):
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCKS + turn)))
