"""The supervisor of a worker process: what a kernel starts or prints ends with the worker.

A kernel is code of whoever wrote it. It may start processes that leave their process group and outlive their
parent. On Linux such a process becomes a child of its nearest ancestor that asked to be a subreaper. The
supervisor is that ancestor: it kills all of them when the worker ends, when the tuner says so, or when they
hold too much memory. Its parent, the guard, is a subreaper too and has no other task: if either of the two is
killed, the other one kills what is left. The process that the tuner starts is the guard. Elsewhere than on
Linux, the supervisor kills the process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

from tunebench.executor import _memory
from tunebench.fault import MEMORY_STATUS

__all__ = ["KILL_S", "SHOWN_BYTES", "children_of", "descendants", "kill_descendants", "supervise"]

SHOWN_BYTES = 64 << 10
"""Output of one worker that is shown, in bytes; the rest is counted and dropped."""

LARGEST_FILE_BYTES = 8 << 30
OPEN_FILES = 4096
MORE_PROCESSES = 4096
"""Processes and threads that the user may have in addition to those when the worker starts."""

OOM_SCORE = 500
"""Added to a worker's score (0 to 1000) by which Linux chooses what to kill if memory runs out."""

KILL_S = 5.0
"""Time limit for killing all descendants of a process, in seconds."""

_POLL_S = 0.2

# Source: linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38


def supervise(calls: int, lifeline: int, memory_bytes: int, serve: Callable[[int], None]) -> None:
    """Fork a worker that serves calls, and end with it, with the same exit status.

    The worker ends when the tuner ends or closes the connection, or sends SIGTERM to this process.

    Args:
        calls: File descriptor of the connection to the tuner; only the worker uses it.
        lifeline: File descriptor that closes when the tuner ends.
        memory_bytes: Memory that the worker and what it starts may hold, in bytes.
        serve: Runs in the worker, with the file descriptor of the connection.
    """
    for ignored in (signal.SIGINT, signal.SIGHUP):  # the tuner handles both
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    _prctl(_PR_SET_CHILD_SUBREAPER)
    guard = os.getpid()
    supervisor = os.fork()
    if supervisor != 0:
        os.close(calls)
        os.close(lifeline)
        _end_with(_reap(supervisor, 0))
    _leave(guard)
    supervisor = os.getpid()
    output, shown = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(lifeline)
        _become_worker(supervisor, output, shown)
        serve(calls)
        return
    os.close(calls)
    os.close(shown)
    _end_with(_await(worker, output, lifeline, memory_bytes))


def _leave(guard: int) -> None:
    """Prepare the forked supervisor: it ends what it started when its guard ends."""
    if sys.platform == "linux":
        os.setpgid(0, 0)  # a tuner that finds the guard dead kills the guard's group
    _prctl(_PR_SET_CHILD_SUBREAPER)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != guard:  # it ended before this process asked for the signal
        os._exit(1)


def _end_with(status: int | None) -> NoReturn:
    """Kill the remaining descendants of this process, and exit with a wait status."""
    kill_descendants(os.getpid())
    _exit_like(status or 0)


# -- the worker ----------------------------------------------------------------------------------------------


def _become_worker(supervisor: int, output: int, shown: int) -> None:
    """Prepare the forked process: it ends with its supervisor, has limits, and writes to a pipe."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it ended before this process asked to end with it
        os._exit(1)
    _prctl(_PR_SET_NO_NEW_PRIVS)
    for stream in (1, 2):
        os.dup2(shown, stream)
    os.close(output)
    os.close(shown)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE), encoding="ascii")
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, LARGEST_FILE_BYTES)
    _limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    _limit(resource.RLIMIT_NPROC, _threads_of_user() + MORE_PROCESSES)


def _limit(kind: int, maximum: int) -> None:
    """Lower a limit of this process and its children, unless it is lower already."""
    soft, hard = resource.getrlimit(kind)
    bounds = [maximum, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    with contextlib.suppress(OSError, ValueError):  # not on this system
        resource.setrlimit(kind, (min(bounds), hard))


def _threads_of_user() -> int:
    """Return the number of threads of all processes of this user, which is what Linux limits."""
    threads = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == os.getuid():
                threads += sum(1 for _ in (process / "task").iterdir())
    return threads


# -- the supervisor ------------------------------------------------------------------------------------------


def _await(worker: int, output: int, lifeline: int, memory_bytes: int) -> int:
    """Show the output of the worker until it or the tuner ends, or memory does; return a wait status."""
    poll, bytes_left, checked = select.poll(), SHOWN_BYTES, 0.0
    poll.register(output, select.POLLIN)
    poll.register(lifeline, select.POLLIN)
    with contextlib.suppress(AttributeError, OSError):  # elsewhere than on Linux, poll often
        poll.register(os.pidfd_open(worker), select.POLLIN)
    while True:
        ready = dict(poll.poll(1000 * _POLL_S))
        if output in ready:
            bytes_left -= _show(output, bytes_left, poll)
        if lifeline in ready:
            kill_descendants(os.getpid())
            os.killpg(0, signal.SIGKILL)  # this process too, and on systems without /proc the worker
        if time.monotonic() >= checked + _POLL_S:
            if _memory.exceeds(lambda: descendants(os.getpid()), memory_bytes):
                return MEMORY_STATUS << 8  # as of a process that exited with it
            checked = time.monotonic()
        if (status := _reap(worker)) is not None:
            while bytes_left > 0 and output in dict(poll.poll(0)):
                bytes_left -= _show(output, bytes_left, poll)
            return status


def _show(output: int, bytes_left: int, poll: select.poll) -> int:
    """Copy output to stderr, which is not the stream of results; return the number of bytes read."""
    text = os.read(output, 1 << 16)
    if not text:
        poll.unregister(output)
    with contextlib.suppress(OSError):
        if bytes_left > 0:
            os.write(2, text[:bytes_left])
        if 0 < bytes_left <= len(text):
            os.write(2, b"\n(a worker process printed more, which is not shown)\n")
    return len(text)


def _reap(child: int, options: int = os.WNOHANG) -> int | None:
    """Release the ended children of this process; return the wait status of one of them once it has ended.

    Args:
        child: Process id of that one.
        options: Options of waitpid; 0 waits for its end.
    """
    while True:
        pid, status = os.waitpid(-1, options)
        if pid == child:
            return status
        if pid == 0:
            return None


def _stop(_signal: int, _frame: object) -> NoReturn:
    """Kill the worker and everything that it started, and end by SIGTERM."""
    kill_descendants(os.getpid())
    _exit_like(signal.SIGTERM)


def _exit_like(status: int) -> NoReturn:
    """End this process with the wait status of another one."""
    if os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        _limit(resource.RLIMIT_CORE, 0)
        if ended_by != signal.SIGKILL:
            signal.signal(ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), ended_by)
    os._exit(os.waitstatus_to_exitcode(status))


# -- processes -----------------------------------------------------------------------------------------------


def kill_descendants(root: int, keep: Collection[int] = ()) -> None:
    """Kill all processes that a process started directly or indirectly, however fast they multiply.

    They are stopped first: a stopped process starts no other. Does nothing on systems without /proc.

    Args:
        root: The process, which lives.
        keep: Descendants that live, too.
    """
    deadline = time.monotonic() + KILL_S
    stopped: set[int] = set()
    while time.monotonic() < deadline:
        processes = descendants(root) - set(keep)
        if not processes:
            break
        fresh = processes - stopped
        for pid in fresh or processes:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP if fresh else signal.SIGKILL)
        stopped |= fresh
        if not fresh:
            time.sleep(0.001)
    for pid in stopped:
        with contextlib.suppress(ChildProcessError):  # a child of another process, which releases it
            os.waitpid(pid, os.WNOHANG)


def descendants(root: int) -> set[int]:
    """Return the living descendants of a process."""
    processes: set[int] = set()
    new = children_of(root)
    while new:
        processes |= new
        new = {child for pid in new for child in children_of(pid)} - processes
    return {pid for pid in processes if _is_alive(pid)}


def children_of(pid: int) -> set[int]:
    """Return the processes that a process started, and those of its descendants that lost their parent."""
    children: set[int] = set()
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"{thread.path}/children", "rb") as listed:
                children.update(map(int, listed.read().split()))
    return children


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def _prctl(option: int, value: int = 1) -> None:
    """Set an attribute of this process; does nothing elsewhere than on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
