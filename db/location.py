"""Location of a database: the path of an SQLite file, or the URL of a server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlencode

from tunebench import _environment
from tunebench.errors import DatabaseError, InputError

__all__ = ["Location", "default_path", "locate"]


_WRITTEN = (
    "expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE; write % @ : / ? # in a user name or password as "
    "%25 %40 %3A %2F %3F %23"
)

# Source: libpq of PostgreSQL 17, "Parameter Key Words".
_DSN = re.compile(
    r"\s*(host|hostaddr|port|dbname|user|password|passfile|service|sslmode|application_name|options"
    r"|connect_timeout)\s*="
)
_DSN_PAIR = re.compile(r"\s*(\w+)\s*=\s*(?:'((?:[^'\\]|\\.)*)'|((?:[^\s'\\]|\\.)*))(?=\s|$)")

_HOST = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[\w.%-]*)(:\d*)?", re.ASCII)

_QUERY_PART = re.compile(r"[\w%]+=", re.ASCII)

_SECRET = re.compile(r"pass(?!file)|secret|token|pwd", re.IGNORECASE)
"""Names of values that are not shown."""


NO_RECORD = "tune a workload first, or name another one by --db"
"""What to do about a database without records."""


@dataclass(frozen=True, slots=True)
class Location:
    """Location of a database; exactly one of the two fields is set.

    Attributes:
        path: SQLite file; may not exist yet.
        url: SQLAlchemy URL of a server.
    """

    path: Path | None = None
    url: str | None = None

    def require(self) -> None:
        """Check that the file exists.

        Raises:
            DatabaseError: if it does not.
        """
        if self.path is not None and not self.path.exists():
            raise DatabaseError(f"database {self} does not exist: {NO_RECORD}")

    @property
    def option(self) -> str | None:
        """Value of `--db` in a command for this database; None for the default one, which needs no option."""
        try:
            return None if self == locate(None) else str(self)
        except InputError:  # TUNEBENCH_DB names no database, so only the option does
            return str(self)

    def __str__(self) -> str:
        """Return the path, or the URL without its passwords."""
        return str(self.path) if self.url is None else _without_passwords(self.url)

    def __repr__(self) -> str:
        return f"Location({str(self)!r})"


def default_path() -> Path:
    """Return the SQLite file in the user's data folder."""
    return _environment.data_folder() / "tunebench.db"


def locate(db: str | Path | None = None) -> Location:
    """Return the location of a database.

    Args:
        db: Path, SQLAlchemy URL, keywords and values of libpq (``host=h dbname=d user=u``), or None:
            `TUNEBENCH_DB`, or else `default_path`. ``postgres://`` means ``postgresql://``.

    Raises:
        InputError: if it names no file, or its URL is ambiguous. SQLite in memory is not supported.
    """
    name_or_url = str(db if db is not None else _environment.database() or default_path())
    if _DSN.match(name_or_url):
        name_or_url = _url_of_dsn(name_or_url)
    scheme, separator, rest = name_or_url.partition("://")
    if separator and not scheme.startswith("sqlite"):
        return Location(url=_checked(name_or_url))
    name = unquote(rest.removeprefix("/")) if separator else name_or_url
    if not name or ":memory:" in name or "?" in name:
        raise InputError(
            f"database {_without_passwords(name_or_url)!r} must name a file, such as results.db or sqlite:///results.db"
        )
    return Location(path=_environment.expanded(name, "database"))


def _without_passwords(url: str) -> str:
    """Return a URL without its passwords: of the user, and in the query."""
    address, question, query = url.partition("?")
    scheme, separator, rest = address.partition("://")
    if separator and "@" in rest:  # the last @ ends the password, whatever it contains
        user, _, host = rest.rpartition("@")
        name, colon, _ = user.partition(":")
        rest = f"{name}{':***' if colon else ''}@{host}"
    shown = [
        f"{name}=***" if _SECRET.search(unquote(name)) else f"{name}{equals}{value}"
        for name, equals, value in (part.partition("=") for part in query.split("&"))
    ]
    return f"{scheme}{separator}{rest}{question}{'&'.join(shown)}"


def _checked(url: str) -> str:
    """Return a server's URL under the name that SQLAlchemy knows, if only one reading of it is possible.

    A driver would take a part of an unquoted password for the host, and print it.

    Raises:
        InputError: if a user name or a password contains an unquoted separator; the message shows neither.
    """
    scheme, _, rest = url.partition("://")
    address, _, query = rest.partition("?")
    server, _, database = address.partition("/")
    user, _, host = server.rpartition("@")
    quoted = not any(sign in user for sign in "@#") and user.count(":") <= 1
    plain = "@" not in database and "#" not in address and all(map(_HOST.fullmatch, host.split(",")))
    named = not query or all(map(_QUERY_PART.match, query.split("&")))
    if not (quoted and plain and named):
        raise InputError(
            f"database {scheme}://…: cannot tell its user, password, host and port apart: {_WRITTEN}"
        )
    dialect, plus, driver = scheme.partition("+")
    return f"{'postgresql' if dialect == 'postgres' else dialect}{plus}{driver}://{rest}"


def _url_of_dsn(text: str) -> str:
    """Return the URL of a server that is named by keywords and values of libpq.

    Raises:
        InputError: if a value is not quoted correctly; the message shows no value.
    """
    values: dict[str, str] = {}
    end = 0
    while text[end:].strip():
        pair = _DSN_PAIR.match(text, end)
        if pair is None:
            raise InputError(
                "database: expected keywords and values such as host=h dbname=d user=u password='p w', with "
                f"\\' for a quote in a value; cannot read what follows {', '.join(values) or 'the start'}"
            )
        values[pair[1]] = re.sub(r"\\(.)", r"\1", pair[2] if pair[2] is not None else pair[3])
        end = pair.end()
    database = quote(values.pop("dbname", ""), safe="")
    return f"postgresql:///{database}?{urlencode(values, quote_via=quote, safe='/')}"
