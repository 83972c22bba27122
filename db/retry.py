"""What passes: a server is restarted, a lock is held for long. Those who have patience wait for it."""

from __future__ import annotations

import sqlite3
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import sqlalchemy as sa

from tunebench.db.location import Location
from tunebench.errors import DatabaseError

__all__ = ["RetryPolicy", "retry"]

T = TypeVar("T")

_CONFLICTS = ("40001", "40P01")
"""Two transactions of PostgreSQL got in each other's way; one of them was undone, and may be done again."""

_AWAY = ("57P01", "57P02", "57P03", "53300", "58030")
"""It shuts down, crashes, starts up, has no room for one more, or its disk fails; and all of class 08."""

_ATTEMPTS = 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


def _warn(line: str) -> None:
    warnings.warn(line, RuntimeWarning, stacklevel=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to wait for a database that was there and is away.

    Attributes:
        limit_s: How long at most, at a time.
        notify: Is told in one line what is waited for, and with an empty line that it is back.
    """

    limit_s: float = 120.0
    notify: Callable[[str], None] = _warn


def retry(retry_policy: RetryPolicy | None, location: Location, attempt: Callable[[bool], T]) -> T:
    """Do something on a database, again and again while what keeps it from being done may pass.

    Args:
        retry_policy: How long to wait for a database that is away; None waits for nothing.
        location: The database.
        attempt: Does it, in one transaction, and raises `DatabaseError` from what the driver said. It is told
            whether it may have been done already: a connection that breaks at a commit does not tell.

    Raises:
        DatabaseError: if it does not pass, or takes longer than there is retry_policy.
    """
    pause_s, conflicts = _FIRST_PAUSE_S, 0
    away_since: float | None = None
    while True:
        try:
            done = attempt(away_since is not None)
        except DatabaseError as error:
            if _state(error) in _CONFLICTS and conflicts < _ATTEMPTS:
                conflicts += 1
            elif retry_policy is None or not _is_away(error):
                raise
            elif away_since is None:
                away_since = time.monotonic()
                retry_policy.notify(f"waiting up to {retry_policy.limit_s:.0f} s: {error}")
            elif time.monotonic() - away_since >= retry_policy.limit_s:
                raise
        else:
            if away_since is not None and retry_policy is not None:
                retry_policy.notify("")
            return done
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _is_away(error: DatabaseError) -> bool:
    cause = error.__cause__
    reason = getattr(cause, "orig", None) or cause
    if isinstance(reason, sqlite3.OperationalError):
        return "locked" in str(reason)
    if not isinstance(cause, sa.exc.OperationalError | sa.exc.InterfaceError):
        return False
    state = _state(error)
    return cause.connection_invalidated or not state or state in _AWAY or state.startswith("08")


def _state(error: DatabaseError) -> str:
    """Return the five letters by which PostgreSQL tells what happened; nothing if it did not say anything."""
    return getattr(getattr(error.__cause__, "orig", None), "sqlstate", None) or ""
