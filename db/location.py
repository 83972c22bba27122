"""Location of a database: the path of an SQLite file, or the URL of a server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from tunebench import _environment
from tunebench.errors import InputError

__all__ = ["Location", "default_path", "locate"]


@dataclass(frozen=True, slots=True)
class Location:
    """Location of a database; exactly one of the two fields is set.

    Attributes:
        path: SQLite file; may not exist yet.
        url: SQLAlchemy URL of a server.
    """

    path: Path | None = None
    url: str | None = None

    def __str__(self) -> str:
        """Return the path, or the URL without its password."""
        return str(self.path) if self.url is None else re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", self.url)


def default_path() -> Path:
    """Return the SQLite file in the user's data folder."""
    import platformdirs

    return platformdirs.user_data_path("tunebench", appauthor=False) / "tunebench.db"


def locate(db: str | Path | None = None) -> Location:
    """Return the location of a database.

    Args:
        db: Path, SQLAlchemy URL, or None: `TUNEBENCH_DB`, or else `default_path`.

    Raises:
        InputError: if it names no file; SQLite databases in memory are not supported.
    """
    given = str(db if db is not None else _environment.database() or default_path())
    scheme, separator, rest = given.partition("://")
    if separator and not scheme.startswith("sqlite"):
        return Location(url=given)
    name = unquote(rest.removeprefix("/")) if separator else given
    if not name or ":memory:" in name or "?" in name:
        raise InputError(f"database {given!r} must name a file, such as results.db or sqlite:///results.db")
    return Location(path=Path(name).expanduser())
