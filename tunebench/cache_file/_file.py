"""Files of recordings: plain or compressed JSON, of limited size, written whole or not at all."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tunebench.errors import InputError

__all__ = ["MAX_BYTES", "LimitedFile", "open_limited", "replacing"]

MAX_BYTES = 1 << 30
"""Most that a file may hold once it is decompressed."""
MAX_EXPANSION = 200
"""Most times its size that a compressed file may expand to; recordings come to 10."""
BUFFERED_BYTES = 1 << 18
"""A smaller file is taken for one of this size."""


class LimitedFile:
    """A file of limited size that is read in pieces, decompressed if it is compressed by gzip.

    Attributes:
        total_bytes: Its size as it lies on the disk.
    """

    def __init__(self, path: Path, raw: io.BufferedReader, limit_bytes: int) -> None:
        compressed = raw.peek(2)[:2] == b"\x1f\x8b"
        self._path, self._raw, self._limit_bytes = path, raw, limit_bytes
        self._file: Any = gzip.GzipFile(fileobj=raw) if compressed else raw
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._read_bytes = 0
        self.total_bytes = os.fstat(raw.fileno()).st_size

    @property
    def done_bytes(self) -> int:
        """How much of it was read, as it lies on the disk."""
        return self._raw.tell()

    def readline(self, most: int) -> bytes:
        """Return a line, or the first `most` bytes of it; nothing at the end."""
        return self._counted(self._file.readline(most))

    def read(self, size: int) -> str:
        """Return about `size` characters of its text; nothing at the end."""
        while True:
            data = self._counted(self._file.read(size))
            text = self._decoder.decode(data, final=not data)
            if text or not data:  # a piece may be the half of one character
                return text

    def _counted(self, data: bytes) -> bytes:
        self._read_bytes += len(data)
        if self._read_bytes > self._limit_bytes:
            raise InputError(
                f"{self._path} holds more than {self._limit_bytes >> 20} MiB; import it in parts"
            )
        if self._read_bytes > MAX_EXPANSION * max(self.done_bytes, BUFFERED_BYTES):
            raise InputError(
                f"{self._path} expands to more than {MAX_EXPANSION} times its size: no measurements do"
            )
        return data


@contextmanager
def open_limited(path: Path, what: str, limit_bytes: int = MAX_BYTES) -> Iterator[LimitedFile]:
    """Open a file for reading, whatever may go wrong with it until it is closed.

    Args:
        path: An ordinary file.
        what: What it is read as.
        limit_bytes: Most that it may hold once it is decompressed.

    Raises:
        InputError: if it cannot be read, is too large, or what is made of it is no JSON.
    """
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is no ordinary file; give one that can be read twice")
        with open(path, "rb") as raw:
            yield LimitedFile(path, raw, limit_bytes)
    except RecursionError:
        raise InputError(f"{path} cannot be read{what}: it is nested too deeply") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise InputError(f"{path} cannot be read{what}: {error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Open a file for writing text; it takes its name when all of it is there.

    A name that ends in ``.gz`` is compressed.

    Raises:
        InputError: if it cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    os.close(handle)
    fresh = Path(name)
    try:
        if path.suffix == ".gz":
            with gzip.open(fresh, "wt", encoding="utf-8", compresslevel=6) as file:
                yield file
        else:
            with open(fresh, "w", encoding="utf-8") as file:
                yield file
        fresh.chmod(0o666 & ~_umask())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _umask() -> int:
    """Return the mask of rights that new files lack; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
