"""Execution of Numba-CUDA kernels in Numba's simulator, in a separate process, without a GPU.

An environment variable selects the simulator when Numba is first imported, so that it cannot share a process
with the compiler. It performs about 1e5 element operations per second, which suits small workloads only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tunebench.dtype import numpy_dtype
from tunebench.emulate.python_child import run_in_child, serve_parent
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
        timeout_s: Limit in seconds, including the start of Python, without waits for a busy processor.

    Returns:
        One array for every tensor of `workload.outputs()`, by name.

    Raises:
        EmulationFailed: The kernel raises, crashes or takes too long.
    """
    return run_in_child(
        __name__, variant, workload, config, inputs, timeout_s=timeout_s, NUMBA_ENABLE_CUDASIM="1"
    )


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
    _widen_integers()
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


@functools.cache
def _widen_integers() -> None:
    """Let kernels read integers of arrays as int64, the type in which compiled Numba code computes.

    The simulator returns NumPy scalars, for which int8(100) + int8(100) is -56, but 200 on a device. Values
    that are stored wrap around to the type of the array on both.
    """
    import numpy as np
    from numba.cuda.simulator import kernelapi
    from numba.cuda.simulator.cudadrv.devicearray import FakeWithinKernelCUDAArray

    def widened(value: Any) -> Any:
        return np.int64(value) if isinstance(value, np.signedinteger) else value

    def wrapped(value: Any, array: Any) -> Any:
        whole = isinstance(value, int | np.integer) and getattr(array, "dtype", np.dtype("O")).kind == "i"
        return np.asarray(value, np.int64).astype(array.dtype) if whole else value

    class OnChip(np.ndarray):
        def __getitem__(self, index: Any) -> Any:
            return widened(super().__getitem__(index))

        def __setitem__(self, index: Any, value: Any) -> None:
            super().__setitem__(index, wrapped(value, self))

    class Allocator:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def empty(self, *args: Any) -> OnChip:
            return np.empty(*args).view(OnChip)

        def frombuffer(self, *args: Any, **kwargs: Any) -> OnChip:
            return np.frombuffer(*args, **kwargs).view(OnChip)

    read, write = FakeWithinKernelCUDAArray.__getitem__, FakeWithinKernelCUDAArray.__setitem__
    FakeWithinKernelCUDAArray.__getitem__ = lambda array, index: widened(read(array, index))
    FakeWithinKernelCUDAArray.__setitem__ = lambda array, index, value: write(
        array, index, wrapped(value, array._item)
    )
    kernelapi.np = Allocator()  # the line of the caller says whether an array is shared or local


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
    serve_parent(run_simulated)
