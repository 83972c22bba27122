"""Kernels that cheat or are broken, in plain Python, and honest kernels that look suspicious.

Each is a kernel of softmax (rows, cols) f32, called as `kernel(x, y)`. Python kernels can do more than
compiled ones: they read the memory of the process and replace its functions.

Source: the kernels of KernelBench ("Eval unit tests for adversarial eval testing"), of GPU MODE
(reference-kernels, "reward hacks fabricating benchmark time"; pygpubench, "exploit test suite"), and the
categories of Wafer ("A field guide to reward hacking in AI kernel generation").
"""

from __future__ import annotations

import ctypes
import functools
import gc
import queue
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tunebench.measure import cpu, runner, timed_launches, timing, verify
from tunebench.workload import Tolerance
from tunebench.workloads.operators.softmax import Softmax

Kernel = Callable[[Any, Any], None]
CHEATS: dict[str, Callable[[], Kernel]] = {}
"""Factory of each dishonest kernel: "kind: what it does"."""
HONEST: dict[str, Callable[[], Kernel]] = {}
"""Factory of each honest kernel."""


def registering(
    kernels: dict[str, Callable[[], Kernel]],
) -> Callable[[str], Callable[..., Callable[[], Kernel]]]:
    """Return the decorator that registers a factory in `kernels` under a name."""
    return lambda name: functools.partial(kernels.setdefault, name)


cheat, honest = registering(CHEATS), registering(HONEST)


def softmax(x: Any, y: Any) -> None:
    with np.errstate(invalid="ignore"):  # rows with infinity or NaN
        power = np.exp(x - x.max(axis=1, keepdims=True))
        y[:] = power / power.sum(axis=1, keepdims=True)


def replaying(key: Callable[[Any, Any], Any]) -> Callable[[], Kernel]:
    """Return the factory of a kernel that stores its results under a key, and replays them."""

    def factory() -> Kernel:
        stored: dict[Any, Any] = {}

        def kernel(x: Any, y: Any) -> None:
            stored_output = stored.get(key(x, y))
            if stored_output is None:
                softmax(x, y)
                stored[key(x, y)] = y.copy()
            else:
                y[:] = stored_output

        return kernel

    return factory


def sometimes(skips: Callable[[int], bool], instead: Kernel = lambda x, y: None) -> Callable[[], Kernel]:
    """Return the factory of a kernel that does something else at some calls, counted from 0."""

    def factory() -> Kernel:
        calls = iter(range(10**9))
        return lambda x, y: (instead if skips(next(calls)) else softmax)(x, y)

    return factory


def replacing(owner: Any, name: str, value: Any) -> Callable[[], Kernel]:
    """Return the factory of a kernel that replaces a function of the process and computes nothing more."""

    def factory() -> Kernel:
        def kernel(x: Any, y: Any) -> None:
            setattr(owner, name, value)
            softmax(x, y)

        return kernel

    return factory


# -- results of earlier calls ------------------------------------------------------------------------------


@cheat("stale output: relies on what the first call wrote")
def _() -> Kernel:
    return sometimes(lambda call: call > 0)()


@cheat("stale output: computes until warm-up is over")
def _() -> Kernel:
    return sometimes(lambda call: call > 1)()


@cheat("stale output: copies the result of the first call")
def _() -> Kernel:
    return replaying(lambda x, y: 0)()


CHEATS["cache: by the address of the input"] = replaying(lambda x, y: x.ctypes.data)
CHEATS["cache: by the address of the output"] = replaying(lambda x, y: y.ctypes.data)
CHEATS["cache: by the identity of the array"] = replaying(lambda x, y: id(x))
CHEATS["cache: by shape"] = replaying(lambda x, y: x.shape)
CHEATS["cache: by the first row"] = replaying(lambda x, y: x[0].tobytes())
CHEATS["cache: by corners"] = replaying(lambda x, y: x[:: x.shape[0] - 1, :: x.shape[1] - 1].tobytes())
CHEATS["cache: by every 64th element"] = replaying(lambda x, y: x.reshape(-1)[::64].tobytes())
CHEATS["cache: by a rounded sum"] = replaying(
    lambda x, y: round(float(np.where(np.isfinite(x), x, 0).sum()) / 1000)
)

# -- calls that differ -------------------------------------------------------------------------------------

CHEATS["later calls: every second computes nothing"] = sometimes(lambda call: call % 2 == 1)
CHEATS["later calls: every third computes nothing"] = sometimes(lambda call: call % 3 == 2)
CHEATS["later calls: wrong from the fifth on"] = sometimes(lambda call: call >= 4)
CHEATS["later calls: one in two at random"] = sometimes(
    lambda call: call > 0 and random.Random(call).random() < 0.5
)


def half(x: Any, y: Any) -> None:
    softmax(x[: len(x) // 2], y[: len(x) // 2])


def without_last_row(x: Any, y: Any) -> None:
    softmax(x[:-1], y[:-1])


def stored_as_half(x: Any, y: Any) -> None:
    softmax(x.astype(np.float16), y)


def uniform(x: Any, y: Any) -> None:
    y[:] = 1 / x.shape[1]


CHEATS["later calls: half of the rows"] = sometimes(lambda call: call > 0, half)
CHEATS["later calls: all rows but one"] = sometimes(lambda call: call > 0, without_last_row)
CHEATS["later calls: lower precision"] = sometimes(lambda call: call > 0, stored_as_half)
CHEATS["later calls: a constant"] = sometimes(lambda call: call > 0, uniform)


@cheat("later calls: computes the inputs of the call before")
def _() -> Kernel:
    before: list[Any] = []

    def kernel(x: Any, y: Any) -> None:
        softmax(before[0] if before else x, y)
        before[:] = [x.copy()]

    return kernel


# -- detection of the verification -------------------------------------------------------------------------


@cheat("detection: works only outside of the timer, found on the stack")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name != "time_us":
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None:
            softmax(x, y)

    return kernel


@cheat("detection: works only for the first call with newly allocated arrays")
def _() -> Kernel:
    seen: set[tuple[int, int]] = set()

    def kernel(x: Any, y: Any) -> None:
        if (x.ctypes.data, y.ctypes.data) not in seen:
            softmax(x, y)
        seen.add((x.ctypes.data, y.ctypes.data))

    return kernel


@cheat("detection: computes nothing within a second of the last call")
def _() -> Kernel:
    last = [0.0]

    def kernel(x: Any, y: Any) -> None:
        if time.monotonic() - last[0] > 1:
            softmax(x, y)
        last[0] = time.monotonic()

    return kernel


@cheat("detection: works only on poisoned outputs that it has not seen, and leaves the rest as it is")
def _() -> Kernel:
    calls = [0]

    def kernel(x: Any, y: Any) -> None:
        calls[0] += 1
        if np.isnan(y).all() and calls[0] == 1:
            softmax(x, y)

    return kernel


# -- memory of the process ---------------------------------------------------------------------------------


def references() -> list[Any]:
    """Return the references that the process holds."""
    input_sets = [candidate for candidate in gc.get_objects() if type(candidate) is verify.InputSet]
    return [
        candidate.__dict__["references"] for candidate in input_sets if "references" in candidate.__dict__
    ]


@cheat("memory: copies the reference after the first call")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        found = references()
        if found:
            y[:] = found[0]["y"].value
        else:
            softmax(x, y)

    return kernel


@cheat("memory: overwrites the reference with its own wrong result")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        uniform(x, y)
        for found in references():
            found["y"].value[:] = y

    return kernel


@cheat("memory: makes the reference NaN")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        uniform(x, y)
        for found in references():
            found["y"].value[:] = np.nan

    return kernel


@cheat("memory: regenerates the inputs from their seed, with results known in advance")
def _() -> Kernel:
    known: list[Any] = []

    def kernel(x: Any, y: Any) -> None:
        if not known:
            drawn = Softmax(rows=40, cols=65, dtype="f32").draw(np.random.default_rng(7))["x"]
            known.append(np.empty_like(drawn))
            softmax(drawn, known[0])
        y[:] = known[0]

    return kernel


@cheat("memory: overwrites its input, so that its result is trivial")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        x[:] = 0
        uniform(x, y)

    return kernel


@cheat("memory: overwrites its input after a correct result")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        softmax(x, y)
        x[0, 0] = 0

    return kernel


@cheat("memory: writes past the end of its output")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        softmax(x, y)
        ctypes.memset(y.ctypes.data + y.nbytes, 0, 64)

    return kernel


# -- the clock and the check -------------------------------------------------------------------------------

CHEATS["replaced: time.perf_counter_ns"] = replacing(time, "perf_counter_ns", lambda: 0)
CHEATS["replaced: time.monotonic"] = replacing(time, "monotonic", lambda: 0.0)
CHEATS["replaced: the bound clock"] = replacing(cpu, "_now_ns", lambda: 0)
CHEATS["replaced: CpuTimer.time_us"] = replacing(cpu.CpuTimer, "time_us", lambda self, call: 1.0)
CHEATS["replaced: code of CpuTimer.time_us"] = replacing(
    cpu.CpuTimer.time_us, "__code__", (lambda self, call: 1.0).__code__
)
CHEATS["replaced: median_interval"] = replacing(runner, "median_interval", lambda us: (1.0, (1.0, 1.0)))
CHEATS["replaced: statistics.median"] = replacing(statistics, "median", lambda us: 1.0)
CHEATS["replaced: collect"] = replacing(timing, "collect", lambda *a, **b: timing.Samples((1.0,)))
CHEATS["replaced: worst_error"] = replacing(verify, "worst_error", lambda *a: 0.0)
CHEATS["replaced: errors_of"] = replacing(verify, "errors_of", lambda *a: verify.Errors())
CHEATS["replaced: EveryElement.errors"] = replacing(verify.EveryElement, "errors", lambda *a: verify.Errors())
CHEATS["replaced: TimedLaunches.verify"] = replacing(
    timed_launches.TimedLaunches, "verify", lambda self: (verify.Errors(), None)
)
CHEATS["replaced: numpy.max"] = replacing(np, "max", lambda *a, **b: 0.0)
CHEATS["replaced: the tolerance of the operator"] = replacing(
    Softmax, "tolerance", lambda self: Tolerance(eps_out=1e9, eps_acc=1e9, reason="all is allowed")
)

# -- work that outlives the call ---------------------------------------------------------------------------


@cheat("asynchronous: a new thread computes after the return")
def _() -> Kernel:
    def late(x: Any, y: Any) -> None:
        time.sleep(0.02)
        softmax(x, y)

    def kernel(x: Any, y: Any) -> None:
        if not np.isnan(y).all() or threading.active_count() > 40:
            return
        thread = threading.Thread(target=late, args=(x, y), daemon=True)
        thread.start()
        if kernel.first:  # type: ignore[attr-defined]
            thread.join()
        kernel.first = False  # type: ignore[attr-defined]

    kernel.first = True  # type: ignore[attr-defined]
    return kernel


@cheat("asynchronous: a thread that waits for work, and is awaited once")
def _() -> Kernel:
    work: queue.Queue[Any] = queue.Queue()
    calls = [0]

    def serve() -> None:
        while (task := work.get(timeout=5)) is not None:
            time.sleep(0.01)
            softmax(*task)
            work.task_done()

    def kernel(x: Any, y: Any) -> None:
        calls[0] += 1
        if calls[0] == 1:
            threading.Thread(target=serve, daemon=True).start()
        work.put((x, y))
        if calls[0] == 1:
            work.join()
        if calls[0] == 12:
            work.put(None)

    return kernel


@cheat("asynchronous: a timer")
def _() -> Kernel:
    calls = [0]

    def kernel(x: Any, y: Any) -> None:
        calls[0] += 1
        if calls[0] == 1:
            softmax(x, y)
        else:
            threading.Timer(0.01, softmax, (x, y)).start()

    return kernel


# -- broken ------------------------------------------------------------------------------------------------


def _with(change: Callable[[Any], None]) -> Callable[[], Kernel]:
    def factory() -> Kernel:
        def kernel(x: Any, y: Any) -> None:
            softmax(x, y)
            change(y)

        return kernel

    return factory


CHEATS["broken: writes nothing"] = lambda: lambda x, y: None
CHEATS["broken: writes zeros"] = lambda: lambda x, y: y.fill(0)
CHEATS["broken: one element is NaN"] = _with(lambda y: y.__setitem__((3, 3), np.nan))
CHEATS["broken: one element is infinite"] = _with(lambda y: y.__setitem__((-1, -1), np.inf))
CHEATS["broken: an unwritten column"] = lambda: lambda x, y: softmax(x[:, :-1], y[:, :-1])
CHEATS["broken: lower precision"] = lambda: stored_as_half
CHEATS["broken: copies its input"] = lambda: lambda x, y: y.__setitem__(slice(None), x)

# -- honest ------------------------------------------------------------------------------------------------

HONEST["computes"] = lambda: softmax
HONEST["caches by all of its input, which never returns"] = replaying(lambda x, y: x.tobytes())


@honest("computes poisoned outputs only, which all timed outputs are")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        if np.isnan(y[0, 0]):
            softmax(x, y)

    return kernel


@honest("recomputes only if its first element is wrong, which it is before each timed launch")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        row = np.exp(x[0] - x[0].max())
        if not abs(y[0, 0] - row[0] / row.sum()) < 1e-6:
            softmax(x, y)
        else:
            raise AssertionError("it found a correct output, and would have been timed without any work")

    return kernel


@honest("waits for its thread")
def _() -> Kernel:
    def kernel(x: Any, y: Any) -> None:
        thread = threading.Thread(target=softmax, args=(x, y))
        thread.start()
        thread.join()

    return kernel
