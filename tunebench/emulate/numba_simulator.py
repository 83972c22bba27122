"""Execution of Numba-CUDA kernels in Numba's simulator, in a separate process, without a GPU.

An environment variable selects the simulator when Numba is first imported, so that it cannot share a process
with the compiler. It performs about 1e5 element operations per second, which suits small workloads only.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tunebench._child import WORKING_FOLDER, absolute_environment, python_command
from tunebench._figure import significant
from tunebench.dtype import numpy_dtype
from tunebench.emulate.emulator import EmulationFailed
from tunebench.space import Config
from tunebench.variant import Argument, NumbaCudaVariant, Scalar, TensorMap
from tunebench.workload import Workload

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["main", "run_simulated", "simulate"]


def simulate(
    variant: NumbaCudaVariant[Any],
    workload: Workload,
    config: Config,
    inputs: Mapping[str, Array],
    *,
    timeout_s: float = 60.0,
) -> dict[str, Array]:
    """Run one configuration in Numba's simulator and return its outputs.

    Outputs are filled with NaN beforehand.

    Args:
        variant: The kernel variant.
        workload: A small workload (see `GpuVariant.emulation_workload`).
        config: A valid point of the variant's space.
        inputs: One array for every tensor of `workload.inputs()`, by name, of its shape and type.
        timeout_s: Wall-clock limit in seconds, including the start of Python.

    Returns:
        One array for every tensor of `workload.outputs()`, by name.

    Raises:
        EmulationFailed: The kernel raises, crashes or takes too long.
    """
    # The variant's class may come from a user's file, or from a folder on this process's path only.
    module = sys.modules[type(variant).__module__]
    file = module.__file__ if module.__name__.startswith("tunebench_user_") else None
    job = pickle.dumps((file, pickle.dumps((variant, workload, config, dict(inputs)))))
    try:
        process = subprocess.run(
            python_command("from tunebench.emulate.numba_simulator import main; main()"),
            input=job,
            capture_output=True,
            timeout=timeout_s,
            cwd=WORKING_FOLDER,
            env=absolute_environment(NUMBA_ENABLE_CUDASIM="1"),
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"simulation did not finish in {significant(timeout_s)} s"
        raise EmulationFailed(reason, timed_out=True) from None
    if process.returncode != 0:
        log = process.stderr.decode(errors="replace").strip()
        raise EmulationFailed(f"simulation: {log.splitlines()[-1] if log else process.returncode}")
    outputs: dict[str, Array] = pickle.loads(process.stdout)  # noqa: S301 - from our own child process
    return outputs


def run_simulated(
    variant: NumbaCudaVariant[Any], workload: Workload, config: Config, inputs: Mapping[str, Array]
) -> dict[str, Array]:
    """Run the launches one after the other; Numba must have been imported as the simulator."""
    import numpy as np
    from numba import cuda

    tensors = dict(inputs)
    for tensor in (*workload.outputs(), *variant.scratch(workload, config)):
        tensors[tensor.name] = np.full(tensor.shape, np.nan, numpy_dtype(tensor.dtype))
    function = variant.kernel(workload, config)
    _show_simulated_module(function)
    kernel = cuda.jit(function)

    def passed(argument: Argument | TensorMap) -> Any:
        if isinstance(argument, Scalar):
            return argument.number()
        assert isinstance(argument, str), f"Numba kernels accept no {argument}"
        return tensors[argument]

    for launch in variant.launches(workload, config):
        arguments = map(passed, launch.arguments)
        kernel[launch.grid, launch.block, 0, launch.smem_bytes](*arguments)
    return {tensor.name: tensors[tensor.name] for tensor in workload.outputs()}


def _show_simulated_module(function: Callable[..., None]) -> None:
    """Let a kernel see the module `cuda` that the simulator creates for each launch.

    The simulator replaces `numba.cuda` in the kernel's globals. Variants import Numba within functions, so
    that their `cuda` is a closure variable; this function redirects that variable to the kernel's globals.
    """
    from numba import cuda

    name = "numba_cuda_of_this_launch"
    function.__globals__[name] = cuda

    class Simulated:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(function.__globals__[name], attribute)

    for cell in function.__closure__ or ():
        if cell.cell_contents is cuda:
            cell.cell_contents = Simulated()


def main() -> None:
    """Read a job from standard input, run it, and write its outputs to standard output."""
    from tunebench.kernels import load_file

    # A kernel's own prints must not mix with the results.
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    file, job = pickle.loads(sys.stdin.buffer.read())  # noqa: S301 - written by our own parent process
    if file is not None:
        load_file(file)
    outputs = run_simulated(*pickle.loads(job))  # noqa: S301 - likewise
    with results:
        pickle.dump(outputs, results)
