"""Extensions of Numba on the CPU: half-precision arrays, raw addresses and functions that vectorise.

f16 and bf16 arrays are passed as uint16 (see `NumbaCpuVariant`), and bool arrays are accessed as uint8.
`load` and `store` convert to and from f32, rounding to nearest even; they are inlined and vectorised.

Within a kernel's parallel loop, arrays are raw addresses with flat indices, and innermost loops are separate
functions. Reference counts, shapes and negative indices of arrays would keep LLVM from vectorising a loop
that writes one array and reads another, and take much of the compile time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from tunebench.dtype import DType
from tunebench.workload import Workload

T = TypeVar("T")

__all__ = ["address", "exp2", "exponential", "inlined", "jitted", "load", "rank", "shared", "store"]


@functools.cache
def load(dtype: DType) -> Callable[..., Any]:
    """Return the jitted function that converts a stored element to f32."""
    import numpy as np

    if dtype == "f16":
        return _convert("from_f16")
    if dtype == "bf16":

        @inlined
        def load_bf16(bits: Any) -> Any:
            # Numba widens a shift to 64 bits.
            return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)

        return load_bf16
    if dtype in ("bool", "i8"):

        @inlined
        def load_byte(byte: Any) -> Any:
            return np.float32(byte)

        return load_byte

    @inlined
    def load_f32(value: Any) -> Any:
        return value

    return load_f32


@functools.cache
def store(dtype: DType) -> Callable[..., Any]:
    """Return the jitted function that rounds an f32 to a stored element."""
    import numpy as np

    if dtype == "f16":
        return _convert("to_f16")
    if dtype == "bf16":

        @inlined
        def store_bf16(value: Any) -> Any:
            bits = np.float32(value).view(np.uint32)
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
            return np.uint16(quiet if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else rounded)

        return store_bf16
    if dtype == "bool":

        @inlined
        def store_bool(value: Any) -> Any:
            return np.uint8(np.float32(value) != np.float32(0))

        return store_bool
    if dtype == "i8":

        @inlined
        def store_i8(value: Any) -> Any:
            return np.int8(np.int32(value))  # LLVM has no value for a number that is not in i8

        return store_i8

    @inlined
    def store_f32(value: Any) -> Any:
        return np.float32(value)

    return store_f32


def jitted(fastmath: frozenset[str] = frozenset()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator of functions that only jitted code calls; they have no entries for Python and C.

    Each entry takes as much compile time as a small function. LLVM takes twice as long for a loop nest in one
    function than for one split into several.

    Args:
        fastmath: LLVM fast-math flags.
    """
    import numba

    decorate: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(
        fastmath=set(fastmath), error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
    )
    return decorate


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that is inlined into its callers, and not optimised separately."""
    import numba

    made: Callable[..., Any] = numba.njit(inline="always")(function)
    return made


def shared(make: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function that makes jitted functions for a workload and further arguments.

    Workloads that differ only in sizes share them, so they must not depend on sizes. A process that compiles
    several configurations translates them to LLVM's code once.
    """
    made: dict[tuple[Any, ...], T] = {}

    @functools.wraps(make)
    def make_once(workload: Workload, *arguments: Any) -> T:
        values = (getattr(workload, field.name) for field in dataclasses.fields(workload))
        key = (type(workload), *(value for value in values if type(value) is not int), *arguments)
        if key not in made:
            made[key] = make(workload, *arguments)
        return made[key]

    return make_once


@functools.cache
def address() -> Callable[[Any], Any]:
    """Return the intrinsic for the address of an array's first element; the caller keeps the array alive."""
    from numba import types
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    @intrinsic  # type: ignore[untyped-decorator]
    def address_of(_typing: Any, array: Any) -> Any:
        return types.CPointer(array.dtype)(array), generate

    return address_of  # type: ignore[no-any-return]


@functools.cache
def exp2() -> Callable[..., Any]:
    """Return the jitted function 2**t for f32 t up to 127; results below 2**-126 become 0, NaN is kept.

    t is split into the nearest integer, which becomes the exponent, and a remainder in [-1/2, 1/2], whose
    power is a polynomial of degree 6. Its relative error is below 1.2e-7, two roundings of f32.

    Source: Taylor coefficients ln(2)**k / k!; the first one left out, ln(2)**7 / 7! / 2**7, bounds the error.
    """
    import math

    import numpy as np

    c1, c2, c3, c4, c5, c6 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(1, 7))
    one, bias, lowest = np.float32(1), np.int32(127), np.float32(-126)

    @inlined
    def power(t: Any) -> Any:
        clamped = lowest if t < lowest else t
        whole = np.float32(np.rint(clamped))
        f = clamped - whole
        p = one + f * (c1 + f * (c2 + f * (c3 + f * (c4 + f * (c5 + f * c6)))))
        scale = np.int32((np.int32(whole) + bias) << np.int32(23)).view(np.float32)
        return np.float32(0) if t < lowest else p * scale

    return power


def exponential(form: str) -> tuple[Callable[..., Any], Any]:
    """Return an exponential function, and the factor that its argument must be multiplied by.

    Args:
        form: ``poly`` or ``libm``.
    """
    import numpy as np

    return (exp2(), np.float32(np.log2(np.e))) if form == "poly" else (np.exp, np.float32(1))


@functools.cache
def rank() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return inlined functions from f32 to an int32 of the same order, and back.

    LLVM vectorises the maximum of integers, but that of floats only if NaN is excluded.

    Source: IEEE 754: magnitudes are ordered as integers; negative values need all bits but the sign inverted.
    """
    import numpy as np

    magnitude, sign_place = np.int32(0x7FFFFFFF), np.int32(31)

    @inlined
    def flipped(bits: Any) -> Any:
        return np.int32(bits ^ np.int32(np.int32(bits >> sign_place) & magnitude))

    @inlined
    def rank_of(value: Any) -> Any:
        return flipped(np.float32(value).view(np.int32))

    @inlined
    def value_of(ranked: Any) -> Any:
        return flipped(ranked).view(np.float32)

    return rank_of, value_of


def _convert(direction: str) -> Callable[..., Any]:
    """Return an intrinsic that converts between f32 and the uint16 bits of f16 by one instruction."""
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
