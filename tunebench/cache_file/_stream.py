"""Streaming JSON parser: yields the members of an object, and the rows of a large member one by one.

A cache file is one object. One member contains thousands of rows; the others are short. The text is read in
pieces, and Python's parser decodes each value once it is complete.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from tunebench.errors import InputError

__all__ = ["CHUNK", "MAX_VALUE", "DuplicateName", "JsonMember", "as_object", "members"]

MAX_VALUE = 1 << 22
"""Largest length of one value: a row, or another member."""
MAX_DIGITS = 300
"""Longer integers become infinity, because converting them is slow."""

CHUNK = 1 << 16


class TextSource(Protocol):
    """A text that is read in pieces."""

    def read(self, size: int, /) -> str:
        """Return about `size` characters; empty at the end."""


_skip_blanks: Callable[[str, int], re.Match[str]] = re.compile(r"[ \t\n\r]*").match  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class JsonMember:
    """A member of the object, or one value of a member with rows.

    Attributes:
        name: Name of the member.
        value: Its value; for a member with rows first an empty object or list, then each row.
        key: Key or index of a row; None for the member itself.
    """

    name: str
    value: Any
    key: str | int | None = None


@dataclass(frozen=True, slots=True)
class DuplicateName:
    """Replaces an object that contains a name twice, which is ambiguous."""

    name: str


def as_object(value: Any) -> dict[str, Any]:
    """Return a value that must be an object.

    Args:
        value: Decoded JSON.

    Raises:
        InputError: if it is not an object, or contains a name twice.
    """
    if isinstance(value, DuplicateName):
        raise InputError(f"it contains {value.name[:100]!r} twice")
    if not isinstance(value, dict):
        raise InputError("it must be an object")
    return value


def members(file: TextSource, rows_of: tuple[str, ...], unfinished: str) -> Iterator[JsonMember]:
    """Yield the members of the object in a file; nothing if the file contains another value.

    Args:
        file: Text of the file.
        rows_of: Names of the members with rows.
        unfinished: The one of them that may end after a row, as in a file that is still being written.

    Raises:
        ValueError: if it is not valid JSON, or a value is too long.
        RecursionError: if it is nested too deeply.
    """
    text = _JsonReader(file)
    if text.peek() != "{":
        text.value()  # distinguish invalid JSON from valid JSON that is not an object
        return
    for name in text.members():
        if name in rows_of and text.peek() in "{[":
            yield from _rows(text, name, may_end=name == unfinished)
            if text.ended:
                return
        else:
            yield JsonMember(name, text.value())
    text.end()


def _rows(text: _JsonReader, name: str, *, may_end: bool) -> Iterator[JsonMember]:
    if text.peek() == "[":
        yield JsonMember(name, [])
        for number in text.items():
            yield JsonMember(name, text.value(), number)
        return
    yield JsonMember(name, {})
    for key in text.members(may_end=may_end):
        yield JsonMember(name, text.value(), key)


class _JsonReader:
    """Parser of a text that is read in pieces; parsed text is discarded."""

    def __init__(self, file: TextSource) -> None:
        self._file, self._text, self._place = file, "", 0
        self._whole = False
        self.ended = False
        """Whether the text ended where its object may be unfinished."""

    def peek(self) -> str:
        """Return the next character that is not blank; empty at the end."""
        while True:
            self._place = _skip_blanks(self._text, self._place).end()
            if self._place < len(self._text) or not self._more():
                return self._text[self._place : self._place + 1]

    def value(self) -> Any:
        """Return the next value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._place)
            except json.JSONDecodeError as error:
                # An incomplete value fails at the end of the text, or as an unterminated string.
                cut_off = error.pos + 16 > len(self._text) or error.msg.startswith("Unterminated")
                if not (cut_off and self._more()):
                    raise
                continue
            if end < len(self._text) or not self._more():  # 12 may be the start of 123
                self._place = end
                return value

    def members(self, *, may_end: bool = False) -> Iterator[str]:
        """Yield the names in an object; the caller reads the value of each.

        Args:
            may_end: Whether the text may end before the object does.
        """
        for _ in self._between("{", "}", may_end=may_end):
            if self.peek() != '"':
                raise self._fault("expected a name")
            name = str(self.value())
            self._take(":")
            yield name

    def items(self) -> Iterator[int]:
        """Yield the indexes of a list; the caller reads the value of each."""
        yield from self._between("[", "]")

    def end(self) -> None:
        """Check that only blanks follow."""
        if self.peek():
            raise self._fault("expected the end")

    def _between(self, begin: str, end: str, *, may_end: bool = False) -> Iterator[int]:
        self._take(begin)
        number = 0
        while self.peek() != end:
            if number:
                if self._ends(may_end):
                    return
                self._take(",")
                if self._ends(may_end):
                    return
            number += 1
            yield number
        self._take(end)

    def _ends(self, may_end: bool) -> bool:
        self.ended = may_end and not self.peek()
        return self.ended

    def _take(self, character: str) -> None:
        if self.peek() != character:
            raise self._fault(f"expected {character!r}")
        self._place += 1

    def _fault(self, message: str) -> ValueError:
        context = self._text[self._place : self._place + 20]
        return ValueError(f"{message}, got {context!r}" if context else f"{message}, but the file ends")

    def _more(self) -> bool:
        """Read at least as much text as is unparsed, so that a long value is not parsed too often."""
        if self._whole:
            return False
        waiting = len(self._text) - self._place
        if waiting > MAX_VALUE:
            raise ValueError(f"a value is longer than {MAX_VALUE >> 20} Mi characters")
        piece = self._file.read(max(CHUNK, waiting))
        if piece:
            self._text, self._place = self._text[self._place :] + piece, 0
        self._whole = not piece
        return bool(piece)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | DuplicateName:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    counts = Counter(name for name, _ in pairs)
    return DuplicateName(next(name for name, count in counts.items() if count > 1))


def _integer(digits: str) -> int | float:
    """Return an integer; infinity, which rows must not contain, for one that is slow to convert."""
    return int(digits) if len(digits) <= MAX_DIGITS else math.inf


_DECODER: json.JSONDecoder = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)
