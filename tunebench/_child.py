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
import time
from pathlib import Path

from tunebench._user_code import LONGEST_WAIT

__all__ = [
    "WORKING_FOLDER",
    "absolute_environment",
    "find_program",
    "import_path",
    "python_command",
    "run_limited",
]

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


def run_limited(
    command: list[str | Path], job: bytes, *, timeout_s: float, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a child in `WORKING_FOLDER` and return its status and its output.

    Args:
        command: Program and arguments.
        job: Standard input.
        timeout_s: Limit in seconds: of wall time if all threads of the child sleep then, else of processor
            time, since on a busy machine the child waits for a processor. Wall time is limited to
            `LONGEST_WAIT` times as much in any case.
        environment: Changes of environment variables.

    Raises:
        subprocess.TimeoutExpired: if the limit is exceeded; the child is killed.
    """
    pipe, ends = subprocess.PIPE, time.monotonic() + LONGEST_WAIT * timeout_s
    variables = absolute_environment(**environment)
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=WORKING_FOLDER, env=variables
    ) as process:
        wait_s, unsent = timeout_s, job
        try:
            while True:
                try:
                    output, errors = process.communicate(unsent or None, timeout=wait_s)
                except subprocess.TimeoutExpired:
                    left_s = timeout_s - _processor_s(process.pid)
                    if left_s <= 0 or time.monotonic() >= ends or _sleeps(process.pid):
                        raise
                    wait_s, unsent = max(left_s, 0.05), b""  # `communicate` sends the job in its first call
                else:
                    return subprocess.CompletedProcess(command, process.returncode, output, errors)
        except BaseException:
            process.kill()
            raise


def _processor_s(pid: int) -> float:
    """Return the processor time of all threads of a process, in seconds; infinity if it is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return float("inf")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _sleeps(pid: int) -> bool:
    """Return whether no thread of a process can run; one that hands over a lock may seem to, for a moment."""
    for _ in range(20):
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            try:
                if stat.read_bytes().rpartition(b")")[2].split()[0] in (b"R", b"D"):
                    return False
            except OSError:  # the thread has ended
                return False
        time.sleep(0.01)
    return True


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
