"""Worker process that measures: the only place where any exception becomes an outcome.

A worker is started with a `Setup`, builds its runner once, and handles tasks until it is stopped. A crash or
a hang ends this process only; the executor detects it and starts another.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tunebench.binary.compiled import Binary
from tunebench.device import Device
from tunebench.errors import CodeTimeout, describe_error
from tunebench.fault import DeviceLost, LaunchRefused, environment_fault
from tunebench.kernels import preload
from tunebench.measure._blas import in_one_thread
from tunebench.measure._confinement import confine
from tunebench.measure.judged import take_channel
from tunebench.measure.machine import spin_only_if_idle
from tunebench.measure.observer import NVML, load_observer
from tunebench.measure.originals import Originals
from tunebench.measure.runner import Runner
from tunebench.measure.timing import Protocol
from tunebench.outcome import LaunchFailed, Result, TimedOut, WrongResult
from tunebench.task import Task

__all__ = ["Setup", "measure", "start"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Configuration of a measuring worker.

    Attributes:
        runner: The runner to use: ``"offline"`` for a device that is not on this machine.
        device: The device to measure on, or for.
        protocol: How samples are taken.
        variant_files: Users' Python files with variants, to load.
        observers: What observes the measurements: `tunebench.measure.observer.NVML`, or users' Python files.
    """

    runner: Literal["cpu", "cuda", "offline"]
    device: Device
    protocol: Protocol
    variant_files: tuple[str, ...] = ()
    observers: tuple[str, ...] = ()


_runner: Runner | None = None
_originals: Originals | None = None


def start(setup: Setup) -> None:
    """Prepare this process: load users' variants, build the runner."""
    global _runner, _originals
    confine()  # before there are other threads, which would not be
    if (
        setup.runner != "cpu"
    ):  # verification shares the processor with compilers, which pause for a CPU kernel
        in_one_thread()
    _runner = _build(setup)  # before user code, which may replace what it imports
    _originals = Originals()
    preload(setup.variant_files)
    _runner.observers = tuple(name if name == NVML else load_observer(name) for name in setup.observers)
    _originals.restore()


def _build(setup: Setup) -> Runner:
    if setup.runner == "cpu":
        from tunebench.measure.cpu import CpuRunner

        spin_only_if_idle()
        return CpuRunner(setup.protocol, setup.device)
    if setup.runner == "cuda":
        from tunebench.measure.cuda import CudaRunner

        return CudaRunner(
            setup.protocol, setup.device, trusted=not setup.variant_files and set(setup.observers) <= {NVML}
        )
    from tunebench.measure.offline import OfflineRunner

    return OfflineRunner(setup.protocol)


def measure(task: Task, binary: Binary, abort_above_us: float | None) -> Result:
    """Verify and time one compiled configuration in this process, or run its launches for a judge.

    Raises:
        EnvironmentFault: The failure is not that of the configuration.
    """
    if _runner is None:
        raise RuntimeError("measure needs a runner: call start(setup) first")
    channel = take_channel()
    replaced = _restore()  # by the variant's module, as it was imported
    result = _run(_runner, task, binary, abort_above_us, channel)
    replaced = _restore() or replaced
    if replaced is None:
        return result
    reason = f"the variant replaced {replaced} in the process that measures it, so its time is not valid"
    return dataclasses.replace(result, outcome=WrongResult(reason=reason))


def _run(
    runner: Runner, task: Task, binary: Binary, abort_above_us: float | None, channel: int | None
) -> Result:
    """Run a task, for a judge if there is a connection to one; an exception becomes an outcome."""
    try:
        if channel is None:
            outcome, effort = runner.run(task, binary, abort_above_us)
        else:
            outcome, effort = runner.serve(task, binary, channel)
    except DeviceLost as lost:  # the device is unusable for this process; the exit status encodes the fault
        print(lost, file=sys.stderr, flush=True)  # noqa: T201 - the last words of a process
        os._exit(lost.status)
    except BaseException as error:  # the process boundary of measuring: the reason is kept
        if fault := environment_fault(error):
            raise fault from error
        if isinstance(error, CodeTimeout):
            late = TimedOut(reason=describe_error(error), conditions=error.conditions)
            return Result(outcome=late, resources=binary.resources)
        failure = LaunchFailed(reason=describe_error(error), refused=isinstance(error, LaunchRefused))
        return Result(outcome=failure, resources=binary.resources)
    return Result(
        outcome=outcome,
        resources=binary.resources,
        effort=effort,
        conditions={**host(), **runner.conditions()},
    )


def _restore() -> str | None:
    return _originals.restore() if _originals is not None else None


def host() -> Mapping[str, Any]:
    """Return the machine and interpreter, for the conditions of a record."""
    from tunebench import __version__

    return {
        "tunebench": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "host": platform.node(),
        "pid": os.getpid(),
    }
