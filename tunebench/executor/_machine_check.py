"""A check that this machine has memory, files, threads, processes and disk space, in a new process.

It decides whose fault it is that a resource ran out for a kernel: if the machine has it, the kernel's.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from tunebench._environment import binary_folder
from tunebench.errors import EnvironmentFault, WorkerUnusable, describe_error
from tunebench.executor.process import ProcessCaller, ProcessStage
from tunebench.outcome import Crashed, TimedOut

__all__ = ["machine_fault"]

MEMORY_BYTES, FILES, DISK_BYTES = 1 << 27, 64, 1 << 20
LIMIT_S = 30.0


def machine_fault() -> EnvironmentFault | None:
    """Return which resource this machine lacks, by a check in a new process; None if it lacks none."""
    with ProcessCaller(ProcessStage(function=check, start=_start, timeout_s=LIMIT_S)) as caller:
        try:
            answer = caller.call(str(binary_folder()))
        except EnvironmentFault as fault:
            return fault
        except WorkerUnusable as error:
            return EnvironmentFault(str(error))
    if isinstance(answer, Crashed | TimedOut):
        return EnvironmentFault(f"a check of this machine's memory, files and disks: {answer.reason}")
    return None


def _start() -> None:
    """Prepare nothing."""


def check(folder: str) -> None:
    """Use a little of each resource.

    Args:
        folder: A folder that tunebench writes to.

    Raises:
        EnvironmentFault: if the system refuses one of them.
    """
    resources: dict[str, Callable[[], object]] = {
        "memory": lambda: b"x" * MEMORY_BYTES,
        "open files": _open_files,
        "threads": _start_thread,
        "processes": _start_process,
        "space for temporary files": lambda: _write(tempfile.gettempdir()),
        f"space in {folder}": lambda: _write(folder),
    }
    for name, use in resources.items():
        try:
            use()
        except (OSError, MemoryError, RuntimeError) as error:
            raise EnvironmentFault(f"this machine lacks {name}: {describe_error(error)}") from error


def _open_files() -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(FILES):
            stack.enter_context(open(os.devnull, "rb"))


def _start_thread() -> None:
    thread = threading.Thread(target=_start)
    thread.start()
    thread.join()


def _start_process() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _write(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x" * DISK_BYTES)
        file.flush()
        os.fsync(file.fileno())
