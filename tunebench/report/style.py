"""Style sheet and script of the pages: light and dark, narrow screens, tables sorted by their headers."""

from __future__ import annotations

import functools
from importlib import resources

__all__ = ["chart_script", "script", "style_sheet"]


@functools.cache
def style_sheet() -> str:
    """Return the style sheet of the pages."""
    return _text("page.css")


@functools.cache
def script() -> str:
    """Return the script of the pages, which sorts tables and zooms into charts."""
    return chart_script() + _text("page.js")


@functools.cache
def chart_script() -> str:
    """Return the script that zooms into search charts; `setUpCharts` starts it."""
    return _text("chart.js")


def _text(name: str) -> str:
    return resources.files("tunebench.report").joinpath(name).read_text(encoding="utf-8")
