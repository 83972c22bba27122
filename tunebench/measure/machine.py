"""State of this machine while it measures: load of other programs, and drift of a reference kernel.

On a busy machine the wall time of a run includes the time in which its threads waited for a processor.
`ThreadClocks` reads that waiting and the processor time of every thread. `RunTimes.run_us` is the time that
the run would have taken without it (docs/decisions/0077-processor-time-on-a-busy-machine.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebench._lazy import np

__all__ = [
    "BUSY",
    "STAT",
    "TASKS",
    "MachineState",
    "OutsideClock",
    "RunTimes",
    "ThreadClocks",
    "busy_elsewhere",
    "busy_s",
    "keep_freed_memory",
    "spin_only_if_idle",
]

BUSY = 0.1
"""Share of all processors above which the load of other programs is recorded, since it distorts times."""

_SHORTEST_S = 0.1
"""Shortest time over which the use is measured: the system counts in hundredths of a second."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Numbers of parameters of mallopt. Source: malloc.h of glibc."""

STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Positions of idle time in the first line of /proc/stat: idle, and idle while waiting for a disk."""
_WITHOUT_GUESTS = 8
"""Number of times of that line that do not count twice."""

_REFERENCE_ELEMENTS = 1 << 15
_REFERENCE_RUNS = 5

_TOLERATED_WAIT = 0.05
"""Share of a run that its threads may wait for a processor; the wall time of such a run is its time."""
_TOLERATED_WAIT_US = 20.0
"""Time that they may wait beyond that share, in microseconds: the start of threads on an idle machine."""

TASKS = "/proc/self/task"
# Bound before any kernel could replace them.
_clock_ns, _process_ns = time.clock_gettime_ns, time.process_time_ns
_list_folder, _open, _read, _close = os.listdir, os.open, os.read, os.close


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """Times of one run of a kernel.

    Attributes:
        wall_us: Wall time.
        busiest_us: Longest processor time of a thread; at least that of all threads together over the number
            of processors.
        processor_us: Processor time of all threads.
        waited_us: Time that all threads together waited for a processor that another thread used.
    """

    wall_us: float
    busiest_us: float
    processor_us: float
    waited_us: float

    @property
    def interrupted(self) -> bool:
        """Whether threads waited for a processor longer than they do on an idle machine."""
        return self.waited_us > _TOLERATED_WAIT * self.wall_us + _TOLERATED_WAIT_US

    @property
    def run_us(self) -> float:
        """Time of the run with a free processor for each thread, in microseconds.

        No more is subtracted from the wall time than the threads waited for a processor, so that a run that
        sleeps or leaves its work to another process gains nothing. The result is at least the processor time
        of the busiest thread, so that threads that only wait gain nothing either.
        """
        if not self.interrupted:
            return self.wall_us
        return min(self.wall_us, max(self.busiest_us, self.wall_us - self.waited_us))


class ThreadClocks:
    """Processor time, and time spent waiting for a processor, of all threads of this process.

    Args:
        processors: Number of processors that this process may use.
    """

    def __init__(self, processors: int) -> None:
        self._processors = processors

    def times(self, run: Callable[[], object], now_ns: Callable[[], int]) -> RunTimes:
        """Run a function once and return its times.

        Args:
            run: The function.
            now_ns: The wall clock, in nanoseconds.
        """
        threads = _threads()
        waited_ns, processor_ns, clocks_ns = _waited_ns(threads), _process_ns(), _clocks_ns(threads)
        start_ns = now_ns()
        run()
        wall_ns = now_ns() - start_ns
        spent_ns = [
            max(0, after_ns - before_ns)  # the clock of a thread that has ended is 0
            for before_ns, after_ns in zip(clocks_ns, _clocks_ns(threads), strict=True)
        ]
        processor_ns = _process_ns() - processor_ns
        started = [thread for thread in _threads() if thread not in threads]
        spent_ns += _clocks_ns(started)
        ended_ns = processor_ns - sum(
            spent_ns
        )  # taken for one thread, so that the busiest is never underrated
        waited_ns = _waited_ns([*threads, *started]) - waited_ns
        return RunTimes(
            wall_us=wall_ns / 1e3,
            busiest_us=max(processor_ns / self._processors, ended_ns, *spent_ns) / 1e3,
            processor_us=processor_ns / 1e3,
            waited_us=max(0, waited_ns) / 1e3,
        )


class OutsideClock:
    """Times of runs in other processes, read from outside: nothing that they do to their own clocks matters.

    Args:
        processors: Number of processors that the processes may use.
    """

    def __init__(self, processors: int) -> None:
        self._processors = processors
        self._before: dict[str, tuple[int, int]] = {}

    def begin(self, processes: Iterable[int]) -> None:
        """Read the clocks of all threads of processes, and of this thread, before a run.

        Args:
            processes: Their process ids.
        """
        self._before = _schedules(processes)

    def times(self, processes: Iterable[int], wall_ns: int) -> RunTimes:
        """Return the times of the run since `begin`.

        Args:
            processes: Process ids of the processes that run now.
            wall_ns: Wall time of the run.
        """
        spent_ns, waited_ns = [0], 0
        for thread, (running, waiting) in _schedules(processes).items():
            running_before, waiting_before = self._before.get(thread, (0, 0))
            spent_ns.append(running - running_before)
            waited_ns += waiting - waiting_before
        return RunTimes(
            wall_us=wall_ns / 1e3,
            busiest_us=max(sum(spent_ns) / self._processors, *spent_ns) / 1e3,
            processor_us=sum(spent_ns) / 1e3,
            waited_us=max(0, waited_ns) / 1e3,
        )


def _schedules(processes: Iterable[int]) -> dict[str, tuple[int, int]]:
    """Return how long each thread ran and waited, in nanoseconds; of this process, only the waits count."""
    schedules = {}
    for process in processes:
        folder = f"/proc/{process}/task"
        with contextlib.suppress(OSError):  # the process has ended, or the system does not list threads
            for thread in _list_folder(folder):
                schedules[f"{folder}/{thread}"] = _schedule(f"{folder}/{thread}")
    own = f"{TASKS}/{threading.get_native_id()}"
    schedules[own] = (0, _schedule(own)[1])
    return schedules


def _schedule(thread: str) -> tuple[int, int]:
    try:
        with open(f"{thread}/schedstat", "rb") as file:
            running, waiting, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0, 0
    return running, waiting


def _threads() -> list[int]:
    """Return the system's numbers of the threads of this process; empty if the system does not list them."""
    try:
        return [int(name) for name in _list_folder(TASKS)]
    except OSError:
        return []


def _clocks_ns(threads: list[int]) -> list[int]:
    """Return the processor time of each thread, in nanoseconds; 0 of a thread that has ended."""
    return [_thread_clock_ns(thread) for thread in threads]


def _thread_clock_ns(thread: int) -> int:
    try:
        return _clock_ns(
            (~thread << 3) | 6
        )  # Source: pthread_getcpuclockid of glibc: CPUCLOCK_SCHED, one thread
    except OSError:
        return 0


def _waited_ns(threads: list[int]) -> int:
    """Return how long threads waited for a processor since they started, in nanoseconds; 0 if unknown."""
    total_ns = 0
    for thread in threads:
        try:
            file = _open(f"{TASKS}/{thread}/schedstat", os.O_RDONLY)
        except OSError:  # the thread has ended, or the kernel does not count
            continue
        try:
            # Source: Documentation/scheduler/sched-stats.rst: time running, time waiting, number of slices.
            total_ns += int(_read(file, 64).split()[1])
        except OSError:  # the thread has ended since
            continue
        finally:
            _close(file)
    return total_ns


def busy_elsewhere(seconds: float = _SHORTEST_S) -> float:
    """Return the share of all processors that other programs use, 0 to 1; 0 if it is unknown.

    Args:
        seconds: Time over which it is measured.
    """
    began, used_s = time.monotonic(), _used_elsewhere_s()
    time.sleep(seconds)
    return _share(used_s, _used_elsewhere_s(), time.monotonic() - began)


def keep_freed_memory() -> None:
    """Make the allocator of glibc keep freed memory for arrays of any size; others stay as they are.

    New pages cost a kernel with temporary arrays, and a reference in float64, more than their computation.

    Source: mallopt(3). `M_MMAP_THRESHOLD` ends at 32 MiB, so that larger arrays need `M_MMAP_MAX`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def spin_only_if_idle() -> None:
    """Make waiting OpenMP threads sleep instead of spin if other programs use the processors.

    A thread that spins takes the processor from the thread that it waits for, and its processor time says
    nothing about the kernel. Call this before OpenMP is loaded; a policy in the environment is kept.
    """
    if busy_elsewhere() > BUSY:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


class MachineState:
    """State of the machine since this object was created.

    Args:
        time_us: Runs a function once and returns its time in microseconds.
    """

    def __init__(self, time_us: Callable[[Callable[[], object]], float]) -> None:
        self._time_us = time_us
        self._values = np.ones(_REFERENCE_ELEMENTS)
        self.begin()

    def begin(self) -> None:
        """Start to count the processor time of other programs."""
        self._began, self._used_s = time.monotonic(), _used_elsewhere_s()

    def conditions(self, *, reference: bool) -> Mapping[str, Any]:
        """Return the conditions of measurements since `begin`.

        Args:
            reference: Whether to time the reference kernel, a running sum in one thread.

        Returns:
            `busy_elsewhere`, the share of all processors that other programs used, if above `BUSY`;
            `reference_us`, the shortest time of the reference kernel, in microseconds.
        """
        conditions: dict[str, Any] = {}
        wall_s = time.monotonic() - self._began
        share = _share(self._used_s, _used_elsewhere_s(), wall_s) if wall_s >= _SHORTEST_S else 0.0
        if share > BUSY:
            conditions["busy_elsewhere"] = round(share, 2)
        if reference:
            runs = range(_REFERENCE_RUNS)
            conditions["reference_us"] = min(self._time_us(lambda: np.cumsum(self._values)) for _ in runs)
        return conditions


def _share(before_s: float | None, after_s: float | None, wall_s: float) -> float:
    """Return the share of all processors that two readings of their use differ by; 0 if one is unknown."""
    if before_s is None or after_s is None:
        return 0.0
    return min(1.0, max(0.0, (after_s - before_s) / (wall_s * (os.cpu_count() or 1))))


def _used_elsewhere_s() -> float | None:
    """Return the processor time of other programs since the system started, in seconds; None if unknown."""
    used_s = busy_s()
    return None if used_s is None else used_s - time.process_time()


def busy_s() -> float | None:
    """Return the processor time of all programs since the system started, in seconds; None if unknown."""
    try:
        times = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1:]][:_WITHOUT_GUESTS]
        busy = sum(times) - sum(times[index] for index in _IDLE)
        return busy / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
