"""State of the files of a package, by which caches on disk notice that its source was changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tunebench._version import __version__

__all__ = ["source_state"]


def source_state(flat: Iterable[Path], deep: Iterable[Path]) -> str:
    """Return a hash of names, sizes and times of all source files in folders.

    Args:
        flat: Folders whose own files count.
        deep: Folders whose files count, with those of folders below.
    """
    lines = [__version__]
    for folder in flat:
        lines += sorted(_stamps(folder, deep=False))
    for folder in deep:
        lines += sorted(_stamps(folder, deep=True))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _stamps(folder: Path, *, deep: bool) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((".py", ".cuh", ".toml")):
                status = entry.stat()
                yield f"{entry.path} {status.st_size} {status.st_mtime_ns}"
            elif deep and entry.name != "__pycache__" and entry.is_dir():
                yield from _stamps(Path(entry.path), deep=True)
