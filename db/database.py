"""One open database: its engine, read transactions, and retry of queries while the server is unavailable."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import sqlalchemy as sa

from tunebench._deprecation import warn_renamed
from tunebench.db.engine import create_engine, translate_decode_errors, translate_errors
from tunebench.db.location import Location
from tunebench.db.retry import RetryPolicy, retry

__all__ = ["Database", "retrying"]

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound="Database")


_RENAMED = {
    "fastest": "fastest_samples",
    "known": "trial_outcomes",
    "places": "measured_spaces",
    "times": "config_times",
}


class Database:
    """Connection pool of one database; base of `Reader` and `Store`.

    Attributes:
        location: Path or URL.
        retry_policy: How long queries of a search wait for a database that becomes unavailable; None raises
            at once.
    """

    def __init__(
        self, location: Location, *, read_only: bool, retry_policy: RetryPolicy | None = None
    ) -> None:
        self.location, self.retry_policy = location, retry_policy
        self._engine = create_engine(location, read_only=read_only)
        self._pid = os.getpid()

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self.location}>"

    if not TYPE_CHECKING:  # type checkers must report unknown methods

        def __getattr__(self, name: str) -> Any:
            """Return a renamed method by its old name."""
            if name not in _RENAMED:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            warn_renamed(f"Store.{name}", f"Store.{_RENAMED[name]}")
            return getattr(self, _RENAMED[name])

    def _own_engine(self) -> sa.Engine:
        """Return the engine; after a fork, without the connections of the parent process."""
        if os.getpid() != self._pid:
            self._engine.dispose(close=False)
            self._pid = os.getpid()
        return self._engine

    @contextmanager
    def _read(self) -> Iterator[sa.Connection]:
        with (
            translate_errors(self.location),
            translate_decode_errors(self.location),
            self._own_engine().connect() as connection,
        ):
            yield connection


def retrying(method: Callable[Concatenate[D, P], T]) -> Callable[Concatenate[D, P], T]:
    """Retry a read method while the database is unavailable, as `Database.retry_policy` allows."""

    def outlasting(self: D, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return retry(self.retry_policy, self.location, lambda again: method(self, *args, **kwargs))

    functools.update_wrapper(outlasting, method)
    return outlasting
