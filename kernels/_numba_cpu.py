"""Loads and stores of half-precision arrays for Numba on the CPU, which knows neither f16 nor bf16.

Such arrays arrive as uint16 (see `NumbaCpuVariant`); `load` and `store` convert to and from f32, rounding
to nearest even, and are inlined and vectorised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tunebench.dtype import DType

__all__ = ["load", "store"]


@functools.cache
def load(dtype: DType) -> Callable[..., Any]:
    """Return a jitted function that turns one stored element into f32."""
    import numba
    import numpy as np

    if dtype == "f16":
        return _convert("from_f16")
    if dtype == "bf16":

        @numba.njit(inline="always")  # type: ignore[untyped-decorator]
        def load_bf16(bits: Any) -> Any:
            # Numba widens a shift to 64 bits.
            return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)

        return load_bf16  # type: ignore[no-any-return]

    @numba.njit(inline="always")  # type: ignore[untyped-decorator]
    def load_f32(value: Any) -> Any:
        return value

    return load_f32  # type: ignore[no-any-return]


@functools.cache
def store(dtype: DType) -> Callable[..., Any]:
    """Return a jitted function that rounds an f32 to one stored element."""
    import numba
    import numpy as np

    if dtype == "f16":
        return _convert("to_f16")
    if dtype == "bf16":

        @numba.njit(inline="always")  # type: ignore[untyped-decorator]
        def store_bf16(value: Any) -> Any:
            bits = np.float32(value).view(np.uint32)
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
            return np.uint16(quiet if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else rounded)

        return store_bf16  # type: ignore[no-any-return]

    @numba.njit(inline="always")  # type: ignore[untyped-decorator]
    def store_f32(value: Any) -> Any:
        return np.float32(value)

    return store_f32  # type: ignore[no-any-return]


def _convert(direction: str) -> Callable[..., Any]:
    """Return an intrinsic that converts between uint16 bits of f16 and f32 by one instruction."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    half, single, bits = ir.HalfType(), ir.FloatType(), ir.IntType(16)

    @intrinsic  # type: ignore[untyped-decorator]
    def from_f16(_typing: Any, value: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.fpext(builder.bitcast(args[0], half), single)

        return types.float32(types.uint16), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def to_f16(_typing: Any, value: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.bitcast(builder.fptrunc(args[0], half), bits)

        return types.uint16(types.float32), generate

    return {"from_f16": from_f16, "to_f16": to_f16}[direction]  # type: ignore[no-any-return]
