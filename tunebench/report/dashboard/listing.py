"""Lists that are sorted, filtered and divided into pages by the query of a URL.

A page is found by the values of the row before or after it, not by its number, so that a link stays correct
while rows are added.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import urlencode

from tunebench.errors import InputError

__all__ = ["PAGE_ROWS", "Column", "Header", "Page", "Query", "choose", "page_of"]

PAGE_ROWS = 50
"""Rows of a page."""

LONGEST_TEXT = 500
"""Most characters of a value in a query, except a place."""

T = TypeVar("T")
Span = Literal["after", "before"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[T]):
    """A column of a list.

    Attributes:
        name: Name in the URL; empty if the list cannot be ordered by it.
        title: Header.
        key: Value to order by: a text or a number; None if the row has none.
        right: Whether its cells are aligned right.
        minor: Whether it is left out on narrow screens.
        hint: Explanation of the header.
    """

    name: str
    title: str
    key: Callable[[T], Any] = lambda row: None
    right: bool = False
    minor: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A header of a table: its column, the link that orders by it, and the current order of the column."""

    column: Column[Any]
    href: str
    sorted: str


class Query:
    """The query of a URL.

    Args:
        path: Path of the page.
        values: Names and values.
        names: Names that the page knows; others are ignored.
    """

    def __init__(self, path: str, values: Mapping[str, str], names: Sequence[str]) -> None:
        self.path = path
        self._values = {name: values[name] for name in names if values.get(name)}
        self._places = {name: values[name] for name in ("after", "before") if values.get(name)}
        self.order, self.descending = values.get("sort", ""), values.get("order") == "desc"
        for name, value in self._values.items():
            if len(value) > LONGEST_TEXT:
                raise InputError(f"{name} must have at most {LONGEST_TEXT} characters, got {len(value)}")

    def get(self, name: str) -> str:
        """Return the value of a name; empty without one."""
        return self._values.get(name, "")

    @property
    def filters(self) -> Mapping[str, str]:
        """The names with a value."""
        return self._values

    @property
    def place(self) -> tuple[Span, list[Any]] | None:
        """Span and values of the neighbouring row; None for the first page.

        Raises:
            InputError: if it is not a JSON list of texts and numbers.
        """
        for span in ("after", "before"):
            if span in self._places:
                return span, _decoded(self._places[span])
        return None

    def link(self, **changes: str) -> str:
        """Return the URL of the page with other values; the place is dropped unless it is given."""
        values = dict(self._values)
        if self.order:
            values |= {"sort": self.order, "order": "desc" if self.descending else ""}
        values |= changes
        parameters = {name: value for name, value in values.items() if value}
        return f"{self.path}?{urlencode(parameters)}" if parameters else self.path

    def to(self, span: Span, cursor: Sequence[Any]) -> str:
        """Return the URL of the page after or before a row."""
        return self.link(**{span: json.dumps(list(cursor), separators=(",", ":"), ensure_ascii=False)})

    def headers(self, columns: Sequence[Column[Any]], default: str) -> list[Header]:
        """Return the headers of columns; a second click on one reverses the order.

        Args:
            columns: The columns.
            default: Name of the column of the order without `sort` in the URL.
        """
        current = self.order or default
        headers = []
        for column in columns:
            is_current = column.name == current and bool(column.name)
            reverse = "desc" if is_current and not self.descending else ""
            direction = ("descending" if self.descending else "ascending") if is_current else ""
            href = self.link(sort=column.name, order=reverse) if column.name else ""
            headers.append(Header(column=column, href=href, sorted=direction))
        return headers


def _decoded(text: str) -> list[Any]:
    try:
        cursor = json.loads(text)
    except (ValueError, RecursionError):
        cursor = None
    if not isinstance(cursor, list) or not all(isinstance(value, str | int | float) for value in cursor):
        raise InputError(
            "the place in the list must be a JSON list of texts and numbers; open the first page again"
        )
    return cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """A page of a list.

    Attributes:
        rows: Its rows.
        total: Number of rows of the list; None if they were not counted.
        headers: Headers of the table.
        previous: URL of the page before; empty without one.
        next: URL of the page after; empty without one.
        first: URL of the first page; empty on it.
    """

    rows: tuple[T, ...]
    total: int | None
    headers: list[Header]
    previous: str
    next: str
    first: str


def choose(name: str, value: str, choices: Sequence[str]) -> str:
    """Return a value of a query, or the first of the known ones if it is empty.

    Raises:
        InputError: if it is not one of the known ones.
    """
    if value and value not in choices:
        raise InputError(f"{name} must be one of {', '.join(choices)}; got {value[:LONGEST_TEXT]!r}")
    return value or choices[0]


def page_of(
    query: Query, rows: Sequence[T], columns: Sequence[Column[T]], *, default: str, tie: Callable[[T], str]
) -> Page[T]:
    """Sort rows as a query says, and return the page that it names.

    Args:
        query: The query.
        rows: All rows that the filters selected.
        columns: The columns.
        default: Name of the column of the order without `sort` in the URL.
        tie: Unique text of each row, which orders rows with equal values.

    Raises:
        InputError: if the column or the place is unknown.
    """
    names = [default, *(column.name for column in columns if column.name and column.name != default)]
    name = choose("sort", query.order, names)
    key = next(column.key for column in columns if column.name == name)
    descending = query.descending

    def place(row: T) -> list[Any]:
        value = key(row)
        # Missing values are last in both orders.
        return [int((value is None) != descending), "" if value is None else value, tie(row)]

    def sort_key(cursor: list[Any]) -> tuple[int, bool, Any, Any]:
        return cursor[0], isinstance(cursor[1], str), cursor[1], cursor[2]

    ordered = sorted(rows, key=lambda row: sort_key(place(row)), reverse=descending)
    start, stop = 0, PAGE_ROWS
    if query.place is not None:
        span, neighbour = query.place
        start, stop = _span([sort_key(place(row)) for row in ordered], span, neighbour, sort_key, descending)
    shown = tuple(ordered[start:stop])
    return Page(
        rows=shown,
        total=len(ordered),
        headers=query.headers(columns, default),
        previous=query.to("before", place(shown[0])) if start > 0 and shown else "",
        next=query.to("after", place(shown[-1])) if stop < len(ordered) and shown else "",
        first=query.link() if start > 0 or (query.place and not shown) else "",
    )


def _span(
    keys: Sequence[Any],
    span: Span,
    neighbour: list[Any],
    sort_key: Callable[[list[Any]], Any],
    descending: bool,
) -> tuple[int, int]:
    """Return start and end of the page next to a row, which may not exist any more."""
    try:
        at = sort_key(neighbour)
        passed = sum((key >= at if descending else key <= at) for key in keys)
        before = sum((key > at if descending else key < at) for key in keys)
    except (IndexError, TypeError):
        raise InputError("the place in the list is of another order; open the first page again") from None
    if span == "after":
        return passed, passed + PAGE_ROWS
    return max(0, before - PAGE_ROWS), before
