"""Files of recordings: plain or compressed JSON, of limited size, written whole or not at all."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tunebench.errors import InputError

__all__ = ["MAX_BYTES", "load", "opened", "replacing"]

MAX_BYTES = 1 << 30
"""Most that a file may hold once it is decompressed."""


def load(path: Path) -> Any:
    """Return the JSON value of a file.

    A cache file of Kernel Tuner that is still being written lacks its last two brackets; it is read all the
    same.

    Raises:
        InputError: if the file cannot be read, is too large, or holds no JSON.
    """
    with _readable(path), opened(path) as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise InputError(f"{path} holds more than {MAX_BYTES >> 20} MiB")
    with _readable(path):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            unfinished = text.rstrip().removesuffix(b",")
            if b'"cache"' not in unfinished[: 1 << 16] or unfinished.endswith(b"}}"):
                raise
            return json.loads(unfinished + b"}}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a file for reading bytes, decompressing it if it is compressed by gzip."""
    with open(path, "rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    with gzip.open(path, "rb") if compressed else open(path, "rb") as file:
        yield file


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
