"""Files that commands write."""

from __future__ import annotations

from pathlib import Path

from tunebench.errors import InputError

__all__ = ["require_folder", "write_page"]


def require_folder(path: Path | None) -> None:
    """Raise InputError before the long work if a file cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"cannot write to {path}: it is a folder, expected the name of a file")
    if not path.absolute().parent.is_dir():
        raise InputError(f"cannot write to {path}: there is no folder {path.absolute().parent}")


def write_page(path: Path, page: str) -> None:
    """Write an HTML page, replacing an existing file atomically; raise InputError if it cannot be written."""
    from tunebench.cache_file import replacing

    with replacing(path) as file:
        file.write(page)
