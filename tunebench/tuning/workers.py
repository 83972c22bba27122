"""The processes that compile and measure: on this machine, or on each worker of a cluster."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from tunebench._environment import binary_folder, visible_gpus
from tunebench._host import cores
from tunebench.compile import unavailable
from tunebench.compile import worker as compile_worker
from tunebench.errors import DeviceError
from tunebench.executor import judge
from tunebench.executor.local import LocalExecutor
from tunebench.executor.process import ProcessStage
from tunebench.kernels import loaded_files
from tunebench.measure import worker as measure_worker
from tunebench.measure.cuda import require_cuda_core
from tunebench.measure.observer import absolute_observers
from tunebench.tuning.audit import task_bound_us
from tunebench.tuning.baseline_rounds import JUDGE_TIMEOUT_S
from tunebench.tuning.plan import Plan
from tunebench.tuning.tunable import TuningTarget
from tunebench.variant import Language

__all__ = ["COMPILE_TIMEOUT_S", "start_on_worker", "start_workers", "user_code_limit_s"]

COMPILE_TIMEOUT_S = 300.0
"""Time limit of compiling one configuration, in seconds; it does not count waits for a processor."""

USER_CODE_S = 10.0
"""Least time limit of each function of a variant, in seconds: its first call may import Numba."""


def user_code_limit_s(plan: Plan) -> float:
    """Return the time limit of each function of a variant or operator, in seconds.

    Args:
        plan: The tuning plan.
    """
    return max(USER_CODE_S, plan.timeout_s)


def start_workers(target: TuningTarget, plan: Plan, compilers: int = 0) -> LocalExecutor:
    """Start compile processes, and one measuring process per GPU, or one per core if times are predicted.

    Args:
        target: The device, and the runner to use.
        plan: The tuning plan.
        compilers: Number of compile processes if the plan leaves it open; 0 is one per core.
    """
    files, offline = loaded_files(), target.runner == "offline"
    setup = measure_worker.Setup(
        runner=target.runner,
        device=target.device,
        protocol=plan.protocol,
        variant_files=files,
        observers=absolute_observers(plan.observers),
    )
    return LocalExecutor(
        compiling=ProcessStage(
            function=compile_worker.compile_task,
            start=compile_worker.start,
            start_arguments=(binary_folder(), files),
            workers=plan.workers or compilers or cores(),
            timeout_s=COMPILE_TIMEOUT_S,
            user_code_s=user_code_limit_s(plan),
        ),
        measuring=ProcessStage(
            function=measure_worker.measure,
            start=measure_worker.start,
            start_arguments=(setup,),
            workers=cores() if offline else max(1, len(target.gpus)),
            timeout_s=plan.timeout_s,
            user_code_s=user_code_limit_s(plan),
            gpus=_visible(target.gpus),
        ),
        judging=None if offline else judging_stage(target, plan),
        bound=None if offline else functools.partial(task_bound_us, cache=plan.protocol.cache),
        overlap=target.runner != "cpu",
    )


def _visible(gpus: Sequence[int]) -> tuple[str, ...]:
    """Return GPUs by position in the form of `CUDA_VISIBLE_DEVICES`, which may list some of the machine's."""
    listed = visible_gpus()
    return tuple(listed[gpu] if gpu < len(listed) else str(gpu) for gpu in gpus)


def judging_stage(target: TuningTarget, plan: Plan) -> ProcessStage:
    """Return the stage that verifies and times finalists from a process that loads no kernel.

    Args:
        target: The device.
        plan: The tuning plan.
    """
    setup = judge.JudgeSetup(device=target.device, protocol=plan.protocol, limit_s=plan.timeout_s)
    return ProcessStage(
        function=judge.examine, start=judge.start, start_arguments=(setup,), timeout_s=JUDGE_TIMEOUT_S
    )


def start_on_worker(
    target: TuningTarget, plan: Plan, languages: Iterable[Language], compilers: int
) -> LocalExecutor:
    """Start the processes on a worker of a cluster, after a check of its compilers and packages.

    Args:
        target: The device of the worker.
        plan: The tuning plan.
        languages: Languages of the variants to try.
        compilers: Number of compile processes; 0 is one per core.

    Raises:
        DeviceError: if a compiler is missing.
        MissingDependency: if cuda.core is missing.
    """
    if target.runner == "cuda":
        require_cuda_core()
    for language in languages:
        reason = unavailable(language)
        if reason is not None:
            raise DeviceError(reason)
    return start_workers(target, plan, compilers)
