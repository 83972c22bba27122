"""Processes that measure kernels in plain Python, which may do to their process what they like.

A dishonest kernel may corrupt the memory of its process, or leave threads there: none runs in the process of
the tests.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tests.measure import cheating_kernels, outside_cheats
from tests.measure.cheating_kernels import Kernel
from tunebench.binary.compiled import Binary
from tunebench.device import find
from tunebench.executor import judge
from tunebench.executor.local import LocalExecutor
from tunebench.executor.process import ProcessStage
from tunebench.kernels import variant
from tunebench.measure import cpu, worker
from tunebench.measure.timing import Protocol
from tunebench.measure.worker import Setup
from tunebench.outcome import Outcome
from tunebench.task import Task
from tunebench.workload import Workload

DEVICE = find("cpu")
SEED = 7
KERNELS = {
    **cheating_kernels.CHEATS,
    **cheating_kernels.HONEST,
    **outside_cheats.CHEATS,
    **outside_cheats.HONEST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTask(Task):
    """A task whose kernel is one of `KERNELS`."""

    kernel: str


@functools.cache
def _kernel(name: str) -> Kernel:
    return KERNELS[name]()


def start(setup: Setup) -> None:
    """Prepare a process in which a binary is the name of a kernel of `KERNELS`."""
    vars(cpu)["load_numba_cpu"] = lambda binary, *_: _kernel(binary.key)
    for operator in ("softmax", "gemm"):
        kernel_class: Any = type(variant(f"{operator}/numba_cpu"))
        kernel_class.arguments = lambda _, workload, __: tuple(
            tensor.name for tensor in (*workload.inputs(), *workload.outputs())
        )
    worker.start(setup)


def compile_name(task: KernelTask) -> Binary:
    """Return the name of a kernel in place of machine code."""
    return Binary(key=task.kernel, language="numba-cpu", target="", payload=b"", entries=("kernel",))


def nothing() -> None:
    """Prepare a process that compiles names."""


def stages(protocol: Protocol) -> dict[str, Any]:
    """Return the stages of an executor of the kernels.

    Args:
        protocol: How samples are taken.
    """
    setup = Setup(runner="cpu", device=DEVICE, protocol=protocol)
    judged = judge.JudgeSetup(device=DEVICE, protocol=protocol, limit_s=10.0)
    return {
        "compiling": ProcessStage(function=compile_name, start=nothing),
        "measuring": ProcessStage(
            function=worker.measure, start=start, start_arguments=(setup,), timeout_s=10.0
        ),
        "judging": ProcessStage(
            function=judge.examine, start=judge.start, start_arguments=(judged,), timeout_s=60.0
        ),
    }


def executor(protocol: Protocol, *, judged: bool = True) -> LocalExecutor:
    """Return an executor of the kernels.

    Args:
        protocol: How samples are taken.
        judged: Whether finalists are verified and timed from another process.
    """
    chosen = {name: stage for name, stage in stages(protocol).items() if judged or name != "judging"}
    return LocalExecutor(**chosen, overlap=False)


def measure(workers: LocalExecutor, name: str, workload: Workload, *, thorough: bool) -> Outcome:
    """Return the outcome of a kernel.

    Args:
        workers: From `executor`.
        name: Its name in `KERNELS`.
        workload: A softmax, or a product.
        thorough: Whether to measure it as a finalist.
    """
    chosen = variant(f"{workload.operator}/numba_cpu")
    task = KernelTask(
        variant=chosen,
        workload=workload,
        config=chosen.default(workload, DEVICE),
        device=DEVICE,
        seed=SEED,
        thorough=thorough,
        kernel=name,
    )
    return workers.submit(task).result().outcome
