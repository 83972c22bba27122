"""Element types of workloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "DTYPES",
    "DType",
    "bits_dtype",
    "bits_of",
    "is_integer",
    "itemsize",
    "numpy_dtype",
    "storage",
    "underflow",
    "unit_roundoff",
]

DType = Literal["f32", "tf32", "f16", "bf16", "e4m3", "i8", "i32", "i64", "bool"]
"""`tf32` is a multiplication format, not a storage format: such tensors are stored as `f32`.

`e4m3` is the 8-bit float of 4 exponent and 3 fraction bits without infinities. Products of `i8` accumulate in
`i32`. `i64` is for indices. `bool` is one byte, 0 or 1.
"""

DTYPES: tuple[DType, ...] = get_args(DType)

_ITEMSIZE: dict[DType, int] = {
    "f32": 4,
    "tf32": 4,
    "f16": 2,
    "bf16": 2,
    "e4m3": 1,
    "i8": 1,
    "i32": 4,
    "i64": 8,
    "bool": 1,
}
_NUMPY: dict[DType, str] = {
    "f32": "float32",
    "f16": "float16",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
    "bool": "bool",
}
_SIGNIFICAND_BITS: dict[DType, int] = {"f32": 24, "tf32": 11, "f16": 11, "bf16": 8, "e4m3": 4}


def storage(dtype: DType) -> DType:
    """Return the type in which values of `dtype` are stored in memory."""
    return "f32" if dtype == "tf32" else dtype


def is_integer(dtype: DType) -> bool:
    """Return whether `dtype` holds whole numbers, whose sums of products are exact."""
    return dtype in ("i8", "i32", "i64")


def itemsize(dtype: DType) -> int:
    """Return the size of one stored element in bytes."""
    return _ITEMSIZE[dtype]


def unit_roundoff(dtype: DType) -> float:
    """Return the largest relative error of rounding to `dtype`, to nearest; 0 for integers and bool.

    Source: IEEE 754-2019 for f32 and f16; significand widths of bf16 (8) and tf32 (11) from the
    NVIDIA A100 whitepaper, "Tensor Cores"; Micikevicius et al., "FP8 formats for deep learning", 2022.
    """
    return 0.0 if dtype not in _SIGNIFICAND_BITS else float(2.0 ** -_SIGNIFICAND_BITS[dtype])


def underflow(dtype: DType) -> float:
    """Return the largest absolute error of rounding to `dtype` near zero, where its spacing is constant.

    For f16 and e4m3 it is half the smallest subnormal number, which is 2**-24 or 2**-9. Subnormal numbers of
    f32 and bf16 may become 0, as many devices flush them: the error is up to the smallest normal number.
    """
    least = {"f16": 2.0**-25, "e4m3": 2.0**-10, "f32": 2.0**-126, "tf32": 2.0**-126, "bf16": 2.0**-126}
    return least.get(dtype, 0.0)


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy type that stores `dtype` (bf16 and e4m3 come from the package ml_dtypes)."""
    import numpy as np

    if dtype in ("bf16", "e4m3"):
        import ml_dtypes

        numpy_type: np.dtype[Any] = np.dtype(
            ml_dtypes.bfloat16 if dtype == "bf16" else ml_dtypes.float8_e4m3fn
        )
    else:
        numpy_type = np.dtype(_NUMPY[storage(dtype)])
    return numpy_type


def bits_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy type in which CPU kernels receive `dtype`: integers for floats of 16 and 8 bits."""
    import numpy as np

    integers = {"f16": "uint16", "bf16": "uint16", "e4m3": "uint8"}
    return np.dtype(integers[dtype]) if dtype in integers else numpy_dtype(dtype)


def bits_of(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of a stored type as CPU kernels receive it, without a copy (see `bits_dtype`)."""
    integers = {"float16": "uint16", "bfloat16": "uint16", "float8_e4m3fn": "uint8"}
    name = integers.get(array.dtype.name)
    return array if name is None else array.view(name)
