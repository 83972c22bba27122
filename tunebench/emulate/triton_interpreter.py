"""Execution of Triton kernels by Triton's interpreter, in a separate process, without a GPU.

An environment variable selects the interpreter when Triton is imported. It runs programs one after the other,
each operation on a whole block by NumPy: races between programs do not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.compile.triton import kernel_of
from tunebench.dtype import numpy_dtype
from tunebench.emulate.python_child import run_in_child, serve_parent
from tunebench.space import Config
from tunebench.variant import RESTORE_ENTRY, Argument, Scalar, TensorMap, TritonVariant
from tunebench.workload import Workload

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["interpret", "main", "run_interpreted"]

_TYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
    "bool": "bool",
}
"""Names of types as Triton reads them from a tensor of torch."""


def interpret(
    variant: TritonVariant[Any],
    workload: Workload,
    config: Config,
    inputs: Mapping[str, Array],
    *,
    timeout_s: float = 60.0,
) -> dict[str, Array]:
    """Run one configuration by Triton's interpreter and return its outputs.

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
        __name__, variant, workload, config, inputs, timeout_s=timeout_s, TRITON_INTERPRET="1"
    )


class HostTensor:
    """An array as the interpreter expects a tensor of torch, which need not be installed.

    Args:
        array: The array, C-contiguous; the kernel writes into it.
        dtype: Its type as this package names it.
    """

    class _Type(str):
        """Name of a type, which Triton reads by `str` and looks up by hash."""

    def __init__(self, array: Array, dtype: str) -> None:
        self.array, self.dtype = array, self._Type(_TYPES[dtype])
        self.shape = array.shape

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return int(self.array.ctypes.data)

    def element_size(self) -> int:
        """Return the size of an element in bytes."""
        return int(self.array.itemsize)

    def untyped_storage(self) -> HostTensor:
        """Return the memory, which is this tensor."""
        return self

    def cpu(self) -> HostTensor:
        """Return this tensor, which is on the host."""
        return self

    def new_empty(self, *_: Any, **__: Any) -> HostTensor:
        """Return this tensor: the interpreter would make a copy on the host of it."""
        return self

    def set_(self, *_: Any) -> HostTensor:
        """Return this tensor, which has its memory."""
        return self

    def copy_(self, other: HostTensor) -> HostTensor:
        """Return this tensor: the kernel wrote into its memory."""
        assert other is self
        return self

    def storage_offset(self) -> int:
        """Return the index of the first element in the memory."""
        return 0

    def size(self) -> tuple[int, ...]:
        """Return the extents."""
        return self.shape

    def stride(self) -> tuple[int, ...]:
        """Return the strides in elements."""
        return tuple(stride // self.array.itemsize for stride in self.array.strides)


def run_interpreted(
    variant: TritonVariant[Any], workload: Workload, config: Config, inputs: Mapping[str, Array]
) -> dict[str, Array]:
    """Run the launches one after the other; Triton must have been imported with TRITON_INTERPRET=1."""
    tensors = {tensor.name: tensor for tensor in workload.inputs()}
    arrays = {name: np.asarray(array, order="C") for name, array in inputs.items()}
    for tensor in (*workload.outputs(), *variant.scratch(workload, config)):
        tensors[tensor.name] = tensor
        arrays[tensor.name] = np.full(tensor.shape, np.nan, numpy_dtype(tensor.dtype))

    def passed(argument: Argument | TensorMap) -> Any:
        if isinstance(argument, Scalar):
            return argument.value
        assert isinstance(argument, str), f"Triton kernels accept no {argument}"
        array = arrays[argument]
        return HostTensor(array, tensors[argument].dtype) if array.shape else array.item()

    for launch in variant.launches(workload, config):
        if launch.entry.startswith(RESTORE_ENTRY):
            original, copied = launch.arguments[:2]
            np.copyto(arrays[str(copied)], arrays[str(original)])
            continue
        kernel = kernel_of(variant.source(workload, config), launch.entry)
        programs = (launch.grid[0] // launch.cluster, *launch.grid[1:])
        constants = variant.constants(workload, config)
        names = [name for name in kernel.arg_names if name not in constants]
        values = dict(zip(names, map(passed, launch.arguments), strict=False))
        kernel[programs](**values, **constants)
    return {tensor.name: arrays[tensor.name] for tensor in workload.outputs()}


def main() -> None:
    """Read a job from standard input, run it, and write its outputs to standard output."""
    serve_parent(run_interpreted)
