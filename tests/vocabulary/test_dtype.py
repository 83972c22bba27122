"""Element types: sizes and roundoff, and conversions in CUDA that match NumPy bit by bit."""

from __future__ import annotations

from typing import get_args

import ml_dtypes
import pytest

from tunebench.dtype import (
    DTYPES,
    DType,
    is_integer,
    itemsize,
    numpy_dtype,
    storage,
    underflow,
    unit_roundoff,
)
from tunebench.kernels.common.cuda import ctype


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_elements_have_declared_size(dtype: DType) -> None:
    assert storage(dtype) in get_args(DType)
    assert numpy_dtype(dtype).itemsize == itemsize(dtype)
    assert ctype(dtype)
    assert is_integer(dtype) == (numpy_dtype(dtype).kind == "i")


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "e4m3"])
def test_unit_roundoff_is_half_the_spacing(dtype: DType) -> None:
    info = ml_dtypes.finfo(numpy_dtype(dtype))
    assert unit_roundoff(dtype) == float(info.eps) / 2
    flushed = dtype in ("f32", "bf16")
    least = float(info.smallest_normal) if flushed else float(info.smallest_subnormal) / 2
    assert underflow(dtype) == least


def test_integers_are_exact() -> None:
    assert unit_roundoff("i8") == unit_roundoff("i32") == underflow("i32") == 0
