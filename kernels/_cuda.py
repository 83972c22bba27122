"""What CUDA C++ variants share on the Python side: the names of stored types, and the helpers' text."""

from __future__ import annotations

from tunebench.dtype import DType, storage
from tunebench.kernels import include

__all__ = ["ctype", "helpers"]

_CTYPES: dict[DType, str] = {
    "f32": "float",
    "f16": "half_t",
    "bf16": "bf16_t",
    "e4m3": "e4m3_t",
    "i8": "i8",
    "i32": "i32",
}


def ctype(dtype: DType) -> str:
    """Return the C++ type that stores `dtype`, as `_types.cuh` names it."""
    return _CTYPES[storage(dtype)]


def helpers(*names: str) -> str:
    """Return helper files of this package by name (``"types"``, ``"ptx"``, …), in the order given."""
    return "".join(include(f"_{name}.cuh") for name in names)
