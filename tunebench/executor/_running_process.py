"""One worker process, started by `subprocess`, and the connection to it."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from multiprocessing.connection import Connection
from time import monotonic as _monotonic  # a user's file may replace it in the module `time`

from tunebench.executor import _memory
from tunebench.executor._supervisor import KILL_S
from tunebench.executor._worker_main import OUTSIDE, WITHIN

__all__ = ["END_S", "STALL_S", "RunningProcess"]

END_S = 2.0
"""Time in which an idle process or a supervisor may end by itself, in seconds."""

OUTSIDE_S = 600.0
"""Time that a call may take to draw inputs and to compute references, in seconds."""

STALL_S = 30
"""Time without progress after which sending a message or receiving the rest of a reply fails, in seconds."""

LARGEST_REPLY = 1 << 31
"""Largest reply of a process, in bytes."""

_MAIN = (
    "import sys, json; sys.path[:] = json.loads(sys.argv.pop()); "
    "from tunebench.executor._worker_main import serve; "
    "from tunebench.executor._supervisor import supervise; supervise(*map(int, sys.argv[1:]), serve)"
)


class RunningProcess:
    """A process of its own process group, and the connection to it.

    Raises:
        OSError: if the system refuses to start it.
        InputError: if its memory limit is not valid.
    """

    def __init__(self) -> None:
        limit_bytes = _memory.limit_bytes()
        self.connection, theirs = multiprocessing.Pipe()
        _limit_stalls(self.connection)
        inherited = [theirs.fileno(), _lifeline()[0].fileno()]
        arguments = [*map(str, inherited), str(limit_bytes), json.dumps(sys.path)]
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        try:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-P", "-c", _MAIN, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                process_group=0,  # the parent handles Ctrl-C, and a kill reaches the children of the worker
            )
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()
        try:
            self._end: int | None = os.pidfd_open(self._process.pid)
        except (AttributeError, OSError):  # not on this system
            self._end = None

    def exchange(self, message: bytes, limit_s: float) -> bytes:
        """Send a message and return the reply.

        Inputs and references do not count toward the time limit of the call; their limit is `OUTSIDE_S`.

        Args:
            message: The message.
            limit_s: Time limit of the call, in seconds.

        Raises:
            TimeoutError: if there is no reply within the time limit.
            BlockingIOError: if a part of the message or the reply makes no progress for `STALL_S`.
            EOFError, OSError: if the process ends first.
        """
        self.connection.send_bytes(message)
        left_s = {False: limit_s, True: OUTSIDE_S}
        outside = False
        while True:
            begun = _monotonic()
            reply = self._receive(left_s[outside])
            left_s[outside] = max(0.0, left_s[outside] - (_monotonic() - begun))
            if reply not in (OUTSIDE, WITHIN):
                return reply
            outside = reply == OUTSIDE

    def _receive(self, limit_s: float) -> bytes:
        # A child of the process may hold its end of the connection open: its end is awaited too.
        ready = _ready([self.connection.fileno(), self._end], limit_s)
        if not ready:
            raise TimeoutError
        if self.connection.fileno() not in ready and not self.connection.poll():
            raise EOFError
        return self.connection.recv_bytes(LARGEST_REPLY)

    def ended(self, limit_s: float | None) -> bool:
        """Return whether the process has ended, after waiting for its end; its process id stays reserved."""
        if self._end is None:
            try:
                self._process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return False
            return True
        return bool(_ready([self._end], limit_s))

    def kill(self) -> None:
        """Kill the process and everything that it started (see `tunebench.executor._supervisor`)."""
        with contextlib.suppress(OSError):
            os.kill(self._process.pid, signal.SIGTERM)
        self.ended(KILL_S + END_S)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Return the exit code of the ended process, and release its process id."""
        if self._end is not None:
            os.close(self._end)
        return self._process.wait()


def _limit_stalls(connection: Connection) -> None:
    """Make sends and receives of a connection raise BlockingIOError after `STALL_S` without progress."""
    limit = struct.pack("@ll", STALL_S, 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setblocking(True)  # a program may have set another default
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, limit)


def _ready(descriptors: Iterable[int | None], limit_s: float | None) -> set[int]:
    """Wait until file descriptors can be read or are closed, and return these; empty after the time limit."""
    poll = select.poll()
    for descriptor in descriptors:
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if limit_s is None else 1e3 * limit_s)}


@functools.cache
def _lifeline() -> tuple[Connection, Connection]:
    """Return a pipe without messages: workers read one end, the other closes when this process ends."""
    return multiprocessing.Pipe(duplex=False)
