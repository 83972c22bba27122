"""Source of CUDA C++ with the files that it includes, so that its text is all that reaches the compilers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tunebench.errors import InputError

__all__ = ["with_includes"]

MAX_BYTES = 16 << 20
"""Largest source with all its headers; those of the CUDA toolkit take less than 4 MiB."""

_MAX_DEPTH = 200
_CUDA_HEADERS = "; those of CUDA are in /usr/local/cuda/include, or in nvidia/cu13/include of site-packages"
_INCLUDE = re.compile(r'[ \t]*#[ \t]*include[ \t]*(?:"(?P<quoted>[^"\n]+)"|<(?P<angled>[^>\n]+)>)')
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b", re.MULTILINE)
_TOKEN = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|/\*.*?\*/|//[^\n]*""", re.DOTALL)


def with_includes(text: str, folder: Path | None, includes: Sequence[str | Path]) -> str:
    """Return a source in which every `#include` is replaced by the text of the file.

    A quoted file is searched in the folder of the file that includes it, then in `includes`; one in angle
    brackets in `includes` alone. A file that is not there becomes an `#error`, because the line may be in a
    branch that is not compiled.

    Args:
        text: CUDA C++.
        folder: Folder of the source file; None if the source is text.
        includes: Further folders, by priority.

    Raises:
        InputError: A folder does not exist, a file is not UTF-8 text, or the result is too large.
    """
    folders = [Path(include).expanduser() for include in includes]
    for path in folders:
        if not path.is_dir():
            raise InputError(f"includes: {path} is not a folder")
    return _Inliner(folders).inlined(text, folder, "kernel", 0)


class _Inliner:
    """The files that were included once, and the size of the result."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self.once: set[Path] = set()
        self.size = 0

    def inlined(self, text: str, folder: Path | None, name: str, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise InputError(f"{name} is included {_MAX_DEPTH} files deep; it needs `#pragma once`")
        self.size += len(text)
        if self.size > MAX_BYTES:
            raise InputError(f"the source with all its headers is larger than {MAX_BYTES >> 20} MiB")
        return "".join(self._lines(text, folder, name, depth))

    def _lines(self, text: str, folder: Path | None, name: str, depth: int) -> Iterator[str]:
        start, joined = 0, _without_comments(text)
        for match in re.finditer(r"^.*$", joined, re.MULTILINE):
            include = _INCLUDE.match(match[0])
            if include is None:
                continue
            yield text[start : match.start()]
            start = match.end()
            yield self._included(include, folder, depth)
            yield f'\n#line {joined.count(chr(10), 0, start) + 1} "{name}"'
        yield text[start:]

    def _included(self, include: re.Match[str], folder: Path | None, depth: int) -> str:
        """Return the text that replaces the line of an `#include`."""
        name = include["quoted"] or include["angled"]
        near = [folder] if include["quoted"] and folder is not None else []
        paths = (candidate / name for candidate in (*near, *self.folders))
        path = next((path.resolve() for path in paths if path.is_file()), None)
        if path is None:
            return f"#error {name} is not in the folders of includes={_CUDA_HEADERS}"
        if path in self.once:
            return ""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"included file {path}: {error}") from None
        if _ONCE.search(_without_comments(text)):
            self.once.add(path)
            text = _ONCE.sub(lambda line: " " * len(line[0]), text)
        return f'#line 1 "{name}"\n{self.inlined(text, path.parent, name, depth + 1)}'


def _without_comments(text: str) -> str:
    """Return a source of the same length without comments; joined lines stay apart."""
    return _TOKEN.sub(lambda token: re.sub(r"[^\n]", " ", token[0]) if token[0][0] == "/" else token[0], text)
