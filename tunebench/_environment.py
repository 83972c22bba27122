"""All environment variables that tunebench reads; no other module reads any. `docs/cli.md` lists them."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["VARIABLES", "cache_folder", "columns", "cxx", "database", "debug"]

VARIABLES = {
    "COLUMNS": "width of tables where the output is not a terminal",
    "CXX": "host C++ compiler that emulates CUDA kernels where there is no GPU; default g++, then c++",
    "TUNEBENCH_CACHE": "folder of what can be made again, such as compiled kernels",
    "TUNEBENCH_DB": "database, as a path or an SQLAlchemy URL; the option --db wins",
    "TUNEBENCH_DEBUG": "1: show the traceback of an error on the command line",
}
"""Environment variables and their meaning."""


def _text(name: str) -> str | None:
    """Return a variable's value, or None if it is unset or empty."""
    assert name in VARIABLES, name
    return os.environ.get(name) or None


def cache_folder() -> Path:
    """Return the folder for regenerable files; it may not exist yet. Default: the user's cache folder."""
    text = _text("TUNEBENCH_CACHE")
    if text is not None:
        return Path(text).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("tunebench", appauthor=False)


def columns() -> int | None:
    """Return the requested table width in characters, or None."""
    text = _text("COLUMNS")
    return int(text) if text is not None and text.isdecimal() else None


def cxx() -> str | None:
    """Return the requested host C++ compiler, or None."""
    return _text("CXX")


def database() -> str | None:
    """Return the database to use without `--db`, or None; read again at every lookup."""
    return os.environ.get("TUNEBENCH_DB") or None


def debug() -> bool:
    """Return whether errors on the command line include a traceback."""
    return _text("TUNEBENCH_DEBUG") not in (None, "0")
