"""Time of calls: by the clock on a CPU, by CUDA events on a GPU without waiting for it."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from tunebench.torch.profiling._demand_counter import DemandCounter, ProfiledOperation

__all__ = ["CallTimer", "TimedCall"]


class TimedCall:
    """A call whose time is not known yet.

    Attributes:
        shares: What the call counts as: operation, number of calls, fraction of the time.
    """

    __slots__ = ("shares",)

    def __init__(self, *shares: tuple[ProfiledOperation, int, float]) -> None:
        self.shares = shares


class CallTimer:
    """Times calls and adds them to a counter.

    A call may be held until the next call of its thread, so that its shares can still change; on a GPU the
    last call is always held. Shares may also be set after the call. Events are queried by the threads that
    make calls, because a query from another thread would invalidate a CUDA graph capture.
    """

    def __init__(self, counter: DemandCounter) -> None:
        self._counter = counter
        self._held: dict[int, tuple[TimedCall, float]] = {}
        self._pending: deque[tuple[TimedCall, Any, Any, Any]] = deque()
        self._spare: defaultdict[Any, list[Any]] = defaultdict(list)
        self._lock = threading.Lock()

    def time(self, call: TimedCall, device: Any, function: Callable[[], Any], *, hold: bool = False) -> Any:
        """Make a call and return its result.

        Args:
            call: The call to count.
            device: Its torch device.
            function: Makes the call.
            hold: Whether to hold it until the next call of this thread.
        """
        if device.type == "cuda":
            return self._time_on_stream(call, device, function)
        began = time.perf_counter_ns()
        result = function()
        took_us = (time.perf_counter_ns() - began) / 1e3
        held_call = self._held.pop(threading.get_ident(), None)
        if held_call is not None:
            self._add(*held_call)
        if hold:
            self._held[threading.get_ident()] = (call, took_us)
        else:
            self._add(call, took_us)
        return result

    def _time_on_stream(self, call: TimedCall, device: Any, function: Callable[[], Any]) -> Any:
        if torch.cuda.is_current_stream_capturing():  # captured calls do not run now
            self._add(call, 0.0)
            return function()
        stream = torch.cuda.current_stream(device)
        begin, end = self._event(device), self._event(device)
        begin.record(stream)
        result = function()
        end.record(stream)
        self._add_finished()
        with self._lock:
            self._pending.append((call, device, begin, end))
        return result

    def _event(self, device: Any) -> Any:
        try:
            return self._spare[device].pop()
        except IndexError:
            return torch.cuda.Event(enable_timing=True)

    def _add_finished(self) -> None:
        """Count the calls whose events have happened, except the last one, whose shares may change."""
        with self._lock:
            while len(self._pending) > 1 and self._pending[0][-1].query():
                self._add_first()

    def _add_first(self) -> None:
        call, device, begin, end = self._pending.popleft()
        self._add(call, 1e3 * begin.elapsed_time(end))
        self._spare[device] += (begin, end)

    def finish(self) -> None:
        """Count all calls; waits for the GPU."""
        for held_call in (self._held.pop(thread) for thread in tuple(self._held)):
            self._add(*held_call)
        with self._lock:
            while self._pending:
                self._pending[0][-1].synchronize()
                self._add_first()

    def _add(self, call: TimedCall, took_us: float) -> None:
        for entry, calls, share in call.shares:
            self._counter.add(entry, calls, share * took_us)
