"""Files that commands write."""

from __future__ import annotations

from pathlib import Path

from tunebench._private_file import require_replaceable

__all__ = ["require_folder", "require_plot", "write_page"]


def require_folder(path: Path | None) -> None:
    """Raise InputError before the long work if a file cannot be written."""
    if path is not None:
        require_replaceable(path)


def require_plot(path: Path | None, *suffixes: str) -> None:
    """Raise before the long work if a plot cannot be written.

    Args:
        path: File of the plot; none for no plot.
        suffixes: Suffixes that need no Matplotlib, such as ``.html``.

    Raises:
        InputError: if the folder does not exist, or Matplotlib does not support the suffix.
        MissingDependency: if Matplotlib is needed and not installed.
    """
    require_folder(path)
    if path is not None and path.suffix not in suffixes:
        from tunebench._plot import require_suffix

        require_suffix(path)


def write_page(path: Path, page: str) -> None:
    """Write an HTML page, replacing an existing file atomically; raise InputError if it cannot be written."""
    from tunebench.cache_file import replacing

    with replacing(path) as file:
        file.write(page)
