"""The element types a workload may ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import numpy as np

__all__ = ["DTYPES", "DType", "itemsize", "numpy_dtype", "storage", "underflow", "unit_roundoff"]

DType = Literal["f32", "tf32", "f16", "bf16"]
"""`tf32` is a way to multiply, not to store: such tensors are stored as `f32`."""

DTYPES: tuple[DType, ...] = get_args(DType)

_ITEMSIZE: dict[DType, int] = {"f32": 4, "tf32": 4, "f16": 2, "bf16": 2}
_SIGNIFICAND_BITS: dict[DType, int] = {"f32": 24, "tf32": 11, "f16": 11, "bf16": 8}


def storage(dtype: DType) -> DType:
    """Return the type that values of `dtype` have in memory."""
    return "f32" if dtype == "tf32" else dtype


def itemsize(dtype: DType) -> int:
    """Return the size of one stored element in bytes."""
    return _ITEMSIZE[dtype]


def unit_roundoff(dtype: DType) -> float:
    """Return the largest relative error of rounding to `dtype`, to nearest.

    Source: IEEE 754-2019 for f32 and f16; significand widths of bf16 (8) and tf32 (11) from the
    NVIDIA A100 whitepaper, "Tensor Cores".
    """
    return float(2.0 ** -_SIGNIFICAND_BITS[dtype])


def underflow(dtype: DType) -> float:
    """Return the largest absolute error of rounding to `dtype` near zero, where its spacing is constant.

    Only f16 has so short a range that results fall there: half its smallest subnormal number, 2**-24.
    """
    return float(2.0**-25) if dtype == "f16" else 0.0


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy type that stores `dtype` (bf16 comes from the package ml_dtypes)."""
    import numpy as np

    if dtype == "bf16":
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    else:
        found = np.dtype({"f32": "float32", "tf32": "float32", "f16": "float16"}[dtype])
    return found
