"""Child processes with a time limit that does not count waits for a processor."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tunebench._child import WORKING_FOLDER, absolute_environment
from tunebench._user_code import LONGEST_WAIT

__all__ = ["run_limited"]


def run_limited(
    command: Sequence[str | Path], job: bytes, *, timeout_s: float, **environment: str
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
