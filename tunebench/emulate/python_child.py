"""Kernels in Python that another process runs, because an environment variable selects how, at the import."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tunebench._child import python_command
from tunebench._figure import significant
from tunebench.emulate.emulator import EmulationFailed
from tunebench.emulate.limited_child import run_limited

if TYPE_CHECKING:
    from tunebench.space import Config
    from tunebench.variant import GpuVariant
    from tunebench.workload import Array, Workload

__all__ = ["run_in_child", "serve_parent"]


def run_in_child(
    module: str,
    variant: GpuVariant[Any],
    workload: Workload,
    config: Config,
    inputs: Mapping[str, Array],
    *,
    timeout_s: float,
    **environment: str,
) -> dict[str, Array]:
    """Call `main` of a module in a new process, and return the outputs of a configuration.

    Args:
        module: The module, whose `main` calls `serve_parent`.
        variant: The kernel variant.
        workload: A small workload (see `GpuVariant.emulation_workload`).
        config: A valid point of the variant's space.
        inputs: One array for every tensor of `workload.inputs()`, by name, of its shape and type.
        timeout_s: Limit in seconds, including the start of Python, without waits for a busy processor.
        environment: Variables of the process.

    Returns:
        One array for every tensor of `workload.outputs()`, by name.

    Raises:
        EmulationFailed: The kernel raises, crashes or takes too long.
    """
    # The variant's class may come from a user's file, or from a folder on this process's path only.
    defining = sys.modules[type(variant).__module__]
    file = defining.__file__ if defining.__name__.startswith("tunebench_user_") else None
    job = pickle.dumps((file, pickle.dumps((variant, workload, config, dict(inputs)))))
    try:
        process = run_limited(
            python_command(f"from {module} import main; main()"), job, timeout_s=timeout_s, **environment
        )
    except subprocess.TimeoutExpired:
        reason = f"simulation did not finish in {significant(timeout_s)} s"
        raise EmulationFailed(reason, timed_out=True) from None
    if process.returncode != 0:
        log = process.stderr.decode(errors="replace").strip()
        raise EmulationFailed(f"simulation: {log.splitlines()[-1] if log else process.returncode}")
    outputs: dict[str, Array] = pickle.loads(process.stdout)  # noqa: S301 - from our own child process
    return outputs


def serve_parent(run: Callable[..., dict[str, Array]]) -> None:
    """Read a job from standard input, run it, and write its outputs to standard output.

    Args:
        run: Takes a variant, a workload, a configuration and inputs; returns outputs.
    """
    from tunebench.kernels import load_file

    # A kernel's own prints must not mix with the results.
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    file, job = pickle.loads(sys.stdin.buffer.read())  # noqa: S301 - written by our own parent process
    if file is not None:
        load_file(file)
    outputs = run(*pickle.loads(job))  # noqa: S301 - likewise
    with results:
        pickle.dump(outputs, results)
