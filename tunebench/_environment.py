"""All environment variables that tunebench reads; no other module reads any. `docs/cli.md` lists them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tunebench._private_file import check_folder
from tunebench.errors import InputError

__all__ = [
    "VARIABLES",
    "binary_folder",
    "cache_folder",
    "carried_folder",
    "columns",
    "config",
    "config_folder",
    "cpu_cache_mb",
    "cxx",
    "data_folder",
    "database",
    "debug",
    "default_database",
    "expanded",
    "numba_variables",
    "raw_database",
    "worker_memory_gb",
]

VARIABLES = {
    "COLUMNS": "width of tables where the output is not a terminal",
    "CXX": "host C++ compiler that emulates CUDA kernels where there is no GPU; default g++, then c++",
    "TUNEBENCH_CACHE": "folder of what can be made again, such as compiled kernels; closed to other users",
    "TUNEBENCH_CARRIED": "folder of GPU kernels compiled elsewhere, used whatever compiler is installed",
    "TUNEBENCH_CONFIG": "file of defaults to use instead of the nearest tunebench.toml; none for no file",
    "TUNEBENCH_CPU_CACHE": "last-level cache of the processor in MB; default what the system reports",
    "TUNEBENCH_DB": "database, as a path, an SQLAlchemy URL or keywords of libpq; the option --db wins",
    "TUNEBENCH_DEBUG": "1: show the traceback of an error on the command line",
    "TUNEBENCH_WORKER_MEMORY": "memory limit of each worker in GB; default 75 % of the machine's memory",
}
"""Environment variables and their meaning."""


def _text(name: str) -> str | None:
    """Return a variable's value, or None if it is unset or empty."""
    assert name in VARIABLES, name
    return os.environ.get(name) or None


def cache_folder() -> Path:
    """Return the folder for regenerable files; it may not exist yet.

    Default: the user's cache folder; for a user without a home folder, one in the folder of temporary files.

    Raises:
        EnvironmentFault: if another user may write the folder, and so replace compiled kernels in it.
        InputError: if the path starts with ``~`` and the user has no home folder.
    """
    text = _text("TUNEBENCH_CACHE")
    folder = _user_cache_folder() if text is None else expanded(text, "TUNEBENCH_CACHE")
    check_folder(folder)
    return folder


def binary_folder() -> Path:
    """Return the folder of compiled kernels, in `cache_folder`; it may not exist yet."""
    return cache_folder() / "binaries"


def carried_folder() -> Path | None:
    """Return the folder of kernels that were compiled on another machine, or None.

    Raises:
        EnvironmentFault: if another user may write the folder.
        InputError: if the path starts with ``~`` and the user has no home folder.
    """
    text = _text("TUNEBENCH_CARRIED")
    if text is None:
        return None
    folder = expanded(text, "TUNEBENCH_CARRIED")
    check_folder(folder)
    return folder


def _user_cache_folder() -> Path:
    folder = _user_folder("user_cache_path")
    if folder is None:
        import tempfile

        return Path(tempfile.gettempdir(), f"tunebench-cache-{os.getuid()}")
    return folder


def data_folder() -> Path:
    """Return the user's folder of data that cannot be made again; it may not exist yet.

    Raises:
        InputError: if the user has no home folder.
    """
    folder = _user_folder("user_data_path")
    if folder is None:
        raise InputError(
            "this user has no home folder for a database: name a database by --db or TUNEBENCH_DB, "
            "or set HOME"
        )
    return folder


def _user_folder(kind: str) -> Path | None:
    """Return a folder in the user's home; None without HOME if the system does not list the user."""
    import platformdirs

    try:
        folder: Path = getattr(platformdirs, kind)("tunebench", appauthor=False)
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None  # older versions of platformdirs return "~"


def expanded(path: str, name: str) -> Path:
    """Return a path with ``~`` replaced by the home folder.

    Args:
        path: The path, as the user wrote it.
        name: Its name in messages.

    Raises:
        InputError: if it starts with ``~`` and that user has no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{name} {path!r}: there is no such home folder; write the whole path") from error


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` lists, in the order in which the driver counts them."""
    return tuple(filter(None, map(str.strip, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))))


def columns() -> int | None:
    """Return the requested table width in characters, or None."""
    text = _text("COLUMNS")
    return int(text) if text is not None and text.isdecimal() else None


def cxx() -> str | None:
    """Return the requested host C++ compiler, or None."""
    return _text("CXX")


def numba_variables() -> dict[str, str]:
    """Return the variables that Numba reads when it compiles for a processor, with their values."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("NUMBA_") and not name.startswith("NUMBA_CUDA_")
    }


def database() -> str | None:
    """Return the database to use without `--db`, or None; read again at every lookup."""
    return os.environ.get("TUNEBENCH_DB") or _default_database


def _raw_database() -> Callable[[], object]:
    variables = getattr(os.environ, "_data", None)
    encode = getattr(os.environ, "encodekey", None)
    if variables is None or encode is None:  # another implementation of Python
        return lambda: os.environ.get("TUNEBENCH_DB")
    return functools.partial(variables.get, encode("TUNEBENCH_DB"))


raw_database: Callable[[], object] = _raw_database()
"""Returns a value that differs whenever `TUNEBENCH_DB` does, in a tenth of the time of `os.environ.get`."""

_default_database: str | None = None
"""Database of the file of defaults, while a command runs."""


@contextlib.contextmanager
def default_database(db: str) -> Iterator[None]:
    """Use a database within the context where neither `--db` nor `TUNEBENCH_DB` names one.

    Args:
        db: Path or URL.
    """
    global _default_database
    before, _default_database = _default_database, db
    try:
        yield
    finally:
        _default_database = before


def config() -> str | None:
    """Return the requested file of defaults, ``none`` for no file, or None without a request."""
    return _text("TUNEBENCH_CONFIG")


def config_folder() -> Path | None:
    """Return the folder of the user's configuration; it may not exist. None without a home folder."""
    return _user_folder("user_config_path")


def completing() -> bool:
    """Return whether a shell asks for completions ($_TUNEBENCH_COMPLETE; see `tunebench completion`)."""
    return bool(os.environ.get("_TUNEBENCH_COMPLETE"))


def debug() -> bool:
    """Return whether errors on the command line include a traceback."""
    return _text("TUNEBENCH_DEBUG") not in (None, "0")


def worker_memory_gb() -> float | None:
    """Return the memory limit of a worker, in GB; None if none is given.

    Raises:
        InputError: if it is not a positive number.
    """
    return _size("TUNEBENCH_WORKER_MEMORY", "GB")


def cpu_cache_mb() -> float | None:
    """Return the size of the processor's last-level cache, in MB; None if none is given.

    Raises:
        InputError: if it is not a positive number.
    """
    return _size("TUNEBENCH_CPU_CACHE", "MB")


def _size(name: str, unit: str) -> float | None:
    text = _text(name)
    if text is None:
        return None
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise InputError(f"{name} must be a positive number of {unit}, such as 8; got {text!r}")
    return size
