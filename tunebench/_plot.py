"""Figures of Matplotlib without a window, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tunebench.errors import InputError, MissingDependency

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["empty_figure", "require_suffix", "save_figure"]

WIDTH_INCHES, HEIGHT_INCHES, DOTS_AN_INCH = 8.0, 5.0, 150


def empty_figure() -> Figure:
    """Return a figure without axes.

    Raises:
        MissingDependency: if Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("matplotlib", "plot") from error
    return Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")


def require_suffix(path: str | Path) -> None:
    """Raise unless a plot can be written to a file with this suffix.

    Raises:
        MissingDependency: if Matplotlib is not installed.
        InputError: if Matplotlib does not support the suffix.
    """
    suffixes = empty_figure().canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in suffixes:
        raise InputError(f"{path}: the suffix of a plot must be one of .{', .'.join(sorted(suffixes))}")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure to a file.

    Args:
        figure: The figure.
        path: File to write; its suffix selects the format.

    Raises:
        InputError: if Matplotlib does not support the format.
        OSError: if the file cannot be written.
    """
    require_suffix(path)
    figure.savefig(path, dpi=DOTS_AN_INCH)
