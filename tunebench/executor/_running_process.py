"""One worker process, started by `subprocess`, and the connection to it."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import select
import signal
import socket
import struct
import subprocess
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from tunebench._child import WORKING_FOLDER, absolute_environment, python_command
from tunebench._figure import significant
from tunebench._user_code import GRACE_S, LEAST_S, LONGEST_WAIT
from tunebench.executor import _memory
from tunebench.executor._call_clock import CallClock
from tunebench.executor._supervisor import KILL_S
from tunebench.executor._worker_main import CHANNEL, OUTSIDE, USER_CODE, WITHIN, number_of

__all__ = ["END_S", "STALL_S", "CallLate", "ReplyUnreadable", "RunningProcess"]

END_S = 2.0
"""Time in which an idle process or a supervisor may end by itself, in seconds."""

OUTSIDE_S = 600.0
"""Time that a call may take to draw inputs and to compute references, in seconds."""

STALL_S = 30
"""Time without progress after which sending a message or receiving the rest of a reply fails, in seconds."""

LARGEST_REPLY = 1 << 31
"""Largest reply of a process, in bytes."""

_MAIN = (
    "from tunebench.executor._worker_main import serve; "
    "from tunebench.executor._supervisor import supervise; supervise(*map(int, sys.argv[1:]), serve)"
)


class CallLate(TimeoutError):
    """A call exceeded its time limit.

    Args:
        reason: The limit that was exceeded.
        conditions: Conditions of `TimedOut`.
    """

    def __init__(self, reason: str, conditions: Mapping[str, Any]) -> None:
        super().__init__(reason)
        self.conditions = conditions


class ReplyUnreadable(Exception):
    """A reply that no worker sends: user code wrote to the connection, or replaced what makes replies."""


class RunningProcess:
    """A process of its own process group, and the connection to it.

    Args:
        gpu: The only GPU that it sees, in the form of `CUDA_VISIBLE_DEVICES`; None for all of this process.

    Raises:
        OSError: if the system refuses to start it.
        InputError: if its memory limit is not valid.
    """

    def __init__(self, gpu: str | None = None) -> None:
        self._calls = 0
        limit_bytes = _memory.limit_bytes()
        self.connection, theirs = multiprocessing.Pipe()
        _limit_stalls(self.connection)
        inherited = [theirs.fileno(), _lifeline()[0].fileno()]
        command = python_command(_MAIN, *map(str, inherited), str(limit_bytes))
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                cwd=WORKING_FOLDER,
                env=absolute_environment(**({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})),
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

    @property
    def pid(self) -> int:
        """Process id of the guard (see `tunebench.executor._supervisor`)."""
        return self._process.pid

    def exchange(
        self, message: bytes, limit_s: float, user_code_s: float, channel: int | None = None
    ) -> bytes:
        """Send a message and return the reply.

        Inputs and references do not count toward the time limit of the call; their limit is `OUTSIDE_S`. The
        functions of a variant count, and each has a limit of its own. The clock of a limit stops while the
        process waits for a processor.

        Args:
            message: The message.
            limit_s: Time limit of the call, in seconds.
            user_code_s: Time limit of each function of a variant, in seconds; the process enforces it, and
                is killed `GRACE_S` later.
            channel: File descriptor that the call uses (see `tunebench.measure.judged`).

        Raises:
            CallLate: if there is no reply within a time limit, or if a part of the message or the reply makes
                no progress for `STALL_S`.
            EOFError, OSError: if the process ends first.
            ReplyUnreadable: if the reply is not that of this call.
        """
        clock, number = CallClock(self._process.pid), number_of(self._calls)
        self._calls += 1
        try:
            if channel is not None:
                self._send_channel(channel)
            reply = self._answer(clock, message, limit_s, user_code_s)
            if not reply.startswith(number):
                raise ReplyUnreadable("the answer of a worker process is not the answer of its call")
            return reply.removeprefix(number)
        except BlockingIOError:
            reason = f"its connection stalled for {STALL_S} s"
            raise CallLate(reason, clock.conditions("connection", STALL_S)) from None

    def _send_channel(self, channel: int) -> None:
        self.connection.send_bytes(CHANNEL)
        with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            socket.send_fds(end, [CHANNEL[:1]], [channel])

    def _answer(self, clock: CallClock, message: bytes, limit_s: float, user_code_s: float) -> bytes:
        self.connection.send_bytes(message)
        limits_s = {WITHIN: limit_s, OUTSIDE: OUTSIDE_S}
        left_s, stage = dict(limits_s), WITHIN
        while True:
            if stage.startswith(USER_CODE):
                limits_s[stage] = left_s[stage] = user_code_s + GRACE_S
            reply = self._receive(clock, stage, left_s, limits_s[stage])
            if reply not in (OUTSIDE, WITHIN) and not reply.startswith(USER_CODE):
                return reply
            stage = reply

    def _receive(self, clock: CallClock, stage: bytes, left_s: dict[bytes, float], limit_s: float) -> bytes:
        """Return the next message of the process, and reduce the time left of the stage that it is in."""
        began_s = clock.wall_s
        while True:
            since_s = clock.wall_s
            # A child of the process may hold its end of the connection open: its end is awaited too.
            ready = _ready([self.connection.fileno(), self._end], left_s[stage])
            left_s[stage] = max(0.0, left_s[stage] - (clock.wall_s - since_s))
            if ready:
                break
            if clock.wall_s - began_s < LONGEST_WAIT * limit_s:
                left_s[stage] += clock.credit_s()
            if left_s[stage] <= LEAST_S:
                raise _late(clock, stage, limit_s)
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


def _late(clock: CallClock, stage: bytes, limit_s: float) -> CallLate:
    """Return the error of a stage that exceeded its limit."""
    limited, reason = "call", "no answer"
    if stage == OUTSIDE:
        limited, reason = "inputs", "no inputs and reference"
    elif stage.startswith(USER_CODE):
        limited, limit_s = "user code", limit_s - GRACE_S
        reason = f"{stage.removeprefix(USER_CODE).decode()} did not return"
    return CallLate(f"{reason} within {significant(limit_s)} s", clock.conditions(limited, limit_s))


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
