"""The main function of a worker process: it calls one function for each message of its parent."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tunebench._user_code import limit_user_code
from tunebench.errors import TaskUnreadable, describe_error
from tunebench.executor._process_state import ProcessState
from tunebench.executor._supervisor import kill_descendants
from tunebench.kernels import failed_files
from tunebench.measure.judged import offer_channel
from tunebench.measure.originals import Originals
from tunebench.measure.task_limit import notify_with

__all__ = ["CHANNEL", "OUTSIDE", "USER_CODE", "WITHIN", "Reply", "number_of", "serve"]

OUTSIDE, WITHIN = b"outside the time limit", b"within the time limit"
"""Messages of a process before its reply: the clock of the call stops, and continues."""

USER_CODE = b"user code: "
"""Beginning of a message before the reply: the function it names begins, and has its own limit."""

CHANNEL = b"channel"
"""Message to a process before a call; one byte follows, with a file descriptor for the call."""

Reply = tuple[bool, Any]
"""Whether a call returned, and its result; else the exception that it raised."""


def serve(calls: int) -> None:
    """Start as the first message says, then answer calls until the parent closes the connection.

    A kill of this process leaves nothing to clean up: Numba creates a lock by the default start method on
    import, and only a lock made for `fork` has no name in the system, which would remain.

    Args:
        calls: File descriptor of the connection to the parent.
    """
    if "fork" in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("fork", force=True)
    connection, functions, supervisor = Connection(calls), [], os.getppid()
    stages = [WITHIN]

    def enter(stage: bytes | None) -> None:
        """Report the stage that begins; None ends the current one."""
        if stage is None:
            stages.pop()
        else:
            stages.append(stage)
        connection.send_bytes(stages[-1])

    def notify_function(name: str | None) -> None:
        enter(None if name is None else USER_CODE + name.encode(errors="replace"))

    def prepare(
        function: Callable[..., Any], begin: Callable[..., None], arguments: tuple[Any, ...], limit_s: float
    ) -> None:
        functions.append(function)
        begin(*arguments)
        limits.enter_context(limit_user_code(limit_s, notify_function))

    notify_with(lambda begins: enter(OUTSIDE if begins else None))
    with contextlib.ExitStack() as limits, contextlib.suppress(EOFError, OSError):
        connection.send_bytes(number_of(0) + _call(prepare, connection.recv_bytes()))
        state, originals = ProcessState(), Originals()
        for number in itertools.count(1):
            reply = _call(functions[0], _next_call(connection))
            state.restore()
            originals.restore()
            connection.send_bytes(number_of(number) + reply)
            kill_descendants(supervisor, keep=(os.getpid(),))  # they would disturb the next measurement


def _next_call(connection: Connection) -> bytes:
    """Return the pickled arguments of the next call, and offer it the file descriptor that came before."""
    message = connection.recv_bytes()
    while message == CHANNEL:
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            _, descriptors, _, _ = socket.recv_fds(end, 1, 1)
        offer_channel(*descriptors)
        message = connection.recv_bytes()
    return message


def number_of(call: int) -> bytes:
    """Return the bytes before the reply to a call of a process, so that no other message is taken for it."""
    return call.to_bytes(8)


def _call(function: Callable[..., Any], blob: bytes) -> bytes:
    """Return the pickled reply to a call with pickled arguments."""
    try:
        arguments = pickle.loads(blob)  # noqa: S301 - from our own parent
    except BaseException as error:  # a class of a user's file, which may raise anything
        module = getattr(error, "name", None)
        reason = failed_files().get(str(module)) or describe_error(error)
        return pickle.dumps((False, TaskUnreadable(f"a worker process cannot load the task: {reason}")))
    depth = sys.getrecursionlimit()
    try:
        try:
            value = function(*arguments)
        finally:
            sys.setrecursionlimit(depth)  # user code may have lowered it, and errors are described below
    except RecursionError as error:  # also raised by our own code, then
        return pickle.dumps((False, TaskUnreadable(f"a worker process: {describe_error(error)}")))
    except Exception as error:
        try:
            reply = pickle.dumps((False, error))
            pickle.loads(reply)  # noqa: S301 - made here
        except Exception:  # an exception that does not survive pickling becomes its text
            return pickle.dumps((False, RuntimeError(describe_error(error))))
        return reply
    except BaseException as error:  # raised again in the parent, SystemExit would end it
        return pickle.dumps((False, RuntimeError(describe_error(error))))
    try:
        return pickle.dumps((True, value))
    except Exception as error:  # user code replaced its class
        unreadable = TaskUnreadable(f"a worker process cannot send its result: {describe_error(error)}")
        return pickle.dumps((False, unreadable))
