"""Programs of libraries: how NumPy and torch compute each operator, one module per operator.

They are baselines of searches, and candidates (`tunebench.kernels.common.library`).

A module has one or both of these functions:

- ``numpy_call(workload, inputs)``: a NumPy program that computes the workload, or None.
- ``torch_calls(workload, tensors)``: torch's programs by name, ``"torch"`` for what its users would write;
  empty if torch has none.

Preparation (views, transposes without a copy) happens when a program is created, and calls that the library
may reject happen in the first run. A program recomputes everything in each run, and returns the output, or
a tuple of outputs in the order of `Workload.outputs`; outputs that the library does not return are omitted at
the end. A program raises if its library rejects the workload. Operators without a module, such as users' own,
have none.

A run reads f32 inputs as they are then, so that a program can be created once for tensors whose values
change; other inputs may be read when the program is created. Three baselines prepare f32 inputs: a bias of
attention is joined with a mask and the weights of gated_gemm with each other when the program is created, and
torch's autograd records attention on a GPU in the first run.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.dtype import DType
from tunebench.workload import Workload

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["LibraryCall", "Tensors", "numpy_call", "single", "torch_calls", "torch_tensor", "torch_type"]

LibraryCall = Callable[[], Any]
Tensors = Mapping[str, Any]
"""Arrays of NumPy or tensors of torch by name; a number for one of shape `()`."""


def numpy_call(workload: Workload, inputs: Tensors, out: Array | None = None) -> LibraryCall | None:
    """Return a NumPy program for the workload, or None.

    Args:
        workload: The workload.
        inputs: An array for each input by name, in its stored type.
        out: For gemm and gated_gemm, an f32 array in the shape of the output, which the program overwrites
            and returns instead of a new array.
    """
    call: Callable[..., LibraryCall | None] | None = getattr(_module(workload), "numpy_call", None)
    if call is None:
        return None
    return call(workload, inputs) if out is None else call(workload, inputs, out)


def torch_calls(workload: Workload, tensors: Tensors) -> Mapping[str, LibraryCall]:
    """Return torch's programs for the workload by name; empty if torch has none.

    Args:
        workload: The workload.
        tensors: A torch tensor for each input by name; a number for one of shape `()`.
    """
    calls: Callable[..., Mapping[str, LibraryCall]] | None = getattr(_module(workload), "torch_calls", None)
    return calls(workload, tensors) if calls is not None else {}


def single(inputs: Tensors) -> dict[str, Array]:
    """Return inputs in f32, because NumPy computes half types slowly; indices unchanged."""
    return {
        name: value if value.dtype.name in ("int32", "int64") else np.asarray(value, dtype=np.float32)
        for name, value in inputs.items()
    }


def torch_tensor(value: Array, device: Any = "cpu") -> Any:
    """Return an array as a torch tensor on a device; one of shape `()` as a number.

    Args:
        value: The array, in its stored type.
        device: Device of torch.
    """
    import torch

    if not value.shape:
        return float(value)
    bits = {"bfloat16": np.int16, "float8_e4m3fn": np.int8}.get(value.dtype.name)
    if bits is None:
        return torch.from_numpy(np.ascontiguousarray(value)).to(device)
    return torch.from_numpy(value.view(bits)).view(getattr(torch, value.dtype.name)).to(device)


def torch_type(dtype: DType) -> Any:
    """Return torch's type for a stored type."""
    import torch

    names = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "bool": "bool"}
    names |= {"i8": "int8", "i32": "int32", "i64": "int64", "e4m3": "float8_e4m3fn"}
    return getattr(torch, names[dtype])


def _module(workload: Workload) -> ModuleType | None:
    return _module_of(workload.operator)


@functools.cache
def _module_of(operator: str) -> ModuleType | None:
    name = f"{__name__}.{operator}"
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None
