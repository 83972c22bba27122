"""The processes that compile and measure for a run: of this machine, or of each worker of a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterable

from tunebench._environment import cache_folder
from tunebench.compile import unavailable
from tunebench.compile import worker as compile_worker
from tunebench.errors import DeviceError
from tunebench.executor.local import LocalExecutor, Stage
from tunebench.kernels import loaded_files
from tunebench.measure import worker as measure_worker
from tunebench.measure.cuda import require_cuda_core
from tunebench.tuning.candidate import Target
from tunebench.tuning.plan import Plan
from tunebench.variant import Language

__all__ = ["start_on_worker", "start_workers"]

COMPILE_TIMEOUT_S = 300.0


def start_workers(target: Target, plan: Plan, compilers: int = 0) -> LocalExecutor:
    """Start them: compilers, and one that measures, or one for each core where nothing is timed.

    Args:
        target: The device, and what runs configurations there.
        plan: How to tune.
        compilers: How many compile where the plan does not tell; 0 is one for each core.
    """
    files = loaded_files()
    setup = measure_worker.Setup(
        runner=target.runner, device=target.device, protocol=plan.protocol, variant_files=files
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return LocalExecutor(
        compiling=Stage(
            function=compile_worker.compile_task,
            start=compile_worker.start,
            start_arguments=(cache_folder() / "binaries", files),
            workers=plan.workers or compilers or cores,
            timeout_s=COMPILE_TIMEOUT_S,
        ),
        measuring=Stage(
            function=measure_worker.measure,
            start=measure_worker.start,
            start_arguments=(setup,),
            workers=cores if target.runner == "offline" else 1,
            timeout_s=plan.timeout_s,
        ),
        overlap=target.runner != "cpu",
    )


def start_on_worker(
    target: Target, plan: Plan, languages: Iterable[Language], compilers: int
) -> LocalExecutor:
    """Start them on a worker of a cluster, which may lack what the driver has.

    Args:
        target: The worker's own device.
        plan: How to tune.
        languages: Those of the variants that are tried.
        compilers: How many processes compile; 0 is one for each core.

    Raises:
        DeviceError, MissingDependency: if something is not installed there: no trial is to fail of that.
    """
    if target.runner == "cuda":
        require_cuda_core()
    for language in languages:
        reason = unavailable(language)
        if reason is not None:
            raise DeviceError(reason)
    return start_workers(target, plan, compilers)
