"""Child processes that run nothing of the current folder, which may be a stranger's.

A program looks for code in more places than it says: Python imports from the folder in which `python -m`
runs, Numba reads `.numba_config.yaml` there, Ray lets its workers import from it, and compilers look there
for headers. Children therefore run in `WORKING_FOLDER`, Python with `-P` and with the import path of this
process, and programs are searched for in folders that do not depend on the current one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["WORKING_FOLDER", "absolute_environment", "find_program", "import_path", "python_command"]

WORKING_FOLDER = str(Path(os.sep).absolute())
"""Working folder of children: only the system's administrator can write it."""

_PATHS = ("CXX", "TUNEBENCH_CACHE", "TUNEBENCH_CARRIED")
"""Environment variables with a path that children read."""


def import_path() -> list[str]:
    """Return the import path of this process, without entries that depend on the current folder."""
    return [str(Path(entry).absolute()) for entry in sys.path]


def python_command(main: str, *arguments: str) -> list[str]:
    """Return the command of a Python process with the import path and the options of this one.

    Args:
        main: Python code, which finds the arguments in ``sys.argv[1:]``.
        *arguments: The arguments.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    code = f"import sys, json; sys.path[:] = json.loads(sys.argv.pop()); {main}"
    return [sys.executable, *flags, "-P", "-c", code, *arguments, json.dumps(import_path())]


def absolute_environment(**changes: str) -> dict[str, str]:
    """Return the environment of a child, whose paths do not depend on the current folder.

    Args:
        **changes: Variables that differ from those of this process.
    """
    relative = {name: os.environ[name] for name in _PATHS if os.environ.get(name)}
    absolute = {
        name: path
        if path.startswith("~") or (name == "CXX" and os.sep not in path)
        else str(Path(path).absolute())
        for name, path in relative.items()
    }
    return {**os.environ, **absolute, **changes}


def find_program(name: str) -> str | None:
    """Return the absolute path of a program, or None; folders of PATH that are relative do not count.

    Args:
        name: Its name, or its path.
    """
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    path = shutil.which(
        name, path=os.pathsep.join(folder for folder in folders if Path(folder).is_absolute())
    )
    return None if path is None else str(Path(path).absolute())
