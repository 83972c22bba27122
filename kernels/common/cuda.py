"""Host side of CUDA C++ variants: C++ type names, header files, latency of a block's first operands."""

from __future__ import annotations

from tunebench.device import Device
from tunebench.dtype import DType, storage
from tunebench.kernels import include

__all__ = ["ctype", "first_product", "flag", "helpers"]

_CTYPES: dict[DType, str] = {
    "f32": "float",
    "f16": "half_t",
    "bf16": "bf16_t",
    "e4m3": "e4m3_t",
    "i8": "i8",
    "i32": "i32",
    "i64": "i64",
    "bool": "bool_t",
}


def ctype(dtype: DType) -> str:
    """Return the C++ type that stores `dtype`, as `types.cuh` names it; bool as `strided.cuh` does."""
    return _CTYPES[storage(dtype)]


def flag(value: bool) -> str:
    """Return a truth value in C++ spelling."""
    return str(value).lower()


def first_product(device: Device) -> float:
    """Return the clocks from a block's start to its first multiplication.

    The first operands go through shared memory. They come from L1 at least: another block may have loaded
    them.
    """
    return device.l1_latency + device.smem_latency


def helpers(*names: str) -> str:
    """Return the text of header files by name (``"types"``, ``"ptx"``, …), in the order given."""
    return "".join(include(f"{name}.cuh") for name in names)
