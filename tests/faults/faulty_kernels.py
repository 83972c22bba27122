"""A variant whose configurations fail in 54 ways; two are right, and are measured between the others.

`tests.faults.kernel_faults` tunes a copy of this file in another folder, since a failure of a module of
tunebench is not that of a user's kernel. A workload with few rows has the faults of `QUICK` only.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import errno
import itertools
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tunebench.device import Device
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, NumbaCpuVariant
from tunebench.workloads.operators.softmax import Softmax

__all__ = ["EXPECTED", "FEW_ROWS", "QUICK", "RIGHT", "VARIANT", "FaultySoftmax"]

FEW_ROWS = 16
"""Workloads with so many rows have the faults of `QUICK`; larger ones have all faults."""

kept: list[Any] = []
"""What kernels leak."""


class Unprintable(Exception):
    """An exception without text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Unpicklable(Exception):
    """An exception with a lock, which cannot be sent to another process."""

    def __init__(self, one: str, _two: str) -> None:
        super().__init__(one, threading.Lock())


def fail(error: BaseException) -> None:
    """Raise an exception."""
    raise error


def leak_files() -> None:
    """Open files until the system refuses."""
    while True:
        kept.append(open(os.devnull))  # noqa: SIM115 - leaked on purpose


def leak_memory() -> None:
    """Write to memory until the worker is ended."""
    while True:
        kept.append(np.ones(1 << 24))


def limit_addresses() -> None:
    """Allocate more addresses than the process allows itself."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 33, resource.RLIM_INFINITY))
    kept.append(bytearray(1 << 34))


def write_large_file() -> None:
    """Make a file larger than a worker may."""
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), 1 << 40)


def delete_folder() -> None:
    """Delete the working folder."""
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)  # noqa: PTH106 - as in a kernel


def leave_folder() -> None:
    """Change the working folder and the rights of new files."""
    os.chdir("/")
    os.umask(0o777)


def leave_thread() -> None:
    """Start a thread that never ends."""
    threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()


def start_children() -> None:
    """Start processes that outlive the kernel."""
    for _ in range(8):
        if os.fork() == 0:
            os.setsid()
            time.sleep(1e6)


def deadlock() -> None:
    """Wait for a lock that is never released."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def recurse() -> None:
    """Recurse until Python refuses."""
    recurse()


def loop() -> None:
    """Loop for ever."""
    for _ in itertools.count():
        pass


def flood() -> None:
    """Print 16 MB."""
    for _ in range(1 << 8):
        sys.stdout.write("x" * (1 << 16))
    sys.stdout.flush()


def remove_modules() -> None:
    """Forget the modules whose classes results have."""
    for name in [name for name in sys.modules if name.startswith("tunebench.")]:
        del sys.modules[name]


def forge_answer() -> None:
    """Answer for the worker, on every connection."""
    for descriptor in range(3, 100):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.send(struct.pack("!i", 4) + b"junk")


def kill_itself(number: int) -> Callable[[], None]:
    """Return a function that sends a signal to this process."""
    return lambda: os.kill(os.getpid(), number)


IN_KERNEL: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "memory error": (lambda: fail(MemoryError()), ("launch_failed",)),
    "address limit": (limit_addresses, ("launch_failed",)),
    "memory leak": (leak_memory, ("crashed",)),
    "file leak": (leak_files, ("launch_failed",)),
    "large file": (write_large_file, ("launch_failed",)),
    "full disk": (lambda: fail(OSError(errno.ENOSPC, "No space left on device")), ("launch_failed",)),
    "no thread": (lambda: fail(RuntimeError("can't start new thread")), ("launch_failed",)),
    "no process": (lambda: fail(BlockingIOError(errno.EAGAIN, "Try again")), ("launch_failed",)),
    "closed streams": (lambda: os.closerange(0, 3), ("measured",)),
    "closed files": (lambda: os.closerange(0, 4096), ("crashed",)),
    "deleted folder": (delete_folder, ("measured",)),
    "other folder": (leave_folder, ("measured",)),
    "thread left": (leave_thread, ("wrong_result",)),
    "processes left": (start_children, ("measured",)),
    "deadlock": (deadlock, ("timed_out",)),
    "sleep": (lambda: time.sleep(1e6), ("timed_out",)),
    "sigkill": (kill_itself(signal.SIGKILL), ("crashed",)),
    "sigsegv": (kill_itself(signal.SIGSEGV), ("crashed",)),
    "sigbus": (kill_itself(signal.SIGBUS), ("crashed",)),
    "sigabrt": (kill_itself(signal.SIGABRT), ("crashed",)),
    "sigterm": (kill_itself(signal.SIGTERM), ("crashed",)),
    "real-time signal": (kill_itself(signal.SIGRTMIN + 1), ("crashed",)),
    "sigstop": (kill_itself(signal.SIGSTOP), ("timed_out",)),
    "exit 0": (lambda: os._exit(0), ("crashed",)),
    "exit 1": (lambda: os._exit(1), ("crashed",)),
    "exit 79": (lambda: os._exit(79), ("crashed",)),
    "sys.exit": (lambda: sys.exit(3), ("launch_failed",)),
    "exit at exit": (lambda: atexit.register(os._exit, 5), ("measured",)),
    "interrupt": (lambda: fail(KeyboardInterrupt()), ("launch_failed",)),
    "recursion": (recurse, ("launch_failed",)),
    "no text": (lambda: fail(Unprintable()), ("launch_failed",)),
    "no pickle": (lambda: fail(Unpicklable("one", "two")), ("launch_failed",)),
    "long text": (lambda: fail(ValueError("x" * (1 << 24))), ("launch_failed",)),
    "odd text": (lambda: fail(ValueError("\udcff \0 \x1b[2J")), ("launch_failed",)),
    "flood": (flood, ("measured",)),
    "alarm left": (lambda: signal.setitimer(signal.ITIMER_REAL, 2.0), ("measured",)),
    "recursion limit": (
        lambda: sys.setrecursionlimit(40),
        ("launch_failed", "crashed", "measured", "aborted"),
    ),
    "no open": (lambda: setattr(builtins, "open", None), ("wrong_result",)),
    "no modules": (remove_modules, ("crashed", "wrong_result")),
    "forged answer": (forge_answer, ("crashed",)),
}
"""Faults of Python code that a kernel calls, each with the outcomes that it may have."""

IN_FACTORY: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "factory loops": (loop, ("compile_failed",)),
    "factory sleeps": (lambda: time.sleep(1e6), ("compile_failed",)),
    "factory exits": (lambda: os._exit(0), ("compile_failed",)),
    "factory raises": (lambda: fail(Unprintable()), ("compile_failed",)),
    "factory lacks memory": (lambda: fail(MemoryError()), ("compile_failed",)),
    "no function": (lambda: None, ("compile_failed",)),
    "no types": (lambda: None, ("compile_failed",)),
}
"""Faults of the function that returns the kernel."""

IN_TUNER: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "source loops": (loop, ("compile_failed",)),
    "source raises": (lambda: fail(ValueError("no source")), ("compile_failed",)),
}
"""Faults of the function that returns generated source, which the tuner calls too."""

IN_CODE: dict[str, tuple[str, ...]] = {
    "huge array": ("launch_failed",),
    "loop": ("timed_out",),
    "nan": ("wrong_result",),
    "overrun": ("wrong_result",),
    "wrong": ("wrong_result",),
}
"""Faults of compiled code."""

QUICK = ("huge array", "file leak", "exit 0", "real-time signal", "factory sleeps", "source raises")
"""Faults of workloads with few rows."""

EXPECTED: dict[str, tuple[str, ...]] = {
    **{name: kinds for name, (_, kinds) in (IN_KERNEL | IN_FACTORY | IN_TUNER).items()},
    **IN_CODE,
}
"""Outcomes that each fault may have."""

RIGHT = ("right", "right too")


def act(number: int) -> None:
    """Do what goes wrong in a kernel, by its number in `EXPECTED`."""
    IN_KERNEL[list(EXPECTED)[number]][0]()


class FaultySoftmax(NumbaCpuVariant[Softmax]):
    """Softmax of f32 rows without a prologue."""

    name = "faulty_kernels"
    operator = Softmax
    space = Space(
        (Parameter("fault", (*RIGHT, *EXPECTED), "what goes wrong"),),
        (lambda fault, workload: (workload.rows > FEW_ROWS) | np.isin(fault, (*RIGHT, *QUICK)),),
    )

    def default(self, workload: Softmax, device: Device) -> Config:
        return Config({"fault": RIGHT[0]})

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        return Costs(blocks=1, full_blocks=0, threads=1, fma=1.0)

    def generated(self, workload: Softmax, config: Config) -> str:
        action, _ = IN_TUNER.get(config["fault"], (None, ()))
        if action is not None:
            action()
        return ""

    def kernel(self, workload: Softmax, config: Config) -> Callable[..., None]:
        import numba

        fault = config["fault"]
        action, _ = IN_FACTORY.get(fault, (None, ()))
        if action is not None:
            action()
        right = right_kernel()
        if fault in IN_KERNEL:
            return kernel_that_calls(list(EXPECTED).index(fault), numba.njit(right))
        return {**faulty_code(numba.njit(right)), "no function": None}.get(fault, right)  # type: ignore[return-value]


def right_kernel() -> Callable[..., None]:
    """Return a kernel that computes the softmax of each row."""
    one, lowest = np.float32(1), np.float32(-1e30)

    def softmax(x: Any, y: Any) -> None:
        for i in range(x.shape[0]):
            top, total = lowest, np.float32(0)
            for j in range(x.shape[1]):
                top = max(top, x[i, j])
            for j in range(x.shape[1]):
                y[i, j] = np.exp(x[i, j] - top)
                total += y[i, j]
            for j in range(x.shape[1]):
                y[i, j] *= one / total

    return softmax


def kernel_that_calls(number: int, softmax: Callable[..., None]) -> Callable[..., None]:
    """Return a right kernel that then does what goes wrong, in Python."""
    import numba

    def python(x: Any, y: Any) -> None:
        softmax(x, y)
        with numba.objmode():
            act(number)

    return python


def faulty_code(softmax: Callable[..., None]) -> dict[str, Callable[..., None]]:
    """Return the kernels whose compiled code is wrong, by fault."""
    one, lowest = np.float32(1), np.float32(-1e30)

    def huge_array(x: Any, y: Any) -> None:
        y[0, 0] = np.empty(1 << 42)[1 << 40]

    def endless(x: Any, y: Any) -> None:
        while x[0, 0] > lowest:
            y[0, 0] += one

    def nan(x: Any, y: Any) -> None:
        softmax(x, y)
        y[0, 0] = np.nan

    def overrun(x: Any, y: Any) -> None:
        softmax(x, y)
        y[y.shape[0], 0] = one

    def wrong(x: Any, y: Any) -> None:
        softmax(x, y)
        y[0, 0] += one

    def no_types(x: Any, y: Any) -> None:
        y.no_such_method()

    kernels = (huge_array, endless, nan, overrun, wrong, no_types)
    return dict(zip(("huge array", "loop", "nan", "overrun", "wrong", "no types"), kernels, strict=True))


VARIANT = FaultySoftmax()
