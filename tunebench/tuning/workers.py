"""The processes of this machine that compile and measure for a run."""

from __future__ import annotations

import os

from tunebench._environment import cache_folder
from tunebench.compile import worker as compile_worker
from tunebench.kernels import loaded_files
from tunebench.measure import worker as measure_worker
from tunebench.search.executor.local import LocalExecutor, Stage
from tunebench.tuning.candidate import Target
from tunebench.tuning.plan import Plan

__all__ = ["start_workers"]

COMPILE_TIMEOUT_S = 300.0


def start_workers(target: Target, plan: Plan) -> LocalExecutor:
    """Start them: compilers for each core, and one that measures, or as many where nothing is timed."""
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
            workers=plan.workers or cores,
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
