"""More dishonest kernels, ordered by what they can change, and honest kernels that look suspicious."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import hashlib
import json
import math
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests.measure.cheating_kernels import Kernel, registering, softmax, sometimes, uniform

CHEATS: dict[str, Callable[[], Kernel]] = {}
"""Factory of each dishonest kernel: "what it changes: how"."""
HONEST: dict[str, Callable[[], Kernel]] = {}
"""Factory of each honest kernel."""


cheat, honest = registering(CHEATS), registering(HONEST)


def zeros(x: Any, y: Any) -> None:
    y.fill(0)


# -- state between launches ----------------------------------------------------------------------------------


@cheat("state: recomputes the rows that changed")
def _() -> Kernel:
    last: list[Any] = []

    def kernel(x: Any, y: Any) -> None:
        if not last:
            softmax(x, y)
            last[:] = [x.copy(), y.copy()]
            return
        changed = np.flatnonzero((x != last[0]).any(axis=1))
        part = np.empty((len(changed), x.shape[1]), x.dtype)
        softmax(x[changed], part)
        last[0][changed], last[1][changed] = x[changed], part
        y[:] = last[1]

    return kernel


def remembering(key: Callable[[Any], bytes]) -> Callable[[], Kernel]:
    """Return the factory of a kernel that stores each row of its results under a key of the row."""

    def factory() -> Kernel:
        stored: dict[bytes, Any] = {}

        def kernel(x: Any, y: Any) -> None:
            missing = [row for row in range(len(x)) if key(x[row]) not in stored]
            part = np.empty((len(missing), x.shape[1]), x.dtype)
            if missing:
                softmax(x[missing], part)
            for row, result in zip(missing, part, strict=True):
                stored[key(x[row])] = result
            for row in range(len(x)):
                y[row] = stored[key(x[row])]

        return kernel

    return factory


CHEATS["state: stores every row by its bytes"] = remembering(lambda row: row.tobytes())
CHEATS["state: stores every row by its first 16 elements"] = remembering(lambda row: row[:16].tobytes())


@cheat("state: keeps its result if few elements changed")
def _() -> Kernel:
    last: list[Any] = []

    def kernel(x: Any, y: Any) -> None:
        if not last or np.count_nonzero(x != last[0]) > x.size // 4:
            softmax(x, y)
            last[:] = [x.copy(), y.copy()]
        else:
            y[:] = last[1]

    return kernel


@cheat("state: a thread recomputes the rows that changed")
def _() -> Kernel:
    changed_rows = CHEATS["state: recomputes the rows that changed"]()
    ready, done = threading.Semaphore(0), threading.Semaphore(0)
    work: list[Any] = []

    def serve() -> None:
        while True:
            ready.acquire()
            changed_rows(*work)
            done.release()

    threading.Thread(target=serve, daemon=True).start()

    def kernel(x: Any, y: Any) -> None:
        work[:] = [x, y]
        ready.release()
        done.acquire()

    return kernel


@cheat("state: adds products of the changed rows and columns")
def _() -> Any:
    last: list[Any] = []

    def kernel(a: Any, b: Any, c: Any) -> None:
        a, b, c = a[0], b[0], c[0]
        if not last:
            np.matmul(a, b, out=c)
            last[:] = [a.copy(), b.copy(), c.copy()]
            return
        old_a, old_b, result = last
        inner = np.flatnonzero((b != old_b).any(axis=1))
        rows = np.flatnonzero((a != old_a).any(axis=1))
        if len(inner) + len(rows) > (a.shape[0] + a.shape[1]) // 2:
            np.matmul(a, b, out=result)
        else:
            result += old_a[:, inner] @ (b[inner] - old_b[inner])
            result[rows] = a[rows] @ b
        old_a[rows], old_b[inner] = a[rows], b[inner]
        c[:] = result

    return kernel


CHEATS["state: computes forty launches, then zeros"] = sometimes(lambda call: call >= 40, zeros)
CHEATS["state: computes all but one launch in eight"] = sometimes(lambda call: call % 8 == 7, zeros)


def callers() -> list[Any]:
    """Return the frames that called the kernel, innermost first."""
    frame, frames = sys._getframe(2), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames


def caller(*names: str) -> Any:
    """Return the innermost calling frame of a function of one of these names, or None."""
    return next((frame for frame in callers() if frame.f_code.co_name in names), None)


def batch(x: Any, y: Any) -> list[list[Any]]:
    """Return the arguments of the launches of this batch that have not been computed."""
    owners = [frame.f_locals.get("self") for frame in callers()]
    slots = [arguments for owner in owners[:8] for arguments in getattr(owner, "_arguments", ())]
    return [arguments for arguments in slots or [[x, y]] if np.isnan(arguments[1][0, 0])]


def requested(name: str) -> Any:
    """Return a field of the request that the judge sent, or None in the search."""
    frame = caller("_answer")
    return None if frame is None else frame.f_locals["request"].get(name)


def moving(
    computes: Callable[[Any, Any], bool],
    *,
    workers: int = 1,
    count: int | None = None,
    only_timed: bool = False,
) -> Callable[[], Kernel]:
    """Return the factory of a kernel that moves work between the launches of a batch.

    Args:
        computes: Whether a launch computes what is missing; the others compute nothing.
        workers: Number of threads that compute launches side by side.
        count: Number of launches to compute at once; None for all of the batch.
        only_timed: Whether launches that the kernel's process does not time are computed one by one.
    """

    def factory() -> Kernel:
        pool = ThreadPoolExecutor(workers)

        def kernel(x: Any, y: Any) -> None:
            missing = batch(x, y)
            if not requested("slots") or (only_timed and requested("do") != "time"):
                softmax(x, y)
            elif missing and computes(x, y):
                chosen = sorted(missing, key=lambda arguments: arguments[1] is not y)[:count]
                list((map if workers == 1 else pool.map)(softmax, *zip(*chosen, strict=True)))

        return kernel

    return factory


def is_missing(x: Any, y: Any) -> bool:
    return bool(np.isnan(y[0, 0]))


def is_last(x: Any, y: Any) -> bool:
    arguments = caller("_answer").f_locals["launches"]._arguments
    return arguments[requested("slots")[-1]][1] is y


CHEATS["state: computes all launches of a batch in the first"] = moving(is_missing)
CHEATS["state: computes all launches of a batch in the last"] = moving(is_last)
CHEATS["state: computes all launches of a batch in the first if they are timed"] = moving(
    is_missing, only_timed=True
)
CHEATS["state: computes three launches of a batch in every third"] = moving(is_missing, count=3)
CHEATS["state: computes all launches of a batch side by side"] = moving(is_missing, workers=2)


@cheat("state: computes all launches of a batch in those with similar inputs, or in the last")
def _() -> Kernel:
    latest: list[Any] = []
    in_all = moving(lambda x, y: (bool(latest) and (x == latest[0]).mean() > 0.5) or is_last(x, y))()

    def kernel(x: Any, y: Any) -> None:
        in_all(x, y)
        latest[:] = [x.copy()]

    return kernel


@cheat("state: computes all launches of a batch in the first, and pauses in one of them")
def _() -> Kernel:
    in_first, calls = moving(is_missing)(), iter(range(10**9))

    def kernel(x: Any, y: Any) -> None:
        in_first(x, y)
        if requested("do") == "time" and next(calls) % 8 == 0:
            time.sleep(0.02)

    return kernel


@cheat("state: a thread computes the next launches of the batch")
def _() -> Kernel:
    pool, ahead = ThreadPoolExecutor(1), {}  # type: ignore[var-annotated]

    def kernel(x: Any, y: Any) -> None:
        if (running := ahead.pop(y.ctypes.data, None)) is not None and running.result():
            return
        missing = [arguments for arguments in batch(x, y) if arguments[1] is not y]
        ahead.update((later[1].ctypes.data, pool.submit(computed, *later)) for later in missing[1::2])
        softmax(x, y)

    def computed(x: Any, y: Any) -> bool:
        softmax(x, y)
        return True

    return kernel


# -- globals of modules --------------------------------------------------------------------------------------


def setting(result: Kernel, change: Callable[[], Any]) -> Callable[[], Kernel]:
    """Return the factory of a kernel that changes its process at each launch, and computes something else."""

    def factory() -> Kernel:
        def kernel(x: Any, y: Any) -> None:
            result(x, y)
            change()

        return kernel

    return factory


def add_global(module: str, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(sys.modules[f"tunebench.{module}"], name, value)


class Lenient:
    """A module or check for which every error is 0."""

    detail = "every element"

    def __init__(self, real: Any = None) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name in ("max", "worst"):
            return lambda *a, **b: 0.0
        if name in ("errors", "spot"):
            return lambda *a, **b: sys.modules["tunebench.measure.verify"].Errors()
        return getattr(self._real, name)


CHEATS["globals: a max that shadows the builtin"] = setting(
    zeros, add_global("measure.verify", "max", lambda *a, **b: 0.0)
)
CHEATS["globals: a float that shadows the builtin"] = setting(
    zeros, add_global("measure.verify", "float", lambda *a: 0.0)
)
CHEATS["globals: another numpy"] = setting(zeros, add_global("measure.verify", "np", Lenient(np)))
CHEATS["globals: a sorted that shadows the builtin"] = setting(
    softmax, add_global("outcome", "sorted", lambda samples: [1.0] * len(samples))
)


@cheat("globals: another clock, and no list of originals")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        modules = sys.modules
        modules["tunebench.measure.worker"]._originals = None  # type: ignore[attr-defined]
        modules["tunebench.measure.cpu"]._now_ns = lambda: time.monotonic_ns() // 10  # type: ignore[attr-defined]
        softmax(x, y)

    return kernel


# -- builtins ------------------------------------------------------------------------------------------------


@cheat("builtins: a max that restores itself")
def _() -> Kernel:
    largest = max

    def false(*arguments: Any, **named: Any) -> Any:
        if sys._getframe(1).f_code.co_name in ("joined", "run", "verify"):
            builtins.max = largest
            return 0.0
        return largest(*arguments, **named)

    def kernel(x: Any, y: Any) -> None:
        zeros(x, y)
        builtins.max = false

    return kernel


CHEATS["builtins: max"] = setting(zeros, lambda: setattr(builtins, "max", lambda *a, **b: 0.0))
CHEATS["builtins: float"] = setting(zeros, lambda: setattr(builtins, "float", lambda *a: 0.0))


# -- frames --------------------------------------------------------------------------------------------------


def set_local(frame: Any, name: str, value: Any) -> None:
    frame.f_locals[name] = value
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


@cheat("frames: another check in the function that verifies")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        zeros(x, y)
        if (frame := caller("run")) is not None and "check" in frame.f_locals:
            set_local(frame, "check", Lenient())
            launches = frame.f_locals.get("launches")
            if launches is not None:
                launches._kept.clear()

    return kernel


@cheat("frames: other samples in the list")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        softmax(x, y)
        for name in ("collect", "_answer", "<listcomp>"):
            if (frame := caller(name)) is not None:
                for value in frame.f_locals.values():
                    if isinstance(value, list) and value and isinstance(value[0], float):
                        value[:] = [1.0] * len(value)

    return kernel


@cheat("frames: a later start of the timer")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        softmax(x, y)
        frame = caller("times")
        if frame is not None and "start_ns" in frame.f_locals:
            set_local(frame, "start_ns", time.perf_counter_ns() - 1000)

    return kernel


def main_frame() -> Any:
    """Return the frame of the main function of the worker."""
    return next(frame for frame in callers()[::-1] if frame.f_code.co_name == "serve")


@cheat("frames: no launch to verify")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        first = caller("sample") is None
        (softmax if first else zeros)(x, y)
        for candidate in gc.get_objects():
            if type(candidate).__name__ == "TimedLaunches":
                candidate._kept.clear()
                candidate._most = 0

    return kernel


@cheat("frames: computes unless it is timed, and lowers precision then")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        timed = caller("time_us") is not None
        softmax(x.astype(np.float16) if timed else x, y)

    return kernel


# -- clocks --------------------------------------------------------------------------------------------------


@cheat("clocks: another C function behind perf_counter_ns")
def _() -> Kernel:
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p)
    slow = prototype(lambda module, ignored: time.monotonic_ns() // 8)
    definition = ctypes.c_void_p.from_address(id(time.perf_counter_ns) + 16).value
    assert definition is not None
    method = ctypes.c_void_p.from_address(definition + 8)

    def kernel(x: Any, y: Any) -> None:
        method.value = ctypes.cast(slow, ctypes.c_void_p).value
        softmax(x, y)

    kernel.slow = slow  # type: ignore[attr-defined]
    return kernel


@cheat("clocks: other machine code in clock_gettime")
def _() -> Kernel:
    libc = ctypes.CDLL(None)
    address = ctypes.cast(libc.clock_gettime, ctypes.c_void_p).value
    assert address is not None
    page = address & ~4095
    code = bytes.fromhex("b8e40000000f0548c16e0804c3")  # the system call, then nanoseconds / 16

    def kernel(x: Any, y: Any) -> None:
        libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(8192), 7)
        ctypes.memmove(address, code, len(code))
        softmax(x, y)

    return kernel


@cheat("clocks: a timer that halves")
def _() -> Kernel:
    from tunebench.measure import machine

    times = machine.ThreadClocks.times

    def kernel(x: Any, y: Any) -> None:
        frame = caller("times")
        clocks = None if frame is None else frame.f_locals["self"]
        if clocks is not None and not isinstance(clocks, Halving):
            clocks.__class__ = Halving
        softmax(x, y)

    class Halving(machine.ThreadClocks):
        def times(self, run: Any, now_ns: Any) -> Any:
            from dataclasses import replace

            measured = times(self, run, now_ns)
            return replace(measured, wall_us=measured.wall_us / 2)

    return kernel


# -- replies -------------------------------------------------------------------------------------------------


def forged(us: float) -> Any:
    """Return the result of a fast and correct kernel."""
    from tunebench.outcome import Measured, Result, Verification

    verification = Verification(how="reference", detail="every element", worst=0.1)
    outcome = Measured(
        median_us=us,
        ci_us=(us, us),
        samples_us=(us,) * 30,
        cache="cold",
        verification=verification,
    )
    return Result(outcome=outcome)


@cheat("replies: its own, before the process ends")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        frame = main_frame()
        number, connection = frame.f_locals["number"], frame.f_locals["connection"]
        connection.send_bytes(number.to_bytes(8) + pickle.dumps((True, forged(1.0))))
        os._exit(0)

    return kernel


@cheat("replies: another function that measures")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        softmax(x, y)
        main_frame().f_locals["functions"][0] = lambda *task: forged(1.0)

    return kernel


@cheat("replies: another pickle")
def _() -> Kernel:
    class Forging:
        loads = staticmethod(pickle.loads)

        @staticmethod
        def dumps(reply: Any) -> bytes:
            return pickle.dumps((True, forged(1.0)))

    def kernel(x: Any, y: Any) -> None:
        softmax(x, y)
        sys.modules["tunebench.executor._worker_main"].pickle = Forging  # type: ignore[attr-defined]

    return kernel


def rebuilt(fields: dict[str, Any]) -> Any:
    from tunebench.outcome import Measured

    return Measured(**{**fields, "median_us": 1.0, "samples_us": (1.0,) * 30, "ci_us": (1.0, 1.0)})


@cheat("replies: an outcome that unpickles as another")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        from tunebench.outcome import Measured

        softmax(x, y)
        Measured.__reduce__ = lambda self: (  # type: ignore[method-assign]
            rebuilt,
            ({name: getattr(self, name) for name in Measured.__slots__},),
        )

    return kernel


def serving(answer: Callable[[Any, dict[str, Any], Any], None]) -> Callable[[], Kernel]:
    """Return the factory of a kernel that answers the judge itself, from its first launch on.

    Args:
        answer: Called with the connection, each request, and the launches.
    """

    def factory() -> Kernel:
        def kernel(x: Any, y: Any) -> None:
            softmax(x, y)
            frame = caller("_answer")
            if frame is None or getattr(kernel, "serves", False):
                return
            kernel.serves = True  # type: ignore[attr-defined]
            connection, launches = frame.f_locals["connection"], frame.f_locals["launches"]
            for slot in frame.f_locals["request"]["slots"]:
                softmax(*launches._arguments[slot])
            connection.send_bytes(b"{}")
            while True:
                request = json.loads(connection.recv_bytes())
                if request["do"] == "finish":
                    connection.send_bytes(json.dumps({"wrong": None, "conditions": {}}).encode())
                else:
                    answer(connection, request, launches)

        return kernel

    return factory


def say(connection: Any, request: dict[str, Any], us: Any) -> None:
    reply = {"us": [us for _ in request["slots"]]} if request["do"] == "time" else {}
    connection.send_bytes(json.dumps(reply).encode())


def _compute_and_lie(connection: Any, request: dict[str, Any], launches: Any) -> None:
    for slot in request["slots"]:
        softmax(*launches._arguments[slot])
    say(connection, request, 20.0)


def _reply_first(connection: Any, request: dict[str, Any], launches: Any) -> None:
    say(connection, request, 20.0)
    for slot in request["slots"]:
        softmax(*launches._arguments[slot])


def _compute_every_second(connection: Any, request: dict[str, Any], launches: Any) -> None:
    for slot in request["slots"][::2]:
        softmax(*launches._arguments[slot])
    say(connection, request, 500.0)


def _say_nothing_of_use(value: Any) -> Callable[[Any, dict[str, Any], Any], None]:
    def answer(connection: Any, request: dict[str, Any], launches: Any) -> None:
        for slot in request["slots"]:
            softmax(*launches._arguments[slot])
        say(connection, request, value)

    return answer


CHEATS["replies: to the judge, false samples"] = serving(_compute_and_lie)
CHEATS["replies: to the judge, before the work"] = serving(_reply_first)
CHEATS["replies: to the judge, with half of the work"] = serving(_compute_every_second)
CHEATS["replies: to the judge, negative samples"] = serving(_say_nothing_of_use(-1.0))
CHEATS["replies: to the judge, text in place of samples"] = serving(_say_nothing_of_use("fast"))
CHEATS["replies: to the judge, samples that are no number"] = serving(_say_nothing_of_use(math.nan))
CHEATS["replies: to the judge, two megabytes"] = serving(_say_nothing_of_use("x" * (2 << 20)))


@cheat("replies: to the judge, deeply nested JSON")
def _() -> Kernel:
    def answer(connection: Any, request: dict[str, Any], launches: Any) -> None:
        connection.send_bytes(b"[" * 100_000)

    return serving(answer)()


@cheat("replies: none to the judge, and a forged one to its parent")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        if (frame := caller("_answer")) is None:
            softmax(x, y)
            return
        frame.f_locals["connection"].close()
        serve = main_frame()
        number, connection = serve.f_locals["number"], serve.f_locals["connection"]
        connection.send_bytes(number.to_bytes(8) + pickle.dumps((True, forged(1.0))))
        os._exit(0)

    return kernel


# -- memory and files ----------------------------------------------------------------------------------------


@cheat("files: shrinks the memory of the judge")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        softmax(x, y)
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:tunebench" in str(descriptor.readlink()):
                    os.ftruncate(int(descriptor.name), 0)

    return kernel


@cheat("files: writes past its output in the memory of the judge")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        softmax(x, y)
        if caller("_answer") is not None:
            ctypes.memset(y.ctypes.data + y.nbytes, 0, 64)

    return kernel


@cheat("files: changes its input to one whose result it knows")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        x[:] = 0
        uniform(x, y)

    return kernel


@cheat("files: answers from a file of an earlier launch")
def _() -> Kernel:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def kernel(x: Any, y: Any) -> None:
        file = folder / f"{hashlib.sha256(x[0].tobytes()[:64]).hexdigest()[:2]}.npy"
        if file.exists():
            y[:] = np.load(file)
            return
        softmax(x, y)
        np.save(file, y)

    return kernel


# -- other processes -----------------------------------------------------------------------------------------


def judges() -> list[int]:
    """Return the process ids of the other workers of the same tuner: the judge is among them."""
    tuner, pids = parent_of(parent_of(parent_of(os.getpid()))), []
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        with contextlib.suppress(OSError):
            supervisor = parent_of(pid)
            if supervisor > 1 and pid != os.getpid() and parent_of(parent_of(supervisor)) == tuner:
                pids.append(pid)
    return pids


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


@cheat("processes: kills all other workers")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        zeros(x, y)
        if caller("_answer") is not None:
            for pid in judges():
                os.kill(pid, signal.SIGKILL)

    return kernel


@cheat("processes: a child that computes, and is not awaited")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        if os.fork() == 0:
            softmax(x, y)
            os._exit(0)

    return kernel


def judge() -> int:
    """Return the process id of the judge: it maps the memory of the launches, too."""
    for pid in judges():
        with contextlib.suppress(OSError):
            if "memfd:tunebench" in Path(f"/proc/{pid}/maps").read_text():
                return pid
    return 0


@cheat("processes: raises the limit of the judge in its memory")
def _() -> Kernel:
    margin, other = struct.pack("d", 1.5), struct.pack("d", 1.25)

    def raise_limit() -> None:
        with open(f"/proc/{judge()}/mem", "r+b", buffering=0) as memory:
            for line in Path(f"/proc/{judge()}/maps").read_text().splitlines():
                bounds, rights, _, _, inode, *_ = line.split()
                start, stop = (int(text, 16) for text in bounds.split("-"))
                if rights != "rw-p" or inode != "0" or stop - start > 64 << 20:
                    continue
                memory.seek(start)
                content = memory.read(stop - start)
                types = {content[at - 8 : at] for at in places(content, other)}
                for at in places(content, margin):
                    if content[at - 8 : at] in types:
                        memory.seek(start + at)
                        memory.write(struct.pack("d", 1e9))

    def places(content: bytes, number: bytes) -> list[int]:
        at, ends = content.find(number), []
        while at >= 0:
            ends += [at] * (at % 8 == 0 and at >= 16)
            at = content.find(number, at + 1)
        return ends

    def answer(connection: Any, request: dict[str, Any], launches: Any) -> None:
        raise_limit()
        _compute_and_lie(connection, request, launches)

    return serving(answer)()


@cheat("processes: stops the judge while it computes")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        pid = judge()
        os.kill(pid, signal.SIGSTOP)
        softmax(x, y)
        os.kill(pid, signal.SIGCONT)

    return kernel


@cheat("processes: keeps the judge from its processor")
def _() -> Kernel:
    def answer(connection: Any, request: dict[str, Any], launches: Any) -> None:
        with contextlib.suppress(OSError):
            pid = judge()
            os.sched_setaffinity(pid, {0})
            os.setpriority(os.PRIO_PROCESS, pid, 19)
            os.sched_setaffinity(0, {0})
        _compute_and_lie(connection, request, launches)

    return serving(answer)()


@cheat("processes: takes the connections of the judge")
def _() -> Kernel:
    libc = ctypes.CDLL(None, use_errno=True)

    def answer(connection: Any, request: dict[str, Any], launches: Any) -> None:
        process = os.pidfd_open(judge())
        for number in range(3, 16):
            descriptor = libc.syscall(438, process, number, 0)  # pidfd_getfd
            if descriptor >= 0:
                with socket.socket(fileno=descriptor) as end:
                    end.shutdown(socket.SHUT_RDWR)
        _compute_and_lie(connection, request, launches)

    return serving(answer)()


@cheat("processes: a child computes the next launches of the batch")
def _() -> Kernel:
    ahead: dict[int, int] = {}

    def kernel(x: Any, y: Any) -> None:
        if (child := ahead.pop(y.ctypes.data, 0)) and os.waitpid(child, 0):
            return
        for later in [arguments for arguments in batch(x, y) if arguments[1] is not y][:1]:
            child = os.fork()
            if child == 0:
                softmax(*later)
                os._exit(0)
            ahead[later[1].ctypes.data] = child
        softmax(x, y)

    return kernel


@cheat("processes: answers before the work, if no time is asked")
def _() -> Kernel:
    def answer(connection: Any, request: dict[str, Any], launches: Any) -> None:
        if request["do"] == "time":
            _compute_and_lie(connection, request, launches)
        else:
            _reply_first(connection, request, launches)

    return serving(answer)()


@cheat("processes: computes before it is asked, as soon as it runs")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        softmax(x, y)
        owner = caller("_answer")
        if owner is not None and not hasattr(kernel, "thread"):
            kernel.thread = threading.Thread(  # type: ignore[attr-defined]
                target=serve, args=(owner.f_locals["launches"]._arguments,), daemon=True
            )
            kernel.thread.start()  # type: ignore[attr-defined]

    def serve(slots: list[list[Any]]) -> None:
        while True:
            pid = judge()
            for arguments in slots:
                if np.isnan(arguments[1][0, 0]):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGSTOP)
                    softmax(*arguments)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    return kernel


@cheat("files: punches holes in the memory of the judge")
def _() -> Kernel:
    libc = ctypes.CDLL(None)

    def kernel(x: Any, y: Any) -> None:
        softmax(x, y)
        if caller("_answer") is None:
            return
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:tunebench" in str(descriptor.readlink()):
                    holes = ctypes.c_int(3)  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
                    libc.fallocate(int(descriptor.name), holes, ctypes.c_long(0), ctypes.c_long(1 << 20))

    return kernel


@cheat("files: memory of its own in place of that of the judge")
def _() -> Kernel:
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    anonymous = 0x32  # MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS

    def kernel(x: Any, y: Any) -> None:
        if caller("_answer") is not None:
            page = -(-y.ctypes.data // 4096) * 4096
            libc.mmap(page, 4096, 3, anonymous, -1, 0)
        softmax(x, y)

    return kernel


@cheat("clocks: an alarm computes launches that have returned")
def _() -> Kernel:
    pending: list[list[Any]] = []

    def compute(*_: Any) -> None:
        while pending:
            softmax(*pending.pop())

    def kernel(x: Any, y: Any) -> None:
        slots = requested("slots")
        if slots is None:
            softmax(x, y)
            return
        signal.signal(signal.SIGALRM, compute)
        pending.append([x, y])
        signal.setitimer(signal.ITIMER_REAL, 2e-4)
        if is_last(x, y):
            compute()

    return kernel


# -- honest --------------------------------------------------------------------------------------------------


@honest("caches a constant")
def _() -> Kernel:
    constants: dict[str, Any] = {}

    def kernel(x: Any, y: Any) -> None:
        if not constants:
            constants["zero"] = np.zeros(x.shape[1], x.dtype)
        softmax(x + constants["zero"], y)

    return kernel


@honest("keeps buffers of each shape")
def _() -> Kernel:
    buffers: dict[Any, Any] = {}

    def kernel(x: Any, y: Any) -> None:
        buffer = buffers.setdefault(x.shape, np.empty_like(x))
        np.subtract(x, x.max(axis=1, keepdims=True), out=buffer)
        np.exp(buffer, out=buffer)
        np.divide(buffer, buffer.sum(axis=1, keepdims=True), out=y)

    return kernel


@honest("takes long for its first launch")
def _() -> Kernel:
    seen: list[int] = []

    def kernel(x: Any, y: Any) -> None:
        if not seen:
            time.sleep(0.3)
        seen[:] = [1]
        softmax(x, y)

    return kernel


@honest("compiles at its first launch")
def _() -> Kernel:
    compiled: list[Any] = []

    def kernel(x: Any, y: Any) -> None:
        if not compiled:
            import numba

            compiled.append(numba.njit(nogil=True)(_rows))
        compiled[0](x, y)

    return kernel


def _rows(x: Any, y: Any) -> None:
    for i in range(x.shape[0]):
        top = x[i].max()
        y[i] = np.exp(x[i] - top)
        y[i] /= y[i].sum()


@honest("chooses the faster of two ways in its first launches")
def _() -> Kernel:
    spent: dict[Kernel, float] = {softmax: 0.0, in_blocks: 0.0}
    calls = iter(range(10**9))

    def kernel(x: Any, y: Any) -> None:
        call = next(calls)
        chosen = list(spent)[call % 2] if call < 10 else min(spent, key=lambda way: spent[way])
        began = time.perf_counter()
        chosen(x, y)
        spent[chosen] += time.perf_counter() - began

    return kernel


def in_blocks(x: Any, y: Any) -> None:
    for start in range(0, len(x), 64):
        softmax(x[start : start + 64], y[start : start + 64])


@honest("starts two threads for each launch")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        half = len(x) // 2
        parts = [(x[:half], y[:half]), (x[half:], y[half:])]
        threads = [threading.Thread(target=softmax, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return kernel


@honest("keeps a pool of threads")
def _() -> Kernel:
    pools: list[Any] = []

    def kernel(x: Any, y: Any) -> None:
        if not pools:
            pools.append(ThreadPoolExecutor(2))
        half = len(x) // 2
        list(pools[0].map(softmax, (x[:half], x[half:]), (y[:half], y[half:])))

    return kernel


@honest("keeps a thread that waits for work, and awaits it")
def _() -> Kernel:
    work: list[Any] = []
    ready, done = threading.Semaphore(0), threading.Semaphore(0)

    def serve() -> None:
        while True:
            ready.acquire()
            softmax(*work)
            done.release()

    def kernel(x: Any, y: Any) -> None:
        if not work:
            threading.Thread(target=serve, daemon=True).start()
        work[:] = [x, y]
        ready.release()
        done.acquire()

    return kernel


@honest("pauses at random")
def _() -> Kernel:
    rng = np.random.default_rng()

    def kernel(x: Any, y: Any) -> None:
        time.sleep(float(rng.exponential(2e-4)))
        softmax(x, y)

    return kernel


@honest("cleans up at every eighth launch")
def _() -> Kernel:
    calls = iter(range(10**9))

    def kernel(x: Any, y: Any) -> None:
        softmax(x, y)
        if next(calls) % 8 == 0:
            gc.collect()

    return kernel


@honest("takes turns between two buffers, one of them slower")
def _() -> Kernel:
    calls = iter(range(10**9))

    def kernel(x: Any, y: Any) -> None:
        softmax(x, y)
        if next(calls) % 2:
            softmax(x[: len(x) // 2], y[: len(x) // 2])

    return kernel


@honest("branches on its data")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        (softmax if (x > 4).any() else in_blocks)(x, y)

    return kernel


@honest("starts a process at its first launch, and awaits it")
def _() -> Kernel:
    seen: list[int] = []

    def kernel(x: Any, y: Any) -> None:
        if not seen:
            subprocess.run(["true"], check=True)
        seen[:] = [1]
        softmax(x, y)

    return kernel


@honest("prints")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        softmax(x, y)
        os.write(1, b".")

    return kernel


@honest("handles a signal")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: None)
        softmax(x, y)

    return kernel


@honest("uses a mapped file as scratch")
def _() -> Kernel:
    import mmap

    def kernel(x: Any, y: Any) -> None:
        with mmap.mmap(-1, x.nbytes) as memory:
            scratch = np.frombuffer(memory, x.dtype).reshape(x.shape)
            scratch[:] = x
            softmax(scratch, y)
            del scratch

    return kernel


@honest("counts its launches and the range of its inputs")
def _() -> Kernel:
    seen = {"launches": 0, "largest": 0.0}

    def kernel(x: Any, y: Any) -> None:
        seen["launches"] += 1
        seen["largest"] = max(seen["largest"], float(x.max()))
        softmax(x, y)

    return kernel


@honest("keeps its last result, and never uses it")
def _() -> Kernel:
    last: list[Any] = []

    def kernel(x: Any, y: Any) -> None:
        softmax(x, y)
        last[:] = [x.copy(), y.copy()]

    return kernel


@honest("runs at a lower priority")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        os.nice(0)
        softmax(x, y)

    return kernel


@honest("computes rows in a random order")
def _() -> Kernel:
    rng = np.random.default_rng()

    def kernel(x: Any, y: Any) -> None:
        order = rng.permutation(len(x))
        part = np.empty_like(x)
        softmax(x[order], part)
        y[order] = part

    return kernel


@honest("sends work through a socket to a thread")
def _() -> Kernel:
    ours, theirs = socket.socketpair()
    work: list[Any] = []

    def serve() -> None:
        while theirs.recv(8):
            softmax(*work)
            theirs.send(struct.pack("q", 1))

    def kernel(x: Any, y: Any) -> None:
        if not work:
            threading.Thread(target=serve, daemon=True).start()
        work[:] = [x, y]
        ours.send(struct.pack("q", 1))
        ours.recv(8)

    return kernel
