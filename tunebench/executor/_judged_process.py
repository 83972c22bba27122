"""The measuring process as its judge sees it: stopped, except while it runs what it was asked to run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from tunebench._figure import significant
from tunebench._host import cores
from tunebench.executor._call_clock import CallClock
from tunebench.executor._supervisor import children_of, descendants, kill_descendants
from tunebench.measure.arena import SlotArena
from tunebench.measure.machine import OutsideClock
from tunebench.outcome import TimedOut

__all__ = ["Ended", "JudgedProcess", "Late", "Wrong"]

LARGEST_REPLY = 1 << 20
"""Largest reply, in bytes."""


class Ended(Exception):
    """The measuring process ended, or closed the connection."""


class Wrong(Exception):
    """The configuration is wrong; the message is the reason."""


class Late(Exception):
    """The launches did not end within the time limit."""

    def __init__(self, outcome: TimedOut) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class JudgedProcess:
    """The measuring process of a configuration, and all processes that it starts.

    Args:
        connection: The connection to it.
        guard: Process id of its guard (see `tunebench.executor._supervisor`).
        limit_s: Time limit of all launches, in seconds.

    Attributes:
        spent_us: Time in which it ran, in microseconds.
    """

    def __init__(self, connection: Connection, guard: int, limit_s: float) -> None:
        self._connection, self._guard, self._limit_s = connection, guard, limit_s
        self._clock = OutsideClock(cores())
        self._call_clock = CallClock(guard)
        self._stopped: set[int] = set()
        self.spent_us = 0.0

    def open(self, arena: SlotArena) -> None:
        """Hand over the memory, and wait until the measuring process has loaded the configuration."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end, _gone():
            end.setblocking(True)
            socket.send_fds(end, [arena.slots.to_bytes(8)], [arena.descriptor])
        with _gone():
            self._connection.poll(None)  # loading has the limit of the measuring process's call
        self._call_clock = CallClock(self._guard)
        self._receive()
        self.stop()

    def ask(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        """Return the reply to a request, and the time until it arrived, without waits for a processor.

        Returns:
            The reply, and the time in microseconds.
        """
        processes = self._kernel_processes()
        self._clock.begin(processes)
        message = json.dumps(request).encode()
        # The clock runs whenever one of them does: they could stop this process, or compute after a reply.
        began_ns = time.perf_counter_ns()
        with _gone():
            self._connection.send_bytes(message)
        self.resume()
        reply = self._receive()
        self._signal(signal.SIGSTOP)
        wall_ns = time.perf_counter_ns() - began_ns
        while started := self._kernel_processes() - self._stopped:
            self._stopped |= started
            self._signal(signal.SIGSTOP)
            wall_ns = time.perf_counter_ns() - began_ns
        us = self._clock.times(self._stopped, wall_ns).run_us
        self.spent_us += us
        return reply, us

    def _receive(self) -> dict[str, Any]:
        with _gone():
            while not self._connection.poll(min(1.0, self._limit_s)):
                if self._call_clock.wall_s - self._call_clock.waited_s() > self._limit_s:
                    raise self._late()
            message = self._connection.recv_bytes(LARGEST_REPLY)
        try:
            reply = json.loads(message)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise Wrong("the process that runs the kernel sent an answer that is none")
        return reply

    def _late(self) -> Late:
        reason = f"no answer within {significant(self._limit_s)} s"
        conditions = self._call_clock.conditions("call", self._limit_s)
        return Late(TimedOut(reason=reason, conditions=conditions))

    def _kernel_processes(self) -> set[int]:
        """Return the measuring process and all processes that it started."""
        return {pid for supervisor in children_of(self._guard) for pid in descendants(supervisor)}

    def stop(self) -> None:
        """Stop the measuring process, and what it started."""
        self._stopped = self._kernel_processes()
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let these processes run."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._stopped:
            with contextlib.suppress(OSError):  # it has ended
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill the measuring process, and what it started."""
        for supervisor in children_of(self._guard):
            kill_descendants(supervisor)


@contextlib.contextmanager
def _gone() -> Iterator[None]:
    """Raise `Ended` for an error of the connection."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise Ended from error
