"""Reading of plain or gzip files with limits on their size, and atomic writing."""

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
"""Largest size of a decompressed file."""
MAX_EXPANSION = 200
"""Largest compression ratio; cache files reach 10. Guards against decompression bombs."""
BUFFERED_BYTES = 1 << 18
"""Smaller files count as this size in the ratio."""


class LimitedFile:
    """A file that is read in pieces and decompressed if it is compressed by gzip; its size is limited.

    Attributes:
        total_bytes: Size on disk.
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
        """Number of bytes read on disk."""
        return self._raw.tell()

    def readline(self, most: int) -> bytes:
        """Return a line, or its first `most` bytes; empty at the end."""
        return self._counted(self._file.readline(most))

    def read(self, size: int) -> str:
        """Return about `size` characters; empty at the end."""
        while True:
            data = self._counted(self._file.read(size))
            text = self._decoder.decode(data, final=not data)
            if text or not data:  # a piece may end within a character
                return text

    def _counted(self, data: bytes) -> bytes:
        self._read_bytes += len(data)
        if self._read_bytes > self._limit_bytes:
            raise InputError(
                f"{self._path} contains more than {self._limit_bytes >> 20} MiB; import it in parts"
            )
        if self._read_bytes > MAX_EXPANSION * max(self.done_bytes, BUFFERED_BYTES):
            raise InputError(
                f"{self._path} expands to more than {MAX_EXPANSION} times its size, which no cache file does"
            )
        return data


@contextmanager
def open_limited(path: Path, what: str, limit_bytes: int = MAX_BYTES) -> Iterator[LimitedFile]:
    """Open a file for reading; translate every error within the context.

    Args:
        path: A regular file.
        what: Suffix of messages that names the expected format.
        limit_bytes: Largest decompressed size.

    Raises:
        InputError: if the file cannot be read, is too large, or is not valid JSON.
    """
    try:
        if not path.exists():
            raise InputError(f"{path} does not exist")
        if not path.is_file():
            raise InputError(f"{path} is not a regular file; it must be readable twice")
        with open(path, "rb") as raw:
            yield LimitedFile(path, raw, limit_bytes)
    except RecursionError:
        raise InputError(f"{path} cannot be read{what}: it is nested too deeply") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise InputError(f"{path} cannot be read{what}: {error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Open a text file for writing; it is renamed to its final name when it is complete.

    A name that ends in ``.gz`` is compressed.

    Args:
        path: The file.

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
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _umask() -> int:
    """Return the umask; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
