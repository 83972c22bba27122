"""The graph runner: a thread that runs segments while Python goes on."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from typing import Any

import torch

from tunebench.torch.coexecution._segment import Segment

__all__ = ["Job", "submit"]

_SWITCH_S = 5e-5
"""Time after which a thread must hand over Python's lock while a segment runs beside Python."""


class Job:
    """A segment that runs, or waits to run, in the thread of the graph runner."""

    def __init__(self, segment: Segment, values: list[Any], numbers: list[Any]) -> None:
        self.seconds = 0.0
        self._work = segment, values, numbers
        self._threads = torch.get_num_threads()
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()
        self._interval_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)

    def run(self) -> None:
        """Run the segment; an error is kept for the thread that waits."""
        segment, values, numbers = self._work
        start = time.perf_counter()
        try:
            if torch.get_num_threads() != self._threads:  # decides the order of sums
                torch.set_num_threads(self._threads)
            segment.run(values, numbers)
        except BaseException as error:  # kept, and raised where the result is waited for
            self._error = error
        finally:
            self.seconds = time.perf_counter() - start
            self._done.release()

    def wait(self) -> None:
        """Wait until the segment has run, and raise its error."""
        with self._done:
            pass
        sys.setswitchinterval(self._interval_s)
        if self._error is not None:
            raise self._error


_JOBS: queue.SimpleQueue[Job] = queue.SimpleQueue()
_STARTED: list[threading.Thread] = []
_LOCK = threading.Lock()


def submit(segment: Segment, values: list[Any], numbers: list[Any]) -> Job:
    """Run a segment in the thread of the graph runner; segments run in the order of the calls."""
    with _LOCK:
        if not _STARTED:
            _STARTED.append(threading.Thread(target=_serve, args=(_JOBS,), name="graph runner", daemon=True))
            _STARTED[0].start()
    job = Job(segment, values, numbers)
    _JOBS.put(job)
    return job


def _serve(jobs: queue.SimpleQueue[Job]) -> None:
    while True:
        jobs.get().run()


def _forget() -> None:
    """Start a new thread in a forked process, which has none of its parent's."""
    global _JOBS, _LOCK
    _JOBS, _LOCK = queue.SimpleQueue(), threading.Lock()
    _STARTED.clear()


os.register_at_fork(after_in_child=_forget)
